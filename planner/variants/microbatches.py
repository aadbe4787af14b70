"""Microbatches of another size, without tracing the model again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from planner.model.figures import PHASES, Phase, Work, totals
from planner.model.graph_record import Layer
from planner.model.layer_graph import LayerGraph
from planner.model.length_graph import layer_at
from planner.plan.problem import Problem


def in_proportion(graph: LayerGraph, samples: int) -> LayerGraph:
    """Return the graph with FLOPs, bytes, stashes and peaks in proportion to the samples.

    So is the first dimension of a tensor between layers if it is a multiple of the samples there
    were. Weights are read, and new gradients of parameters held, as before. Measured times stay as
    they are. Splits over tensor-parallel
    groups are left out.

    Args:
        graph: traced with any number of samples.
        samples: of a microbatch, at least 1.
    """
    record, gradients = graph.record, graph.new_gradient_bytes
    size = {parameter.name: parameter.bytes for parameter in record.parameters}
    share = _Share(samples, record.samples_per_microbatch)
    boundaries = tuple(
        tensor.model_copy(
            update={
                "bytes": share.of(tensor.bytes),
                "shape": share.of_shape(tensor.shape),
                "lengths": tuple(
                    row.model_copy(update={"bytes": share.of(row.bytes)}) for row in tensor.lengths
                ),
            }
        )
        for tensor in record.boundaries
    )
    layers = tuple(
        _with_peak(_scaled_layer(layer, share, size), share, gradients[layer.name])
        for layer in record.layers
    )
    update = {
        "samples_per_microbatch": samples,
        "layers": layers,
        "boundaries": boundaries,
        "splits": (),
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


def _scaled_layer(layer: Layer, share: _Share, size: dict[str, int]) -> Layer:
    """Scale all figures but the weights' share of the traffic."""
    weights = sum(size[name] for name in layer.parameters)
    work = tuple(row for phase in PHASES for row in _scaled_work(layer, phase, share, weights))
    update: dict[str, Any] = {"work": work}
    update |= {name: share.of(getattr(layer, name)) for name in ("stash_bytes", "batch_bytes")}
    for phase in PHASES:
        flops, traffic = f"{phase}_flops", f"{phase}_traffic_bytes"
        bytes_ = getattr(layer, traffic)
        update[flops] = share.of(getattr(layer, flops))
        update[traffic] = share.beyond(min(weights, bytes_), bytes_)
        if work:
            update[flops], update[traffic] = totals(work, phase)
    update["collectives"] = tuple(
        row.model_copy(update={"bytes": share.of(row.bytes)}) for row in layer.collectives
    )
    scaled = (_scaled_layer(layer_at(layer, row), share, size) for row in layer.lengths)
    update["lengths"] = tuple(
        row.model_copy(update={"work": other.work, "batch_bytes": other.batch_bytes})
        for row, other in zip(layer.lengths, scaled, strict=True)
    )
    if layer.weight_stash_bytes is not None:
        update["weight_stash_bytes"] = share.of(layer.weight_stash_bytes)
    return layer.model_copy(update=update)


def _scaled_work(layer: Layer, phase: Phase, share: _Share, weights: int) -> Iterator[Work]:
    """Yield a phase's rows; products read the weights first, other operations the rest of them."""
    rows = [row for row in layer.work if row.phase == phase]
    fixed: dict[int, int] = {}
    for index in sorted(range(len(rows)), key=lambda i: rows[i].operation_class == "memory"):
        fixed[index] = min(weights, rows[index].traffic_bytes)
        weights -= fixed[index]
    for index, row in enumerate(rows):
        bytes_ = share.beyond(fixed[index], row.traffic_bytes)
        yield row.model_copy(update={"flops": share.of(row.flops), "traffic_bytes": bytes_})


def _with_peak(layer: Layer, share: _Share, gradient_bytes: int) -> Layer:
    """Scale a layer's peak, if it is given, but for a new gradient of a parameter."""
    if layer.peak_bytes is None:
        return layer
    fixed = min(gradient_bytes, layer.peak_bytes)
    return layer.model_copy(update={"peak_bytes": share.beyond(fixed, layer.peak_bytes)})


def resized(problem: Problem, samples: int, **settings: Any) -> Problem:
    """Return a problem with microbatches of another size, see :func:`in_proportion`.

    Args:
        problem: as it is; measured times stay what they were.
        samples: of a microbatch, at least 1.
        settings: of the job, to change with it.
    """
    job = problem.job.model_copy(update={"samples_per_microbatch": samples, **settings})
    return replace(problem, graph=in_proportion(problem.graph, samples), job=job)
