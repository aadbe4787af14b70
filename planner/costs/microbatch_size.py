"""A layer graph with microbatches of another size, without tracing the model again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.artifacts.graph_record import Layer
from planner.artifacts.layer_graph import LayerGraph
from planner.artifacts.work import PHASES, Phase, Work, totals


def in_proportion(graph: LayerGraph, samples: int) -> LayerGraph:
    """The graph with FLOPs, bytes, stashes and peaks in proportion to a microbatch's samples.

    Weights are read, and new gradients of parameters held, as before. Measured times stay what
    they were: who lets times count has to refuse them.

    Args:
        graph: traced with any number of samples.
        samples: of a microbatch, at least 1.
    """
    record, gradients = graph.record, graph.new_gradient_bytes
    size = {parameter.name: parameter.bytes for parameter in record.parameters}
    share = _Share(samples, record.samples_per_microbatch)
    boundaries = tuple(
        tensor.model_copy(update={"bytes": share.of(tensor.bytes)}) for tensor in record.boundaries
    )
    layers = tuple(
        _with_peak(_scaled_layer(layer, share, size), share, gradients[layer.name])
        for layer in record.layers
    )
    update = {"samples_per_microbatch": samples, "layers": layers, "boundaries": boundaries}
    return LayerGraph.from_record(record.model_copy(update=update))


class _Share(NamedTuple):
    """The new number of samples and the old one."""

    new: int
    old: int

    def of(self, whole: int) -> int:
        """What is in proportion to the samples, rounded up."""
        return -(-whole * self.new // self.old)

    def beyond(self, fixed: int, whole: int) -> int:
        """All but a part that stays."""
        return fixed + self.of(whole - fixed)


def _scaled_layer(layer: Layer, share: _Share, size: dict[str, int]) -> Layer:
    """All in proportion but the weights' share of the traffic."""
    weights = sum(size[name] for name in layer.parameters)
    work = tuple(row for phase in PHASES for row in _scaled_work(layer, phase, share, weights))
    update: dict[str, Any] = {"work": work, "stash_bytes": share.of(layer.stash_bytes)}
    for phase in PHASES:
        flops, traffic = f"{phase}_flops", f"{phase}_traffic_bytes"
        bytes_ = getattr(layer, traffic)
        update[flops] = share.of(getattr(layer, flops))
        update[traffic] = share.beyond(min(weights, bytes_), bytes_)
        if work:
            update[flops], update[traffic] = totals(work, phase)
    if layer.weight_stash_bytes is not None:
        update["weight_stash_bytes"] = share.of(layer.weight_stash_bytes)
    return layer.model_copy(update=update)


def _scaled_work(layer: Layer, phase: Phase, share: _Share, weights: int) -> Iterator[Work]:
    """A phase's rows; products read the weights, what is left of them other operations."""
    rows = [row for row in layer.work if row.phase == phase]
    fixed: dict[int, int] = {}
    for index in sorted(range(len(rows)), key=lambda i: rows[i].operation_class == "memory"):
        fixed[index] = min(weights, rows[index].traffic_bytes)
        weights -= fixed[index]
    for index, row in enumerate(rows):
        bytes_ = share.beyond(fixed[index], row.traffic_bytes)
        yield row.model_copy(update={"flops": share.of(row.flops), "traffic_bytes": bytes_})


def _with_peak(layer: Layer, share: _Share, gradient_bytes: int) -> Layer:
    """Its peak, if that was told, in proportion but for a new gradient of a parameter."""
    if layer.peak_bytes is None:
        return layer
    fixed = min(gradient_bytes, layer.peak_bytes)
    return layer.model_copy(update={"peak_bytes": share.beyond(fixed, layer.peak_bytes)})
