"""Published schedules by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Orders
from planner.schedules.assignment import Assignment
from planner.schedules.pe import spp_execution
from planner.schedules.placements import DoesNotApplyError
from planner.schedules.split import dual_pipe_v, zb_h1, zb_h2, zb_v
from planner.schedules.whole import (
    eager_one_forward_one_backward,
    gpipe,
    interleaved_one_forward_one_backward,
    looped_breadth_first,
    one_forward_one_backward,
)
from planner.schedules.zero_bubble import zb_auto

Rule = Callable[[PlacedPipeline, Assignment], Orders]
"""Stages and the replica of each (stage, microbatch) to orders; may raise DoesNotApplyError."""

WHOLE: dict[str, Rule] = {
    "gpipe": gpipe,
    "looped breadth first": looped_breadth_first,
    "1f1b": one_forward_one_backward,
    "eager 1f1b": eager_one_forward_one_backward,
    "interleaved 1f1b": interleaved_one_forward_one_backward,
    "pe": spp_execution,
}
"""Schedules with whole backwards."""
SPLIT: dict[str, Rule] = {
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-auto": zb_auto,
    "zb-v": zb_v,
    "dualpipe-v": dual_pipe_v,
}
"""Schedules with split backwards: weight gradients run apart from input gradients."""
WITHOUT_REPLICAS = ("interleaved 1f1b", *SPLIT)
"""Schedules that are defined for stages on single devices alone."""


def published_orders(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool
) -> Iterator[tuple[str, Orders]]:
    """Yield the published schedules that are defined for these stages, by name.

    Args:
        pipeline: the stages.
        owner: the replica of each (stage, microbatch).
        split: whether weight gradients may run apart.
    """
    for name, rule in (WHOLE | SPLIT if split else WHOLE).items():
        try:
            yield name, rule(pipeline, owner)
        except DoesNotApplyError:
            continue
