"""The layers of a model, and how they split over a tensor-parallel group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from planner.model.graph_record import GraphRecord, Layer
from planner.model.layer_graph import LayerGraph
from planner.model.split_record import LayerSplit, SplitRecord
from planner.report.tables import Table
from planner.units import format_bytes, four_digits, plural


def layer_table(graph: LayerGraph) -> Table:
    """Return layers with FLOPs, parameters, stash, and bytes sent if cut after them."""
    record, names = graph.record, list(graph.layers)

    def cells(number: int, name: str) -> Iterator[str]:
        layer, crossing = graph.layers[name], graph.crossing(names[: number + 1])
        yield name
        yield four_digits(layer.forward_flops / 1e9)
        yield four_digits((layer.input_gradient_flops + layer.weight_gradient_flops) / 1e9)
        yield format_bytes(graph.nodes[name]["parameter_bytes"])
        yield format_bytes(layer.stash_bytes)
        yield format_bytes(sum(tensor.bytes for tensor in crossing))

    table = Table.of(
        f"{record.name}: {plural(len(record.layers), 'layer')}, "
        f"{plural(record.samples_per_microbatch, 'sample')} per microbatch, {record.precision}",
        ["layer"],
        ["forward GFLOP", "backward GFLOP", "parameters", "stash", "cut"],
        (cells(number, name) for number, name in enumerate(names)),
    )
    table.note = _note(record)
    return table


def _note(record: GraphRecord) -> str:
    trained = sum(p.elements for p in record.parameters if p.trainable)
    others = sum(p.elements for p in record.parameters if not p.trainable)
    frozen = f" and {others:,} without gradients (frozen, or buffers)" if others else ""
    uncounted = ", ".join(record.uncounted_operators)
    return (
        f"{trained:,} parameters{frozen}; FLOP formulas cover {record.flop_coverage:.1%} of "
        "operators; cut: bytes sent if the model is cut after this layer"
    ) + (f"; counted as free: {uncounted}" if uncounted else "")


def split_table(graph: GraphRecord, split: SplitRecord) -> Table:
    """Return layers with how they split, what is shared of them, and their collectives.

    Args:
        graph: the layer graph.
        split: its split at one degree.
    """
    sizes = {row.name: row.bytes for row in graph.parameters}

    def cells(layer: Layer, row: LayerSplit) -> Iterator[str]:
        kinds = dict.fromkeys(split.regions[index].kind for index in row.regions)
        bytes_ = sum(collective.bytes for collective in row.collectives)
        yield from (layer.name, ", ".join(kinds) or "not split")
        yield from (_counts(row, forward=True), _counts(row, forward=False))
        yield f"{bytes_ / graph.samples_per_microbatch / 2**20:,.2f}"
        yield _percent(row.flops, layer.flops)
        yield _percent(row.parameter_bytes, sum(sizes[name] for name in layer.parameters))
        yield _percent(row.stash_bytes, layer.stash_bytes)

    return Table.of(
        f"{graph.name} over groups of {split.degree}"
        f"{', positions shared between regions' if split.sequence else ''}"
        f"{', whole experts' if split.experts else ''}",
        ("layer", "split by", "collectives forward", "backward"),
        ("MiB sent a sample", "shared FLOPs", "parameters", "stash"),
        map(cells, graph.layers, split.layers),
    )


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
