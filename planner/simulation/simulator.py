"""Timed replay of a pipeline's operations, transfers and reductions.

The rules: a device runs one operation at a time, each as soon as its inputs have arrived and the
operation before it has ended. While k devices of a host compute, each takes the host's
``slowdown[k - 1]`` times as long as alone. A result is sent to the neighbouring stage the moment it
is ready, or when the runtime's rules let it set off (:mod:`planner.simulation.exchanges`), and the
device goes on, or waits. A transfer holds every link of its route for latency + bytes / narrowest
bandwidth; a link serves requests in the order they are made. Gradients of a stage are reduced after
its last backward, or in buckets while it runs, or later if the runtime does, one reduction per
device at a time; the optimizer step follows the last of them.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from planner.costs.placement import PlacedPipeline, Transfer, place_plan
from planner.costs.reductions import GradientReduction
from planner.errors import DeadlockError
from planner.plan.operations import Kind, Operation, Orders, owners
from planner.plan.plan import Plan
from planner.simulation.exchanges import Exchanges, Message, exchanges_of
from planner.simulation.shared_hosts import HostLoad, computed_together, host_loads
from planner.simulation.timeline import (
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
    gradients_ready_s,
)


class Policy(Protocol):
    """Decides what a free device runs next."""

    def offer(self, device: str, operation: Operation) -> None:
        """Announce an operation that can run on its device from now on; each is offered once.

        Both a whole backward and its input gradient are offered, whichever the policy will run.
        """

    def choose(self, device: str, now_s: float) -> Operation | None:
        """Return one of the waiting operations, or None to wait for another event."""

    def unfinished(self) -> str:
        """Describe what still waits, for a deadlock's message; empty if all is done."""


class FixedOrder:
    """Runs each device's operations in a given order."""

    def __init__(self, orders: Orders) -> None:
        self._left = {device: list(reversed(order)) for device, order in orders.items()}
        self._available: defaultdict[str, set[Operation]] = defaultdict(set)

    def offer(self, device: str, operation: Operation) -> None:
        """Note that the operation can run once its turn comes."""
        self._available[device].add(operation)

    def choose(self, device: str, now_s: float) -> Operation | None:
        """Return the next operation of the order once it can run."""
        left = self._left.get(device)
        if left and left[-1] in self._available[device]:
            self._available[device].discard(left[-1])
            return left.pop()
        return None

    def unfinished(self) -> str:
        """Describe the operation that each device waits at."""
        return ", ".join(
            f"{device} waits at {left[-1]}" for device, left in self._left.items() if left
        )


def simulate(pipeline: PlacedPipeline, orders: Orders) -> Timeline:
    """Replay given orders.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
    """
    owner = owners(orders)
    exchanges = exchanges_of(pipeline, owner, orders)
    return Replay(pipeline, owner, FixedOrder(orders), exchanges).run()


def simulate_plan(plan: Plan) -> Timeline:
    """Replay a plan's orders under the cost model, one transfer per link and direction.

    Args:
        plan: the plan; ``planner.verify`` checks whether it is valid.

    Returns:
        Start and end of each operation, transfer and all-reduce in seconds, with
        ``iteration_time_s``, ``bubble``, ``busy_s``, ``memory`` and ``peak_memory_bytes`` by
        device.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
        PipeplanError: if an order has a word that is not an operation.
    """
    return simulate(place_plan(plan), plan.parsed_orders())


def run(pipeline: PlacedPipeline, owner: Mapping[tuple[int, int], str], policy: Policy) -> Timeline:
    """Replay under any policy.

    Args:
        pipeline: stages with their times.
        owner: the device of each (stage, microbatch).
        policy: what each device runs next. As nobody knows that in advance, receives that block
            count as overlapped.

    Raises:
        DeadlockError: if nothing can run although operations are left.
    """
    return Replay(pipeline, owner, policy, exchanges_of(pipeline, owner, None)).run()


class Replay:
    """The event loop over ends of operations and arrivals of transfers, in order of time."""

    def __init__(
        self,
        pipeline: PlacedPipeline,
        owner: Mapping[tuple[int, int], str],
        policy: Policy,
        exchanges: Exchanges,
    ) -> None:
        self.pipeline = pipeline
        self.owner = owner
        self.policy = policy
        self.exchanges = exchanges
        self._waits = bool(exchanges.after)
        self.last = len(pipeline.stages) - 1
        self.heap: list[tuple[float, Operation, bool]] = []
        self.free_at = dict.fromkeys(pipeline.devices, 0.0)
        self.free_again_at: dict[tuple[int, int] | str, float] = defaultdict(float)
        self.operations: list[OperationEvent] = []
        self.transfers: list[TransferEvent] = []
        self._loads = host_loads(pipeline.problem.cluster)
        self._on_hosts: dict[str, OperationEvent] = {}
        self._changed: dict[HostLoad, None] = {}
        self._durations: dict[tuple[int, str, str], float] = {}
        self._transfers: dict[tuple[bool, int, str, str], Transfer] = {}

    def run(self) -> Timeline:
        """Run the replay to its end; once only."""
        for stage, microbatch in self.owner:
            if stage == 0:
                self._offer(Operation(0, "F", microbatch))
        for device in self.pipeline.devices:
            self._send(self.exchanges.start(device), 0.0)
        self._dispatch(self.pipeline.devices, 0.0)
        self._time_again()
        while self.heap:
            now = self.heap[0][0]
            touched: dict[str, None] = {}
            while self.heap and self.heap[0][0] == now:
                _, operation, arrival = heapq.heappop(self.heap)
                hear = self._arrive if arrival else self._finish
                for device in hear(operation, now):
                    touched[device] = None
            self._dispatch(touched, now)
            if self._changed:
                self._time_again()
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
            if self.free_at[device] > now or (self._waits and self.exchanges.is_waiting(device)):
                continue
            operation = self.policy.choose(device, now)
            if operation is not None:
                self._start(device, operation, now)

    def _start(self, device: str, operation: Operation, now: float) -> None:
        key = (operation.stage, operation.kind, device)
        if key not in self._durations:
            self._durations[key] = self.pipeline.seconds(*key)
        if device in self._loads:
            self._compute_on_host(device, OperationEvent(device, operation, now, math.inf))
            return
        end = now + self._durations[key]
        self.free_at[device] = end
        self.operations.append(OperationEvent(device, operation, now, end))
        heapq.heappush(self.heap, (end, operation, False))

    def _compute_on_host(self, device: str, event: OperationEvent) -> None:
        """Begin an operation whose end depends on what else its host computes."""
        load, operation = self._loads[device], event.operation
        self.free_at[device] = math.inf
        self._on_hosts[device] = event
        load.start(device, self._durations[operation.stage, operation.kind, device], event.start_s)
        self._changed[load] = None

    def _time_again(self) -> None:
        """Note when the computations of hosts end on which something began or ended."""
        for load in self._changed:
            for device, end_s in load.ends_s:
                event = self._on_hosts[device]
                if event.end_s != end_s:
                    self._on_hosts[device] = replace(event, end_s=end_s)
                    heapq.heappush(self.heap, (end_s, event.operation, False))
        self._changed.clear()

    def _ends_now(self, device: str, operation: Operation, now: float) -> bool:
        """Return whether an operation ends; on a host its end may have been put off since."""
        event = self._on_hosts.get(device)
        if event is None or (event.operation, event.end_s) != (operation, now):
            return False
        load = self._loads[device]
        load.stop(device, now)
        self._changed[load] = None
        self.free_at[device] = now
        alone_s = self._durations[operation.stage, operation.kind, device]
        stretch = (event.end_s - event.start_s) / alone_s if alone_s else 1.0
        self.operations.append(replace(self._on_hosts.pop(device), stretch=stretch))
        return True

    def _finish(self, operation: Operation, now: float) -> Collection[str]:
        device, sent = self._device(operation), None
        if device in self._loads and not self._ends_now(device, operation, now):
            return ()
        stage, kind, microbatch = operation
        if kind == "F":
            if stage < self.last:
                sent = Operation(stage + 1, "F", microbatch)
            else:
                self._offer_backward(stage, microbatch)
        if kind in "BI" and stage > 0:
            sent = Operation(stage - 1, "B", microbatch)
        if kind == "I":
            self._offer(Operation(stage, "W", microbatch))
        if self._waits:
            self._send(self.exchanges.end(device, operation, sent), now)
        elif sent is not None:
            self._send((sent,), now)
        return (device,)

    def _offer_backward(self, stage: int, microbatch: int) -> None:
        self._offer(Operation(stage, "B", microbatch))
        self._offer(Operation(stage, "I", microbatch))

    def _send(self, messages: Iterable[Message], now: float) -> None:
        """Request the links of the routes now; a consumer can run when its transfer ends."""
        for consumer in messages:
            stage, kind, microbatch = consumer
            target = self.owner.get((stage, microbatch))
            if target is None:
                continue
            source = self.owner[stage - 1 if kind == "F" else stage + 1, microbatch]
            self._request(self._transfer(consumer, source, target), consumer, source, now)

    def _request(self, transfer: Transfer, consumer: Operation, source: str, now: float) -> None:
        occupied = transfer.occupied if transfer.streams else transfer.links
        start = max([now, *(self.free_again_at[resource] for resource in occupied)])
        end = start + transfer.seconds
        for resource in occupied:
            self.free_again_at[resource] = end
        self._note_transfer(transfer, consumer, source, start, end)
        heapq.heappush(self.heap, (end, consumer, True))

    def _note_transfer(
        self, transfer: Transfer, consumer: Operation, source: str, start: float, end: float
    ) -> None:
        kind: Kind = consumer.kind
        producer = Operation(consumer.stage + (-1 if kind == "F" else 1), kind, consumer.microbatch)
        target = self._device(consumer)
        self.transfers.append(
            TransferEvent(source, target, producer, start, end, transfer.links, transfer.streams)
        )

    def _transfer(self, consumer: Operation, source: str, target: str) -> Transfer:
        key = (consumer.kind == "F", consumer.stage, source, target)
        if key not in self._transfers:
            if consumer.kind == "F":
                found = self.pipeline.forward_transfer(consumer.stage - 1, source, target)
            else:
                found = self.pipeline.backward_transfer(consumer.stage + 1, source, target)
            self._transfers[key] = found
        return self._transfers[key]

    def _arrive(self, operation: Operation, now: float) -> Collection[str]:
        """Deliver a message and return the devices that may go on; none if it has not come."""
        if operation.kind == "F":
            self._offer(operation)
        else:
            self._offer_backward(operation.stage, operation.microbatch)
        if not self._waits:
            return (self._device(operation),)
        self._send(self.exchanges.arrive(operation), now)
        return (self._device(operation), *self.exchanges.ends.get(operation, ())[:1])

    def _timeline(self) -> Timeline:
        operations, transfers = self.operations, self.transfers
        if self._loads:
            operations = sorted(operations, key=lambda event: event.start_s)
        transfers = sorted(transfers, key=lambda event: (event.start_s, event.operation))
        return _reduced(self.pipeline, tuple(operations), tuple(transfers))


def reduced_soonest(timeline: Timeline) -> Timeline:
    """Return a timeline, with reductions after the last backwards if that is faster.

    Several buckets may lose more by their latencies than they gain by the overlap.
    """
    at_once = timeline.pipeline.reduced_at_once
    if at_once is None:
        return timeline
    later = _reduced(at_once, timeline.operations, timeline.transfers)
    return min(timeline, later, key=lambda row: row.iteration_time_s)


def _reduced(
    pipeline: PlacedPipeline,
    operations: tuple[OperationEvent, ...],
    transfers: tuple[TransferEvent, ...],
) -> Timeline:
    """Return the timeline of operations in the order of their starts, with all reductions."""
    done = dict.fromkeys(pipeline.devices, 0.0)
    last: dict[tuple[int, str], OperationEvent] = {}
    for event in operations:
        done[event.device] = event.end_s
        if event.operation.kind in "BW":
            last[event.operation.stage, event.device] = event
    if pipeline.behaviour.send == "blocking":
        for transfer in transfers:
            done[transfer.source] = max(done[transfer.source], transfer.end_s)
    free_at = dict.fromkeys(pipeline.devices, 0.0)
    syncs = pipeline.synchronisations
    ready_s = (_ready_s(pipeline, sync, last, done) for sync in syncs)
    waiting = sorted((ready, index) for index, ready in enumerate(ready_s))
    events = []
    for ready, index in waiting:
        sync = syncs[index]
        start = max([ready, *(free_at[device] for device in sync.devices)])
        end = start + sync.seconds
        events.append(SynchronisationEvent(sync, start, end))
        for device in sync.devices:
            free_at[device] = end
            done[device] = max(done[device], end)
    loads = host_loads(pipeline.problem.cluster)
    end_s = computed_together(loads, done, pipeline.optimizer_s)
    by_start = tuple(sorted(events, key=lambda event: event.start_s))
    # Differences of moments are rounded: where nothing slows a step it takes just its own time.
    steps_s = {
        device: end_s[device] - done[device] if device in loads else alone_s
        for device, alone_s in pipeline.optimizer_s.items()
    }
    return Timeline(pipeline, operations, transfers, by_start, end_s, steps_s)


def _ready_s(
    pipeline: PlacedPipeline,
    sync: GradientReduction,
    last: Mapping[tuple[int, str], OperationEvent],
    done: Mapping[str, float],
) -> float:
    """Return when gradients may be reduced.

    Args:
        pipeline: whose runtime reduces them.
        sync: the reduction.
        last: the last backward of each stage and device.
        done: when each device has run its operations and ended the sends that it waits for.
    """
    match pipeline.behaviour.reduction:
        case "flush":
            return max(done.values())
        case "device":
            return max(done[device] for device in sync.devices)
    members = ((stage, device) for stage in sync.stages for device in sync.devices)
    events = (last[pair] for pair in members if pair in last)
    return max((gradients_ready_s(sync, event) for event in events), default=0.0)
