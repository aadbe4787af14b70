"""How layers split over a tensor-parallel group, as a table and lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.model.graph_record import GraphRecord
from planner.model.split_record import LayerSplit, SplitRecord
from planner.report.tables import new_table, plain

if TYPE_CHECKING:
    from rich.table import Table


def split_table(graph: GraphRecord, split: SplitRecord) -> Table:
    """Return layers with how they split, what is shared of them, and their collectives.

    Args:
        graph: the layer graph.
        split: its split at one degree.
    """
    table = new_table(
        f"{plain(graph.name)} over groups of {split.degree}"
        f"{', positions shared between regions' if split.sequence else ''}"
        f"{', whole experts' if split.experts else ''}",
        ("layer", "split by", "collectives forward", "backward"),
        ("MiB sent a sample", "shared FLOPs", "parameters", "stash"),
    )
    sizes = {row.name: row.bytes for row in graph.parameters}
    for layer, row in zip(graph.layers, split.layers, strict=True):
        kinds = dict.fromkeys(split.regions[index].kind for index in row.regions)
        bytes_ = sum(collective.bytes for collective in row.collectives)
        held = sum(sizes[name] for name in layer.parameters)
        table.add_row(
            plain(layer.name),
            ", ".join(kinds) or "not split",
            _counts(row, forward=True),
            _counts(row, forward=False),
            f"{bytes_ / graph.samples_per_microbatch / 2**20:,.2f}",
            _percent(row.flops, layer.flops),
            _percent(row.parameter_bytes, held),
            _percent(row.stash_bytes, layer.stash_bytes),
        )
    return table


def unsplit_lines(split: SplitRecord) -> Iterator[str]:
    """Yield a line for each parameter that is not split, with the reason, and a summary."""
    for row in split.layers:
        for name, reason in row.unsplit.items():
            yield f"not split: {name}: {reason}"
    if split.summed_parameters:
        yield (
            f"{len(split.summed_parameters)} parameters that every member has are summed over the "
            "group once an iteration"
        )
    inside = [row.name for row in split.boundaries if row.placement == "region"]
    if inside:
        yield (
            "no stage of a plan ends at these tensors, of which every member has a share: "
            f"{', '.join(inside)}"
        )


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _counts(row: LayerSplit, *, forward: bool) -> str:
    found = Counter(
        collective.kind.replace("_", "-")
        for collective in row.collectives
        if (collective.phase == "forward") is forward
    )
    return ", ".join(f"{count} {name}" for name, count in found.items())
