"""Comparison of an exported model with a layer graph: layers, parameters and boundaries."""

from collections.abc import Iterator, Sequence, Set

from torch import Tensor, fx

from planner.model.graph_record import Boundary, GraphRecord, Parameter
from planner.model.tracing.export import ExportedStep
from planner.model.tracing.gradients import nodes_with_gradient
from planner.model.tracing.layers import LayerAssignment
from planner.model.tracing.trace import parameters_of
from planner.units import plural


def structure_differences(
    expected: GraphRecord, exported: ExportedStep, layers: LayerAssignment
) -> list[str]:
    """Return one line per difference that matters for running a plan; empty if there is none.

    FLOP counts and stash may differ between versions of torch and are not compared.
    """
    names = tuple(layer.name for layer in expected.layers)
    if names != layers.names:
        pairs = zip(names, layers.names, strict=False)
        first = next((f"{a!r} against {b!r}" for a, b in pairs if a != b), "at the end")
        count = plural(len(layers.names), "layer")
        return [f"it has {count}, the plan {len(names)}; they differ {first}"]
    gradients = nodes_with_gradient(exported)
    found = parameters_of(exported, layers, gradients)
    problems = [
        *_parameter_differences(expected.parameters, found),
        *_boundary_differences(expected.boundaries, layers, gradients),
    ]
    return problems[:10]


def _parameter_differences(
    expected: Sequence[Parameter], found: Sequence[Parameter]
) -> Iterator[str]:
    planned, own = ({p.name: p for p in parameters} for parameters in (expected, found))
    for name in sorted(planned.keys() | own.keys()):
        here, there = own.get(name), planned.get(name)
        if here is None or there is None or here.elements != there.elements:
            yield (
                f"parameter {name!r} has {here.elements if here else 'no'} elements, the plan says "
                f"{there.elements if there else 'none'}"
            )
        elif here.trainable != there.trainable:
            yield f"parameter {name!r} {_gradients(here.trainable)}"


def _boundary_differences(
    expected: Sequence[Boundary], layers: LayerAssignment, gradients: Set[fx.Node]
) -> Iterator[str]:
    planned = {b.name: b for b in expected}
    for node, producer, _ in layers.crossing_tensors():
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue
        there = planned.pop(node.name, None)
        shape = (producer, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if there is None or (there.producer, there.shape, there.dtype) != shape:
            yield f"boundary tensor {node.name!r} of layer {producer!r} differs"
        elif (node in gradients) != there.requires_grad:
            yield (
                f"boundary tensor {node.name!r} of layer {producer!r} "
                f"{_gradients(node in gradients)}"
            )
    yield from (f"boundary tensor {name!r} is missing" for name in planned)


def _gradients(has_one: bool) -> str:
    if has_one:
        return "takes a gradient, the plan says it takes none"
    return "takes no gradient (it is frozen or detached), the plan says it takes one"
