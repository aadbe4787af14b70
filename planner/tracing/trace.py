"""``trace``: conversion of a torch model into a layer graph."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.errors import PipeplanError, require_kind
from planner.job import Job
from planner.model.figures import PHASES, Work, totals
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
from planner.tracing.sharing import buffers_written, require_no_writes
from planner.tracing.torch_private import require_supported

LOG = logging.getLogger(__name__)
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
    require_kind(job, Job, "job", "Job.load reads a file")
    if isinstance(model, nn.Module) or not (isinstance(model, str) or callable(model)):
        raise PipeplanError(
            f'model: expected "module:factory" or a function that makes the module, not '
            f"{type(model).__name__}; write trace(lambda: MyModule(), job)"
        )
    given = {**job.model_arguments, **arguments}
    step = trace_step(model, job.model_copy(update={"model_arguments": given}), name)
    return LayerGraph.from_record(step.graph)


def trace_step(model: str | Factory, job: Job, name: str | None = None) -> TracedStep:
    """Build a model on the meta device, export its training step and count its layers' costs.

    What the step leaves out without a change of gradients is logged as a warning.

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
    named = str(name or getattr(factory, "__name__", type(factory).__name__))
    batches = [batch]
    if job.lengths is not None:
        batches = [batch_at(batch, job.lengths, i) for i in range(len(job.lengths.tokens))]
    steps = [traced_at(module, given, job, own_loss, named) for given in batches]
    for note in steps[-1].exported.notes:
        LOG.warning("%s: %s", named, note)
    if job.lengths is None:
        return steps[-1]
    require_no_writes(steps[-1].exported)
    shares = list(zip(job.lengths.tokens, job.lengths.all_shares, strict=True))
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
        boundaries=tuple(_boundaries(layers, measured, gradients)),
        parameters=parameters,
        flop_coverage=measured.coverage,
        uncounted_operators=tuple(sorted(measured.uncounted)),
        recomputes_attention=job.recompute_attention,
    )


# --- work -----------------------------------------------------------------------------------------


def work_of(costs: Iterable[OperationCost]) -> tuple[Work, ...]:
    """Return the layer's work: rows of operations of equal class and size, by phase, in order.

    Operations without products are one row per phase: their times add up as their traffic does.
    """
    rows = [row for cost in costs for row in _rows(cost)]
    merged = [
        row.model_copy(update={name: number * getattr(row, name) for name in _SIZES})
        for row, number in Counter(row for row in rows if row.flops).items()
    ]
    for phase in PHASES:
        moved = [row for row in rows if row.phase == phase and not row.flops]
        if moved:
            sums = {name: sum(getattr(row, name) for row in moved) for name in _SIZES}
            merged.append(moved[0].model_copy(update=sums))
    return tuple(sorted(merged, key=lambda row: PHASES.index(row.phase)))


_SIZES = ("operations", "flops", "traffic_bytes")


def _rows(cost: OperationCost) -> Iterator[Work]:
    """Yield one operation's phases; one without traffic is a view and no device operation."""
    for phase in PHASES:
        flops = getattr(cost, f"{phase}_flops")
        bytes_ = getattr(cost, f"{phase}_traffic_bytes")
        if flops or bytes_:
            factor = cost.gradients if phase == "input_gradient" else 1
            yield Work(
                phase=phase,
                operation_class=cost.operation_class if flops else "memory",
                operations=max(1, cost.launches * factor),
                flops=flops,
                traffic_bytes=bytes_,
            )


def gradient_sum(bytes_: int) -> OperationCost:
    """Return the work of adding a microbatch's gradient to earlier ones: two reads and a write.

    The first microbatch of an iteration has nothing to add to; it is not treated differently.
    """
    return OperationCost(weight_gradient_traffic_bytes=3 * bytes_)


# --- records --------------------------------------------------------------------------------------


def _layers(
    exported: ExportedStep,
    layers: LayerAssignment,
    measured: Measurement,
    parameters: Iterable[Parameter],
) -> tuple[Layer, ...]:
    nodes: dict[str, list[fx.Node]] = {name: [] for name in layers.names}
    for node in measured.cost:
        nodes[layers.layer_of[node]].append(node)
    late = [(node, bytes_) for node, _, bytes_ in measured.weight_stash]
    held = (measured.saved.values(), late, measured.again.values(), _read(layers))
    stash, weight_stash, again, batch = (_by_layer(layers, rows) for rows in held)
    used = _parameter_names(exported, layers)
    written: dict[str, dict[str, None]] = {name: {} for name in layers.names}
    for node, buffer in buffers_written(layers.layer_of):
        written[layers.layer_of[node]][exported.name_of(buffer)] = None
    size = {row.name: row.bytes for row in parameters if row.trainable}
    found = []
    for name in layers.names:
        costs = [measured.cost[node] for node in nodes[name]]
        sums = [gradient_sum(size[own]) for own in used[name] if own in size]
        work = work_of([*costs, *sums])
        figures: dict[str, Any] = {}
        for phase in PHASES:
            flops, bytes_ = totals(work, phase)
            figures |= {f"{phase}_flops": flops, f"{phase}_traffic_bytes": bytes_}
        found.append(
            Layer(
                name=name,
                **figures,
                stash_bytes=stash[name],
                weight_stash_bytes=weight_stash[name],
                again_bytes=again[name],
                parameters=tuple(used[name]),
                writes=tuple(written[name]),
                batch_bytes=batch[name],
                work=work,
                products=tuple(product for _, product in products_of(nodes[name])),
            )
        )
    return tuple(found)


def _by_layer(
    layers: LayerAssignment, rows: Iterable[tuple[fx.Node, int]]
) -> defaultdict[str, int]:
    """Return the sum of the bytes of operations, by layer."""
    found: defaultdict[str, int] = defaultdict(int)
    for node, bytes_ in rows:
        found[layers.layer_of[node]] += bytes_
    return found


def _read(layers: LayerAssignment) -> Iterator[tuple[fx.Node, int]]:
    """Yield each entry of the batch for one operation of every layer that reads it."""
    for node in layers.inputs:
        value = node.meta["val"]
        users = {layers.layer_of[user]: user for user in node.users if user in layers.layer_of}
        yield from ((user, value.numel() * value.element_size()) for user in users.values())


def _boundaries(
    layers: LayerAssignment, measured: Measurement, gradients: Set[fx.Node]
) -> Iterator[Boundary]:
    for node, producer, users in layers.crossing_tensors():
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue  # Its parts cross, not the tuple.
        saver = measured.saved.get(measured.storage.get(node, -1))
        yield Boundary(
            name=node.name,
            producer=producer,
            users=users,
            bytes=value.numel() * value.element_size(),
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            requires_grad=node in gradients,
            saved_by=layers.layer_of[saver[0]] if saver else None,
        )


def _parameter_names(exported: ExportedStep, layers: LayerAssignment) -> dict[str, dict[str, None]]:
    used: dict[str, dict[str, None]] = {name: {} for name in layers.names}
    for node in exported.graph.find_nodes(op="get_attr"):
        for user in node.users:
            if user in layers.layer_of and str(node.target) in exported.names:
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
    nodes: dict[str, list[fx.Node]] = {}
    for node in exported.graph.find_nodes(op="get_attr"):
        name = exported.names.get(str(node.target), "")
        if name in used:
            nodes.setdefault(name, []).append(node)
    values: dict[str, Any] = {name: exported.attribute(rows[-1]) for name, rows in nodes.items()}
    return tuple(
        Parameter(
            name=name,
            elements=values[name].numel(),
            bytes=values[name].numel() * values[name].element_size(),
            trainable=not gradients.isdisjoint(rows),
        )
        for name, rows in nodes.items()
    )
