"""Timed replay of a pipeline's operations, transfers and reductions.

The rules: a device runs one operation at a time, each as soon as its inputs have arrived and the
operation before it has ended. While k devices of a host compute, each takes the host's
``slowdown[k - 1]`` times as long as alone, and one that communicates longer again by its type's
factor (:mod:`planner.simulation.progress`). A result is sent to the neighbouring stage the moment
it is ready, or when the runtime's rules let it set off (:mod:`planner.simulation.exchanges`), and
the device goes on, or waits. A transfer alone takes latency + bytes / narrowest bandwidth; those of
one device to another go one after the other, and all that is on a link at once shares it, or by
older rules waits for each other (:mod:`planner.simulation.network`). Gradients of a stage are
reduced after its last backward, or in buckets while it runs, or later if the runtime does, one
reduction per device at a time; the optimizer step follows the last of them, and all-gathers of
parameters follow that (:mod:`planner.simulation.gathers`). Offloaded stashes travel to the host and
back meanwhile (:mod:`planner.simulation.copies`). Replicas that divide weights start each operation
of their stage together (:mod:`planner.simulation.together`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from planner.costs.collectives import CollectiveLoad
from planner.costs.placed_pipeline import PlacedPipeline, Transfer
from planner.costs.placement import place_plan
from planner.errors import DeadlockError
from planner.plan.operations import Kind, Operation, Orders, owners
from planner.plan.plan import Plan
from planner.simulation.copies import StashCopies
from planner.simulation.exchanges import Exchanges, Message, exchanges_of
from planner.simulation.gathers import gathered
from planner.simulation.gradients import GradientMoments, Made
from planner.simulation.network import Flow, Key, Link, Network, Way, limiting_links
from planner.simulation.policy import FixedOrder
from planner.simulation.progress import ComputeLoad, computed_together
from planner.simulation.timeline import (
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)
from planner.simulation.together import StartedTogether


def simulate(
    pipeline: PlacedPipeline, orders: Orders, by_microbatch: Sequence[PlacedPipeline] = ()
) -> Timeline:
    """Replay given orders.

    Args:
        pipeline: stages with their times.
        orders: of all devices.
        by_microbatch: the same stages with the times and messages of each microbatch, where these
            differ; memory is that of ``pipeline``.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
        PipeplanError: if neighbouring stages are on devices that no path joins.
    """
    # numba takes half a second to import, so only who replays anything waits for that.
    from planner.program.lower.lower import lower_orders
    from planner.program.replay import replay
    from planner.simulation.replayed import timeline_of

    placed = {id(row): row for row in by_microbatch}
    numbers = {key: number for number, key in enumerate(placed)}
    length_of = [numbers[id(row)] for row in by_microbatch]
    lowered = lower_orders(pipeline, orders, tuple(placed.values()), length_of)
    return timeline_of(lowered, replay(lowered.program), by_microbatch)


def replay_objects(
    pipeline: PlacedPipeline, orders: Orders, by_microbatch: Sequence[PlacedPipeline] = ()
) -> Timeline:
    """Replay given orders as :func:`simulate` does, by the event loop of :class:`Replay`."""
    owner = owners(orders)
    exchanges = exchanges_of(pipeline, owner, orders)
    copies = StashCopies(pipeline, orders)
    policy, together = FixedOrder(orders), StartedTogether(pipeline)
    return Replay(pipeline, owner, policy, exchanges, copies, by_microbatch, together).run()


def simulate_plan(plan: Plan) -> Timeline:
    """Replay a plan's orders under the cost model and the rules of its runtime.

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


class Replay:
    """The event loop over ends of operations and arrivals of transfers, in order of time."""

    def __init__(
        self,
        pipeline: PlacedPipeline,
        owner: Mapping[tuple[int, int], str],
        policy: FixedOrder,
        exchanges: Exchanges,
        copies: StashCopies,
        by_microbatch: Sequence[PlacedPipeline] = (),
        together: StartedTogether | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._together = together
        self._by_microbatch = by_microbatch
        self.owner = owner
        self.policy = policy
        self.exchanges = exchanges
        self.copies = copies
        self._waits = bool(exchanges.after)
        self.last = len(pipeline.stages) - 1
        self.heap: list[tuple[float, Operation, bool]] = []
        self.free_at = dict.fromkeys(pipeline.devices, 0.0)
        self.operations: list[OperationEvent] = []
        self.transfers: list[TransferEvent] = []
        self._load = ComputeLoad(pipeline.problem.cluster)
        # Of devices that may be slowed: what each computes.
        self._computing: dict[str, OperationEvent] = {}
        # By the pipeline whose times a microbatch has, which lives as long as this does.
        self._durations: dict[tuple[int, int, str, str], float] = {}
        self._transfers: dict[tuple[int, bool, int, str, str], Transfer] = {}
        self._network = Network(pipeline.problem.cluster, self._announce, self._load)
        self._gradients = GradientMoments(pipeline, owner)
        # Of these: what its operation makes, and the seconds of it that are behind that.
        self._being_made: dict[str, list[tuple[Made, float]]] = {}
        self._reducing: list[tuple[float, int]] = []
        self._ready_s: dict[int, float] = {}
        self._reduced: dict[int, SynchronisationEvent] = {}
        self._shared: dict[tuple[Link, ...], tuple[Link, ...]] = {}

    def run(self) -> Timeline:
        """Run the replay to its end; once only."""
        for stage, microbatch in self.owner:
            if stage == 0:
                self._offer(Operation(0, "F", microbatch))
        for device in self.pipeline.devices:
            self._send(self.exchanges.start(device), 0.0)
        self._settle(self.pipeline.devices, 0.0)
        while (now := self._next_s()) is not None:
            self._settle(self._hear(now), now)
        waiting = "" if self._together is None else self._together.unfinished()
        unfinished = [text for text in (self.policy.unfinished(), waiting) if text]
        if unfinished:
            raise DeadlockError(f"the orders deadlock: {', '.join(unfinished)}")
        return self._timeline()

    def _next_s(self) -> float | None:
        """Return the next moment at which something ends, arrives or is made."""
        rows = (self.heap, self._gradients.announced, self._reducing, self.copies.coming)
        return min([row[0][0] for row in rows if row], default=None)

    def _hear(self, now: float) -> Collection[str]:
        """Let all end that ends at a moment; return the devices that may go on."""
        touched: dict[str, None] = {}
        while self.heap and self.heap[0][0] == now:
            _, operation, arrival = heapq.heappop(self.heap)
            hear = self._arrive if arrival else self._finish
            for device in hear(operation, now):
                touched[device] = None
        for backward in self.copies.arrived(now):
            self._offer(backward)
            touched[self._device(backward)] = None
        self._gradients.make(now)
        while self._reducing and self._reducing[0][0] == now:
            self._end_reduction(heapq.heappop(self._reducing)[1], now)
        return touched

    def _settle(self, touched: Collection[str], now: float) -> None:
        """Start what can, and time again what that or an end has made slower or faster."""
        self._dispatch(touched, now)
        for number in self._gradients.take_ready():
            self._reduce(number, now)
        self._network.settle(now)
        self._time_again(now)

    def _device(self, operation: Operation) -> str:
        return self.owner[operation.stage, operation.microbatch]

    def _of(self, operation: Operation) -> PlacedPipeline:
        """Return the stages with the times of an operation's microbatch."""
        if not self._by_microbatch:
            return self.pipeline
        return self._by_microbatch[operation.microbatch]

    def _offer(self, operation: Operation) -> None:
        self.policy.offer(self._device(operation), operation)

    def _dispatch(self, devices: Collection[str], now: float) -> None:
        for device in devices:
            if self.free_at[device] > now or (self._waits and self.exchanges.is_waiting(device)):
                continue
            operation = self.policy.choose(device, now)
            if operation is None:
                continue
            if self._together is None:
                self._start(device, operation, now)
                continue
            self.free_at[device] = math.inf
            for member, part in self._together.ready(device, operation):
                self._start(member, part, now)

    def _start(self, device: str, operation: Operation, now: float) -> None:
        pipeline, what = self._of(operation), (operation.stage, operation.kind, device)
        key = (id(pipeline), *what)
        if key not in self._durations:
            self._durations[key] = pipeline.seconds(*what)
        seconds = self._durations[key]
        made = self._gradients.made_by(*what, pipeline.synchronisations)
        self.copies.start(device, operation, now)
        if device in self._load.devices:
            self._being_made[device] = made
            self._computing[device] = OperationEvent(device, operation, now, math.inf)
            self.free_at[device] = math.inf
            self._load.start(device, seconds, now)
            return
        end = now + seconds
        self.free_at[device] = end
        self.operations.append(OperationEvent(device, operation, now, end))
        heapq.heappush(self.heap, (end, operation, False))
        for part, behind_s in made:
            self._gradients.announce(part, max(now, end - behind_s))

    def _time_again(self, now: float) -> None:
        """Note when the computations end that something slows, or no longer slows."""
        for device, progress in self._load.settle(now):
            event = self._computing[device]
            if event.end_s != progress.end_s:
                self._computing[device] = replace(event, end_s=progress.end_s)
                heapq.heappush(self.heap, (progress.end_s, event.operation, False))
            for part, behind_s in self._being_made[device]:
                self._gradients.announce(part, progress.moment(behind_s, now))

    def _ends_now(self, device: str, operation: Operation, now: float) -> bool:
        """Return whether an operation ends that may be slowed; its end may have moved since."""
        event = self._computing.get(device)
        if event is None or (event.operation, event.end_s) != (operation, now):
            return False
        self._load.stop(device)
        self.free_at[device] = now
        self.operations.append(self._computing.pop(device))
        for part, _ in self._being_made[device]:
            self._gradients.announce(part, now)
        return True

    def _finish(self, operation: Operation, now: float) -> Collection[str]:
        device, sent = self._device(operation), None
        if device in self._load.devices and not self._ends_now(device, operation, now):
            return ()
        stage, kind, microbatch = operation
        self.copies.finish(device, operation, now)
        if kind != "I":
            self._gradients.note_done(device)
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
        if not self.copies.is_away(Operation(stage, "B", microbatch)):
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
            self._request(self._transfer(consumer, source, target), consumer, now)

    def _request(self, transfer: Transfer, consumer: Operation, now: float) -> None:
        flow = Flow(
            key=consumer,
            seconds=transfer.seconds,
            waits_for=transfer.occupied,
            latency_s=transfer.latency_s,
            gb_per_s=transfer.gb_per_s,
            links=self._shared_by(transfer.links),
            devices=transfer.ends,
        )
        self._network.request(flow, now)

    def _shared_by(self, links: tuple[Link, ...]) -> tuple[Link, ...]:
        """Return the links of a way at which others can slow it."""
        if links not in self._shared:
            self._shared[links] = tuple(filter(self._limiting.__contains__, links))
        return self._shared[links]

    @cached_property
    def _limiting(self) -> frozenset[Link]:
        links = self.pipeline.problem.cluster.links
        return limiting_links(self._ways(), lambda link: links[link[0]].bandwidth_gb_per_s)

    def _ways(self) -> Iterator[Way]:
        """Yield the ways of all reductions and messages."""
        rows = zip(self.pipeline.synchronisations, self.pipeline.reduction_loads, strict=True)
        for sync, load in rows:
            yield Way(sync.devices, load.links)
        owner = self.owner
        ends = {(s, device, owner.get((s + 1, m))): m for (s, m), device in owner.items()}
        for (stage, source, target), microbatch in ends.items():
            if target is not None:
                there = Operation(stage + 1, "F", microbatch)
                back = Operation(stage, "B", microbatch)
                yield Way((source, target), self._transfer(there, source, target).links)
                yield Way((target, source), self._transfer(back, target, source).links)

    def _announce(self, key: Key, moment_s: float) -> None:
        if isinstance(key, int):
            heapq.heappush(self._reducing, (moment_s, key))
        else:
            heapq.heappush(self.heap, (moment_s, key, True))

    def _note_transfer(self, flow: Flow, consumer: Operation, now: float) -> None:
        kind: Kind = consumer.kind
        producer = Operation(consumer.stage + (-1 if kind == "F" else 1), kind, consumer.microbatch)
        source, target = self._device(producer), self._device(consumer)
        transfer = self._transfer(consumer, source, target)
        span = flow.start_s, now
        self.transfers.append(
            TransferEvent(source, target, producer, *span, transfer, flow.slowed_by)
        )

    def _reduce(self, number: int, now: float) -> None:
        self._ready_s[number] = now
        self._network.request(self._reduction(number), now)

    def _reduction(self, number: int) -> Flow:
        seconds = self.pipeline.synchronisations[number].seconds
        return self._collective(number, seconds, self.pipeline.reduction_loads[number])

    def _gathering(self, number: int) -> Flow:
        seconds = self.pipeline.synchronisations[number].gather_s
        return self._collective(number, seconds, self.pipeline.gather_loads[number])

    def _collective(self, number: int, seconds: float, load: CollectiveLoad) -> Flow:
        """Return a reduction on its way, or its all-gather."""
        sync = self.pipeline.synchronisations[number]
        return Flow(
            key=number,
            seconds=seconds,
            waits_for=[(device,) for device in sync.devices],
            latency_s=load.latency_s,
            gb_per_s=load.gb_per_s,
            links=self._shared_by(load.links),
            devices=sync.devices,
        )

    def _end_reduction(self, number: int, now: float) -> None:
        if (flow := self._network.hear(number, now)) is not None:
            sync = self.pipeline.synchronisations[number]
            self._reduced[number] = SynchronisationEvent(
                sync, flow.start_s, now, number, slowed_by=flow.slowed_by
            )

    def _transfer(self, consumer: Operation, source: str, target: str) -> Transfer:
        pipeline = self._of(consumer)
        key = (id(pipeline), consumer.kind == "F", consumer.stage, source, target)
        if key not in self._transfers:
            if consumer.kind == "F":
                found = pipeline.forward_transfer(consumer.stage - 1, source, target)
            else:
                found = pipeline.backward_transfer(consumer.stage + 1, source, target)
            self._transfers[key] = found
        return self._transfers[key]

    def _arrive(self, operation: Operation, now: float) -> Collection[str]:
        """Deliver a message and return the devices that may go on; none if it has not come."""
        flow = self._network.hear(operation, now)
        if flow is None:
            return ()
        self._note_transfer(flow, operation, now)
        self._note_sent(operation)
        if operation.kind == "F":
            self._offer(operation)
        else:
            self._offer_backward(operation.stage, operation.microbatch)
        if not self._waits:
            return (self._device(operation),)
        self._send(self.exchanges.arrive(operation), now)
        return (self._device(operation), *self.exchanges.ends.get(operation, ())[:1])

    def _note_sent(self, consumer: Operation) -> None:
        if self.pipeline.behaviour.send == "blocking":
            before = consumer.stage + (-1 if consumer.kind == "F" else 1)
            self._gradients.note_done(self.owner[before, consumer.microbatch])

    def _timeline(self) -> Timeline:
        operations, transfers = self.operations, self.transfers
        if self._load.devices:
            operations = sorted(operations, key=lambda event: event.start_s)
        transfers = sorted(transfers, key=lambda event: (event.start_s, event.operation))
        reductions = sorted(
            self._reduced.values(),
            key=lambda event: (event.start_s, self._ready_s[event.number], event.number),
        )
        end_s, steps_s = self._optimizer_steps()
        return Timeline(
            self.pipeline,
            tuple(operations),
            tuple(transfers),
            tuple(reductions),
            end_s,
            steps_s,
            self._gradients.made_s,
            gathered(self.pipeline, end_s, self._gathering),
            tuple(self.copies.events),
        )

    def _optimizer_steps(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return when the optimizer step of each device ends, and how long it takes."""
        done = dict.fromkeys(self.pipeline.devices, 0.0)
        for event in self.operations:
            done[event.device] = max(done[event.device], event.end_s)
        for transfer in self.transfers if self.pipeline.behaviour.send == "blocking" else ():
            done[transfer.source] = max(done[transfer.source], transfer.end_s)
        for reduction in self._reduced.values():
            for device in reduction.synchronisation.devices:
                done[device] = max(done[device], reduction.end_s)
        alone_s = self.pipeline.optimizer_s
        end_s = computed_together(self.pipeline.problem.cluster, done, alone_s)
        # Differences of moments are rounded: where nothing slows a step it takes just its own time.
        steps_s = {
            device: end_s[device] - done[device] if device in self._load.devices else seconds
            for device, seconds in alone_s.items()
        }
        return end_s, steps_s


def reduced_soonest(timeline: Timeline) -> Timeline:
    """Return a timeline, with reductions after the last backwards if that is faster.

    Several buckets may lose more by their latencies than they gain by the overlap.
    """
    at_once = timeline.pipeline.reduced_at_once
    if at_once is None:
        return timeline
    try:
        later = simulate(at_once, timeline.orders)
    except DeadlockError:  # Of an estimate, whose replicas need not run the same.
        return timeline
    return min(timeline, later, key=lambda row: row.iteration_time_s)
