"""A problem with more and smaller microbatches."""

from __future__ import annotations

from dataclasses import replace

from planner.artifacts.job import MAX_MICROBATCHES
from planner.artifacts.layer_graph import Layer, LayerGraph
from planner.artifacts.problem import Problem
from planner.errors import PipeplanError

IN_PROPORTION = (
    "FLOPs, bytes and stashes in proportion to the samples, weights read each time; real layers "
    "lose efficiency in small microbatches"
)
"""What smaller microbatches assume."""


def has_measured_times(problem: Problem) -> bool:
    """Whether a layer's time was measured on a type of the cluster, for this many samples."""
    used = {device.type for device in problem.cluster.devices}
    return any(used & set(layer.measured) for layer in problem.graph.record.layers)


def with_microbatches(problem: Problem, number: int) -> Problem:
    """So many times as many microbatches of so many times fewer samples, see IN_PROPORTION.

    Raises:
        PipeplanError: if samples cannot be divided, or times were measured for this many of them.
    """
    job, record = problem.job, problem.graph.record
    samples = job.samples_per_microbatch
    if samples % number:
        raise PipeplanError(
            f"{samples} samples of a microbatch cannot be divided into {number} equal parts"
        )
    if job.microbatches * number > MAX_MICROBATCHES:
        raise PipeplanError(f"more than {MAX_MICROBATCHES} microbatches; choose a smaller number")
    if has_measured_times(problem):
        raise PipeplanError(
            f"layers have times measured with {samples} samples a microbatch; measure with "
            f"{samples // number} and plan again"
        )
    size = {parameter.name: parameter.bytes for parameter in record.parameters}
    fewer = {
        "samples_per_microbatch": samples // number,
        "layers": tuple(
            _with_peak(problem.graph, _smaller(layer, number, size), number)
            for layer in record.layers
        ),
        "boundaries": tuple(
            tensor.model_copy(update={"bytes": _part(tensor.bytes, number)})
            for tensor in record.boundaries
        ),
    }
    more = {
        "samples_per_microbatch": samples // number,
        "microbatches": job.microbatches * number,
    }
    graph = LayerGraph.from_record(record.model_copy(update=fewer))
    return replace(problem, graph=graph, job=job.model_copy(update=more))


def _part(whole: int, number: int) -> int:
    """Rounded up."""
    return -(-whole // number)


def _smaller(layer: Layer, number: int, size: dict[str, int]) -> Layer:
    """All in proportion but the weights' share of the traffic."""
    weights = sum(size[name] for name in layer.parameters)
    update = {"stash_bytes": _part(layer.stash_bytes, number)}
    for name in ("forward", "input_gradient", "weight_gradient"):
        flops, traffic = f"{name}_flops", f"{name}_traffic_bytes"
        bytes_ = getattr(layer, traffic)
        fixed = min(weights, bytes_)
        update[flops] = _part(getattr(layer, flops), number)
        update[traffic] = fixed + _part(bytes_ - fixed, number)
    if layer.weight_stash_bytes is not None:
        update["weight_stash_bytes"] = _part(layer.weight_stash_bytes, number)
    return layer.model_copy(update=update)


def _with_peak(graph: LayerGraph, layer: Layer, number: int) -> Layer:
    """The same with its peak, if that was told: in proportion but for a gradient of a weight."""
    if layer.peak_bytes is None:
        return layer
    fixed = min(graph.new_gradient_bytes[layer.name], layer.peak_bytes)
    peak_bytes = fixed + _part(layer.peak_bytes - fixed, number)
    return layer.model_copy(update={"peak_bytes": peak_bytes})
