"""The best quick schedule of a partition over what its stages may recompute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage
from planner.costs.placement import place
from planner.errors import DeadlockError
from planner.model.blocks import block_count, first_blocks
from planner.search.budget import Clock, Settings
from planner.search.partition.bounds.partition import (
    PartitionBound,
    in_flight_bound_s,
    with_least_stash,
)
from planner.search.partition.bounds.schedule import link_load_bound_s, schedule_bound_s
from planner.search.partition.chain import Chain, Partition, StageChoice, without_recompute
from planner.search.partition.memory.recompute import Holding
from planner.search.partition.memory.recompute_variants import RecomputeVariants
from planner.search.schedule.heuristic import (
    HasTime,
    Schedule,
    always,
    best_heuristic_schedule,
    fits_memory,
    never,
    quick_estimate_s,
)
from planner.search.schedule.pipeline_groups import place_first
from planner.search.schedule.search import improve_any
from planner.search.schedule.solve import ScheduleTask
from planner.simulation.simulator import reduced_soonest, simulate
from planner.simulation.timeline import Timeline, memory_profile
from planner.space import Backward

MOST_ROUNDS = 3
"""Rounds of dropping recomputation that a schedule does not need."""
BLOCK_STEPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)
"""Numbers of blocks that are tried where every stage recomputes as many, besides all."""
MOST_CHOICES = 2
"""Choices of what to recompute that an estimate is made for."""
LIKELY = 1.03
"""All quick schedules of a choice are tried if its estimate is so near the best one's."""


class QuickScheduler(Protocol):
    """A way to schedule stages whose recomputation is decided, without a search."""

    def __call__(
        self, pipeline: PlacedPipeline, *, backward: Backward, has_time: HasTime
    ) -> Schedule | None:
        """Return a schedule within memory, with these kinds of backward; None if none is found."""


class RecomputedSchedules:
    """Schedules of one chain's partitions, each with the recomputation that suits it best.

    Args:
        chain: the layers.
        scheduler: makes the quick schedules.
        has_time: for more than a few schedules once one is found.
    """

    def __init__(
        self,
        chain: Chain,
        scheduler: QuickScheduler = best_heuristic_schedule,
        has_time: HasTime = always,
    ) -> None:
        self._chain = chain
        self._scheduler = scheduler
        self._has_time = has_time
        self._backward = chain.problem.job.backward
        self._in_blocks = chain.problem.job.recompute == "blocks"
        self._variants = RecomputeVariants(chain)
        self._bound = PartitionBound(chain, self._variants)

    def best(
        self, partition: Partition, pipeline: PlacedPipeline, *, few: bool = False
    ) -> Schedule | None:
        """Return the fastest quick schedule within memory; None if none fits.

        Args:
            partition: stages on devices.
            pipeline: the same stages placed, nothing recomputed.
            few: try but a few schedules, as if there was no time.
        """
        has_time = never if few else self._has_time
        partition = without_recompute(partition)
        found: Schedule | None = None
        for bound_s, placed in self._likely(self._by_bound(partition, pipeline)):
            if found is not None and not has_time():
                break
            if found is not None and bound_s >= found.iteration_time_s:
                continue
            schedule = self._scheduled(placed, has_time)
            if schedule is None:
                continue
            schedule = self.relaxed(partition, schedule)
            if found is None or schedule.iteration_time_s < found.iteration_time_s:
                found = schedule
        return found or (None if self._in_blocks else self._leanest(partition, pipeline))

    def _likely(
        self, rows: list[tuple[float, PlacedPipeline]]
    ) -> list[tuple[float, PlacedPipeline]]:
        """Return the rows whose quick estimates are near the best, that one first."""
        if len(rows) < 2:
            return rows
        estimates = [quick_estimate_s(placed, split=self._chain.splits) for _, placed in rows]
        ranked = sorted((s, number) for number, s in enumerate(estimates) if s is not None)
        return [rows[number] for s, number in ranked if s <= LIKELY * ranked[0][0]] or rows

    def choices(
        self, partition: Partition, pipeline: PlacedPipeline, most_s: float
    ) -> list[PlacedPipeline]:
        """Return the placed stages with the likeliest choices of what to recompute.

        Where memory does not bind, the stages as they are. Left out are choices that bounds show to
        take longer than ``most_s``.
        """
        if not self._variants.may_change(pipeline):
            return [pipeline]
        rows = self._by_bound(without_recompute(partition), pipeline)
        return [placed for bound_s, placed in rows[:MOST_CHOICES] if bound_s <= most_s]

    def promise_s(self, partition: Partition, pipeline: PlacedPipeline) -> float:
        """Return a time that no schedule found by :meth:`best` beats; infinity if nothing fits."""
        partition = without_recompute(partition)
        bounds = [bound_s for bound_s, _ in self._by_bound(partition, pipeline)]
        if not bounds and not self.fits_never(partition, pipeline):
            split = self._chain.splits
            return max(schedule_bound_s(pipeline, split=split), link_load_bound_s(pipeline))
        return min(bounds, default=math.inf)

    def _by_bound(
        self, partition: Partition, pipeline: PlacedPipeline
    ) -> list[tuple[float, PlacedPipeline]]:
        """Return the variants, placed, the most promising first."""
        variants = (
            list(self._block_variants(partition))
            if self._in_blocks
            else self._varied(partition, pipeline)
        )
        placed = [self._placed(variant, pipeline) for variant in variants]
        carried_s, split = link_load_bound_s(pipeline), self._chain.splits
        bounds = [
            max(schedule_bound_s(p, split=split), in_flight_bound_s(p, split=split), carried_s)
            for p in placed
        ]
        return sorted(zip(bounds, placed, strict=True), key=lambda row: row[0])

    def _varied(self, partition: Partition, pipeline: PlacedPipeline) -> list[Partition]:
        """Return the partition with each choice worth scheduling.

        Of several equal groups all recompute what suits the one that is placed.
        """
        held = tuple(
            replace(stage, devices=placed.spec.devices)
            for stage, placed in zip(partition, pipeline.stages, strict=True)
        )
        return [
            tuple(
                replace(stage, recompute=chosen.recompute)
                for stage, chosen in zip(partition, variant, strict=True)
            )
            for variant in self._variants.variants(held, pipeline)
        ]

    def _block_variants(self, partition: Partition) -> Iterator[Partition]:
        """Yield the partition with the first N blocks of every stage recomputed, N from 0 on."""
        names = self._chain.names
        held = [names[stage.begin : stage.end] for stage in partition]
        most = max(map(block_count, held))
        for count in (*(number for number in BLOCK_STEPS if number < most), most):
            yield tuple(
                replace(stage, recompute=tuple(stage.begin + layers.index(n) for n in again))
                for stage, layers in zip(partition, held, strict=True)
                for again in (first_blocks(layers, count),)
            )

    def _leanest(self, partition: Partition, pipeline: PlacedPipeline) -> Schedule | None:
        variant = self._variants.leanest(partition, pipeline)
        if variant is None:
            return None
        schedule = self._scheduled(self._placed(variant, pipeline), self._has_time)
        return schedule and self.relaxed(partition, schedule)

    def _scheduled(self, pipeline: PlacedPipeline, has_time: HasTime) -> Schedule | None:
        """Return the best quick schedule, with gradients reduced as it suits it best."""
        found = self._scheduler(pipeline, backward=self._backward, has_time=has_time)
        return found and replace(found, timeline=reduced_soonest(found.timeline))

    def _placed(self, variant: Partition, pipeline: PlacedPipeline) -> PlacedPipeline:
        if not any(stage.recompute for stage in variant):
            return pipeline
        place_again = place_first if pipeline.groups else place
        return place_again(self._chain.problem, self._chain.specs(variant))

    def improve(
        self,
        partition: Partition,
        start: Schedule,
        settings: Settings,
        clock: Clock,
        limit_s: float,
    ) -> tuple[Schedule, float]:
        """Search with CP-SAT, as improve_any does, for what ``start`` recomputes.

        Returns:
            The best schedule, and a bound on every schedule of the partition whatever it
            recomputes (0 if nothing is proved). Where memory binds, half the time goes into a
            model of its own for that bound.
        """
        pipeline = start.timeline.pipeline
        task = ScheduleTask(settings, clock, backward=self._backward)
        if not self._variants.may_change(pipeline):
            found = improve_any(pipeline, start, task, limit_s)
            if pipeline.sync != self._plain(partition).sync:
                # Other reductions may be over sooner.
                found = replace(found, lower_bound_s=0.0)
            return found, found.lower_bound_s
        found = improve_any(pipeline, start, task, limit_s / 2)
        found = self.relaxed(partition, replace(found, lower_bound_s=0.0))
        light = with_least_stash(self._chain, partition, self._plain(partition))
        begin = replace(found, timeline=simulate(light, found.orders))
        bound = improve_any(light, begin, task, limit_s / 2)
        return found, bound.lower_bound_s

    def _plain(self, partition: Partition) -> PlacedPipeline:
        return place(self._chain.problem, self._chain.specs(partition))

    def bound_s(self, partition: Partition, pipeline: PlacedPipeline) -> float:
        """Return a time that no schedule beats, whatever is recomputed; infinity if none fits."""
        bound_s = self._bound.bound_s(partition, pipeline)
        return bound_s if math.isinf(bound_s) else max(bound_s, link_load_bound_s(pipeline))

    def fits_never(self, partition: Partition, pipeline: PlacedPipeline) -> bool:
        """Return whether it is proved that no recomputation and no schedule fit these stages."""
        return self._variants.fits_never(partition, pipeline)

    def relaxed(self, partition: Partition, schedule: Schedule) -> Schedule:
        """Return the same orders, less recomputed where they leave memory unused; never slower.

        Its ``lower_bound_s`` is dropped where anything changes: it was proved for other stages.
        """
        for _ in range(0 if self._in_blocks else MOST_ROUNDS):
            faster = self._relaxed_once(partition, schedule)
            if faster is None:
                return schedule
            schedule = faster
        return schedule

    def _relaxed_once(self, partition: Partition, schedule: Schedule) -> Schedule | None:
        pipeline = schedule.timeline.pipeline
        if not any(stage.spec.recompute for stage in pipeline.stages) or any(
            len(stages) > 1 for stages in pipeline.stages_on.values()
        ):
            return None
        now = self._now(partition, pipeline)
        rooms = _stash_rooms(schedule.timeline)
        less = tuple(
            self._recomputed(stage, pipeline.stages[j], rooms[j]) for j, stage in enumerate(now)
        )
        changed = [j for j, stage in enumerate(less) if stage != now[j]]
        # Quicker stages move tensors, which may then wait where there is no room for them.
        alone = [(*now[:j], less[j], *now[j + 1 :]) for j in changed]
        for choice in alone if len(changed) < 2 else [less, *alone]:
            faster = self._replayed(choice, schedule)
            if faster is not None:
                return faster
        return None

    def _now(self, partition: Partition, pipeline: PlacedPipeline) -> Partition:
        """Return the partition with what its stages recompute."""
        position = {name: k for k, name in enumerate(self._chain.names)}
        return tuple(
            replace(stage, recompute=tuple(position[name] for name in placed.spec.recompute))
            for stage, placed in zip(partition, pipeline.stages, strict=True)
        )

    def _replayed(self, partition: Partition, schedule: Schedule) -> Schedule | None:
        """Return the same orders for other stages, if that is faster and fits."""
        try:
            sync = schedule.timeline.pipeline.sync
            placed = place(self._chain.problem, self._chain.specs(partition), sync)
            timeline = simulate(placed, schedule.orders)
        except DeadlockError:
            return None
        if not fits_memory(timeline) or timeline.iteration_time_s >= schedule.iteration_time_s:
            return None
        return replace(schedule, timeline=timeline, lower_bound_s=0.0)

    def _recomputed(
        self, stage: StageChoice, now: PlacedStage, rooms: Mapping[int, int]
    ) -> StageChoice:
        """Return a stage with the best choice found that fits whenever what it recomputes now does.

        Args:
            stage: with what it recomputes now.
            now: the same placed.
            rooms: see :func:`_stash_rooms`.
        """
        if not stage.recompute:
            return stage
        cluster = self._chain.problem.cluster
        types = tuple(sorted(cluster.type_of(device) for device in stage.devices))
        least = self._chain.on(types[0]).stashes.workspace_bytes(stage.begin, stage.end)
        # The workspace of now is outside the rooms, that of a choice above the least is inside.
        more = {count: room + now.workspace_bytes - least for count, room in rooms.items()}
        for count in sorted(more, key=lambda count: more[count] / count):
            holding = Holding(stage.begin, stage.end, types, count)
            found = self._variants.chooser.choose([holding], more[count])
            if found is not None and all(
                held * (found.stash_bytes // count) + found.grown_bytes <= room
                for held, room in more.items()
            ):
                return replace(stage, recompute=found.layers)
        return stage


def _stash_rooms(timeline: Timeline) -> dict[int, dict[int, int]]:
    """Return the least room that so many stashes have, by stage and number of stashes.

    At every moment a device holds some number of stashes and something besides. Needs one stage a
    device.
    """
    none, one = (_with_stash(timeline, bytes_) for bytes_ in (0, 1))
    pipeline = timeline.pipeline
    rooms: dict[int, dict[int, int]] = {stage: {} for stage in range(len(pipeline.stages))}
    for device, (stage,) in pipeline.stages_on.items():
        capacity = pipeline.capacity_bytes(device)
        for (_, without), (_, with_stashes) in zip(none[device], one[device], strict=True):
            stashes, room = with_stashes - without, capacity - without
            if stashes > 0:
                rooms[stage][stashes] = min(room, rooms[stage].get(stashes, room))
    return rooms


def _with_stash(timeline: Timeline, bytes_: int) -> dict[str, list[tuple[float, int]]]:
    pipeline = timeline.pipeline
    stages = tuple(replace(stage, stash_bytes=bytes_) for stage in pipeline.stages)
    return memory_profile(replace(timeline, pipeline=replace(pipeline, stages=stages)))
