"""The moments within an operation at which layers use parameters and complete their gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.roofline import layer_times

Moments = Mapping[str, float]
"""Seconds since an operation began, by the name of a parameter, in ascending order."""


@dataclass(frozen=True)
class LayerMoments:
    """The moments at which a stage's layers first use parameters and complete their gradients.

    The times are the plan's costs on one device; layers run one after the other.

    Attributes:
        needed: when the first layer that uses a parameter begins in a forward.
        complete: when the last layer that adds to a gradient ends, by kind of operation.
    """

    needed: Moments
    complete: Mapping[str, Moments]

    @classmethod
    def of(
        cls, pipeline: PlacedPipeline, index: int, device: str, names: Collection[str]
    ) -> LayerMoments:
        """Add up the costs of a stage's layers.

        Args:
            pipeline: the placed plan.
            index: the stage's number.
            device: the device whose times count.
            names: the parameters that matter.
        """
        problem, spec = pipeline.problem, pipeline.stages[index].spec
        kind = problem.cluster.type_of(device)
        machine, precision = problem.cluster.device_types[kind], problem.job.precision
        rows = []
        graph = problem.graph.on(kind)
        for name in graph.in_order(spec.layers):
            layer, recompute = graph.layers[name], name in spec.recompute
            times = layer_times(layer, kind, machine, precision, recompute)
            rows.append(([p for p in layer.parameters if p in names], times))
        needed: dict[str, float] = {}
        begin_s = 0.0
        for used, times in rows:
            for name in used:
                needed.setdefault(name, begin_s)
            begin_s += times.forward_s
        complete = {}
        for letter in "BW":
            moments: dict[str, float] = {}
            end_s = 0.0
            for used, times in reversed(rows):
                end_s += times.seconds(letter)
                for name in used:
                    moments.pop(name, None)
                    moments[name] = end_s
            complete[letter] = moments
        return cls(needed, complete)
