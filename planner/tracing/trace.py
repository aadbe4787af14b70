"""``trace``: a torch model becomes a layer graph."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.artifacts.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.artifacts.job import Job
from planner.artifacts.layer_graph import LayerGraph
from planner.tracing.export import ExportedStep, export_step
from planner.tracing.factory import build, example_batch, import_factory, import_loss
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment, assign_layers
from planner.tracing.measure import Measurement, OperationCost, measure
from planner.tracing.torch_private import require_supported
from planner.tracing.work_rows import gradient_sum, layer_of

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class TracedStep:
    """A model's training step of one microbatch, on the meta device.

    Attributes:
        module: the model, without weights.
        exported: the step.
        layers: of its operations.
        graph: what they count.
    """

    module: nn.Module
    exported: ExportedStep
    layers: LayerAssignment
    graph: GraphRecord


def trace(
    model: str | Factory, job: Job | None = None, *, name: str | None = None, **arguments: Any
) -> LayerGraph:
    """Trace a model into its layer graph, on the meta device: no weights are allocated.

    Args:
        model: ``"module:factory"`` (imported, which runs its code) or the factory itself.
        job: microbatch size, precision, loss and model arguments; default ``Job()``. A loss
            of one's own, ``module:function``, is imported.
        name: of the graph; default the factory's name.
        **arguments: for the factory, over the job's ``model_arguments``.

    Returns:
        A networkx DiGraph of layers with FLOPs, traffic, stash and boundary bytes of one
        microbatch, and the coverage of the FLOP count.

    Raises:
        PipeplanError: if the model cannot be found, built or exported.
    """
    job = job or Job()
    given = {**job.model_arguments, **arguments}
    step = trace_step(model, job.model_copy(update={"model_arguments": given}), name)
    return LayerGraph.from_record(step.graph)


def trace_step(model: str | Factory, job: Job, name: str | None = None) -> TracedStep:
    """Build a model on the meta device, export its training step and count what layers do.

    Args:
        model: see :func:`trace`.
        job: microbatch size, precision, loss and model arguments.
        name: of the graph; default the factory's name.

    Raises:
        PipeplanError: if the model cannot be found, built or exported.
    """
    require_supported()
    factory = import_factory(model) if isinstance(model, str) else model
    own_loss = import_loss(job)
    with torch.device("meta"):
        module = build(factory, job.model_arguments).to(getattr(torch, job.precision))
        batch = example_batch(module, job)
        # What forward makes is on this device too.
        exported = export_step(module, batch, job, own_loss)
    layers = assign_layers(exported)
    graph = graph_record(exported, layers, batch, job, name or _factory_name(factory))
    return TracedStep(module, exported, layers, graph)


def _factory_name(factory: Factory) -> str:
    """A readable name for a factory."""
    return getattr(factory, "__name__", type(factory).__name__)


def graph_record(
    exported: ExportedStep,
    layers: LayerAssignment,
    batch: Mapping[str, Tensor],
    job: Job,
    name: str,
) -> GraphRecord:
    """Measure the exported step and put the figures together, layer by layer."""
    measured = measure(exported, layers, batch)
    gradients = nodes_with_gradient(exported)
    parameters = parameters_of(exported, layers, gradients)
    return GraphRecord(
        name=name,
        samples_per_microbatch=job.samples_per_microbatch,
        precision=job.precision,
        layers=_layers(exported, layers, measured, parameters),
        boundaries=_boundaries(layers, measured, gradients),
        parameters=parameters,
        flop_coverage=measured.coverage,
        uncounted_operators=tuple(sorted(measured.uncounted)),
    )


def _layers(
    exported: ExportedStep,
    layers: LayerAssignment,
    measured: Measurement,
    parameters: Sequence[Parameter],
) -> tuple[Layer, ...]:
    costs: dict[str, list[OperationCost]] = {layer: [] for layer in layers.names}
    for node, cost in measured.cost.items():
        costs[layers.layer_of[node]].append(cost)
    stash: dict[str, int] = defaultdict(int)
    for node, bytes_ in measured.saved.values():
        stash[layers.layer_of[node]] += bytes_
    used = _parameter_names(exported, layers)
    size = {row.name: row.bytes for row in parameters if row.trainable}
    for name in layers.names:
        held = [size[parameter] for parameter in used[name] if parameter in size]
        costs[name] += map(gradient_sum, held)
    return tuple(
        layer_of(
            name,
            costs[name],
            stash[name],
            measured.weight_stash.get(name, 0),
            tuple(used[name]),
        )
        for name in layers.names
    )


def _boundaries(
    layers: LayerAssignment, measured: Measurement, gradients: Set[fx.Node]
) -> tuple[Boundary, ...]:
    rows = []
    for node, producer, users in layers.crossing_tensors():
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue  # Its parts cross, not the tuple.
        saver = measured.saved.get(measured.storage.get(node, -1))
        rows.append(
            Boundary(
                name=node.name,
                producer=producer,
                users=users,
                bytes=value.numel() * value.element_size(),
                shape=tuple(value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
                requires_grad=node in gradients,
                saved_by=layers.layer_of[saver[0]] if saver else None,
            )
        )
    return tuple(rows)


def _parameter_names(exported: ExportedStep, layers: LayerAssignment) -> dict[str, dict[str, None]]:
    used: dict[str, dict[str, None]] = {name: {} for name in layers.names}
    for node in exported.graph.nodes:
        if node.op == "get_attr" and str(node.target) in exported.names:
            for user in node.users:
                if user in layers.layer_of:
                    used[layers.layer_of[user]][exported.names[str(node.target)]] = None
    return used


def parameters_of(
    exported: ExportedStep, layers: LayerAssignment, gradients: Set[fx.Node]
) -> tuple[Parameter, ...]:
    """Parameters and buffers that the layers use, a tied one once.

    Args:
        exported: the training step.
        layers: of its operations.
        gradients: :func:`~planner.tracing.gradients.nodes_with_gradient`; a parameter is trainable
            if one of its nodes is there.
    """
    used = {name for names in _parameter_names(exported, layers).values() for name in names}
    found: dict[str, Tensor] = {}
    trainable: set[str] = set()
    for node in exported.graph.find_nodes(op="get_attr"):
        name = exported.names.get(str(node.target))
        if name is None or name not in used:
            continue
        value = exported.attribute(node)
        assert isinstance(value, Tensor)
        found[name] = value
        if node in gradients:
            trainable.add(name)
    return tuple(
        Parameter(
            name=name,
            elements=value.numel(),
            bytes=value.numel() * value.element_size(),
            trainable=name in trainable,
        )
        for name, value in found.items()
    )
