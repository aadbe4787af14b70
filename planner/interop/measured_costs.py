"""Measured times for a traced graph, from a calibrated graph of the same model or from profiles."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cluster.cluster import Cluster
from planner.costs.optimizer import step_traffic_bytes
from planner.errors import PipeplanError, shorten
from planner.job import BYTES_OF, Job
from planner.model.graph_record import MEASURED, GraphRecord, Layer, Parameter
from planner.model.layer_graph import FORMAT as GRAPH_FORMAT
from planner.model.layer_graph import LayerGraph
from planner.model.length_graph import record_at
from planner.model.measured_costs import FORMAT as COSTS_FORMAT
from planner.model.measured_costs import Costs
from planner.records.document import read_json
from planner.records.formats import KINDS, check_format, kind_of
from planner.units import significant

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CostsFile:
    """A file of measured times.

    Attributes:
        source: how messages name it.
        costs: a profile, or a calibrated graph.
    """

    source: str
    costs: Costs | LayerGraph


def read_costs(path: str | Path, option: str) -> CostsFile:
    """Read a costs file, or a calibrated graph.

    Args:
        path: of the file.
        option: by which it was named, for messages.

    Raises:
        PipeplanError: if it is neither, or has no times.
    """
    data: Any = read_json(path)
    source = f"{option} {path}"
    if not (isinstance(data, dict) and kind_of(data.get("format")) == KINDS[GRAPH_FORMAT]):
        profile = Costs.parse(check_format(data, COSTS_FORMAT, source), source)
        if profile.spread_warning is not None:
            logger.warning("%s: %s", source, profile.spread_warning)
        return CostsFile(source, profile)
    costs = LayerGraph.parse(data, source)
    if not any(layer.measured for layer in costs.record.layers):
        raise PipeplanError(
            f"{source}: layers: none has measured times; give what `pipeplan profile` wrote, or "
            "the graph of `pipeplan profile PLAN.json MEASURED.json --graph`"
        )
    return CostsFile(source, costs)


def with_costs(graph: LayerGraph, cluster: Cluster, file: CostsFile) -> LayerGraph:
    """A graph with the measured times of a file.

    Args:
        graph: as traced.
        cluster: whose device types they are for.
        file: of the same model.

    Raises:
        PipeplanError: if it is of another model, precision or cluster.
    """
    if isinstance(file.costs, Costs):
        return with_profile(graph, cluster, file.costs, file.source)
    return with_measured_times(graph, file.costs, file.source)


def with_optimizer_costs(cluster: Cluster, job: Job, file: CostsFile) -> Cluster:
    """A cluster whose device types step as fast as profiles say; see ``optimizer_efficiency``.

    Args:
        cluster: as it is.
        job: whose optimizer and precision count; those of other optimizers change nothing.
        file: a profile; a calibrated graph says nothing of the optimizer.
    """
    costs = file.costs
    if not isinstance(costs, Costs):
        return cluster
    kind, measured = cluster.device_types.get(costs.device_type), costs.optimizer
    if kind is None or measured is None or measured.optimizer != job.optimizer:
        return cluster
    elements, width = measured.elements, BYTES_OF[job.precision]
    moved = step_traffic_bytes(job, Parameter(name="w", elements=elements, bytes=width * elements))
    rate = moved / max(measured.step.median_s, 1e-9)
    share = rate / (kind.memory_bandwidth_gb_per_s * 1e9)
    measured_kind = kind.model_copy(update={"optimizer_efficiency": significant(share, 4)})
    kinds = {**cluster.device_types, costs.device_type: measured_kind}
    return cluster.model_copy(update={"device_types": kinds})


def with_profile(graph: LayerGraph, cluster: Cluster, costs: Costs, source: str) -> LayerGraph:
    """A graph with profiled times of one device type; those of other types stay.

    What a layer keeps for its backward grows to what was measured, where that is more: some
    kernels need more there than the trace can know. What it holds while it runs is as measured.
    Both are the largest of all profiled types.

    Args:
        graph: as traced, at any size that was profiled or lies between two.
        cluster: which has the type.
        costs: of the same model.
        source: where ``costs`` comes from, for messages.

    Raises:
        PipeplanError: if they are of another model, precision or cluster.
    """
    record = graph.record
    try:
        by_length = [costs.at_length(tokens) for tokens, _ in record.lengths]
        problems = list(_misfits(cluster, costs, record.precision))
        for number, of_length in enumerate(by_length):
            problems += _other_work(record_at(record, number), of_length)
        if not by_length:
            problems += _other_work(record, costs)
        if problems:
            raise PipeplanError(problems)
        given = _Given(graph)
        layers = tuple(_profiled(row, costs, by_length, record, given) for row in record.layers)
    except PipeplanError as error:
        raise PipeplanError(f"{source}: {problem}" for problem in error.problems) from None
    return LayerGraph.from_record(record.model_copy(update={"layers": layers}))


class _Given:
    """Bytes that layers are given, and did not make while they were measured."""

    def __init__(self, graph: LayerGraph) -> None:
        # In each layer's stash; for what it makes; what its weight gradients alone may keep.
        self.inputs: Counter[str] = Counter()
        self.gradients: Counter[str] = Counter()
        self.late_inputs: Counter[str] = Counter()
        for tensor in graph.record.boundaries:
            if tensor.saved_by == tensor.producer:  # Its own backward is done before these.
                self.late_inputs.update(dict.fromkeys(tensor.users, tensor.bytes))
            if tensor.saved_by is not None and tensor.saved_by != tensor.producer:
                self.inputs[tensor.saved_by] += tensor.bytes
            if tensor.requires_grad:
                self.gradients[tensor.producer] += tensor.bytes


def _profiled(
    layer: Layer, costs: Costs, by_length: Sequence[Costs], record: GraphRecord, given: _Given
) -> Layer:
    """Return a layer with its times, at each length if there are several.

    What it holds is that of the longest.
    """
    samples, kind = record.samples_per_microbatch, costs.device_type
    lengths = tuple(
        row.model_copy(update={"measured": {**row.measured, kind: of.at(layer.name, samples)}})
        for row, of in zip(layer.lengths, by_length, strict=True)
    )
    costs = by_length[-1] if by_length else costs
    name, inputs = layer.name, given.inputs[layer.name]
    more_bytes = max(0, costs.bytes_at("stash_bytes", name, samples) - (layer.stash_bytes - inputs))
    backward_bytes = costs.bytes_at("backward_bytes", name, samples) + given.gradients[name]
    peak_bytes = inputs + max(costs.bytes_at("forward_bytes", name, samples), backward_bytes)
    stash_bytes = layer.stash_bytes + more_bytes
    late_bytes = inputs + given.late_inputs[name] + given.gradients[name]
    late_bytes += costs.bytes_at("weight_stash_bytes", name, samples)
    return layer.model_copy(
        update={
            "measured": {**layer.measured, kind: costs.at(name, samples)},
            "lengths": lengths,
            "stash_bytes": stash_bytes,
            # Of what it was given, the weight gradients may keep all or nothing.
            "weight_stash_bytes": min(layer.kept_for_weights_bytes + more_bytes, late_bytes),
            "peak_bytes": max(peak_bytes, stash_bytes, layer.peak_bytes or 0),
        }
    )


def _misfits(cluster: Cluster, costs: Costs, precision: str) -> Iterator[str]:
    if costs.precision != precision:
        yield (
            f"precision: {costs.precision!r}, the job's is {precision!r}; profile the model with "
            "this job"
        )
    kind = cluster.device_types.get(costs.device_type)
    if kind is None:
        known = ", ".join(cluster.device_types)
        yield (
            f"device_type: {costs.device_type!r} is not a device type of the cluster ({known}); "
            f"profile "
            "with --type and the name that the cluster file has for this device"
        )
    elif kind.hardware not in (None, costs.hardware):
        yield (
            f"hardware: {costs.hardware!r} was profiled, the cluster's {costs.device_type} is "
            f"{kind.hardware!r}; profile the model on that one, or run `pipeplan detect` on the "
            "machines that were profiled"
        )


def _other_work(record: GraphRecord, costs: Costs) -> Iterator[str]:
    """Describe layers whose FLOPs are not those that were profiled, or not between them."""
    samples, layers = record.samples_per_microbatch, {row.name: row for row in record.layers}
    for kind in costs.kinds:
        layer, around = layers.get(kind.layers[0]), kind.around(samples)
        if layer is None or around is None:
            continue
        low, high = (row.forward_flops for row in around)
        if not min(low, high) <= layer.forward_flops <= max(low, high):
            profiled = f"{low}" if low == high else f"{low} to {high}"
            yield (
                f"kinds: layer {layer.name!r} had {profiled} forward FLOPs when it was "
                f"profiled, the model has {layer.forward_flops}; these are the costs of another "
                "model, profile this one"
            )


def warn_of_types_without_costs(graph: LayerGraph, cluster: Cluster, source: str) -> None:
    """Log the cluster's device types of which nothing was measured, where others have times.

    Args:
        graph: with all measured times.
        cluster: whose devices would run it.
        source: name of the cluster, for messages.
    """
    used = dict.fromkeys(device.type for device in cluster.devices)
    measured = {name for layer in graph.record.layers for name in layer.measured}
    for name in used if measured else ():
        if name not in measured:
            logger.warning(
                "%s: no times were measured on device type %s: they are predicted from its "
                "figures; profile the model there with --type %s and give that file as a further "
                "--costs",
                *(source, name, name),
            )


def with_measured_times(graph: LayerGraph, costs: LayerGraph, source: str) -> LayerGraph:
    """A graph with the measured times of a calibrated one.

    Args:
        graph: as traced.
        costs: gives the measured times; equal in all else but splits over tensor-parallel groups.
        source: where ``costs`` comes from, for messages.

    Raises:
        PipeplanError: if the two differ in more than measured times.
    """
    problems = list(_differences(graph.record, costs.record))
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)
    if graph.record.splits == costs.record.splits:
        return costs
    update = {"splits": graph.record.splits}
    return LayerGraph.from_record(costs.record.model_copy(update=update))


def _differences(traced: GraphRecord, costs: GraphRecord) -> Iterator[str]:
    remedy = "these are the costs of another model or job; calibrate again"
    ours, theirs = ([layer.name for layer in record.layers] for record in (traced, costs))
    if ours != theirs:
        yield f"layers: {len(theirs)}, the model has {len(ours)} or others; {remedy}"
        return
    for index, (own, other) in enumerate(zip(traced.layers, costs.layers, strict=True)):
        left, right = own.model_dump(exclude=MEASURED), other.model_dump(exclude=MEASURED)
        for name in left.keys() | right.keys():
            if left.get(name) != right.get(name):
                yield (
                    f"layers[{index}].{name}: {shorten(right.get(name))}, the model has "
                    f"{shorten(left.get(name))} in layer {own.name!r}; {remedy}"
                )
    for name in type(traced).model_fields.keys() - {"layers", "splits"}:
        if getattr(traced, name) != getattr(costs, name):
            yield f"{name}: not that of the model; {remedy}"
