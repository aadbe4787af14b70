"""Microbatches of another size, without tracing the model again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from planner.model.figures import PHASES, MeasuredTimes, Work, totals
from planner.model.graph_record import Layer
from planner.model.layer_graph import LayerGraph
from planner.model.split_record import LayerSplit
from planner.plan.problem import Problem
from planner.records.document import Record

SCALED = frozenset(
    (
        *(f"{phase}_flops" for phase in PHASES),
        *("flops", "bytes", "stash_bytes", "weight_stash_bytes", "again_bytes", "batch_bytes"),
    )
)
"""Fields of layers, of their parts and of tensors that are in proportion to the samples."""


def in_proportion(graph: LayerGraph, samples: int) -> LayerGraph:
    """Return the graph with FLOPs, bytes, stashes, peaks and times in proportion to the samples.

    So is the first dimension of a tensor between layers if it is a multiple of the samples there
    were. Weights are read, and new gradients of parameters held, as before: roofline times of
    small microbatches fall by less than in proportion, measured ones just so.

    Args:
        graph: traced with any number of samples.
        samples: of a microbatch, at least 1.
    """
    record, gradients = graph.record, graph.new_gradient_bytes
    size = {parameter.name: parameter.bytes for parameter in record.parameters}
    weights = [sum(size[name] for name in layer.parameters) for layer in record.layers]
    share = _Share(samples, record.samples_per_microbatch)
    layers = tuple(
        _with_peak(_scaled(layer, share, own, own), share, gradients[layer.name])
        for layer, own in zip(record.layers, weights, strict=True)
    )
    splits = []
    for split in record.splits:
        rows = []
        for row, own, whole in zip(split.layers, weights, layers, strict=True):
            # Every member reads the weights of which it has no share.
            in_work = row.parameter_bytes + (split.degree or 1) * max(0, own - row.parameter_bytes)
            scaled = _scaled(row, share, row.parameter_bytes, in_work)
            names = [f"{phase}_traffic_bytes" for phase in PHASES]
            most = {name: min(getattr(scaled, name), getattr(whole, name)) for name in names}
            rows.append(scaled.model_copy(update=most))
        splits.append(split.model_copy(update={"layers": tuple(rows)}))
    update = {
        "samples_per_microbatch": samples,
        "layers": layers,
        "boundaries": tuple(
            share.all_of(tensor).model_copy(update={"shape": share.of_shape(tensor.shape)})
            for tensor in record.boundaries
        ),
        "splits": tuple(splits),
    }
    return LayerGraph.from_record(record.model_copy(update=update))


class _Share(NamedTuple):
    """The new number of samples and the old one."""

    new: int
    old: int

    def of(self, whole: int) -> int:
        """Return a figure in proportion to the samples, rounded up."""
        return -(-whole * self.new // self.old)

    def of_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a microbatch of so many samples."""
        if not shape or shape[0] % self.old:
            return shape
        return (shape[0] // self.old * self.new, *shape[1:])

    def beyond(self, fixed: int, whole: int) -> int:
        """Return a figure in proportion, but for a part that stays."""
        return fixed + self.of(whole - fixed)

    def all_of(self, value: Any) -> Any:
        """Return a record, or several, with every field of :data:`SCALED` and times scaled."""
        if isinstance(value, tuple):
            return tuple(map(self.all_of, value))
        if isinstance(value, dict):
            return {name: self.all_of(row) for name, row in value.items()}
        if not isinstance(value, Record):
            return value
        if isinstance(value, MeasuredTimes):
            update = {name: s and s * self.new / self.old for name, s in value}
        else:
            update = {
                name: self.of(row) if name in SCALED and row is not None else self.all_of(row)
                for name, row in value
            }
        return value.model_copy(update=update)


def _scaled(row: Layer | LayerSplit, share: _Share, weights: int, in_work: int) -> Any:
    """Return a layer, or the part of it that is split, with all figures scaled.

    Args:
        row: the layer or the part.
        share: of the samples.
        weights: bytes of weights in the traffic of each phase.
        in_work: bytes of weights in the traffic of each phase's rows of work.
    """
    update: dict[str, Any] = {"work": _scaled_work(row.work, share, in_work)}
    for phase in PHASES:
        flops, traffic = f"{phase}_flops", f"{phase}_traffic_bytes"
        bytes_ = getattr(row, traffic)
        update[traffic] = share.beyond(min(weights, bytes_), bytes_)
        if row.work and isinstance(row, Layer):
            update[flops], update[traffic] = totals(update["work"], phase)
    if isinstance(row, Layer):
        update["lengths"] = tuple(
            share.all_of(one).model_copy(update={"work": _scaled_work(one.work, share, in_work)})
            for one in row.lengths
        )
    return share.all_of(row).model_copy(update=update)


def _scaled_work(rows: Sequence[Work], share: _Share, weights: int) -> tuple[Work, ...]:
    """Scale rows; products of a phase read the weights first, other operations the rest."""
    left, found = dict.fromkeys(PHASES, weights), {}
    for n in sorted(range(len(rows)), key=lambda n: rows[n].operation_class == "memory"):
        fixed = min(left[rows[n].phase], rows[n].traffic_bytes)
        left[rows[n].phase] -= fixed
        traffic = {"traffic_bytes": share.beyond(fixed, rows[n].traffic_bytes)}
        found[n] = share.all_of(rows[n]).model_copy(update=traffic)
    return tuple(found[n] for n in range(len(rows)))


def _with_peak(layer: Layer, share: _Share, gradient_bytes: int) -> Layer:
    """Scale a layer's peak, if it is given, but for a new gradient of a parameter."""
    if layer.peak_bytes is None:
        return layer
    fixed = min(gradient_bytes, layer.peak_bytes)
    return layer.model_copy(update={"peak_bytes": share.beyond(fixed, layer.peak_bytes)})


def resized(problem: Problem, samples: int, **settings: Any) -> Problem:
    """Return a problem with microbatches of another size, see :func:`in_proportion`.

    Args:
        problem: as it is.
        samples: of a microbatch, at least 1.
        settings: of the job, to change with it.
    """
    job = problem.job.model_copy(update={"samples_per_microbatch": samples, **settings})
    return replace(problem, graph=in_proportion(problem.graph, samples), job=job)


def of_each_size(problem: Problem) -> list[Problem]:
    """Return the problem with each microbatch size of its job and as many samples an iteration.

    Returns:
        Problems whose jobs leave no size open; the problem itself if its job does not.
    """
    job = problem.job
    samples = job.samples_per_microbatch * job.microbatches
    return [
        resized(problem, size, microbatches=samples // size, microbatch_sizes=())
        for size in dict.fromkeys(job.microbatch_sizes)
    ] or [problem]
