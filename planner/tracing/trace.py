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
from planner.tracing.measure import Held, Measurement, measure, products_of
from planner.tracing.sharing import buffers_written, bytes_of, require_no_writes, shape_of
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
    """Do as :func:`trace`, and return the exported step and its costs as well.

    What the step leaves out without a change of gradients is logged as a warning.
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
    exported: ExportedStep, layers: LayerAssignment, measured: Measurement, job: Job, name: str
) -> GraphRecord:
    """Return the measured figures of the exported step, layer by layer."""
    gradients = nodes_with_gradient(exported)
    parameters = parameters_of(exported, layers, gradients)
    return GraphRecord(
        name=name,
        samples_per_microbatch=job.samples_per_microbatch,
        precision=job.precision,
        layers=tuple(_layers(exported, layers, measured, parameters)),
        boundaries=tuple(_boundaries(layers, measured, gradients)),
        parameters=parameters,
        flop_coverage=measured.coverage,
        uncounted_operators=tuple(sorted(measured.uncounted)),
        recomputes_attention=job.recompute_attention,
    )


# --- layers ---------------------------------------------------------------------------------------

_SIZES = ("operations", "flops", "traffic_bytes")


def figures_of(rows: Iterable[Work]) -> dict[str, Any]:
    """Return the sums of FLOPs and traffic of each phase, by the names of a layer's fields."""
    work, found = tuple(rows), dict[str, Any]()
    for phase in PHASES:
        found[f"{phase}_flops"], found[f"{phase}_traffic_bytes"] = totals(work, phase)
    return found


def work_of(rows: Iterable[Work]) -> tuple[Work, ...]:
    """Return the work of operations, by phase: a row for those of equal class and size.

    Operations without products are one row per phase: their times add up as their traffic does.
    """
    equal: Counter[Work] = Counter()
    moved: defaultdict[str, list[Work]] = defaultdict(list)
    for row in rows:
        if row.flops:
            equal[row] += 1
        else:
            moved[row.phase].append(row)
    groups = [[row] * count for row, count in equal.items()] + list(moved.values())
    merged = [
        group[0].model_copy(update={n: sum(getattr(row, n) for row in group) for n in _SIZES})
        for group in groups
    ]
    return tuple(sorted(merged, key=lambda row: PHASES.index(row.phase)))


def work_rows(
    nodes: Iterable[fx.Node], own: Set[str], measured: Measurement, parameters: Iterable[Parameter]
) -> Iterator[tuple[fx.Node | str, Work]]:
    """Yield the work of a layer by operation, and by parameter that of adding gradients up.

    To add a microbatch's gradient to earlier ones takes two reads and a write. The first microbatch
    of an iteration has nothing to add to; it is not treated differently.

    Args:
        nodes: operations of the layer.
        own: names of the layer's parameters, among those of the model.
        measured: what operations cost.
        parameters: all those of the model.
    """
    for node in nodes:
        yield from ((node, row) for row in measured.work[node])
    for parameter in parameters:
        if parameter.trainable and parameter.bytes and parameter.name in own:
            yield (
                parameter.name,
                Work(
                    phase="weight_gradient",
                    operation_class="memory",
                    operations=1,
                    flops=0,
                    traffic_bytes=3 * parameter.bytes,
                ),
            )


def held_by(
    layers: LayerAssignment, measured: Measurement, of: Callable[[Held], int]
) -> dict[str, dict[str, Any]]:
    """Return what each layer keeps for its backward, by the names of its fields.

    ``of`` returns the bytes that count of a row.
    """
    found: dict[str, dict[str, Any]] = {
        name: dict.fromkeys(measured.held(), 0) for name in layers.names
    }
    for kind, rows in measured.held().items():
        for row in rows:
            found[layers.layer_of[row[0]]][kind] += of(row)
    return found


def _layers(
    exported: ExportedStep,
    layers: LayerAssignment,
    measured: Measurement,
    parameters: Iterable[Parameter],
) -> Iterator[Layer]:
    held, used = held_by(layers, measured, lambda row: row[2]), _parameter_names(exported, layers)
    written: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for node, buffer in buffers_written(layers.layer_of):
        written[layers.layer_of[node]][exported.name_of(buffer)] = None
    batch: Counter[str] = Counter()
    for node in layers.inputs:
        for name in {layers.layer_of[user] for user in node.users if user in layers.layer_of}:
            batch[name] += bytes_of(node)
    for name, nodes in layers.nodes_of.items():
        work = [row for _, row in work_rows(nodes, used[name].keys(), measured, parameters)]
        yield Layer(
            name=name,
            **figures_of(work),
            **held[name],
            parameters=tuple(used[name]),
            writes=tuple(written[name]),
            batch_bytes=batch[name],
            work=work_of(work),
            products=tuple(product for _, product in products_of(nodes)),
        )


def _boundaries(
    layers: LayerAssignment, measured: Measurement, gradients: Set[fx.Node]
) -> Iterator[Boundary]:
    for node, producer, users in layers.crossing_tensors():
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue  # Its parts cross, not the tuple.
        saved = measured.saved.get(measured.storage.get(node, -1))
        yield Boundary(
            name=node.name,
            producer=producer,
            users=users,
            bytes=bytes_of(node),
            shape=shape_of(node),
            dtype=str(value.dtype).removeprefix("torch."),
            requires_grad=node in gradients,
            saved_by=layers.layer_of[saved.nodes[0]] if saved else None,
        )


# --- parameters -----------------------------------------------------------------------------------


def _parameter_names(
    exported: ExportedStep, layers: LayerAssignment
) -> defaultdict[str, dict[str, None]]:
    """Return the names of the parameters and buffers that each layer uses."""
    used: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for node in exported.graph.find_nodes(op="get_attr"):
        for user in node.users:
            if user in layers.layer_of and str(node.target) in exported.names:
                used[layers.layer_of[user]][exported.name_of(node)] = None
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
        if str(node.target) in exported.names and exported.name_of(node) in used:
            nodes.setdefault(exported.name_of(node), []).append(node)
    found = []
    for name, rows in nodes.items():
        value: Any = exported.attribute(rows[-1])
        bytes_, trains = value.numel() * value.element_size(), not gradients.isdisjoint(rows)
        found.append(Parameter(name=name, elements=value.numel(), bytes=bytes_, trainable=trains))
    return tuple(found)
