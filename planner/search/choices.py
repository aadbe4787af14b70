"""Choices among the plans near the fastest: by noise, by simplicity, or by lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster.cluster import node_of
from planner.costs.placed_pipeline import PlacedStage
from planner.lengths import ORDERS, Lengths
from planner.model.blocks import block_name
from planner.plan.operations import owners
from planner.schedules.published import published_orders
from planner.search.incumbent import Found, Incumbent
from planner.search.result import Complexity, LengthChoice, Robustness, Simplicity
from planner.simulation.lengths import estimated_times, placed_by_length
from planner.simulation.noise import Noise, times_under_noise

SLOWER = 0.02
"""A robust plan takes at most this share longer than the fastest, without noise."""
MARGIN = 1e-3
"""Share by which its 95th percentile must be below the fastest plan's; less may be chance."""
MOST_COMPARED = 8


@dataclass(frozen=True)
class Choice:
    """How to choose among the plans near the fastest.

    Attributes:
        noise: of the plans at most :data:`SLOWER` slower, take the one whose 95th percentile under
            this noise is least.
        within: of the plans at most this share slower, take the simplest.
    """

    noise: Noise | None = None
    within: float | None = None

    @property
    def most_slower(self) -> float | None:
        """Share by which a plan may be slower than the fastest; None: the fastest is chosen."""
        return SLOWER if self.noise is not None else self.within


def chosen(found: Incumbent, more: Sequence[Found], choice: Choice) -> tuple[Found, dict[str, Any]]:
    """Return the plan that is chosen, and why: a field of :class:`Result`.

    Args:
        found: by the search.
        more: plans that are slower than the fastest.
        choice: how to choose.
    """
    best = found.best
    assert best is not None
    lengths = best.timeline.pipeline.problem.job.lengths
    if lengths is not None:
        return _for_lengths(found.near, lengths)
    if choice.most_slower is None:
        return best, {}
    longest_s = (1 + choice.most_slower) * found.best_s
    near = [row for row in found.near if row.seconds <= longest_s][:MOST_COMPARED]
    if choice.noise is not None:
        return _robust([*near, *more[:MOST_COMPARED]], choice.noise)
    return _simple([*near, *more], choice.most_slower)


def _robust(rows: list[Found], noise: Noise) -> tuple[Found, dict[str, Any]]:
    times = [times_under_noise(row.timeline, noise) for row in rows]
    least = min(range(len(rows)), key=lambda n: times[n].percentile_95_s)
    if times[least].percentile_95_s > (1 - MARGIN) * times[0].percentile_95_s:
        least = 0
    return rows[least], {"robustness": Robustness(noise, times[least], times[0], len(rows))}


def _for_lengths(rows: list[Found], lengths: Lengths) -> tuple[Found, dict[str, Any]]:
    """Take the plan and the order of microbatches with the least mean of expected and 95th time."""
    orders = ORDERS if lengths.order == "any" else (lengths.order,)
    compared = []
    for row in rows[:MOST_COMPARED]:
        placed = placed_by_length(row.timeline.pipeline)
        for order in orders:
            ordered = lengths.model_copy(update={"order": order})
            compared.append((estimated_times(row.timeline, placed, ordered).rank_s, row, ordered))
    rank_s, row, ordered = min(compared, key=lambda found: found[0])
    reason = LengthChoice(ordered.order, rank_s, compared[0][0], len(compared))
    pipeline = row.timeline.pipeline
    job = pipeline.problem.job.model_copy(update={"lengths": ordered})
    pipeline = replace(pipeline, problem=replace(pipeline.problem, job=job))
    timeline = replace(row.timeline, pipeline=pipeline)
    return Found.of(timeline, row.method), {"lengths": reason}


def _simple(rows: list[Found], within: float) -> tuple[Found, dict[str, Any]]:
    ranked = sorted((complexity_of(row), row.seconds, n) for n, row in enumerate(rows))
    complexity, seconds, place = ranked[0]
    reason = Simplicity(
        within,
        complexity,
        seconds,
        rows[place].method,
        complexity_of(rows[0]),
        rows[0].seconds,
        len(rows),
    )
    return rows[place], {"simplicity": reason}


def complexity_of(found: Found) -> Complexity:
    """Return how complex a plan with a schedule would be."""
    pipeline = found.timeline.pipeline
    stages = pipeline.stages
    runs = Counter(
        (operation.stage, device)
        for device, order in found.timeline.orders.items()
        for operation in order
        if operation.kind == "F"
    )
    usual = Counter(len(stage.spec.devices) for stage in stages).most_common(1)[0][0]
    uneven = (
        len(stage.spec.devices) != usual
        or len({pipeline.problem.cluster.type_of(device) for device in stage.spec.devices}) > 1
        or len({runs[number, device] for device in stage.spec.devices}) > 1
        for number, stage in enumerate(stages)
    )
    return Complexity(
        unaligned_stages=sum(map(_is_unaligned, stages)),
        stages=len(stages),
        uneven_stages=sum(uneven),
        divided_blocks=_divided_blocks(stages),
        searched_orders=0 if _is_published(found) else 1,
    )


def _is_published(found: Found) -> bool:
    """Return whether the orders are those of a published schedule of whole backwards."""
    mine = {device: list(order) for device, order in found.timeline.orders.items()}
    owner = owners(found.timeline.orders)
    return any(
        mine == {device: list(order) for device, order in orders.items()}
        for _, orders in published_orders(found.timeline.pipeline, owner, split=False)
    )


def _is_unaligned(stage: PlacedStage) -> bool:
    """Return whether a stage has more devices on one of its nodes than on another."""
    return len(set(Counter(map(node_of, stage.spec.devices)).values())) > 1


def _divided_blocks(stages: tuple[PlacedStage, ...]) -> int:
    held = [{block for block in map(block_name, stage.spec.layers) if block} for stage in stages]
    return sum(count > 1 for count in Counter(block for row in held for block in row).values())
