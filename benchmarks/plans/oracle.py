"""The least iteration time of a tiny problem: every partition, each scheduled exactly.

The schedule of a partition is a model of its own, written from docs/cost_model.md and sharing
nothing with the planner's but the seconds and bytes of stages and messages. It is a relaxation in
three respects: messages of one pair of devices go in any order, where a replay has them in the
order of requests; messages of several pairs and reductions do not slow each other on a link; and
messages take no memory before and after the operations that use and make them. Its optimum is
therefore never above the best plan's time.

Where it is below the time of a plan, there need not be a better plan: :func:`faster_plan` replays
the orders of every solution that is faster than the plan, until one is or none is left.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import NamedTuple

from ortools.sat.python import cp_model

from benchmarks.plans import drawn
from planner import Cluster, Job, LayerGraph, Problem, solve
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec, Transfer, static_with_workspace
from planner.costs.placement import is_connected, place
from planner.costs.reductions import GradientReduction
from planner.errors import DeadlockError
from planner.plan.operations import Kind, Operation, Orders
from planner.simulation.simulator import simulate

TICK_S = 1e-9
"""Durations are rounded down to it, so that the optimum is not above the real one."""
FOUND = 1e-4
"""A plan within this of the optimum counts as the best one: rounding to ticks costs as much."""
MOST_REPLAYS = 100
"""Schedules that are replayed to find out whether one is faster than a plan."""
LIMITS = (4.0, 40.0, 400.0, math.inf)
"""Deterministic seconds of the solver, with one worker and then with several."""
MOST_WORK = 1.0
"""Deterministic seconds for the next schedule to replay."""
Key = tuple[int, int]
WHOLE: dict[str, Kind] = {"F": "F", "I": "B"}
SPLIT: dict[str, Kind] = {"F": "F", "I": "I", "W": "W"}
"""Kinds of the operations of a microbatch, by their names in the model."""
_Held = tuple[cp_model.IntervalVar, int]


def problem_of(data: drawn.Data) -> Problem:
    """Return a problem of its graph, cluster and job as plain data."""
    graph, cluster = LayerGraph.parse(data["graph"]), Cluster.from_data(data["cluster"])
    return Problem(graph, cluster, Job.parse(data["job"], "job"))


def tiny_problems(count: int, seed: int = 0) -> Iterator[Problem]:
    """Yield random problems that are small enough for every plan to be tried."""
    return map(problem_of, drawn.tiny_problems(count, seed))


@dataclass(frozen=True)
class Optimum:
    """The result of trying every partition.

    Attributes:
        time_s: no plan is faster; rounded down to ticks.
        partitions: how many were tried.
        best: the stages that reach it; None if none is faster than what was known.
    """

    time_s: float
    partitions: int
    best: tuple[StageSpec, ...] | None


def optimum_below(problem: Problem, known_s: float) -> Optimum:
    """Return the least time of all plans, or a known one where none is faster.

    Args:
        problem: the tiny problem.
        known_s: iteration time of some plan, in seconds.
    """
    least, best, tried = int(known_s / TICK_S), None, 0
    for specs in partitions_of(problem):
        if not is_connected(place(problem, specs)):
            continue
        tried += 1
        for pipeline in _ways_to_reduce(problem, specs):
            if _is_too_much(pipeline, problem.job.backward, least):
                continue
            found = next(_Schedule(pipeline, problem.job.backward, least).solutions(), None)
            if found is not None:
                least, best = found.ticks, specs
    return Optimum(least * TICK_S, tried, best)


def optima() -> drawn.Data:
    """Return the best times of the tiny problems of the corpus.

    A search gives a first plan, the enumeration what no plan is below, and replays of all schedules
    that may be faster the fastest of them. Where these are too many, the time is what no plan is
    below, and the problem is one of ``relaxed``.
    """
    optima_s, relaxed = [], []
    for number, problem in enumerate(tiny_problems(200)):
        known_s = solve(problem, time_limit_s=0.5, deterministic=True).iteration_time_s
        least_s, faster = optimum_below(problem, known_s).time_s, Faster(None, is_certain=True)
        if known_s > (1 + FOUND) * least_s:
            faster = faster_plan(problem, known_s)
        if not faster.is_certain:
            relaxed.append(number)
        optima_s.append((faster.time_s or known_s) if faster.is_certain else least_s)
    return {"relaxed": relaxed, "optima_s": optima_s}


class TooManyError(Exception):
    """There are too many schedules to replay all."""


class Faster(NamedTuple):
    """What replays say of the schedules that are faster than a plan if links are not shared.

    Attributes:
        time_s: iteration time of a plan that is faster; None if none was found.
        is_certain: whether it is the fastest, or no plan is faster; else there were too many to
            replay.
    """

    time_s: float | None
    is_certain: bool


def faster_plan(problem: Problem, known_s: float, most: int = MOST_REPLAYS) -> Faster:
    """Return the fastest plan below a time, by replays of all schedules that may be.

    Args:
        problem: the tiny problem.
        known_s: iteration time of some plan, in seconds.
        most: schedules that are replayed at most.
    """
    best_s = known_s
    with suppress(TooManyError):
        for number, found_s in enumerate(_replays_s(problem, known_s)):
            if number == most:
                raise TooManyError
            best_s = min(best_s, found_s)
        return Faster(best_s if best_s < known_s else None, is_certain=True)
    return Faster(best_s if best_s < known_s else None, is_certain=False)


def _replays_s(problem: Problem, known_s: float) -> Iterator[float]:
    """Yield the times of replays of all schedules that may be faster than a plan.

    Raises:
        TooManyError: if it takes too long to find the next one.
    """
    known = int(known_s / TICK_S)
    for specs in partitions_of(problem):
        if not is_connected(place(problem, specs)):
            continue
        for pipeline in _ways_to_reduce(problem, specs):
            if not _is_too_much(pipeline, problem.job.backward, known):
                schedule = _Schedule(pipeline, problem.job.backward, known)
                yield from (_replayed_s(pipeline, row.orders) for row in schedule.solutions())


def _replayed_s(pipeline: PlacedPipeline, orders: Orders) -> float:
    """Return the time of a replay; infinity if it waits in a circle or exceeds the memory."""
    try:
        timeline = simulate(pipeline, orders)
    except DeadlockError:
        return math.inf
    return math.inf if timeline.overflow_bytes else timeline.iteration_time_s


def _is_too_much(pipeline: PlacedPipeline, backward: str, known: int) -> bool:
    """Return whether some stage's devices have too little time, whatever the order.

    All their operations follow the first microbatch's way there; all their forwards and gradients
    come before the last gradient's way home.
    """
    head = home = 0
    for number, stage in enumerate(pipeline.stages):
        if number:
            head += _least_way(pipeline, number - 1, "F")
            home += _least_way(pipeline, number, "I")
        taken = 0
        for device in stage.spec.devices:
            forward, gradient, work = _ticks_of(pipeline, number, backward, device)
            rooms = (known - head - home, forward + gradient), (known - head, forward + work)
            taken += min(room // max(each, 1) for room, each in rooms)
        if taken < pipeline.microbatches:
            return True
        ticks = [_ticks_of(pipeline, number, backward, device) for device in stage.spec.devices]
        head += min(forward for forward, _, _ in ticks)
        home += min(gradient for _, gradient, _ in ticks)
    return False


def _ticks_of(
    pipeline: PlacedPipeline, stage: int, backward: str, device: str
) -> tuple[int, int, int]:
    """Return the ticks of a forward, of a gradient on its way and of all of a backward."""
    forward, whole, gradient, weight = (
        int(pipeline.seconds(stage, letter, device) / TICK_S) for letter in "FBIW"
    )
    if backward == "whole":
        return forward, whole, whole
    if backward == "split":
        return forward, gradient, gradient + weight
    return forward, min(gradient, whole), min(gradient + weight, whole)


def _least_way(pipeline: PlacedPipeline, stage: int, kind: str) -> int:
    """Return the ticks of the quickest message that a stage sends after a kind of operation."""
    to = stage + 1 if kind == "F" else stage - 1
    pairs = product(*(pipeline.stages[s].spec.devices for s in (stage, to)))
    return min(int(pipeline.transfer(stage, kind, u, v).seconds / TICK_S) for u, v in pairs)


def _ways_to_reduce(problem: Problem, specs: Sequence[StageSpec]) -> Iterator[PlacedPipeline]:
    """Yield the stages with reductions after the last backwards, and in buckets if allowed."""
    job = problem.job.model_copy(update={"overlap_reduction": False})
    yield place(replace(problem, job=job), specs)
    if problem.job.overlap_reduction and any(len(spec.devices) > 1 for spec in specs):
        yield place(problem, specs)


def partitions_of(problem: Problem) -> Iterator[tuple[StageSpec, ...]]:
    """Yield every cut of the chain with every choice of device sets and recomputed layers."""
    names = list(problem.graph.layers) if problem.job.recompute else []
    for specs in _cuts_of(problem):
        for again in (x for n in range(len(names) + 1) for x in combinations(names, n)):
            yield tuple(
                replace(spec, recompute=tuple(x for x in spec.layers if x in again))
                for spec in specs
            )


def _cuts_of(problem: Problem) -> Iterator[tuple[StageSpec, ...]]:
    names, job = list(problem.graph.layers), problem.job
    most = min(len(names), len(problem.cluster.devices) * job.max_stages_per_device)
    for count in range(1, most + 1):
        for cuts in combinations(range(1, len(names)), count - 1):
            edges = [0, *cuts, len(names)]
            for sets in _device_sets(problem, count):
                yield tuple(
                    StageSpec(tuple(names[edges[j] : edges[j + 1]]), sets[j]) for j in range(count)
                )


def _device_sets(problem: Problem, count: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    devices, job = problem.cluster.device_names, problem.job
    largest = len(devices) if job.replication else 1
    sets = [chosen for n in range(1, largest + 1) for chosen in combinations(devices, n)]
    for choice in product(sets, repeat=count):
        held = Counter(device for chosen in choice for device in chosen)
        if max(held.values()) <= job.max_stages_per_device:
            yield choice


class _Solution(NamedTuple):
    """Orders of one partition's operations, and how many ticks they take."""

    ticks: int
    orders: Orders


class _Schedule:
    """All orders of one partition's operations, with the replica of each microbatch free.

    Args:
        pipeline: the stages.
        backward: kinds of backward that may be used.
        known: only less than so many ticks is of interest.
    """

    def __init__(self, pipeline: PlacedPipeline, backward: str, known: int) -> None:
        self._pipeline, self._backward, self._known = pipeline, backward, known
        self._model = cp_model.CpModel()
        self._on_device: defaultdict[str, list[cp_model.IntervalVar]] = defaultdict(list)
        self._in_line: defaultdict[object, list[cp_model.IntervalVar]] = defaultdict(list)
        self._in_memory: defaultdict[str, list[_Held]] = defaultdict(list)
        self._start: dict[tuple[str, Key], cp_model.IntVar] = {}
        self._end: dict[tuple[str, Key], cp_model.IntVar] = {}
        self._runs: dict[tuple[Key, str], cp_model.BoolVarT] = {}
        self._whole: dict[Key, cp_model.IntVar] = {}
        self._total = self._model.new_int_var(0, max(known - 1, 0), "total")

    def solutions(self) -> Iterator[_Solution]:
        """Yield all orders that take less than what is known, first one with the least ticks.

        Raises:
            TooManyError: if it takes too long to find another one, or that there is none.
        """
        if not self._build():
            return
        limit = math.inf
        while True:
            solver, status = self._solved(limit)
            if status == cp_model.INFEASIBLE:
                return
            if status == cp_model.UNKNOWN:
                raise TooManyError
            assert status == cp_model.OPTIMAL, solver.status_name(status)
            yield _Solution(solver.value(self._total), self._forbidden_orders(solver))
            self._model.clear_objective()  # type: ignore[no-untyped-call]
            limit = MOST_WORK

    def _solved(self, limit: float) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
        """Solve by one worker, or by several that take turns: each creeps on some of these."""
        for most, workers in product(LIMITS, (1, 8)):
            solver = cp_model.CpSolver()
            solver.parameters.num_workers = workers
            solver.parameters.interleave_search = workers > 1
            solver.parameters.max_deterministic_time = min(limit, most)
            status = solver.solve(self._model)
            if status in (cp_model.OPTIMAL, cp_model.INFEASIBLE) or most >= limit:
                break
        return solver, status

    def _build(self) -> bool:
        """State the model; return whether memory suffices at all."""
        pipeline = self._pipeline
        keys = list(product(range(len(pipeline.stages)), range(pipeline.microbatches)))
        for key in keys:
            self._add_microbatch(key)
        for key in keys:
            self._connect(key)
        for intervals in (*self._on_device.values(), *self._in_line.values()):
            self._model.add_no_overlap(intervals)
        for device in pipeline.devices:
            if not self._keep_memory(device):
                return False
        self._add_ends(keys)
        self._model.minimize(self._total)
        return True

    def _forbidden_orders(self, solver: cp_model.CpSolver) -> Orders:
        """Return the orders of a solution, which no later one has.

        Another one has a microbatch on another replica, another kind of backward, or two
        operations that follow each other in reverse.
        """
        chosen = [*self._whole.values(), *filter(solver.boolean_value, self._runs.values())]
        others: list[cp_model.LiteralT] = [
            ~literal if solver.boolean_value(literal) else literal for literal in chosen
        ]
        orders: dict[str, list[Operation]] = {}
        for device in self._pipeline.devices:
            order = self._order(solver, device)
            orders[device] = [operation for operation, _, _ in order]
            for (_, start, _), (_, _, end) in pairwise(order):
                is_reversed = self._model.new_bool_var("")
                self._model.add(end <= start).only_enforce_if(is_reversed)
                others.append(is_reversed)
        self._model.add_bool_or(others)
        return orders

    def _order(
        self, solver: cp_model.CpSolver, device: str
    ) -> list[tuple[Operation, cp_model.IntVar, cp_model.IntVar]]:
        """Return a device's operations in order, each with its start and its end."""
        rows = []
        for key, runs_on in self._runs:
            if runs_on != device or not solver.boolean_value(self._runs[key, device]):
                continue
            kinds = WHOLE if solver.boolean_value(self._whole[key]) else SPLIT
            for name, kind in kinds.items():
                start, end = self._start[name, key], self._end[name, key]
                rows.append((Operation(key[0], kind, key[1]), start, end))
        return sorted(rows, key=lambda row: (solver.value(row[1]), solver.value(row[2])))

    def _time(self, name: str) -> cp_model.IntVar:
        return self._model.new_int_var(0, self._known, name)

    def _add_microbatch(self, key: Key) -> None:
        """Add a stage's operations on a microbatch: F, and B or I and W, on one replica.

        A whole backward is an input gradient that takes its time and a weight gradient that takes
        none, right after it.
        """
        stage, microbatch = key
        devices = self._pipeline.stages[stage].spec.devices
        for kind in "FIW":
            self._start[kind, key], self._end[kind, key] = self._time(kind), self._time(kind)
        whole = self._model.new_bool_var("whole")
        if self._backward != "any":
            self._model.add(whole == (self._backward == "whole"))
        self._whole[key] = whole
        runs = [self._model.new_bool_var(f"{key}@{device}") for device in devices]
        self._model.add_exactly_one(runs)
        for device, literal in zip(devices, runs, strict=True):
            self._runs[key, device] = literal
            self._hold(key, device, literal)
            for is_whole in (False, True):
                self._run_on(key, device, literal, whole, is_whole)
        self._model.add(self._start["W", key] >= self._end["I", key])
        self._model.add(self._start["I", key] >= self._end["F", key])
        if stage == 0 and microbatch:
            # Equal microbatches may be renumbered.
            before = self._start["F", (0, microbatch - 1)]
            self._model.add(before <= self._start["F", key])

    def _hold(self, key: Key, device: str, runs: cp_model.BoolVarT) -> None:
        """Keep a stash until the input gradient has ended, a weight stash from then on."""
        stage = self._pipeline.stages[key[0]]
        times = (self._start["F", key], self._end["I", key], self._end["W", key])
        for (start, end), bytes_ in zip(
            pairwise(times), (stage.stash_bytes, stage.weight_stash_bytes), strict=True
        ):
            size = self._time("held")
            interval = self._model.new_optional_interval_var(start, size, end, runs, "")
            self._in_memory[device].append((interval, bytes_))

    def _messages_bytes(self, stage: int, name: str) -> int:
        """Return what an operation is given and makes, beside the stash that it becomes."""
        placed = self._pipeline.stages[stage]
        if name == "F":
            return placed.output_bytes
        return placed.input_gradient_bytes + placed.output_gradient_bytes if name == "I" else 0

    def _keep_memory(self, device: str) -> bool:
        """Require that the stashes fit at any time; return whether the state alone does."""
        stages = [self._pipeline.stages[stage] for stage in self._pipeline.stages_on[device]]
        room = self._pipeline.capacity_bytes(device) - static_with_workspace(stages)
        held = self._in_memory[device]
        if room >= 0 and sum(bytes_ for _, bytes_ in held) > room:
            self._model.add_cumulative([x for x, _ in held], [b for _, b in held], room)
        return room >= 0

    def _run_on(
        self,
        key: Key,
        device: str,
        runs: cp_model.BoolVarT,
        whole: cp_model.IntVar,
        is_whole: bool,
    ) -> None:
        model, both = self._model, self._model.new_bool_var("")
        kind = whole if is_whole else ~whole
        model.add_bool_or([both, ~runs, ~kind])
        model.add_implication(both, runs)
        model.add_implication(both, kind)
        for name, letter in zip("FIW", "FB " if is_whole else "FIW", strict=True):
            ticks = 0 if letter == " " else self._ticks(self._seconds(key[0], letter, device))
            start, end = self._start[name, key], self._end[name, key]
            interval = model.new_optional_interval_var(start, ticks, end, both, "")
            if ticks:
                self._on_device[device].append(interval)
                self._in_memory[device].append((interval, self._messages_bytes(key[0], name)))

    def _seconds(self, stage: int, letter: str, device: str) -> float:
        return self._pipeline.seconds(stage, letter, device)

    def _ticks(self, seconds: float) -> int:
        return int(seconds / TICK_S)

    def _connect(self, key: Key) -> None:
        """Send activations to the next stage and gradients back, over the links between."""
        stage, microbatch = key
        if stage + 1 == len(self._pipeline.stages):
            return
        after = (stage + 1, microbatch)
        here, there = (self._pipeline.stages[s].spec.devices for s in (stage, stage + 1))
        for u, v in product(here, there):
            both = self._model.new_bool_var("")
            first, second = self._runs[key, u], self._runs[after, v]
            self._model.add_bool_or([both, ~first, ~second])
            self._model.add_implication(both, first)
            self._model.add_implication(both, second)
            self._send(key, "F", after, self._pipeline.transfer(stage, "F", u, v), both)
            self._send(after, "I", key, self._pipeline.transfer(stage + 1, "B", v, u), both)

    def _send(
        self, key: Key, kind: str, to: Key, transfer: Transfer, both: cp_model.BoolVarT
    ) -> None:
        ticks = self._ticks(transfer.seconds)
        start, end = self._time("send"), self._time("sent")
        interval = self._model.new_optional_interval_var(start, ticks, end, both, "")
        for resource in transfer.occupied if ticks else ():
            self._in_line[resource].append(interval)
        self._model.add(start >= self._end[kind, key]).only_enforce_if(both)
        self._model.add(self._start[kind, to] >= end).only_enforce_if(both)

    def _add_ends(self, keys: list[Key]) -> None:
        """Reduce gradients after the last backwards, then step the optimizer on every device.

        Every backward may be the last: what is left of others is over before it ends. A bucket
        begins when each has run its layers.
        """
        pipeline = self._pipeline
        done = {device: self._time(f"done {device}") for device in pipeline.devices}
        for key, device in self._runs:
            literal = self._runs[key, device]
            self._model.add(done[device] >= self._end["W", key]).only_enforce_if(literal)
        on_network: defaultdict[str, list[cp_model.IntervalVar]] = defaultdict(list)
        for reduction in pipeline.synchronisations:
            ticks = self._ticks(reduction.seconds)
            start, end = self._time("reduce"), self._time("reduced")
            interval = self._model.new_interval_var(start, ticks, end, "")
            for key, device in self._runs:
                if key[0] in reduction.stages:
                    self._reduce_after(key, device, reduction, start)
            for device in reduction.devices:
                on_network[device].append(interval)
                self._model.add(done[device] >= end)
        for intervals in on_network.values():
            self._model.add_no_overlap(intervals)
        for device, time in done.items():
            self._model.add(self._total >= time + self._ticks(pipeline.optimizer_s[device]))

    def _reduce_after(
        self, key: Key, device: str, reduction: GradientReduction, start: cp_model.IntVar
    ) -> None:
        """Start a reduction once a backward has run all but the layers ahead of it."""
        runs, whole = self._runs[key, device], self._whole[key]
        for letter, kind in (("B", whole), ("W", ~whole)):
            ahead = math.ceil(reduction.ahead_s(letter, key[0], device) / TICK_S)
            after = self._end["W", key] - ahead
            self._model.add(start >= after).only_enforce_if([runs, kind])
