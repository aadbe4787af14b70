"""``trace``: conversion of a torch model into a layer graph."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.job import Job
from planner.model.figures import PHASES, OperationClass, Phase, Product, Work, totals
from planner.model.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.model.layer_graph import LayerGraph
from planner.model.length_graph import joined
from planner.tracing.attention import with_attention_again
from planner.tracing.export import ExportedStep, export_step
from planner.tracing.factory import (
    Loss,
    batch_at,
    build,
    example_batch,
    import_factory,
    import_loss,
)
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment, assign_layers
from planner.tracing.measure import Measurement, OperationCost, measure
from planner.tracing.products import products_of
from planner.tracing.torch_private import require_supported


def work_of(costs: Iterable[OperationCost]) -> tuple[Work, ...]:
    """Return the layer's work: rows of operations of equal class and size, by phase, in order.

    Operations without products are one row per phase: their times add up as their traffic does.
    """
    # Equal ones by (phase, class, launches, FLOPs, bytes); the bytes of class memory add up.
    count: dict[tuple[Phase, OperationClass, int, int, int], int] = {}
    moved: dict[Phase, list[int]] = {phase: [0, 0] for phase in PHASES}
    for cost in costs:
        for row in _rows(cost):
            if row.operation_class == "memory":
                moved[row.phase][0] += row.operations
                moved[row.phase][1] += row.traffic_bytes
            else:
                key = (row.phase, row.operation_class, row.operations, row.flops, row.traffic_bytes)
                count[key] = count.get(key, 0) + 1
    rows = [
        Work(
            phase=phase,
            operation_class=kind,
            operations=number * operations,
            flops=number * flops,
            traffic_bytes=number * bytes_,
        )
        for (phase, kind, operations, flops, bytes_), number in count.items()
    ]
    rows += [_memory(phase, *moved[phase]) for phase in PHASES if moved[phase][0]]
    return tuple(sorted(rows, key=lambda row: PHASES.index(row.phase)))


def gradient_sum(bytes_: int) -> OperationCost:
    """Return the work of adding a microbatch's gradient to earlier ones: two reads and a write.

    The first microbatch of an iteration has nothing to add to; it is not treated differently.
    """
    return OperationCost(weight_gradient_traffic_bytes=3 * bytes_)


def layer_of(
    name: str,
    costs: Iterable[OperationCost],
    stash_bytes: int,
    weight_stash_bytes: int,
    parameters: tuple[str, ...],
    batch_bytes: int = 0,
    products: tuple[Product, ...] = (),
    again_bytes: int = 0,
) -> Layer:
    """Return a layer whose FLOPs and traffic are those of its operations.

    Args:
        name: name of the layer.
        costs: costs of its operations.
        stash_bytes: bytes kept from forward for backward.
        weight_stash_bytes: bytes kept from the input gradient of a split backward for the weight
            gradient.
        parameters: names of its parameters.
        batch_bytes: bytes of the entries of the batch that it reads.
        products: matrix products of its forward.
        again_bytes: bytes that its backward makes again.
    """
    work = work_of(costs)
    forward, input_gradient, weight_gradient = (totals(work, phase) for phase in PHASES)
    return Layer(
        name=name,
        forward_flops=forward[0],
        input_gradient_flops=input_gradient[0],
        weight_gradient_flops=weight_gradient[0],
        forward_traffic_bytes=forward[1],
        input_gradient_traffic_bytes=input_gradient[1],
        weight_gradient_traffic_bytes=weight_gradient[1],
        stash_bytes=stash_bytes,
        weight_stash_bytes=weight_stash_bytes,
        again_bytes=again_bytes,
        parameters=parameters,
        batch_bytes=batch_bytes,
        work=work,
        products=products,
    )


def _rows(cost: OperationCost) -> Iterator[Work]:
    """Yield one operation's phases; one without traffic is a view and no device operation."""
    for phase in PHASES:
        flops = getattr(cost, f"{phase}_flops")
        bytes_ = getattr(cost, f"{phase}_traffic_bytes")
        factor = cost.gradients if phase == "input_gradient" else 1
        operations = max(1, cost.launches * factor)
        if flops:
            yield Work(
                phase=phase,
                operation_class=cost.operation_class,
                operations=operations,
                flops=flops,
                traffic_bytes=bytes_,
            )
        elif bytes_:
            yield _memory(phase, operations, bytes_)


def _memory(phase: Phase, operations: int, bytes_: int) -> Work:
    return Work(
        phase=phase,
        operation_class="memory",
        operations=operations,
        flops=0,
        traffic_bytes=bytes_,
    )


Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class TracedStep:
    """A model's training step of one microbatch, on the meta device.

    Attributes:
        module: the model, without weights.
        exported: the step.
        layers: layers of its operations.
        measured: what each operation costs.
        graph: the layer graph.
    """

    module: nn.Module
    exported: ExportedStep
    layers: LayerAssignment
    measured: Measurement
    graph: GraphRecord


def trace(
    model: str | Factory, job: Job | None = None, *, name: str | None = None, **arguments: Any
) -> LayerGraph:
    """Trace a model into its layer graph, on the meta device: no weights are allocated.

    Args:
        model: ``"module:factory"`` (imported, which runs its code) or the factory itself.
        job: microbatch size, precision, loss and model arguments; default ``Job()``. A loss of the
            user's own, ``module:function``, is imported.
        name: name of the graph; default: the factory's name.
        **arguments: for the factory; they override the job's ``model_arguments``.

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
    """Build a model on the meta device, export its training step and count its layers' costs.

    Args:
        model: see :func:`trace`.
        job: microbatch size, precision, loss and model arguments.
        name: name of the graph; default: the factory's name.

    Raises:
        PipeplanError: if the model cannot be found, built or exported.
    """
    require_supported()
    factory = import_factory(model) if isinstance(model, str) else model
    own_loss = import_loss(job)
    with torch.device("meta"):
        module = build(factory, job.model_arguments).to(getattr(torch, job.precision))
        batch = example_batch(module, job)
    named = name or _factory_name(factory)
    if job.lengths is None:
        return traced_at(module, batch, job, own_loss, named)
    lengths = job.lengths
    steps = [
        traced_at(module, batch_at(batch, lengths, place), job, own_loss, named)
        for place in range(len(lengths.tokens))
    ]
    shares = list(zip(lengths.tokens, lengths.all_shares, strict=True))
    return replace(steps[-1], graph=joined([step.graph for step in steps], shares))


def traced_at(
    module: nn.Module, batch: Mapping[str, Tensor], job: Job, own_loss: Loss | None, name: str
) -> TracedStep:
    """Export a built model's training step on a batch, and count its layers' costs.

    Args:
        module: on the meta device.
        batch: one microbatch, there as well.
        job: its loss and microbatch size.
        own_loss: where the job names one of the user's own.
        name: name of the graph.

    Raises:
        PipeplanError: if the model cannot be exported.
    """
    with torch.device("meta"):  # What forward makes is on this device too.
        exported = export_step(module, batch, job, own_loss)
    layers = assign_layers(exported)
    measured = measure(exported, layers, batch)
    if job.recompute_attention:
        measured = with_attention_again(measured)
    graph = graph_record(exported, layers, measured, job, name)
    return TracedStep(module, exported, layers, measured, graph)


def _factory_name(factory: Factory) -> str:
    """Return a readable name of a factory."""
    return getattr(factory, "__name__", type(factory).__name__)


def graph_record(
    exported: ExportedStep,
    layers: LayerAssignment,
    measured: Measurement,
    job: Job,
    name: str,
) -> GraphRecord:
    """Return the measured figures of the exported step, layer by layer."""
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
        recomputes_attention=job.recompute_attention,
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
    again: dict[str, int] = defaultdict(int)
    for node, bytes_ in measured.again.values():
        again[layers.layer_of[node]] += bytes_
    for node, bytes_ in measured.saved.values():
        stash[layers.layer_of[node]] += bytes_
    late: dict[str, int] = defaultdict(int)
    for node, _, bytes_ in measured.weight_stash:
        late[layers.layer_of[node]] += bytes_
    used, read = _parameter_names(exported, layers), _batch_bytes(layers)
    products: dict[str, list[Product]] = {layer: [] for layer in layers.names}
    for node, product in products_of(measured.cost):
        products[layers.layer_of[node]].append(product)
    size = {row.name: row.bytes for row in parameters if row.trainable}
    for name in layers.names:
        held = [size[parameter] for parameter in used[name] if parameter in size]
        costs[name] += map(gradient_sum, held)
    return tuple(
        layer_of(
            name,
            costs[name],
            stash[name],
            late[name],
            tuple(used[name]),
            read[name],
            tuple(products[name]),
            again[name],
        )
        for name in layers.names
    )


def _batch_bytes(layers: LayerAssignment) -> dict[str, int]:
    """Return the bytes of the entries of a batch that each layer reads."""
    found = dict.fromkeys(layers.names, 0)
    for node in layers.inputs:
        value = node.meta["val"]
        readers = {layers.layer_of[user] for user in node.users if user in layers.layer_of}
        for name in readers:
            found[name] += value.numel() * value.element_size()
    return found


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
    """Return parameters and buffers that the layers use, tied ones once.

    Args:
        exported: the training step.
        layers: layers of its operations.
        gradients: result of :func:`~planner.tracing.gradients.nodes_with_gradient`; a
            parameter is trainable if one of its nodes is among them.
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
