"""The best single changes of a plan: of a boundary, two devices, a replica, the microbatch size.

A change keeps the order of the plan's operations as far as it can (:mod:`what_if.altered
<planner.analysis.what_if.altered>`), so that its gain is its own and a replay gives its time.
Listing and applying share that replay, so that the time of a listed change is that of the plan it
makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise

from planner.analysis.what_if.altered import Altered, alter, unaltered
from planner.analysis.what_if.values import LEAST_GAIN, ROUNDING, share_saved
from planner.assembly import edited_plan
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import is_connected
from planner.errors import DeadlockError, PipeplanError
from planner.model.blocks import block_name
from planner.plan.membership import Outside, outside
from planner.plan.plan import Plan
from planner.prediction import replay
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.symmetry import Interchange
from planner.search.schedule.heuristic import Schedule, best_heuristic_schedule, fits_memory
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.variants.changes import MicrobatchChange, PlanChange, parse_move
from planner.variants.plan_changes import BoundaryChange, DeviceExchange, ReplicaChange

MOST_EVENTS = 300_000
"""Events of all replays, a few seconds; the changes that promise least are left out beyond."""
MOST_PLACED = 20_000
"""Stages of all changes that are looked at, a few seconds."""
EVENTS_PER_STAGE = 100
"""Events that are shared again among replicas in the time in which a stage is placed."""
SCHEDULE_EVENTS = 5
"""The time of a new schedule where a job asks for an order, in replays."""
STEPS = (1, 2, 4)
"""Possible cuts by which a boundary is moved; it is also moved to the nearest two blocks' ends."""


@dataclass(frozen=True)
class TimedMove:
    """A single change of a plan, and what the plan would take with it.

    Attributes:
        move: the change; as text, what ``pipeplan edit --move`` takes.
        iteration_time_s: of the plan that it makes.
        gain: share of the present iteration time that it saves; negative if it costs.
        lacks_bytes: what devices would lack; empty if it fits in memory.
        assumes: what the time rests on besides the cost model; None if nothing.
    """

    move: PlanChange
    iteration_time_s: float
    gain: float
    lacks_bytes: Mapping[str, int]
    assumes: str | None


@dataclass(frozen=True)
class MovesFound:
    """The single changes of a plan that lie in its job's space.

    Attributes:
        plan_s: iteration time of the plan as it is.
        fits: whether it fits in memory.
        fitting: changes that fit in memory, the fastest first.
        overflowing: changes that would gain :data:`LEAST_GAIN`, but exceed memory, the fastest
            first.
        no_faster: changes that were not replayed, as a bound proves that they are no faster.
        left_out: changes that a quick answer has no room for.
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


def apply_move(plan: Plan, move: PlanChange | str) -> Plan:
    """Return a plan with a single change, predicted again.

    It keeps the proved bound unless the microbatch size changed. It need not fit in memory:
    :func:`planner.verify` tells.

    Args:
        plan: to change.
        move: one that :func:`moves` lists, or as text.

    Raises:
        PipeplanError: naming the change and why it cannot be made.
    """
    change = parse_move(move) if isinstance(move, str) else move
    try:
        schedule = _schedule(_made(unaltered(plan), change))
    except DeadlockError as error:
        raise PipeplanError(f"change '{change}': {error} in the plan's order") from None
    return edited_plan(plan, schedule.timeline, schedule.orders, str(change))


def _made(start: Altered, change: PlanChange) -> Altered:
    """Return a plan under a change.

    Raises:
        PipeplanError: if it cannot be made, lies outside the job's space, or puts what must
            exchange data on devices without a path of links.
    """
    altered = alter(start, change)
    beyond = [found.in_job() for found in _outside(altered, with_orders=False)]
    if not is_connected(altered.pipeline):
        beyond.append("devices that must exchange data have no path of links")
    if beyond:
        raise PipeplanError(f"change '{change}': {problem}" for problem in beyond)
    return altered


def _outside(altered: Altered, *, with_orders: bool) -> Iterator[Outside]:
    """Yield the freedoms that a plan uses and its job does not give."""
    problem, orders = altered.problem, altered.orders if with_orders else {}
    return outside(problem.job.space, altered.stages, orders, tuple(problem.graph.layers))


def _keeps_orders(altered: Altered) -> bool:
    """Return whether the job allows the plan's own order after a change."""
    return not any(_outside(altered, with_orders=True))


def _schedule(altered: Altered) -> Schedule:
    """Return the plan's own order where the job allows it, else the best quick one.

    Raises:
        PipeplanError: if no order that the job allows fits in memory.
        DeadlockError: if devices wait for each other in a circle.
    """
    pipeline = altered.pipeline
    if _keeps_orders(altered):
        return Schedule(altered.orders, simulate(pipeline, altered.orders), "the plan's own")
    best = best_heuristic_schedule(pipeline, backward=altered.problem.job.backward)
    if best is None:
        raise PipeplanError("no order that the job allows fits in memory then")
    return best


def moves(plan: Plan, timeline: Timeline | None = None) -> MovesFound:
    """Return the single changes of a plan, each with the time of the plan that it makes.

    The same answer always, in a few seconds. Of a plan that fits in memory, changes that are proved
    to be no faster are only counted.

    Args:
        plan: it need not fit in memory.
        timeline: its simulation, where that was made already.

    Raises:
        PipeplanError: if the plan cannot be simulated; see :func:`planner.prediction.replay`.
    """
    return _MoveSearch(plan, timeline or replay(plan)).run()


class _MoveSearch:
    """The changes of one plan, screened by bounds, the most promising replayed."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self._plan = plan
        self._plan_s = timeline.iteration_time_s
        self._fits = fits_memory(timeline)
        self._events = len(timeline.operations) + len(timeline.transfers)
        self._no_faster = self._left_out = 0

    def run(self) -> MovesFound:
        """Screen the changes, replay the most promising and sort them."""
        found: list[TimedMove] = []
        room = MOST_EVENTS
        for change, altered in self._promising():
            room -= self._events * (1 if _keeps_orders(altered) else SCHEDULE_EVENTS)
            if room < 0 and found:
                self._left_out += 1
                continue
            with suppress(PipeplanError, DeadlockError):
                found.append(self._timed(change, altered))
        found.sort(key=lambda row: row.iteration_time_s)
        over = [row for row in found if row.lacks_bytes and row.gain >= LEAST_GAIN]
        return MovesFound(
            plan_s=self._plan_s,
            fits=self._fits,
            fitting=tuple(row for row in found if not row.lacks_bytes),
            overflowing=tuple(over),
            no_faster=self._no_faster,
            left_out=self._left_out,
        )

    def _promising(self) -> list[tuple[PlanChange, Altered]]:
        """Return the changes that may be faster, those with the least loads first."""
        rows: list[tuple[list[float], int, PlanChange, Altered]] = []
        start, room = unaltered(self._plan), MOST_PLACED
        for number, change in enumerate(candidate_moves(self._plan)):
            room -= len(self._plan.stages)
            room -= self._events // EVENTS_PER_STAGE if isinstance(change, ReplicaChange) else 0
            if room < 0 and rows:
                self._left_out += 1
                continue
            try:
                altered = _made(start, change)
            except PipeplanError:
                continue
            bound_s = schedule_bound_s(altered.pipeline, split=self._plan.job.splits)
            if self._fits and bound_s >= self._plan_s * (1 - ROUNDING):
                self._no_faster += 1
                continue
            rows.append((_loads_s(altered.pipeline), number, change, altered))
        rows.sort(key=lambda row: row[:2])
        return [row[2:] for row in rows]

    def _timed(self, change: PlanChange, altered: Altered) -> TimedMove:
        timeline = _schedule(altered).timeline
        time_s = timeline.iteration_time_s
        gain = share_saved(time_s, self._plan_s)
        return TimedMove(change, time_s, gain, timeline.overflow_bytes, altered.assumes)


def _loads_s(pipeline: PlacedPipeline) -> list[float]:
    """Return the work of each device if replicas share it evenly, the largest first."""
    loads = dict.fromkeys(pipeline.devices, 0.0)
    for stage in pipeline.stages:
        count = pipeline.microbatches / len(stage.spec.devices)
        for device, times in stage.times.items():
            loads[device] += count * (times.forward_s + times.backward_s)
    return sorted(loads.values(), reverse=True)


# --- the changes there are ------------------------------------------------------------------------


def candidate_moves(plan: Plan) -> Iterator[PlanChange]:
    """Yield single changes of a plan, each of those that are alike once; some may be impossible."""
    yield from _boundary_changes(plan)
    if plan.tensor_parallel is None:  # Layers are split over groups at one size of microbatches.
        yield from (MicrobatchChange(factor) for factor in (Fraction(2), Fraction(1, 2)))
    devices = _Devices(plan)
    if plan.job.replication:
        yield from devices.replica_changes()
    yield from devices.exchanges()


def _boundary_changes(plan: Plan) -> Iterator[PlanChange]:
    graph = plan.problem.graph
    rows = [graph.in_order(stage.layers) for stage in plan.stages]
    for left, (before, after) in enumerate(pairwise(rows)):
        for cut in _cuts(plan, before[::-1], is_tail=True):
            yield BoundaryChange(before[-cut], before[-1], left, left + 1)
        for cut in _cuts(plan, after, is_tail=False):
            yield BoundaryChange(after[0], after[cut - 1], left + 1, left)


def _cuts(plan: Plan, layers: Sequence[str], *, is_tail: bool) -> list[int]:
    """Return how many layers may cross a boundary: a few cuts, and the nearest two blocks' ends.

    Args:
        plan: whose job may limit the cuts.
        layers: of the stage that gives, the nearest to the boundary first.
        is_tail: whether the boundary is after them, so that the last that crosses begins a stage.
    """
    allowed = None if plan.job.cuts is None else set(plan.job.cuts)
    begins = [layers[n - 1 if is_tail else n] for n in range(1, len(layers))]
    cuts = [n for n, name in enumerate(begins, 1) if allowed is None or name in allowed]
    ends = [n for n in cuts if block_name(layers[n - 1]) != block_name(layers[n])]
    few = [cuts[step - 1] for step in STEPS if step <= len(cuts)]
    return sorted({*few, *ends[:2]})


class _Devices:
    """The devices of a plan's cluster, in classes whose members may stand for each other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        cluster = plan.cluster
        group_of = Interchange(cluster).group_of
        self._held = {
            device: tuple(n for n, stage in enumerate(plan.stages) if device in stage.devices)
            for device in cluster.device_names
        }
        self._class_of = {
            device: (group_of.get(device, (device,)), held) for device, held in self._held.items()
        }
        first: dict[tuple[tuple[str, ...], tuple[int, ...]], str] = {}
        for device, its_class in self._class_of.items():
            first.setdefault(its_class, device)
        self._representatives = list(first.values())

    def replica_changes(self) -> Iterator[PlanChange]:
        """Yield a device of each class that joins a stage, leaves one or both.

        None comes to hold more stages than the device that holds most now.
        """
        most, stages = max(map(len, self._held.values())), range(len(self._plan.stages))
        for device in self._representatives:
            held = self._held[device]
            if len(held) < most:
                yield from (ReplicaChange(device, None, n) for n in stages if n not in held)
            for source in held:
                if len(self._plan.stages[source].devices) > 1:
                    others = (n for n in stages if n not in held)
                    yield from (ReplicaChange(device, source, n) for n in (None, *others))

    def exchanges(self) -> Iterator[PlanChange]:
        """Yield two devices of each two classes that are not alike and hold other stages."""
        for one, other in combinations(self._representatives, 2):
            is_alike = self._class_of[one][0] == self._class_of[other][0]
            if not is_alike and self._held[one] != self._held[other]:
                yield DeviceExchange(one, other)
