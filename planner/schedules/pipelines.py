"""Equal pipelines, data parallelism with pipelining: groups of one replica of every stage.

Microbatch m belongs to pipeline m mod R of R; its share is numbered from 0 within it. The slowest
pipeline is scheduled, and all do the same; where R does not divide the microbatches, the last
pipelines run one microbatch less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import PipeplanError
from planner.plan.membership import unequal
from planner.plan.operations import Operation, Orders
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import Rule

Pipelines = Sequence[Sequence[str]]
"""The device of each stage, by pipeline."""


@dataclass(frozen=True)
class EqualPipelines:
    """The pipelines that the replicas of stages form.

    Attributes:
        whole: all stages with their replicas.
        pipelines: the device of each stage, by pipeline.
    """

    whole: PlacedPipeline
    pipelines: Pipelines

    @cached_property
    def slowest(self) -> Sequence[str]:
        """The devices of the pipeline whose microbatches take longest."""
        return max(self.pipelines, key=self._work_s)

    def _work_s(self, devices: Sequence[str]) -> float:
        rows = zip(self.whole.stages, devices, strict=True)
        times = [stage.times[device] for stage, device in rows]
        return sum(row.forward_s + row.backward_s for row in times)

    @property
    def counterparts(self) -> list[Mapping[str, str]]:
        """By pipeline, its device for each of the slowest one's."""
        return [dict(zip(self.slowest, row, strict=True)) for row in self.pipelines]

    @cached_property
    def first(self) -> PlacedPipeline:
        """The slowest pipeline with the largest share; all reduce their gradients."""
        return self.whole.on_pipeline(self.slowest, len(self.pipelines))

    def spread(self, orders: Orders) -> Orders:
        """Return the orders of all pipelines, given those of the slowest one."""
        return spread_orders(orders, self.counterparts, self.whole.microbatches)


def pipelines_of(pipeline: PlacedPipeline) -> EqualPipelines | None:
    """Return the pipelines that equal replicas form.

    The i-th devices of all stages where no device is in two pipelines then, else the i-th in the
    cluster's order.

    Returns:
        None if the replicas form no pipelines with equal shares of the microbatches, or only one.
    """
    listed = [stage.spec.devices for stage in pipeline.stages]
    are_equal = unequal([frozenset(devices) for devices in listed]) is None
    if not are_equal or len(listed[0]) < 2 or pipeline.microbatches % len(listed[0]):
        return None
    pipelines = list(zip(*listed, strict=True))
    held = [device for one in pipelines for device in set(one)]
    if len(set(held)) < len(held):
        number = pipeline.problem.cluster.numbers
        ordered = (sorted(devices, key=number.__getitem__) for devices in listed)
        pipelines = list(zip(*ordered, strict=True))
    return EqualPipelines(pipeline, pipelines)


def orders_of_pipelines(pipeline: PlacedPipeline, pipelines: Pipelines, rule: Rule) -> Orders:
    """Return the orders of a schedule that every pipeline runs on a share of the microbatches.

    Args:
        pipeline: all stages with their replicas.
        pipelines: that these form.
        rule: of the schedule of one pipeline.

    Raises:
        DoesNotApplyError: if the schedule is not defined for such stages.
        PipeplanError: if there are fewer microbatches than pipelines.
    """
    largest_share(pipeline.microbatches, len(pipelines))
    equal = EqualPipelines(pipeline, pipelines)
    return equal.spread(rule(equal.first, balanced_assignment(equal.first)))


def spread_over(
    pipelines: Pipelines, rows: Sequence[Sequence[Operation]], microbatches: int
) -> Orders:
    """Return the orders of a table that every pipeline runs on its share of the microbatches.

    Args:
        pipelines: that run them.
        rows: of one pipeline with the largest share, the operations of each rank.
        microbatches: of all pipelines.
    """
    first = pipelines[0]
    orders = {first[row[0].stage]: row for row in rows if row}
    counterparts = [dict(zip(first, other, strict=True)) for other in pipelines]
    return spread_orders(orders, counterparts, microbatches)


def spread_orders(
    orders: Orders, counterparts: Sequence[Mapping[str, str]], microbatches: int
) -> dict[str, tuple[Operation, ...]]:
    """Return the orders of all groups that do what one of them does.

    Group n of R runs every R-th microbatch, from n on.

    Args:
        orders: of a group with the largest share, its microbatches numbered from 0.
        counterparts: of each group, its device for each of that one's.
        microbatches: of all groups; operations on others are left out.
    """
    count = len(counterparts)
    return {
        names[device]: tuple(
            o._replace(microbatch=o.microbatch * count + number)
            for o in order
            if o.microbatch * count + number < microbatches
        )
        for device, order in orders.items()
        for number, names in enumerate(counterparts)
    }


def largest_share(microbatches: int, pipelines: int) -> int:
    """Return the microbatches of the pipelines that run most, the equal share rounded up.

    Raises:
        PipeplanError: if some pipeline has none.
    """
    if microbatches < pipelines:
        raise PipeplanError(
            f"job.microbatches: {microbatches} are fewer than the {pipelines} pipelines; use more "
            "microbatches or fewer replicas"
        )
    return -(-microbatches // pipelines)
