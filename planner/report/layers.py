"""The layer graph as a table."""

from rich.markup import escape
from rich.table import Table

from planner.artifacts.layer_graph import LayerGraph
from planner.units import plural


def layer_table(graph: LayerGraph) -> Table:
    """Layers with their FLOPs, parameters, stash and what a cut behind them would send."""
    record = graph.record
    table = Table(
        title=f"{escape(record.name)}: {plural(len(record.layers), 'layer')}, "
        f"{plural(record.samples_per_microbatch, 'sample')} a microbatch, "
        f"{escape(record.precision)}",
        caption=_caption(graph),
        caption_justify="left",
    )
    table.add_column("layer", no_wrap=True)
    for name in ("forward GFLOP", "backward GFLOP", "parameters MB", "stash MB", "cut after MB"):
        table.add_column(name, justify="right")
    before: list[str] = []
    for name, layer in graph.layers.items():
        before.append(name)
        backward = layer.input_gradient_flops + layer.weight_gradient_flops
        table.add_row(
            escape(name),
            f"{layer.forward_flops / 1e9:,.2f}",
            f"{backward / 1e9:,.2f}",
            f"{graph.nodes[name]['parameter_bytes'] / 1e6:,.2f}",
            f"{layer.stash_bytes / 1e6:,.2f}",
            f"{sum(tensor.bytes for tensor in graph.crossing(before)) / 1e6:,.2f}",
        )
    return table


def _caption(graph: LayerGraph) -> str:
    record = graph.record
    elements = sum(p.elements for p in record.parameters if p.trainable)
    text = f"{elements:,} parameters; FLOP formulas cover {record.flop_coverage:.1%} of operators"
    if record.uncounted_operators:
        text += f"; counted as free: {escape(', '.join(record.uncounted_operators))}"
    return text
