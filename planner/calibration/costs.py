"""Measured times of one layer graph for another that is the same but for them."""

from collections.abc import Iterator

from planner.artifacts.layer_graph import MEASURED, GraphRecord, LayerGraph
from planner.errors import PipeplanError, shorten


def with_measured_times(graph: LayerGraph, costs: LayerGraph, source: str) -> LayerGraph:
    """A graph with the measured times of a calibrated one.

    Args:
        graph: as traced.
        costs: gives the measured times; equal in all else.
        source: where ``costs`` comes from, for messages.

    Raises:
        PipeplanError: if the two differ in more than measured times.
    """
    problems = list(_differences(graph.record, costs.record))
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)
    return costs


def _differences(traced: GraphRecord, costs: GraphRecord) -> Iterator[str]:
    remedy = "these are the costs of another model or job; calibrate again"
    ours, theirs = ([layer.name for layer in record.layers] for record in (traced, costs))
    if ours != theirs:
        yield f"layers: {len(theirs)}, the model has {len(ours)} or others; {remedy}"
        return
    for index, (own, other) in enumerate(zip(traced.layers, costs.layers, strict=True)):
        # Graphs traced by earlier versions do not tell the work; their totals are compared.
        leave_out = MEASURED if other.work else MEASURED | {"work"}
        left, right = own.model_dump(exclude=leave_out), other.model_dump(exclude=leave_out)
        for name in left.keys() | right.keys():
            if left.get(name) != right.get(name):
                yield (
                    f"layers[{index}].{name}: {shorten(right.get(name))}, the model has "
                    f"{shorten(left.get(name))} in layer {own.name!r}; {remedy}"
                )
    for name in type(traced).model_fields.keys() - {"layers"}:
        if getattr(traced, name) != getattr(costs, name):
            yield f"{name}: not that of the model; {remedy}"
