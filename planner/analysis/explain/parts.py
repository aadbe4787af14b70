"""The parts of an iteration: what its critical path consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.costs.roofline import layer_times
from planner.model.blocks import LOSS
from planner.simulation.critical_path import PathStep
from planner.simulation.timeline import (
    CopyEvent,
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)

PartName = Literal[
    "forwards",
    "backwards",
    "recomputation",
    "loss",
    "copying the batch",
    "loading the batch",
    "host time",
    "slowed computation",
    "messages",
    "slowed messages",
    "reductions",
    "all-gathers of parameters",
    "waiting for shared links",
    "optimizer step",
    "copying stashes",
]
_PHASES: Mapping[str, PartName] = {
    "F": "forwards",
    "B": "backwards",
    "I": "backwards",
    "W": "backwards",
}


@dataclass(frozen=True)
class IterationPart:
    """A part of the critical path; the seconds of all parts sum to the iteration time.

    Attributes:
        name: ``copying the batch`` is of layers without measured times, which have it in their
            forwards; ``copying stashes`` is of those that are offloaded, where something waits for
            it; ``loading the batch`` is the wait for the data loader; ``host time`` is the
            runtime's, in operations and messages; ``slowed computation`` is what operations and
            optimizer steps take longer than alone, ``waiting for shared links`` what messages and
            reductions do, ``slowed messages`` where computation of their devices alone is why.
        seconds: on the path.
        share: of the iteration.
    """

    name: PartName
    seconds: float
    share: float


def iteration_parts(timeline: Timeline, path: Sequence[PathStep]) -> tuple[IterationPart, ...]:
    """Return the parts of a timeline's critical path, the largest first; none that takes no time.

    Of a backward that still runs as its gradients are reduced, what comes before counts in
    proportion.
    """
    found, parts = defaultdict[PartName, float](float), _StepParts(timeline)
    for step in path:
        left_s = step.seconds
        for name, seconds in parts.of(step):
            found[name] += seconds
            left_s -= seconds
        found[parts.beyond(step)] += left_s
    total_s = sum(found.values())
    least_s = total_s * 1e-9  # Less is rounding.
    ranked = sorted(found.items(), key=lambda row: (-row[1], row[0]))
    return tuple(IterationPart(n, s, s / total_s) for n, s in ranked if s > least_s)


class _StepParts:
    """The parts of a step as far as it takes as long as alone."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._pipeline = timeline, timeline.pipeline
        self._whole = {event.operation: event for event in timeline.operations}

    def of(self, step: PathStep) -> Iterator[tuple[PartName, float]]:
        match step.event:
            case OperationEvent(device, operation) as event:
                whole = self._whole[operation]
                share = 1.0
                if event.end_s < whole.end_s:
                    share = step.seconds / (whole.end_s - whole.start_s)
                for name, seconds in self._operation(operation.stage, operation.kind, device):
                    yield name, seconds * share
            case TransferEvent() as event:
                yield "host time", event.transfer.host_s
                yield "messages", event.transfer.seconds - event.transfer.host_s
            case SynchronisationEvent(reduction, is_gather=is_gather):
                yield "all-gathers of parameters" if is_gather else "reductions", reduction.seconds
            case CopyEvent():
                yield "copying stashes", step.seconds
            case _:
                yield "optimizer step", self._pipeline.optimizer_s[step.event.device]

    def beyond(self, step: PathStep) -> PartName:
        """Return what the rest of a step is spent on."""
        if not isinstance(step.event, (TransferEvent, SynchronisationEvent)):
            return "slowed computation"
        return "slowed messages" if step.event.slowed_by is None else "waiting for shared links"

    def _operation(self, stage: int, kind: str, device: str) -> Iterator[tuple[PartName, float]]:
        problem, spec = self._pipeline.problem, self._pipeline.stages[stage].spec
        type_name, precision = problem.cluster.type_of(device), problem.job.precision
        device_type = problem.cluster.device_types[type_name]
        layers = problem.graph.on(type_name).layers
        for name in spec.layers:
            layer, copied_s, loaded_s = layers[name], 0.0, 0.0
            times = layer_times(layer, type_name, device_type, precision)
            if kind == "F" and type_name not in layer.measured:
                copied_s = device_type.copy_s(layer.mean_batch_bytes)
            if kind == "F":
                loaded_s = device_type.load_s(layer.mean_batch_bytes)
            yield "copying the batch", copied_s
            yield "loading the batch", loaded_s
            own_s = times.seconds(kind) - copied_s - loaded_s
            yield "loss" if name == LOSS else _PHASES[kind], own_s
            if kind in "BI" and name in spec.recompute:
                yield "recomputation", times.forward_s - device_type.load_s(layer.mean_batch_bytes)
        collectives = self._pipeline.stages[stage].collective_s.values()
        if collectives:
            # Weights are gathered before each; a backward also reduces and scatters gradients.
            yield "all-gathers of parameters", (kind in "FBI") * sum(r.gather for r in collectives)
            yield "reductions", (kind in "BW") * sum(row.reduction for row in collectives)
        yield "host time", self._pipeline.behaviour.computation_s
