"""Timed replay of a pipeline: what runs when, over which links, in how much memory.

The rules: a device runs one operation at a time, each as soon as its inputs have arrived and the
operation before it has ended. A result sets off to the neighbouring stage the moment it is ready;
a transfer holds every link of its route for latency + bytes / narrowest bandwidth; a link serves
requests in the order they are made. Gradients of a stage are reduced after its last backward, one
reduction a device at a time; the optimizer step follows the last of them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from planner.artifacts.operations import Kind, Operation
from planner.artifacts.plan import Plan
from planner.costs.placement import PlacedPipeline, Synchronisation, Transfer, place_plan
from planner.errors import DeadlockError

Orders = Mapping[str, Sequence[Operation]]


@dataclass(frozen=True)
class OperationEvent:
    """An operation that ran on a device."""

    device: str
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TransferEvent:
    """Activations (kind F) or gradients (kind B) of a stage's microbatch on their way."""

    source: str
    target: str
    operation: Operation
    start_s: float
    end_s: float
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SynchronisationEvent:
    """An all-reduce of gradients."""

    synchronisation: Synchronisation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One iteration, event by event, in order of start."""

    pipeline: PlacedPipeline
    operations: tuple[OperationEvent, ...]
    transfers: tuple[TransferEvent, ...]
    synchronisations: tuple[SynchronisationEvent, ...]
    end_s: Mapping[str, float]

    @cached_property
    def iteration_time_s(self) -> float:
        """When the last device has done its optimizer step."""
        return max(self.end_s.values())

    @cached_property
    def busy_s(self) -> dict[str, float]:
        """Seconds of computation on each device, the optimizer step included."""
        busy = dict(self.pipeline.optimizer_s)
        for event in self.operations:
            busy[event.device] += event.end_s - event.start_s
        return busy

    @property
    def bubble(self) -> float:
        """Idle share of the devices used."""
        if self.iteration_time_s == 0:
            return 0.0
        share = sum(self.busy_s.values()) / (len(self.end_s) * self.iteration_time_s)
        return min(1.0, max(0.0, 1 - share))

    @cached_property
    def memory(self) -> dict[str, list[tuple[float, int]]]:
        """Bytes in use on each device: steps ``(time, bytes from then on)``."""
        return memory_profile(self)

    @cached_property
    def peak_memory_bytes(self) -> dict[str, int]:
        """The most each device holds at any moment."""
        return {device: max(bytes_ for _, bytes_ in steps) for device, steps in self.memory.items()}

    @cached_property
    def overflow_bytes(self) -> dict[str, int]:
        """By device, how much its peak is beyond its capacity; only where it is."""
        over = {
            device: peak - self.pipeline.capacity_bytes(device)
            for device, peak in self.peak_memory_bytes.items()
        }
        return {device: bytes_ for device, bytes_ in over.items() if bytes_ > 0}


class Policy(Protocol):
    """Decides what a free device runs next."""

    def offer(self, device: str, operation: Operation) -> None:
        """From now on the operation can run on its device; each is offered once.

        Both a whole backward and its first half are offered, whichever the policy will run.
        """

    def choose(self, device: str, now_s: float) -> Operation | None:
        """One of the operations offered and not chosen yet, or None to wait for another event."""

    def unfinished(self) -> str:
        """What still waits, for a deadlock's message; empty if all is done."""


class FixedOrder:
    """Runs each device's operations in a given order."""

    def __init__(self, orders: Orders) -> None:
        self._left = {device: list(reversed(order)) for device, order in orders.items()}
        self._available: defaultdict[str, set[Operation]] = defaultdict(set)

    def offer(self, device: str, operation: Operation) -> None:
        """The operation can run once its turn comes."""
        self._available[device].add(operation)

    def choose(self, device: str, now_s: float) -> Operation | None:
        """The next of the order once it can run."""
        left = self._left.get(device)
        if left and left[-1] in self._available[device]:
            self._available[device].discard(left[-1])
            return left.pop()
        return None

    def unfinished(self) -> str:
        """The operation each device waits at."""
        return ", ".join(
            f"{device} waits at {left[-1]}" for device, left in self._left.items() if left
        )


def owners(orders: Orders) -> dict[tuple[int, int], str]:
    """Which device runs each (stage, microbatch)."""
    return {(op.stage, op.microbatch): device for device, order in orders.items() for op in order}


def simulate(pipeline: PlacedPipeline, orders: Orders) -> Timeline:
    """Replay given orders.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
    """
    return run(pipeline, owners(orders), FixedOrder(orders))


def simulate_plan(plan: Plan) -> Timeline:
    """Replay a plan's orders under the cost model, one transfer a link and direction at a time.

    Args:
        plan: whose stages, orders and costs; whether it holds, ``planner.verify`` says.

    Returns:
        When each operation, transfer and all-reduce begins and ends, in seconds, with
        ``iteration_time_s``, ``bubble``, ``busy_s``, ``memory`` and ``peak_memory_bytes`` by
        device.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
        PipeplanError: if an order has a word that is no operation.
    """
    return simulate(place_plan(plan), plan.parsed_orders())


def run(pipeline: PlacedPipeline, owner: Mapping[tuple[int, int], str], policy: Policy) -> Timeline:
    """Replay under any policy.

    Args:
        pipeline: stages with their times.
        owner: the device of each (stage, microbatch).
        policy: what each device runs next.

    Raises:
        DeadlockError: if nothing can run although operations are left.
    """
    return Replay(pipeline, owner, policy).run()


class Replay:
    """The event loop over ends of operations and arrivals of transfers, in order of time."""

    def __init__(
        self, pipeline: PlacedPipeline, owner: Mapping[tuple[int, int], str], policy: Policy
    ) -> None:
        self.pipeline = pipeline
        self.owner = owner
        self.policy = policy
        self.last = len(pipeline.stages) - 1
        self.heap: list[tuple[float, Operation, bool]] = []
        self.free_at = dict.fromkeys(pipeline.devices, 0.0)
        self.link_free_at: dict[tuple[int, int], float] = defaultdict(float)
        self.operations: list[OperationEvent] = []
        self.transfers: list[TransferEvent] = []
        self.last_backward_s: dict[tuple[int, str], float] = {}
        self._durations: dict[tuple[int, str, str], float] = {}
        self._transfers: dict[tuple[bool, int, str, str], Transfer] = {}

    def run(self) -> Timeline:
        """Play it to its end; once only."""
        for stage, microbatch in self.owner:
            if stage == 0:
                self._offer(Operation(0, "F", microbatch))
        self._dispatch(self.pipeline.devices, 0.0)
        while self.heap:
            now = self.heap[0][0]
            touched: dict[str, None] = {}
            while self.heap and self.heap[0][0] == now:
                _, operation, arrival = heapq.heappop(self.heap)
                hear = self._arrive if arrival else self._finish
                device = hear(operation, now)
                if device is not None:
                    touched[device] = None
            self._dispatch(touched, now)
        unfinished = self.policy.unfinished()
        if unfinished:
            raise DeadlockError(f"the orders deadlock: {unfinished}")
        return self._timeline()

    def _device(self, operation: Operation) -> str:
        return self.owner[operation.stage, operation.microbatch]

    def _offer(self, operation: Operation) -> None:
        self.policy.offer(self._device(operation), operation)

    def _dispatch(self, devices: Collection[str], now: float) -> None:
        for device in devices:
            if self.free_at[device] > now:
                continue
            operation = self.policy.choose(device, now)
            if operation is not None:
                self._start(device, operation, now)

    def _start(self, device: str, operation: Operation, now: float) -> None:
        key = (operation.stage, operation.kind, device)
        if key not in self._durations:
            self._durations[key] = self.pipeline.seconds(*key)
        end = now + self._durations[key]
        self.free_at[device] = end
        self.operations.append(OperationEvent(device, operation, now, end))
        heapq.heappush(self.heap, (end, operation, False))

    def _finish(self, operation: Operation, now: float) -> str:
        device = self._device(operation)
        stage, kind, microbatch = operation
        if kind == "F":
            if stage < self.last:
                self._send(Operation(stage + 1, "F", microbatch), device, now)
            else:
                self._offer_backward(stage, microbatch)
        if kind in "BI" and stage > 0:
            self._send(Operation(stage - 1, "B", microbatch), device, now)
        if kind == "I":
            self._offer(Operation(stage, "W", microbatch))
        if kind in "BW":
            self.last_backward_s[stage, device] = now
        return device

    def _offer_backward(self, stage: int, microbatch: int) -> None:
        self._offer(Operation(stage, "B", microbatch))
        self._offer(Operation(stage, "I", microbatch))

    def _send(self, consumer: Operation, source: str, now: float) -> None:
        """Ask for the links of the route now; the consumer can run when the transfer ends."""
        target = self.owner.get((consumer.stage, consumer.microbatch))
        if target is None:
            return
        transfer = self._transfer(consumer, source, target)
        self._request(transfer, consumer, source, now)

    def _request(self, transfer: Transfer, consumer: Operation, source: str, now: float) -> None:
        start = max([now, *(self.link_free_at[link] for link in transfer.links)])
        end = start + transfer.seconds
        for link in transfer.links:
            self.link_free_at[link] = end
        self._note_transfer(transfer, consumer, source, start, end)
        heapq.heappush(self.heap, (end, consumer, True))

    def _note_transfer(
        self, transfer: Transfer, consumer: Operation, source: str, start: float, end: float
    ) -> None:
        kind: Kind = consumer.kind
        producer = Operation(consumer.stage + (-1 if kind == "F" else 1), kind, consumer.microbatch)
        target = self._device(consumer)
        self.transfers.append(TransferEvent(source, target, producer, start, end, transfer.links))

    def _transfer(self, consumer: Operation, source: str, target: str) -> Transfer:
        key = (consumer.kind == "F", consumer.stage, source, target)
        if key not in self._transfers:
            if consumer.kind == "F":
                found = self.pipeline.forward_transfer(consumer.stage - 1, source, target)
            else:
                found = self.pipeline.backward_transfer(consumer.stage + 1, source, target)
            self._transfers[key] = found
        return self._transfers[key]

    def _arrive(self, operation: Operation, now: float) -> str | None:
        """Hand a message over; None if it has not come."""
        if operation.kind == "F":
            self._offer(operation)
        else:
            self._offer_backward(operation.stage, operation.microbatch)
        return self._device(operation)

    def _timeline(self) -> Timeline:
        synchronisations, end_s = self._synchronise()
        return Timeline(
            self.pipeline,
            tuple(self.operations),
            tuple(sorted(self.transfers, key=lambda event: (event.start_s, event.operation))),
            tuple(sorted(synchronisations, key=lambda event: event.start_s)),
            end_s,
        )

    def _synchronise(self) -> tuple[list[SynchronisationEvent], dict[str, float]]:
        done = dict(self.free_at)
        network_free = dict.fromkeys(self.pipeline.devices, 0.0)
        waiting = sorted(
            (self._ready_s(sync), index)
            for index, sync in enumerate(self.pipeline.synchronisations)
        )
        events = []
        for ready, index in waiting:
            sync = self.pipeline.synchronisations[index]
            start = max([ready, *(network_free[device] for device in sync.devices)])
            end = start + sync.seconds
            events.append(SynchronisationEvent(sync, start, end))
            for device in sync.devices:
                network_free[device] = end
                done[device] = max(done[device], end)
        return events, {d: t + self.pipeline.optimizer_s[d] for d, t in done.items()}

    def _ready_s(self, sync: Synchronisation) -> float:
        return max(
            (self.last_backward_s.get((s, d), 0.0) for s in sync.stages for d in sync.devices),
            default=0.0,
        )


def memory_profile(timeline: Timeline) -> dict[str, list[tuple[float, int]]]:
    """Bytes in use over time on each device.

    A received tensor counts from the start of its transfer, a sent one until the end of its
    transfer; a stash from the start of its forward to the end of its backward. Where that is split
    the input gradient leaves what the weight gradient needs.
    """
    pipeline = timeline.pipeline
    changes: dict[str, list[tuple[float, int]]] = {
        device: [(0.0, pipeline.static_bytes(device))] for device in pipeline.devices
    }
    for event in timeline.operations:
        changes[event.device] += _operation_changes(pipeline, event)
    for transfer in timeline.transfers:
        stage = pipeline.stages[transfer.operation.stage]
        forward = transfer.operation.kind == "F"
        bytes_ = stage.output_bytes if forward else stage.input_gradient_bytes
        changes[transfer.target].append((transfer.start_s, bytes_))
        changes[transfer.source].append((transfer.end_s, -bytes_))
    return {device: _accumulate(rows) for device, rows in changes.items()}


def _operation_changes(pipeline: PlacedPipeline, event: OperationEvent) -> list[tuple[float, int]]:
    index, kind, _ = event.operation
    stage = pipeline.stages[index]
    last = index == len(pipeline.stages) - 1
    rows = []
    if kind == "F":
        # The input, counted on arrival, becomes part of the stash.
        rows.append((event.start_s, stage.stash_bytes - stage.input_bytes))
        rows.append((event.start_s, stage.output_bytes))
    if kind in "BI":
        rows.append((event.start_s, stage.input_gradient_bytes))
        rows.append((event.end_s, 0 if last else -stage.output_gradient_bytes))
    if kind == "B":
        rows.append((event.end_s, -stage.stash_bytes))
    if kind == "I":
        extra = pipeline.split_extra_bytes(index, event.device)
        rows.append((event.start_s, extra))
        rows.append((event.end_s, -extra))
        rows.append((event.end_s, stage.weight_stash_bytes - stage.stash_bytes))
    if kind == "W":
        rows.append((event.end_s, -stage.weight_stash_bytes))
    return rows


def _accumulate(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Running sum; what is freed at a moment is free for what starts at it."""
    steps: list[tuple[float, int]] = []
    total = 0
    for time, change in sorted(changes):
        total += change
        if steps and steps[-1][0] == time:
            steps[-1] = (time, total)
        else:
            steps.append((time, total))
    return steps
