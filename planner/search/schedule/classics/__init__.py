"""Published schedules, each by its rule: candidates of the search.

Every generator takes a placed pipeline and the replica of each (stage, microbatch), and returns an
order for each device. It raises DoesNotApplyError where the schedule is not defined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders
from planner.search.schedule.assignment import Assignment
from planner.search.schedule.classics.placements import DoesNotApplyError
from planner.search.schedule.classics.split_backward import dual_pipe_v, zb_h1, zb_h2, zb_v
from planner.search.schedule.classics.spp import spp_execution
from planner.search.schedule.classics.whole_backward import (
    eager_one_forward_one_backward,
    gpipe,
    interleaved_one_forward_one_backward,
    looped_breadth_first,
    one_by_one,
    one_forward_one_backward,
)
from planner.search.schedule.classics.zero_bubble_rules import zb_auto, zero_bubble_orders

Generator = Callable[[PlacedPipeline, Assignment], Orders]

WHOLE: dict[str, Generator] = {
    "gpipe": gpipe,
    "looped breadth first": looped_breadth_first,
    "1f1b": one_forward_one_backward,
    "eager 1f1b": eager_one_forward_one_backward,
    "interleaved 1f1b": interleaved_one_forward_one_backward,
    "pe": spp_execution,
}
"""Schedules with whole backwards."""
SPLIT: dict[str, Generator] = {
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-auto": zb_auto,
    "zb-v": zb_v,
    "dualpipe-v": dual_pipe_v,
}
"""Schedules with split backwards: weight gradients run apart from input gradients."""
BREADTH_FIRST = ("gpipe", "looped breadth first")
"""Schedules that hold all microbatches at once."""
WITHOUT_REPLICAS = ("interleaved 1f1b", *SPLIT)
"""Schedules that are defined for stages on single devices alone."""

__all__ = [
    "BREADTH_FIRST",
    "SPLIT",
    "WHOLE",
    "WITHOUT_REPLICAS",
    "DoesNotApplyError",
    "classic_orders",
    "dual_pipe_v",
    "eager_one_forward_one_backward",
    "gpipe",
    "interleaved_one_forward_one_backward",
    "join_split_backwards",
    "looped_breadth_first",
    "one_by_one",
    "one_forward_one_backward",
    "split_backwards",
    "spp_execution",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zero_bubble_orders",
]


def split_backwards(
    order: Sequence[Operation], stages: Collection[int] | None = None
) -> list[Operation]:
    """Return an order with whole backwards split into an input and a weight gradient each.

    Args:
        order: of a device.
        stages: whose backwards are split; None: of all stages.
    """
    apart: list[Operation] = []
    for operation in order:
        if operation.kind == "B" and (stages is None or operation.stage in stages):
            apart += [operation._replace(kind="I"), operation._replace(kind="W")]
        else:
            apart.append(operation)
    return apart


def join_split_backwards(
    order: Sequence[Operation], is_wanted: Callable[[Operation], bool]
) -> list[Operation]:
    """Join input and weight gradients that follow each other to whole backwards, where wanted.

    Args:
        order: of a device.
        is_wanted: asked for each such input gradient.
    """
    joined: list[Operation] = []
    for operation in order:
        before = operation._replace(kind="I")
        if operation.kind == "W" and joined[-1:] == [before] and is_wanted(before):
            joined[-1] = operation._replace(kind="B")
        else:
            joined.append(operation)
    return joined


def classic_orders(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool
) -> Iterator[tuple[str, Orders]]:
    """Yield the published schedules that are defined for these stages, by name.

    Args:
        pipeline: the stages.
        owner: the replica of each (stage, microbatch).
        split: whether weight gradients may run apart.
    """
    for name, generator in (WHOLE | SPLIT if split else WHOLE).items():
        try:
            yield name, generator(pipeline, owner)
        except DoesNotApplyError:
            continue
