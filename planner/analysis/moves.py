"""The best single changes of a plan: of a boundary, devices, replicas and stages.

Each change is judged by the compiled list schedules of the walk and, where devices may keep their
orders, by the plan's own orders; the faster one counts. Listing and applying share this, so that
the time of a listed change is that of the plan it makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, pairwise

from planner.analysis.changes import (
    KEEPS_ORDERS,
    Move,
    Stages,
    changed,
    changed_orders,
    move,
    parse_move,
)
from planner.analysis.judge import Judge
from planner.assembly import edited_plan
from planner.costs.placement import is_connected, place, specs_of
from planner.errors import DeadlockError, PipeplanError
from planner.model.blocks import block_name
from planner.plan.membership import outside
from planner.plan.plan import Plan
from planner.prediction import replay
from planner.search.walk.walker import Candidate
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

LEAST_GAIN = 0.001
"""A change that gains no larger share of the iteration does not help."""
MOST_TASKS = 6_000_000
"""Tasks of all list schedules, a second or two; changes beyond are left out."""
MOST_EVENTS = 100_000
"""Events of all simulations, a second or two; the fastest by their list schedules come first."""
CUTS = (1, 2, 3, 4)
"""Possible cuts by which a boundary is moved; it is also moved to the nearest two blocks' ends."""


@dataclass(frozen=True)
class TimedMove:
    """A single change of a plan, and what the plan would take with it.

    Attributes:
        move: the change; as text, what ``pipeplan explain --apply`` takes.
        iteration_time_s: of the plan that it makes.
        gain: share of the present iteration time that it saves; negative if it costs.
        lacks_bytes: what devices would lack; empty if it fits in memory.
    """

    move: Move
    iteration_time_s: float
    gain: float
    lacks_bytes: Mapping[str, int]


@dataclass(frozen=True)
class MovesFound:
    """The single changes of a plan that lie in its job's space.

    Attributes:
        plan_s: iteration time of the plan as it is.
        fits: whether it fits in memory.
        fitting: changes that fit in memory, the fastest first.
        overflowing: changes that would gain :data:`LEAST_GAIN`, but exceed memory in the orders
            that were tried, the fastest first.
        no_faster: other changes, whose list schedules are no faster than the plan.
        left_out: changes that were not tried, as a quick answer has no room for them.
    """

    plan_s: float
    fits: bool
    fitting: tuple[TimedMove, ...]
    overflowing: tuple[TimedMove, ...]
    no_faster: int
    left_out: int

    def __repr__(self) -> str:
        """Return how many changes there are, and the best, in a line."""
        best = self.best
        said = "none helps" if best is None else f"best '{best.move}', {-best.gain:+.1%}"
        beyond = len(self.overflowing)
        return f"<MovesFound: {len(self.fitting)} fit, {beyond} exceed memory; {said}>"

    @property
    def best(self) -> TimedMove | None:
        """The fastest change that fits, if it gains :data:`LEAST_GAIN` or the plan does not fit."""
        return next((row for row in self.fitting[:1] if self._helps(row)), None)

    @property
    def helpful(self) -> tuple[TimedMove, ...]:
        """All changes that fit and gain so much or, if the plan does not fit, make it fit."""
        return tuple(filter(self._helps, self.fitting))

    def _helps(self, row: TimedMove) -> bool:
        return row.gain >= LEAST_GAIN or not self.fits


def share_saved(time_s: float, compared_with_s: float) -> float:
    """Return the share of a time that a change saves; negative if it costs, 0 of no time."""
    return 1 - time_s / compared_with_s if compared_with_s > 0 else 0.0


def apply_move(plan: Plan, change: Move | str) -> Plan:
    """Return a plan with a single change, predicted again.

    It keeps the proved bound. It need not fit in memory:
    :func:`planner.verify` tells.

    Args:
        plan: to change.
        change: one that :func:`moves` lists, or as text.

    Raises:
        PipeplanError: naming the change and why it cannot be made.
    """
    wanted = parse_move(change) if isinstance(change, str) else change
    trials = _Trials(plan)
    found = trials.best(wanted, *trials.judged(wanted))
    if found is None:
        raise PipeplanError(
            f"change '{wanted}': no order that was tried runs these stages within memory"
        )
    return edited_plan(plan, found, found.orders, str(wanted))


class _Trials:
    """Tries changes of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._orders = plan, plan.parsed_orders()
        self._problem = plan.problem
        self._stages: Stages = tuple(specs_of(plan.on_groups.stages))
        self.judge = Judge(self._problem, plan.sync)

    def judged(self, change: Move) -> tuple[Stages, Candidate | None]:
        """Return the stages under a change, with their best list schedule.

        Raises:
            PipeplanError: if it cannot be made, lies outside the job's space, or puts what must
                exchange data on devices without a path of links.
        """
        problem, layers = self._problem, tuple(self._problem.graph.layers)
        stages = changed(problem, self._stages, change)
        beyond = [row.in_job() for row in outside(problem.job.space, stages, {}, layers)]
        if not is_connected(place(problem, stages, self._plan.sync)):
            beyond.append("devices that must exchange data have no path of links")
        if beyond:
            raise PipeplanError(f"change '{change}': {row}" for row in beyond)
        return stages, self.judge.judged(stages)

    def best(self, change: Move, stages: Stages, judged: Candidate | None) -> Timeline | None:
        """Return the faster of the list schedule and the plan's own orders.

        The latter need not fit in memory where the former does not.
        """
        listed = None if judged is None else self.judge.timeline(judged)
        own = self._in_own_orders(change, stages)
        if own is None or (listed is not None and own.overflow_bytes):
            return listed
        if listed is None or own.iteration_time_s <= listed.iteration_time_s:
            return own
        return listed

    def _in_own_orders(self, change: Move, stages: Stages) -> Timeline | None:
        """Return a simulation in the plan's orders; None if they are not possible then."""
        if change.kind not in KEEPS_ORDERS:
            return None
        problem, orders = self._problem, changed_orders(self._orders, change)
        if any(outside(problem.job.space, stages, orders, tuple(problem.graph.layers))):
            return None
        with suppress(DeadlockError):
            return simulate(place(problem, stages, self._plan.sync), orders)
        return None


def moves(plan: Plan, timeline: Timeline | None = None) -> MovesFound:
    """Return the single changes of a plan, each with the time of the plan that it makes.

    The same answer always, in a few seconds.

    Args:
        plan: it need not fit in memory.
        timeline: its simulation, where that was made already.

    Raises:
        PipeplanError: if the plan cannot be simulated; see :func:`planner.prediction.replay`.
    """
    timeline = timeline or replay(plan)
    trials = _Trials(plan)
    plan_s, fits = timeline.iteration_time_s, not timeline.overflow_bytes
    rows, left_out = _judged(plan, trials)
    rows.sort(key=lambda row: (row[2] is None, 0.0 if row[2] is None else row[2].seconds))
    events = len(timeline.operations) + len(timeline.transfers)
    found: list[TimedMove] = []
    no_faster = 0
    for number, (change, stages, judged) in enumerate(rows):
        if number * events > MOST_EVENTS and found:
            is_slower = judged is not None and judged.seconds >= plan_s * (1 - LEAST_GAIN)
            no_faster, left_out = no_faster + is_slower, left_out + (not is_slower)
            continue
        made = trials.best(change, stages, judged)
        if made is not None:
            found.append(_timed(change, made, plan_s))
    found.sort(key=lambda row: row.iteration_time_s)
    return MovesFound(
        plan_s=plan_s,
        fits=fits,
        fitting=tuple(row for row in found if not row.lacks_bytes),
        overflowing=tuple(row for row in found if row.lacks_bytes and row.gain >= LEAST_GAIN),
        no_faster=no_faster,
        left_out=left_out,
    )


def _judged(plan: Plan, trials: _Trials) -> tuple[list[tuple[Move, Stages, Candidate | None]], int]:
    """Return the possible changes with their list schedules, and how many there was no room for."""
    rows, left_out = [], 0
    for change in candidate_moves(plan):
        if trials.judge.tasks_done > MOST_TASKS:
            left_out += 1
            continue
        with suppress(PipeplanError):
            rows.append((change, *trials.judged(change)))
    return rows, left_out


def _timed(change: Move, timeline: Timeline, plan_s: float) -> TimedMove:
    time_s = timeline.iteration_time_s
    return TimedMove(change, time_s, share_saved(time_s, plan_s), timeline.overflow_bytes)


# --- the changes there are ------------------------------------------------------------------------


def candidate_moves(plan: Plan) -> Iterator[Move]:
    """Yield single changes of a plan, each of those that are alike once; some may be impossible."""
    stages = range(len(plan.stages))
    yield move("reschedule")
    yield from _boundary_moves(plan)
    devices = _Devices(plan)
    if plan.job.replication:
        yield from devices.replica_moves()
    yield from devices.exchanges()
    yield from (move("merge", source=a, target=b) for a, b in pairwise(stages))
    for number in stages:
        layers = plan.problem.graph.in_order(plan.stages[number].layers)
        middle = len(layers) // 2
        for cut in sorted(_cuts(plan, layers, is_tail=False), key=lambda n: abs(n - middle))[:2]:
            yield from devices.splits(number, layers[cut])


def _boundary_moves(plan: Plan) -> Iterator[Move]:
    graph = plan.problem.graph
    rows = [graph.in_order(stage.layers) for stage in plan.stages]
    for left, (before, after) in enumerate(pairwise(rows)):
        for cut in _few(_cuts(plan, before[::-1], is_tail=True), before[::-1]):
            yield move("boundary", target=left + 1, first=before[-cut])
        for cut in _few(_cuts(plan, after, is_tail=False), after):
            yield move("boundary", target=left + 1, first=after[cut])


def _cuts(plan: Plan, layers: Sequence[str], *, is_tail: bool) -> list[int]:
    """Return how many layers may be cut off a stage.

    Args:
        plan: whose job may limit the cuts.
        layers: of the stage, the nearest to the boundary first.
        is_tail: whether the boundary is after them, so that the last that crosses begins a stage.
    """
    allowed = None if plan.job.cuts is None else set(plan.job.cuts)
    begins = [layers[n - 1 if is_tail else n] for n in range(1, len(layers))]
    return [n for n, name in enumerate(begins, 1) if allowed is None or name in allowed]


def _few(cuts: Sequence[int], layers: Sequence[str]) -> list[int]:
    """Return the nearest cuts, and those at the nearest two blocks' ends."""
    ends = [n for n in cuts if block_name(layers[n - 1]) != block_name(layers[n])]
    return sorted({*(cuts[step - 1] for step in CUTS if step <= len(cuts)), *ends[:2]})


class _Devices:
    """The devices of a plan's cluster, in classes whose members may stand for each other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        cluster = plan.problem.cluster
        held: dict[str, list[int]] = {device: [] for device in cluster.device_names}
        for number, stage in enumerate(plan.on_groups.stages):
            for device in stage.devices:
                held[device].append(number)
        self._held = {device: tuple(rows) for device, rows in held.items()}
        self._class_of = {d: (cluster.type_of(d), cluster.attachment(d)) for d in held}
        first: dict[object, str] = {}
        for device, its_class in self._class_of.items():
            first.setdefault((its_class, self._held[device]), device)
        self._representatives = list(first.values())

    def replica_moves(self) -> Iterator[Move]:
        """Yield a device of each class that joins a stage, leaves one or both.

        None comes to hold more stages than the device that holds most now.
        """
        most, stages = max(map(len, self._held.values())), range(len(self._plan.stages))
        for device in self._representatives:
            held = self._held[device]
            others = [number for number in stages if number not in held]
            if len(held) < most:
                yield from (move("add", device=device, target=number) for number in others)
            for source in held:
                if len(self._plan.stages[source].devices) > 1:
                    yield move("remove", device=device, source=source)
                    for target in others:
                        yield move("move", device=device, source=source, target=target)

    def exchanges(self) -> Iterator[Move]:
        """Yield two devices of each two classes that are not alike and hold other stages."""
        for one, other in combinations(self._representatives, 2):
            is_alike = self._class_of[one] == self._class_of[other]
            if not is_alike and self._held[one] != self._held[other]:
                yield move("exchange", one=one, other=other)

    def splits(self, number: int, first: str) -> Iterator[Move]:
        """Yield a stage cut in two: its devices divided, or an unused one for the second part."""
        if len(self._plan.stages[number].devices) > 1:
            yield move("split", source=number, first=first)
        for device in self._representatives:
            if not self._held[device]:
                yield move("split onto", source=number, first=first, device=device)
