"""Published schedules, each told by its rule: candidates of the search, and its peers.

Every generator takes a placed pipeline and the replica of each (stage, microbatch), and returns an
order for each device. It raises DoesNotApplyError where the schedule is not defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment
from planner.schedule.classics.breadth_first import gpipe, looped_breadth_first
from planner.schedule.classics.interleaved import interleaved_one_forward_one_backward
from planner.schedule.classics.one_by_one import one_by_one
from planner.schedule.classics.one_forward_one_backward import (
    eager_one_forward_one_backward,
    one_forward_one_backward,
)
from planner.schedule.classics.placements import DoesNotApplyError
from planner.schedule.classics.spp import spp_execution
from planner.schedule.classics.v_shaped import dual_pipe_v, zb_v
from planner.schedule.classics.zero_bubble import zb_h1, zb_h2
from planner.schedule.classics.zero_bubble_rules import zb_auto, zero_bubble_orders
from planner.simulator import Orders

Generator = Callable[[PlacedPipeline, Assignment], Orders]

WHOLE: dict[str, Generator] = {
    "gpipe": gpipe,
    "looped breadth first": looped_breadth_first,
    "1f1b": one_forward_one_backward,
    "eager 1f1b": eager_one_forward_one_backward,
    "interleaved 1f1b": interleaved_one_forward_one_backward,
    "pe": spp_execution,
}
"""With whole backwards."""
SPLIT: dict[str, Generator] = {
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-auto": zb_auto,
    "zb-v": zb_v,
    "dualpipe-v": dual_pipe_v,
}
"""With weight gradients apart."""
BREADTH_FIRST = ("gpipe", "looped breadth first")
"""They hold all microbatches at once."""

__all__ = [
    "BREADTH_FIRST",
    "SPLIT",
    "WHOLE",
    "DoesNotApplyError",
    "classic_orders",
    "dual_pipe_v",
    "eager_one_forward_one_backward",
    "gpipe",
    "interleaved_one_forward_one_backward",
    "join_halves",
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


def split_backwards(order: Sequence[Operation]) -> list[Operation]:
    """An order with every whole backward as an input and a weight gradient, one after the other."""
    apart: list[Operation] = []
    for operation in order:
        if operation.kind == "B":
            apart += [operation._replace(kind="I"), operation._replace(kind="W")]
        else:
            apart.append(operation)
    return apart


def join_halves(
    order: Sequence[Operation], is_wanted: Callable[[Operation], bool]
) -> list[Operation]:
    """An order with halves of a backward that follow each other as one, where it is wanted.

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
    """All that are defined for these stages, by name.

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
