"""Whether an exported model has the layers, parameters and boundaries of a layer graph."""

from torch import Tensor

from planner.artifacts.layer_graph import GraphRecord
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment
from planner.tracing.trace import parameters_of


def structure_differences(
    expected: GraphRecord, exported: ExportedStep, layers: LayerAssignment
) -> list[str]:
    """One line a difference in what matters for running a plan; empty if there is none.

    FLOP counts and stash may differ between versions of torch and are not compared.
    """
    names = tuple(layer.name for layer in expected.layers)
    if names != layers.names:
        pairs = zip(names, layers.names, strict=False)
        first = next((f"{a!r} against {b!r}" for a, b in pairs if a != b), "at the end")
        return [f"it has {len(layers.names)} layers, the plan {len(names)}; they differ {first}"]
    sizes = {p.name: p.elements for p in expected.parameters}
    found = {p.name: p.elements for p in parameters_of(exported, layers)}
    problems = [
        f"parameter {name!r} has {found.get(name, 'no')} elements, the plan says "
        f"{sizes.get(name, 'none')}"
        for name in sorted(set(sizes) | set(found))
        if sizes.get(name) != found.get(name)
    ]
    tensors = {b.name: (b.producer, b.shape, b.dtype) for b in expected.boundaries}
    for node, producer, _ in layers.crossing_tensors():
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue
        shape = (producer, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if tensors.pop(node.name, None) != shape:
            problems.append(f"boundary tensor {node.name!r} of layer {producer!r} differs")
    problems += [f"boundary tensor {name!r} is missing" for name in tensors]
    return problems[:10]
