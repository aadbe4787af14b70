"""Sequence parallelism: between regions each rank has a share of the positions.

Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.2: an all-reduce becomes a reduce-scatter where a region ends and an all-gather where one
begins, and norms, dropout and residuals are computed and kept once in a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from planner.model.tracing.sharding.axes import Dimension, results_of, shape_of
from planner.model.tracing.sharding.dimensions import Dimensions, Parts, dimensions_of
from planner.model.tracing.sharding.placements import Placements
from planner.tracing.export import ExportedStep


def share_positions(
    exported: ExportedStep, found: Placements, degree: int | None = None
) -> Placements:
    """Return placements with shares of positions between regions.

    The positions are the last dimension but one of what regions reduce, if it is not the first.

    Args:
        exported: the step.
        found: its placements with every value between regions whole.
        degree: number of devices; None: any that divides the number of positions.
    """
    split = set(found.region_of) | found.sums | found.views
    outside = dimensions_of(exported, frozenset(split))
    chosen: dict[Dimension, Parts] = {}
    for node in found.reduced:
        own = len(shape_of(node)) - 2
        index = outside.class_of.get((node, own)) if own > 0 else None
        if index is None:
            continue
        members = outside.classes[index]
        divides = members.divisor % degree == 0 if degree else members.divisor > 1
        if divides and len({value for value, _ in members.parts}) == len(members.parts):
            chosen.update(members.parts)
    sequence = {
        value: (own, parts)
        for (value, own), parts in chosen.items()
        if value not in split or value in found.reduced
    }
    shared = {
        node
        for node in outside.axes
        if node not in split and _computes_its_share(node, outside, sequence)
    }
    shared |= {part for node in shared for part in results_of(node).values()}
    return replace(found, sequence=sequence, shared=frozenset(shared))


def _computes_its_share(
    node: fx.Node, outside: Dimensions, sequence: Mapping[fx.Node, tuple[int, Parts]]
) -> bool:
    """Return whether an operation makes its share from shares alone."""
    results = {value for axis in outside.axes[node] for value, _ in axis.outputs}
    if not results or not results <= sequence.keys():
        return False
    wanted = {(value, sequence[value][0]) for value in results}
    axes = [axis for axis in outside.axes[node] if not wanted.isdisjoint(axis.outputs)]
    covered = {member for axis in axes for member in (*axis.inputs, *axis.outputs)}
    read = {(n, sequence[n][0]) for n in node.all_input_nodes if n in sequence}
    return len(axes) == 1 and wanted | read <= covered
