"""A problem with more and smaller microbatches, a graph with microbatches of another size."""

from __future__ import annotations

from dataclasses import replace

from planner.artifacts.job import MAX_MICROBATCHES
from planner.artifacts.layer_graph import LayerGraph
from planner.artifacts.problem import Problem
from planner.costs.microbatch_size import in_proportion
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
    job = problem.job
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
    graph = in_proportion(problem.graph, samples // number)
    more = {
        "samples_per_microbatch": samples // number,
        "microbatches": job.microbatches * number,
    }
    return replace(problem, graph=graph, job=job.model_copy(update=more))


def with_samples(graph: LayerGraph, samples: int) -> LayerGraph:
    """A graph with microbatches of another size, see :data:`IN_PROPORTION`.

    Args:
        graph: of a model that cannot be traced again.
        samples: of a microbatch, at least 1.

    Raises:
        PipeplanError: if times were measured for the size that it has.
    """
    record = graph.record
    if record.samples_per_microbatch == samples:
        return graph
    for layer in record.layers:
        if layer.measured:
            raise PipeplanError(
                f"layer graph {record.name!r}: layer {layer.name!r} has times measured with "
                f"{record.samples_per_microbatch} samples a microbatch; for {samples} measure "
                "again, or trace the model and give its profile"
            )
    return in_proportion(graph, samples)
