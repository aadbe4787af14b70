"""One change while it is valued, with the iteration times found under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from planner.analysis.what_if.altered import Altered
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.costs.reductions import GradientReduction
from planner.errors import DeadlockError
from planner.plan.membership import outside
from planner.plan.operations import Orders
from planner.search.partition.bounds.schedule import link_load_bound_s, schedule_bound_s
from planner.search.partition.chain import Chain, Partition
from planner.search.schedule.heuristic import Schedule, fits_memory
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.space import Backward
from planner.variants.changes import Change

Way = Literal["same plan replayed", "same stages, scheduled anew", "solved anew", "as it is"]


@dataclass
class Case:
    """A change, or none, and the fastest known under it.

    Attributes:
        change: None for the plan as it is.
        altered: the plan under it.
        best: the fastest timeline found that fits memory.
        found_by: how.
        replay_s: of the plan itself; None if it does not fit memory then.
        stages_bound_s: no schedule of the plan's stages is faster, whatever they recompute (of a
            change of the plan: with what they recompute).
        lower_bound_s: no plan is faster; None if that was not proved.
        bound_covers: which plans.
        why_not: why the plan itself cannot be run under the change.
        same: the fastest schedule found of the plan's stages with what they recompute.
    """

    change: Change | None
    altered: Altered
    best: Timeline | None = None
    found_by: Way | None = None
    replay_s: float | None = None
    stages_bound_s: float = 0.0
    lower_bound_s: float | None = None
    bound_covers: str | None = None
    why_not: str | None = None
    same: Schedule | None = None

    @property
    def pipeline(self) -> PlacedPipeline:
        """The plan's stages, with what they recompute, under the change."""
        return self.altered.pipeline

    def placed(self, stages: Sequence[StageSpec]) -> PlacedPipeline:
        """Place other stages under the change."""
        return place(self.altered.problem, stages, self.altered.sync)

    @cached_property
    def plain_pipeline(self) -> PlacedPipeline:
        """The plan's stages under the change, nothing recomputed."""
        if not any(stage.recompute for stage in self.altered.stages):
            return self.pipeline
        return self.placed([replace(stage, recompute=()) for stage in self.altered.stages])

    @cached_property
    def chain(self) -> Chain:
        """The changed problem's layers."""
        return Chain(self.altered.problem)

    @cached_property
    def partition(self) -> Partition | None:
        """The plan's stages as cuts of the chain; None if they are none."""
        rows = [(stage.layers, stage.devices) for stage in self.altered.stages]
        return self.chain.partition(rows)

    @property
    def best_s(self) -> float:
        """The shortest iteration found; infinite if none."""
        return float("inf") if self.best is None else self.best.iteration_time_s

    def offer(self, timeline: Timeline, found_by: Way) -> None:
        """Keep a timeline if it is the fastest."""
        if timeline.iteration_time_s < self.best_s:
            self.best, self.found_by = timeline, found_by

    def offer_schedule(self, schedule: Schedule | None) -> None:
        """Keep a schedule of the plan's stages, whatever it recomputes, if it is the fastest."""
        if schedule is not None and fits_memory(schedule.timeline):
            self.offer(schedule.timeline, "same stages, scheduled anew")

    def offer_same(self, schedule: Schedule | None) -> None:
        """Keep a schedule that recomputes what the plan does, if it is the fastest."""
        self.offer_schedule(schedule)
        if schedule is not None and fits_memory(schedule.timeline):
            old_s = float("inf") if self.same is None else self.same.iteration_time_s
            if schedule.iteration_time_s < old_s:
                self.same = schedule

    def with_plan_of(self, timeline: Timeline) -> Altered:
        """Return the same problem with the stages and orders of a timeline."""
        stages = tuple(stage.spec for stage in timeline.pipeline.stages)
        return replace(self.altered, stages=stages, orders=timeline.orders)

    def replay(self, orders: Orders, stages: Sequence[StageSpec] | None = None) -> Timeline | None:
        """Replay stages and orders under the change; None if they fail or overflow memory."""
        placed = self.pipeline if stages is None else self.placed(stages)
        if not is_connected(placed) or not self.allows(stages or self.altered.stages, orders):
            return None
        try:
            timeline = simulate(placed, orders)
        except DeadlockError:
            return None
        return timeline if fits_memory(timeline) else None

    @property
    def backward(self) -> Backward:
        """The kinds of backward that the changed job allows."""
        return self.altered.problem.job.backward

    def allows(self, stages: Sequence[StageSpec], orders: Orders) -> bool:
        """Return whether stages and orders use only the freedoms of the changed job."""
        problem = self.altered.problem
        layers = tuple(problem.graph.layers)
        return not any(outside(problem.job.space, stages, orders, layers))

    def schedule_by(self, orders: Orders, method: str) -> Schedule | None:
        """Replay the plan's stages in other orders; None if they fail or overflow memory."""
        timeline = self.replay(orders)
        return None if timeline is None else Schedule(orders, timeline, method)

    def prove_stages(self) -> None:
        """Bound all schedules of the plan's stages; quick."""
        pipeline = self.pipeline if self.altered.is_of_plan else self.plain_pipeline
        self.stages_bound_s = max(
            schedule_bound_s(pipeline, split=self.backward != "whole"), link_load_bound_s(pipeline)
        )


def holds_under(timeline: Timeline, pipeline: PlacedPipeline) -> bool:
    """Return whether a timetable still holds on other figures: nothing takes longer.

    Every event may start when it did: what it waits for has ended by then, and no device, link or
    memory holds more than it did.

    Args:
        timeline: of the same stages.
        pipeline: their other figures.
    """
    old = timeline.pipeline
    if [s.spec for s in old.stages] != [s.spec for s in pipeline.stages]:
        return False
    if any(a != b for a, b in zip(_bytes(old), _bytes(pipeline), strict=True)):
        return False
    return (
        old.microbatches == pipeline.microbatches
        and all(pipeline.capacity_bytes(d) >= old.capacity_bytes(d) for d in old.devices)
        and all(pipeline.optimizer_s[d] <= old.optimizer_s[d] for d in old.devices)
        and _speeds_hold(old, pipeline)
        and _reductions_hold(old, pipeline)
        and _operations_hold(timeline, pipeline)
        and _transfers_hold(timeline, pipeline)
    )


def _bytes(pipeline: PlacedPipeline) -> list[tuple[int, ...]]:
    return [
        (
            stage.static_bytes,
            stage.workspace_bytes,
            stage.split_workspace_bytes,
            stage.stash_bytes,
            stage.weight_stash_bytes,
            stage.input_bytes,
            stage.output_bytes,
            stage.input_gradient_bytes,
            stage.output_gradient_bytes,
            stage.sent_bytes,
            stage.returned_bytes,
        )
        for stage in pipeline.stages
    ]


def _speeds_hold(old: PlacedPipeline, new: PlacedPipeline) -> bool:
    """Whether devices and their messages are slowed no more than before by anything."""
    before, after = old.problem.cluster, new.problem.cluster
    pairs = (
        (before.slowed_by_communication, after.slowed_by_communication),
        (before.slows_communication, after.slows_communication),
    )
    return all(
        after.host_of.get(device) in (None, before.host_of.get(device))
        and all(factors.get(device, 1.0) <= known.get(device, 1.0) for known, factors in pairs)
        for device in old.devices
    )


def _reductions_hold(old: PlacedPipeline, new: PlacedPipeline) -> bool:
    if len(old.synchronisations) != len(new.synchronisations):
        return False
    rows = zip(old.synchronisations, new.synchronisations, strict=True)
    return all(
        (before.stages, before.devices, before.gathers)
        == (after.stages, after.devices, after.gathers)
        and after.seconds <= before.seconds
        and after.gather_s <= before.gather_s
        and _gradients_hold(old, before, new, after)
        for before, after in rows
    )


def _gradients_hold(
    old: PlacedPipeline, before: GradientReduction, new: PlacedPipeline, after: GradientReduction
) -> bool:
    """Whether a last backward makes the gradients as soon after its start."""
    pairs = product(before.stages, before.devices, "BW")
    return not (before.ahead or after.ahead) or all(
        new.seconds(stage, kind, device) - after.ahead_s(kind, device)
        <= old.seconds(stage, kind, device) - before.ahead_s(kind, device)
        for stage, device, kind in pairs
    )


def _operations_hold(timeline: Timeline, new: PlacedPipeline) -> bool:
    old = timeline.pipeline
    kinds = {(e.operation.stage, e.operation.kind, e.device) for e in timeline.operations}
    return all(new.seconds(*kind) <= old.seconds(*kind) for kind in kinds)


def _transfers_hold(timeline: Timeline, new: PlacedPipeline) -> bool:
    seen = set()
    for event in timeline.transfers:
        key = (event.operation.stage, event.operation.kind, event.source, event.target)
        if key in seen:
            continue
        seen.add(key)
        stage, kind, source, target = key
        send = new.forward_transfer if kind == "F" else new.backward_transfer
        old_send = (
            timeline.pipeline.forward_transfer
            if kind == "F"
            else timeline.pipeline.backward_transfer
        )
        before, after = old_send(stage, source, target), send(stage, source, target)
        if after.links != before.links or after.seconds > before.seconds:
            return False
    return True
