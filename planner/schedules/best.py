"""The fastest published schedule of stages on devices that fits memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders, owners
from planner.plan.operations import one_forward_one_backward as interleaved_order
from planner.program.lower.lower import lower_orders
from planner.program.replay import replay
from planner.schedules.assignment import Assignment, assignments, balanced_assignment
from planner.schedules.listed import NAMES, list_orders, list_rules, split_stages
from planner.schedules.pipelines import pipelines_of
from planner.schedules.placements import DoesNotApplyError
from planner.schedules.published import WHOLE, WITHOUT_REPLICAS, published_orders
from planner.schedules.split import join_split_backwards, split_backwards
from planner.schedules.whole import one_by_one
from planner.schedules.zero_bubble import zero_bubble_orders
from planner.simulation.simulator import reduced_soonest, simulate
from planner.simulation.timeline import Timeline
from planner.space import Backward

_Rows = Iterable[tuple[str, Orders]]


@dataclass(frozen=True)
class Scheduled:
    """Orders and their simulation; ``method`` names the rule that made them."""

    orders: Orders
    timeline: Timeline
    method: str

    @property
    def iteration_time_s(self) -> float:
        """Simulated time of one iteration."""
        return self.timeline.iteration_time_s


def best_schedule(
    pipeline: PlacedPipeline, *, backward: Backward | None = None
) -> Scheduled | None:
    """Return the fastest published schedule; None if no schedule was found that fits memory.

    Where memory is too small for the fastest of them, the microbatches in flight are limited: the
    fastest of the published schedules that fit and of list schedules, or else each microbatch runs
    by itself. Gradients are reduced in buckets, or after the last backwards if that is faster.

    Args:
        pipeline: the stages.
        backward: kinds of backward that schedules may have; None: as the job allows.
    """
    kinds = backward or pipeline.problem.job.backward
    found = _replayed(pipeline, published_for(pipeline, kinds))
    if not found or not found[0].fits:
        more = _replayed(pipeline, _by_job(pipeline, lambda one: _listed(one, kinds)))
        # Published ones stand first, also where others are faster by rounding.
        found = sorted([*found, *more], key=lambda row: float(f"{row.time_s:.9g}"))
    if not any(row.fits for row in found):
        found = _replayed(pipeline, _one_by_one(pipeline, kinds))
    for row in found:
        if row.fits:
            timeline = reduced_soonest(simulate(pipeline, row.orders))
            return Scheduled(row.orders, timeline, row.method)
    return None


class _Replayed(NamedTuple):
    """Orders with their time, by which they sort, and whether they fit memory."""

    time_s: float
    number: int
    method: str
    orders: Orders
    fits: bool


def _replayed(pipeline: PlacedPipeline, rows: _Rows) -> list[_Replayed]:
    """Replay schedules, and return the fastest first.

    Left out are those whose devices wait in a circle.
    """
    found: list[_Replayed] = []
    for method, orders in rows:
        program = lower_orders(pipeline, orders).program
        with suppress(DeadlockError):
            times = replay(program)
            fits = bool((times.peak_bytes <= program.devices["capacity_bytes"]).all())
            found.append(_Replayed(times.time_s, len(found), method, orders, fits))
    return sorted(found, key=lambda row: row[:2])


def published_for(pipeline: PlacedPipeline, kinds: Backward) -> Iterator[tuple[str, Orders]]:
    """Yield the names and orders of the published schedules that the job allows."""
    return _by_job(pipeline, lambda one: _published_of(one, kinds))


def _by_job(
    pipeline: PlacedPipeline, make: Callable[[PlacedPipeline], _Rows]
) -> Iterator[tuple[str, Orders]]:
    """Yield orders made for the stages, or for each of several pipelines if the job wants that."""
    job = pipeline.problem.job
    if job.has_pipelines and pipeline.has_replicas:
        if (equal := pipelines_of(pipeline)) is not None:
            for name, orders in _by_job(equal.first, make):
                yield f"{name}, in {len(equal.pipelines)} equal pipelines", equal.spread(orders)
    elif job.order == "1f1b":
        yield from _interleaved(pipeline)
    else:
        yield from make(pipeline)


def _interleaved(pipeline: PlacedPipeline) -> Iterator[tuple[str, Orders]]:
    """Yield 1F1B, or interleaved 1F1B, if it is defined for the stages as runtimes have it."""
    by_stage = [stage.spec.devices[0] for stage in pipeline.stages]
    loop = list(dict.fromkeys(by_stage))
    rounds = len(by_stage) // len(loop)
    if by_stage != loop * rounds or pipeline.has_replicas:
        return
    microbatches = range(pipeline.microbatches)
    rows = [interleaved_order(n, len(loop), len(by_stage), microbatches) for n in range(len(loop))]
    orders = {device: row for device, row in zip(loop, rows, strict=True) if row is not None}
    if len(orders) == len(loop):
        yield "1f1b" if rounds == 1 else "interleaved 1f1b", orders


def _published_of(pipeline: PlacedPipeline, kinds: Backward) -> Iterator[tuple[str, Orders]]:
    for owner in assignments(pipeline):
        rows = list(_with_pipelines(pipeline, owner, split=kinds != "whole"))
        if kinds != "split":
            yield from (row for row in rows if row[0].partition(" in ")[0] in WHOLE)
        if kinds != "whole":
            stages = split_stages(pipeline)
            for name, orders in rows:
                yield from _joined(pipeline, name, _apart(orders, stages), kinds)
    if kinds != "whole":
        with suppress(DoesNotApplyError):
            for orders in zero_bubble_orders(pipeline):
                yield from _joined(pipeline, "zero-bubble rules", orders, kinds)


def _with_pipelines(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool
) -> Iterator[tuple[str, Orders]]:
    """Yield published schedules; of those without replicas also one in each of equal pipelines."""
    yield from published_orders(pipeline, owner, split=split)
    equal = pipelines_of(pipeline) if len(pipeline.stages) > 1 else None
    if equal is not None:
        one, count = equal.first, len(equal.pipelines)
        for name, orders in published_orders(one, balanced_assignment(one), split=split):
            if name in WITHOUT_REPLICAS:
                yield f"{name} in {count} pipelines", equal.spread(orders)


def _listed(pipeline: PlacedPipeline, kinds: Backward) -> Iterator[tuple[str, Orders]]:
    for owner in assignments(pipeline):
        for split in (False, True):
            if kinds == ("whole" if split else "split"):
                continue
            for rule in list_rules(pipeline, split=split):
                orders = list_orders(pipeline, owner, rule)
                if orders is not None:
                    yield from _joined(pipeline, NAMES[rule.priority], orders, kinds)


def _joined(
    pipeline: PlacedPipeline, name: str, orders: Orders, kinds: Backward
) -> Iterator[tuple[str, Orders]]:
    """Yield orders, and with parts of backwards joined that follow each other and are slower."""
    yield name, orders
    if kinds != "any" or not pipeline.has_quicker_wholes:
        return
    owner = owners(orders)

    def is_quicker(row: Operation) -> bool:
        times = pipeline.stages[row.stage].times[owner[row.stage, row.microbatch]]
        return times.is_quicker_whole

    joined = {device: join_split_backwards(row, is_quicker) for device, row in orders.items()}
    if joined != {device: list(row) for device, row in orders.items()}:
        yield f"{name}, backwards joined", joined


def _apart(orders: Orders, stages: Collection[int]) -> Orders:
    """Return orders with every whole backward of some stages split."""
    return {device: split_backwards(order, stages) for device, order in orders.items()}


def _one_by_one(pipeline: PlacedPipeline, kinds: Backward) -> Iterator[tuple[str, Orders]]:
    """Yield the schedule that needs least memory, where orders are free."""
    job = pipeline.problem.job
    if job.order != "1f1b" and not (job.has_pipelines and pipeline.has_replicas):
        orders = one_by_one(pipeline, balanced_assignment(pipeline))
        splits = range(len(pipeline.stages)) if kinds == "split" else ()
        yield "one by one", _apart(orders, splits)
