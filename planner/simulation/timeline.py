"""The timeline of a replay: its events, iteration time, bubble and memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.costs.placed_pipeline import PlacedPipeline, Resource, Transfer
from planner.costs.reductions import GradientReduction
from planner.plan.operations import Operation

Reals = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True)
class OperationEvent:
    """An operation that ran on a device."""

    device: str
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TransferEvent:
    """The transfer of activations (kind F) or gradients (kind B) of a stage's microbatch.

    ``transfer`` has what it occupies, and how long it takes alone; ``slowed_by`` is the link that
    it got a share of only, if there was one.
    """

    source: str
    target: str
    operation: Operation
    start_s: float
    end_s: float
    transfer: Transfer
    slowed_by: tuple[int, int] | None = None

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The links of its way."""
        return self.transfer.links

    @property
    def occupied(self) -> tuple[Resource, ...]:
        """All that it waits for and that serves one message at a time."""
        return self.transfer.occupied

    @property
    def consumer(self) -> Operation:
        """The operation that needs it; of a gradient, the whole backward."""
        stage, kind, microbatch = self.operation
        return Operation(stage + (1 if kind == "F" else -1), kind, microbatch)


@dataclass(frozen=True)
class SynchronisationEvent:
    """A reduction of gradients, or of a bucket of them; ``number`` is its place in the list.

    ``is_gather`` says that it is the all-gather of parameters that follows a reduce-scatter;
    ``slowed_by`` is a link that it got a share of only, if there was one.
    """

    synchronisation: GradientReduction
    start_s: float
    end_s: float
    number: int = 0
    is_gather: bool = False
    slowed_by: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """The collective that it is, in words."""
        if self.is_gather:
            return "all-gather"
        return "reduce-scatter" if self.synchronisation.gathers else "all-reduce"


@dataclass(frozen=True)
class CopyEvent:
    """A stash on its way over the host link of a device.

    Attributes:
        device: whose link it is.
        operation: the forward after which it goes to the host, or the backward for which it comes
            back.
        start_s, end_s: of the copy.
        bytes: that are copied.
    """

    device: str
    operation: Operation
    start_s: float
    end_s: float
    bytes: int

    @property
    def is_out(self) -> bool:
        """Whether it goes to the host."""
        return self.operation.kind == "F"


@dataclass(frozen=True)
class OptimizerEvent:
    """The optimizer step of a device."""

    device: str
    start_s: float
    end_s: float


Event = OperationEvent | TransferEvent | SynchronisationEvent | OptimizerEvent | CopyEvent


@dataclass(frozen=True)
class Timeline:
    """One iteration, event by event, in order of start.

    ``end_s`` and ``optimizer_s`` are the end and the length of each device's optimizer step.
    ``gathers`` are the all-gathers of parameters after optimizer steps, in the order of reductions.
    ``copies`` are those of offloaded stashes. ``by_task`` has all events by the numbers of their
    tasks in the program that was replayed; ``causes`` says for each task which task with an event
    its start waited for last (-1: none). ``changes`` are the devices, moments and bytes of what is
    held from then on or no more.
    """

    pipeline: PlacedPipeline
    operations: tuple[OperationEvent, ...]
    transfers: tuple[TransferEvent, ...]
    synchronisations: tuple[SynchronisationEvent, ...]
    end_s: Mapping[str, float]
    optimizer_s: Mapping[str, float]
    steps: tuple[OptimizerEvent, ...]
    gathers: tuple[SynchronisationEvent, ...]
    copies: tuple[CopyEvent, ...]
    by_task: Mapping[int, Event] = field(compare=False, repr=False)
    causes: Sequence[int] = field(compare=False, repr=False)
    changes: tuple[Longs, Reals, Longs] = field(compare=False, repr=False)

    @cached_property
    def iteration_time_s(self) -> float:
        """End of the last device's optimizer step, or of the last all-gather behind it."""
        return max(self.done_s.values())

    @cached_property
    def done_s(self) -> Mapping[str, float]:
        """When each device has done its optimizer step and gathered its parameters."""
        done = dict(self.end_s)
        for event in self.gathers:
            for device in event.synchronisation.devices:
                done[device] = max(done[device], event.end_s)
        return done

    @property
    def collectives(self) -> tuple[SynchronisationEvent, ...]:
        """Reductions of gradients, then all-gathers of parameters."""
        return (*self.synchronisations, *self.gathers)

    @property
    def orders(self) -> dict[str, list[Operation]]:
        """The order in which each device ran its operations."""
        orders: dict[str, list[Operation]] = {device: [] for device in self.pipeline.devices}
        for event in sorted(self.operations, key=lambda event: event.start_s):
            orders[event.device].append(event.operation)
        return orders

    @cached_property
    def busy_s(self) -> dict[str, float]:
        """Seconds of computation on each device, including the optimizer step."""
        busy = dict(self.optimizer_s)
        for event in self.operations:
            busy[event.device] += event.end_s - event.start_s
        return busy

    def stretch(self, event: OperationEvent) -> float:
        """Return how many times as long an operation took as it takes alone on its host."""
        stage, kind, _ = event.operation
        alone_s = self.pipeline.seconds(stage, kind, event.device)
        return (event.end_s - event.start_s) / alone_s if alone_s > 0 else 1.0

    @property
    def bubble(self) -> float:
        """Idle fraction of the devices used."""
        if self.iteration_time_s == 0:
            return 0.0
        share = sum(self.busy_s.values()) / (len(self.end_s) * self.iteration_time_s)
        return min(1.0, max(0.0, 1 - share))

    @cached_property
    def memory(self) -> dict[str, list[tuple[float, int]]]:
        """Bytes in use on each device: steps ``(time, bytes from then on)``.

        A received tensor counts from the start of its transfer, a sent one until the end of its
        transfer; a stash from the start of its forward to the end of its backward. If that is
        split, the input gradient leaves what the weight gradient needs. What is offloaded is gone
        from the end of its copy to the host until the start of its copy back.
        """
        devices, moments_s, bytes_ = self.changes
        rows = ((name, devices == place) for place, name in enumerate(self.pipeline.devices))
        return {
            name: _accumulated(self.pipeline.static_bytes(name), moments_s[mine], bytes_[mine])
            for name, mine in rows
        }

    @cached_property
    def peak_memory_bytes(self) -> dict[str, int]:
        """Most memory that each device holds at any moment."""
        return {device: max(bytes_ for _, bytes_ in steps) for device, steps in self.memory.items()}

    @cached_property
    def overflow_bytes(self) -> dict[str, int]:
        """Excess of peak memory over capacity, for devices where there is one."""
        over = {
            device: peak - self.pipeline.capacity_bytes(device)
            for device, peak in self.peak_memory_bytes.items()
        }
        return {device: bytes_ for device, bytes_ in over.items() if bytes_ > 0}


def reduction_spans(timeline: Timeline) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return the start of the first bucket and the end of the last by the stages reduced."""
    spans: dict[tuple[int, ...], tuple[float, float]] = {}
    for event in timeline.synchronisations:
        stages = event.synchronisation.stages
        start_s, end_s = spans.get(stages, (event.start_s, event.end_s))
        spans[stages] = min(start_s, event.start_s), max(end_s, event.end_s)
    return spans


def _accumulated(static: int, moments_s: Reals, bytes_: Longs) -> list[tuple[float, int]]:
    """Return the running sum; memory freed at a moment is free for what starts at it."""
    times_s, places = np.unique([0.0, *moments_s], return_inverse=True)
    changes = np.zeros(len(times_s), np.int64)
    np.add.at(changes, places, [static, *bytes_])
    return list(zip(times_s.tolist(), np.cumsum(changes).tolist(), strict=True))
