"""Plans that may offload stashes to the host, where that wins.

A search without offloading comes first. A second one is of the same problem with stashes of
nothing: its bound holds for every plan, whatever is offloaded or recomputed, and its partitions are
those that memory for stashes would not stand in the way of. The best partitions of both are then
scheduled with as much offloaded as they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise

from planner.cluster.hardware import GIB
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.costs.stage_bytes import stage_bytes
from planner.errors import DeadlockError, InfeasibleError
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.search.budget import Clock, SearchWork
from planner.search.finished import how_ended, limit_text, plan_of, status_of
from planner.search.partition.candidates import simple_partitions, thorough_partitions
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.memory.recompute_variants import one_forward_one_backward
from planner.search.result import HistoryRow, Result
from planner.search.schedule.heuristic import Schedule, fits_memory, quick_schedules
from planner.search.schedule.pipeline_groups import operation_count
from planner.search.state import Progress, Search
from planner.simulation.simulator import reduced_soonest, simulate
from planner.units import plural
from planner.variants.problems import with_job, with_memory

KEPT_SHARE, FREE_SHARE, OFFLOAD_SHARE = 0.45, 0.3, 0.25
"""Shares of the time limit: for the search without offloading, for that with stashes of nothing,
for schedules that offload."""
FEWEST, MOST_KNOWN, MOST_LOOKED_AT = 4, 20, 300
"""Partitions that are scheduled however little time is left, those of a search whose neighbours are
looked at too, and all that are looked at."""
ON_THE_WAY = (2, 3)
"""Times what a stage offloads of a microbatch that a device is taken to hold besides the stashes
that stay: of one whose forward runs, of one on its way back, and perhaps of one on its way out."""
SHARES = (0.0, 0.25, 0.5, 0.75)
"""What a stage is tried with instead, of all that it offloads, once a schedule is known."""
Run = Callable[[Problem, float, Progress], Search]
"""Searches a problem for so many seconds, and reports."""


def stashless(problem: Problem) -> Problem:
    """Return a problem of which a plan that fits is at least as good as any that offloads.

    Its layers keep nothing and hold nothing while they run. What stages receive of each microbatch
    stays in their stash there, so that devices have as much more memory: in the problem itself it
    may be part of a stash that is offloaded or, for weight gradients, not needed.
    """
    record = problem.graph.record
    nothing = {"stash_bytes": 0, "weight_stash_bytes": None, "peak_bytes": 0}
    layers = tuple(layer.model_copy(update=nothing) for layer in record.layers)
    tensors = tuple(row.model_copy(update={"saved_by": None}) for row in record.boundaries)
    light = record.model_copy(update={"layers": layers, "boundaries": tensors})
    job, received_bytes = problem.job, int(Chain(problem).cut_bytes.max())
    more_gib = (job.microbatches * job.max_stages_per_device * received_bytes + 1) / GIB
    kinds = problem.cluster.device_types
    sizes = {name: kind.memory_gib + more_gib for name, kind in kinds.items()}
    return with_memory(replace(problem, graph=LayerGraph.from_record(light)), sizes)


def solve_with_offload(
    problem: Problem,
    run: Run,
    *,
    time_limit_s: float,
    deterministic: bool,
    gap_limit: float,
    progress: Progress,
    infeasible: Callable[[Search], InfeasibleError],
) -> Result:
    """Return the fastest plan found, with a bound on all plans that may offload.

    Args:
        problem: whose job allows to offload.
        run: searches a problem.
        time_limit_s: of everything.
        deterministic: whether that is CP-SAT's deterministic time.
        gap_limit: stop once iteration time / lower bound - 1 is at most this.
        progress: called with every new incumbent or bound.
        infeasible: says why a search found no plan.

    Raises:
        InfeasibleError: if no plan fits, or none was found.
        KeyboardInterrupt: on Ctrl-C before any plan was found.
    """
    clock = Clock(time_limit_s, deterministic)
    history: list[HistoryRow] = []

    def note(row: HistoryRow) -> None:
        history.append(row)
        progress(row)

    # What is proved of plans that do not offload is no bound on those that do.
    kept = run(
        with_job(problem, offload=False),
        KEPT_SHARE * time_limit_s,
        lambda row: note(row._replace(lower_bound_s=0.0)),
    )
    clock.spend(kept.clock.elapsed_s)
    free = run(stashless(problem), FREE_SHARE * time_limit_s, lambda row: None)
    clock.spend(free.clock.elapsed_s)
    if kept.clock.is_stopped or free.clock.is_stopped:
        clock.stop()
    found = OffloadSearch(problem, clock, kept, free, gap_limit)
    best = found.best(note)
    if best is None:
        if clock.is_stopped:
            raise KeyboardInterrupt("before any plan was found")
        error = infeasible(kept)
        raise InfeasibleError(error.problems, is_proved=free.found.is_infeasible)
    method = f"partition portfolio, schedule by {best.method}"
    plan = plan_of(free, best, limit_text(time_limit_s, deterministic), method)
    bound_s = min(free.found.bound_s, best.iteration_time_s)
    status = status_of(free, best.iteration_time_s)
    if clock.is_stopped and status != "optimal":
        status = "interrupted"
    return Result(
        status=status,
        plan=plan,
        lower_bound_s=bound_s,
        history=tuple(history),
        tried=kept.found.tried + free.found.tried + found.tried,
        ended=how_ended(status, is_enough=found.is_done(best.iteration_time_s), has_time=False),
        search_s=clock.elapsed_s,
        deterministic=deterministic,
    )


class OffloadSearch:
    """Schedules of partitions that offload what they need.

    Args:
        problem: whose job allows to offload.
        clock: of the whole search.
        kept: a search without offloading.
        free: a search of the :func:`stashless` problem.
        gap_limit: stop once iteration time / lower bound - 1 is at most this.

    Attributes:
        tried: number of partitions that were scheduled.
    """

    def __init__(
        self, problem: Problem, clock: Clock, kept: Search, free: Search, gap_limit: float
    ) -> None:
        self._problem, self._clock = problem, clock
        self._kept, self._free, self._gap_limit = kept, free, gap_limit
        self._end_s = clock.elapsed_s + OFFLOAD_SHARE * clock.limit_s
        self.tried = 0

    def is_done(self, time_s: float) -> bool:
        """Return whether a time is near enough to the bound."""
        return time_s <= self._free.found.bound_s * (1 + self._gap_limit)

    def best(self, note: Progress) -> Schedule | None:
        """Return the fastest schedule found, of any partition of both searches; None without."""
        best: Schedule | None = None
        for schedule in self._schedules():
            if best is None or schedule.iteration_time_s < best.iteration_time_s:
                best = schedule
                note(self._row(schedule))
            if self.is_done(best.iteration_time_s):
                break
        return best

    def _row(self, schedule: Schedule) -> HistoryRow:
        stages = schedule.timeline.pipeline.stages
        count = sum(stage.offload_bytes > 0 for stage in stages)
        event = f"plan: {plural(len(stages), 'stage')}, {count} of them offloading"
        time_s = schedule.iteration_time_s
        bound_s = min(self._free.found.bound_s, time_s)
        return HistoryRow(self._clock.elapsed_s, time_s, bound_s, event)

    def _schedules(self) -> Iterator[Schedule]:
        """Yield schedules that fit: without offloading, its recomputation exchanged, then anew."""
        known = self._kept.best
        if known is not None:
            schedule = self._again(known.schedule)
            yield schedule
            yield from self._instead_of_recomputing(schedule)
        best_s = math.inf if known is None else known.schedule.iteration_time_s
        for bound_s, plain in self._promising():
            is_over = self._clock.is_stopped or self._clock.elapsed_s >= self._end_s
            if bound_s >= best_s or (is_over and self.tried >= FEWEST):
                return
            found = self._scheduled(plain)
            if found is not None:
                best_s = min(best_s, found.iteration_time_s)
                yield found

    def _promising(self) -> list[tuple[float, PlacedPipeline]]:
        """Return placed partitions that have room for a microbatch, those of least bound first."""
        rows = []
        known = filter(None, map(self._free.chain.at_cuts, self._partitions()))
        for number, partition in enumerate(islice(dict.fromkeys(known), MOST_LOOKED_AT)):
            if number >= FEWEST and self._clock.elapsed_s >= self._end_s:
                break
            self._clock.charge(SearchWork.PARTITION_BOUND)
            bound_s = self._free.proved_s(partition)
            if math.isfinite(bound_s):
                plain = place(self._problem, self._free.chain.specs(partition))
                if is_connected(plain) and self._may_fit(plain):
                    rows.append((bound_s, plain))
        return sorted(rows, key=lambda row: row[0])

    def _partitions(self) -> Iterator[Partition]:
        """Yield the partitions of both searches and their neighbours, then balanced ones."""
        chain, most = self._free.chain, self._free.max_stages
        for search in (self._free, self._kept):
            for candidate in search.ranked()[:MOST_KNOWN]:
                yield candidate.partition
                yield from _with_a_cut_moved(candidate.partition)
        yield from simple_partitions(chain, most)
        yield from thorough_partitions(chain, most)

    def _again(self, schedule: Schedule) -> Schedule:
        """Return a schedule of the search without offloading as one of this problem."""
        pipeline = schedule.timeline.pipeline
        specs = [stage.spec for stage in pipeline.stages]
        placed = place(self._problem, specs, pipeline.sync)
        return replace(schedule, timeline=simulate(placed, schedule.orders), lower_bound_s=0.0)

    def _instead_of_recomputing(self, schedule: Schedule) -> Iterator[Schedule]:
        """Yield the same orders with stages that offload what they recomputed, while faster."""
        specs = [stage.spec for stage in schedule.timeline.pipeline.stages]
        best = schedule
        for j, spec in enumerate(specs):
            if not spec.recompute or not self._has_host_link(spec):
                continue
            changed = replace(spec, recompute=(), offload=spec.recompute)
            found = self._replayed(best, [*specs[:j], changed, *specs[j + 1 :]])
            if found is not None and found.iteration_time_s < best.iteration_time_s:
                best, specs = found, [*specs[:j], changed, *specs[j + 1 :]]
        if best is not schedule:
            yield self.thrifty(best)

    def _has_host_link(self, spec: StageSpec) -> bool:
        cluster = self._problem.cluster
        rates = [cluster.device_type(name).host_link_gb_per_s for name in spec.devices]
        return None not in rates

    def _replayed(self, schedule: Schedule, specs: Sequence[StageSpec]) -> Schedule | None:
        """Return the same orders for stages that keep something else; None if they do not fit."""
        sync = schedule.timeline.pipeline.sync
        placed = place(self._problem, specs, sync)
        self._clock.charge(SearchWork.PLACED_STAGE, len(specs))
        self._clock.charge(SearchWork.REPLAYED_EVENT, 2 * placed.microbatches * len(specs))
        try:
            timeline = simulate(placed, schedule.orders)
        except DeadlockError:
            return None
        return replace(schedule, timeline=timeline) if fits_memory(timeline) else None

    def thrifty(self, schedule: Schedule) -> Schedule:
        """Return the same orders with less offloaded where that fits and is not slower."""
        for j in range(len(schedule.timeline.pipeline.stages)):
            specs = [stage.spec for stage in schedule.timeline.pipeline.stages]
            away = specs[j].offload
            for share in SHARES if away else ():
                less = replace(specs[j], offload=away[: math.floor(share * len(away))])
                found = self._replayed(schedule, [*specs[:j], less, *specs[j + 1 :]])
                if found is not None and found.iteration_time_s <= schedule.iteration_time_s:
                    schedule = found
                    break
        return schedule

    def _scheduled(self, plain: PlacedPipeline) -> Schedule | None:
        """Return the fastest quick schedule of stages that offload what they need."""
        self.tried += 1
        self._clock.charge(SearchWork.SCHEDULED_OPERATION, operation_count(plain))
        found: Schedule | None = None
        for times in ON_THE_WAY:
            placed = place(self._problem, self._offloading(plain, times))
            for schedule in self._quick(placed, times):
                if found is None or schedule.iteration_time_s < found.iteration_time_s:
                    found = schedule
        return found and self.thrifty(found)

    def _may_fit(self, plain: PlacedPipeline) -> bool:
        """Return whether each stage has room for the stash of the microbatch that it runs."""
        return all(
            stage.stash_bytes + stage.tight_bytes()
            <= max(_free_bytes(plain, device) for device in stage.spec.devices)
            for stage in plain.stages
        )

    def _offloading(self, plain: PlacedPipeline, times: int) -> list[StageSpec]:
        """Return the stages with so many of their first layers offloaded as 1F1B needs.

        Stages of one device share its room in proportion to what they would keep.
        """
        in_flight = one_forward_one_backward(plain)
        wanted = {j: in_flight[j] * stage.stash_bytes for j, stage in enumerate(plain.stages)}
        room: dict[int, float] = dict.fromkeys(wanted, math.inf)
        for device, stages in plain.stages_on.items():
            total = sum(wanted[j] for j in stages) or 1
            waiting = sum(_waiting_bytes(plain, j) for j in stages)
            free = _free_bytes(plain, device) - waiting
            for j in stages:
                room[j] = min(room[j], free * wanted[j] / total)
        return [
            self._fitting(plain, j, in_flight[j], min(times, in_flight[j]), room[j])
            for j in sorted(wanted)
        ]

    def _fitting(
        self, plain: PlacedPipeline, j: int, in_flight: int, times: int, room_bytes: float
    ) -> StageSpec:
        """Return a stage with the fewest of its first layers offloaded that make room enough."""
        stage = plain.stages[j]
        if in_flight * stage.stash_bytes <= room_bytes or not self._has_host_link(stage.spec):
            return stage.spec
        low, high = 1, len(stage.spec.layers)
        while low < high:
            middle = (low + high) // 2
            away = self._offload_bytes(plain, j, middle)
            held = in_flight * (stage.stash_bytes - away) + times * away
            low, high = (low, middle) if held <= room_bytes else (middle + 1, high)
        return replace(stage.spec, offload=stage.spec.layers[:low])

    def _offload_bytes(self, plain: PlacedPipeline, j: int, count: int) -> int:
        specs = [stage.spec for stage in plain.stages]
        specs[j] = replace(specs[j], offload=specs[j].layers[:count])
        return stage_bytes(self._problem.graph, specs)[j].offload

    def _quick(self, placed: PlacedPipeline, times: int) -> Iterator[Schedule]:
        """Yield quick schedules within memory, made for what stays of each stash."""
        light = lightened(placed, times)
        seen: set[tuple[object, ...]] = set()
        for schedule in quick_schedules(light, backward="whole"):
            key = tuple((device, tuple(order)) for device, order in schedule.orders.items())
            if key in seen:
                continue
            seen.add(key)
            with suppress(DeadlockError):
                timeline = reduced_soonest(simulate(placed, schedule.orders))
                found = Schedule(schedule.orders, timeline, f"{schedule.method}, with offloading")
                if fits_memory(timeline) and self._kept.task.allows_orders(found):
                    yield found


def _with_a_cut_moved(partition: Partition) -> Iterator[Partition]:
    """Yield a partition with one of its cuts a layer earlier or later."""
    for j, (left, right) in enumerate(pairwise(partition)):
        for cut in (left.end - 1, left.end + 1):
            if left.begin < cut < right.end:
                moved = replace(left, end=cut), replace(right, begin=cut)
                yield (*partition[:j], *moved, *partition[j + 2 :])


def lightened(pipeline: PlacedPipeline, times: int) -> PlacedPipeline:
    """Return stages that keep only what they do not offload.

    Schedules are made for these; a replay of the stages themselves says whether they fit.

    Args:
        pipeline: the stages.
        times: what they offload of so many microbatches, they hold always.
    """
    stages = tuple(
        replace(
            stage,
            stash_bytes=stage.stash_bytes - stage.offload_bytes,
            static_bytes=stage.static_bytes + times * stage.offload_bytes,
            offload_bytes=0,
        )
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)


def _free_bytes(pipeline: PlacedPipeline, device: str) -> int:
    return pipeline.capacity_bytes(device) - pipeline.static_bytes(device)


def _waiting_bytes(pipeline: PlacedPipeline, j: int) -> int:
    """Return enough for one tensor of each kind of a stage to wait or be on its way."""
    stage = pipeline.stages[j]
    gradients = stage.input_gradient_bytes + stage.output_gradient_bytes
    return stage.input_bytes + stage.output_bytes + gradients
