"""Replay of a plan on links that pairs of devices share fairly, as their TCP connections do.

The simulator's links serve one message after the other, for which a bound can be proved. In reality
this holds only for the messages of one sender to one receiver: where messages of several pairs meet
on a link, all are delayed. This replay shows how much that matters to a plan. Rates are max-min
fair (Bertsekas and Gallager, Data Networks, 6.5.2): all rise together until a link is full, then
those over other links continue to rise.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.costs.placement import PlacedPipeline, Transfer, place_plan
from planner.plan.operations import Operation, Orders, owners
from planner.plan.plan import Plan
from planner.simulation.exchanges import Exchanges, exchanges_of
from planner.simulation.simulator import FixedOrder, Policy, Replay
from planner.simulation.timeline import Timeline

_LEFT = 1e-9
"""Fraction of a message that rounding may leave."""

Link = tuple[int, int]


def simulate_fair_links(pipeline: PlacedPipeline, orders: Orders) -> Timeline:
    """Replay given orders; all-reduces run as in :func:`planner.simulation.simulator.simulate`.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
    """
    owner = owners(orders)
    exchanges = exchanges_of(pipeline, owner, orders)
    return _FairReplay(pipeline, owner, FixedOrder(orders), exchanges).run()


def simulate_plan_fair_links(plan: Plan) -> Timeline:
    """Replay a plan as ``planner.simulate`` does, but with links that share their bandwidth fairly.

    Args:
        plan: the plan to replay.

    Raises:
        DeadlockError: if the orders wait for each other.
    """
    return simulate_fair_links(place_plan(plan), plan.parsed_orders())


def fair_rates(
    flows: Sequence[tuple[Sequence[Link], float]], capacity: Mapping[Link, float]
) -> list[float]:
    """Return the max-min fair rate of each flow.

    Args:
        flows: the links of each flow and its maximum rate, which it gets without links.
        capacity: capacity of each link, in the same unit.
    """
    rates = [0.0] * len(flows)
    room = dict(capacity)
    rising = set(range(len(flows)))
    while rising:
        users: dict[Link, int] = {}
        for index in rising:
            for link in flows[index][0]:
                users[link] = users.get(link, 0) + 1
        step = min(flows[index][1] - rates[index] for index in rising)
        step = min([step, *(room[link] / count for link, count in users.items())])
        for index in rising:
            rates[index] += step
        for link, count in users.items():
            room[link] -= step * count
        full = {link for link in users if room[link] <= _LEFT * capacity[link]}
        rising = {
            index
            for index in rising
            if rates[index] < flows[index][1] * (1 - _LEFT) and full.isdisjoint(flows[index][0])
        }
    return rates


@dataclass
class _Flow:
    """A message in transfer.

    Attributes:
        transfer: the message.
        source: sending device.
        asked_s: time of the request.
        most: GB/s of its narrowest link.
        gigabytes: remaining at the last change.
        since_s: time of the last change; at first, when the first byte can arrive.
        rate: GB/s from then on; none before the first byte arrives.
        end_s: time of its next event: its first byte, or its last at this rate; never while earlier
            messages of its pair are in transfer.
    """

    transfer: Transfer
    source: str
    asked_s: float
    most: float
    gigabytes: float
    since_s: float
    end_s: float = math.inf
    rate: float = 0.0


class _FairReplay(Replay):
    """A replay in which each message that begins or ends changes the rates of the others."""

    def __init__(
        self,
        pipeline: PlacedPipeline,
        owner: Mapping[tuple[int, int], str],
        policy: Policy,
        exchanges: Exchanges,
    ) -> None:
        super().__init__(pipeline, owner, policy, exchanges)
        self._cluster = pipeline.problem.cluster
        self._on_their_way: dict[Operation, _Flow] = {}
        self._flowing: defaultdict[Link, dict[Operation, _Flow]] = defaultdict(dict)
        self._queues: defaultdict[tuple[str, str], deque[Operation]] = defaultdict(deque)
        self._received: set[Operation] = set()

    def _request(self, transfer: Transfer, consumer: Operation, source: str, now: float) -> None:
        route = self._cluster.route(source, self._device(consumer))
        if not transfer.links or route is None:
            super()._request(transfer, consumer, source, now)
            return
        bandwidth = route.bandwidth_gb_per_s
        before_s = route.latency_s + self.pipeline.behaviour.message_s
        gigabytes = (transfer.seconds - before_s) * bandwidth
        first_s = now + before_s
        flow = _Flow(transfer, source, now, bandwidth, gigabytes, first_s)
        self._on_their_way[consumer] = flow
        queue = self._queue(flow, consumer)
        queue.append(consumer)
        if len(queue) == 1:
            self._announce(consumer, flow, first_s)

    def _arrive(self, operation: Operation, now: float) -> Collection[str]:
        flow = self._on_their_way.get(operation)
        if flow is None:
            # A message over no link, or an end that was put off or brought forward since.
            return () if operation in self._received else super()._arrive(operation, now)
        if flow.end_s != now:
            return ()
        if flow.rate == 0:
            for link in flow.transfer.links:
                self._flowing[link][operation] = flow
            self._share(flow.transfer.links, now)
            return ()
        for link in flow.transfer.links:
            del self._flowing[link][operation]
        del self._on_their_way[operation]
        self._received.add(operation)
        self._next_of_pair(self._queue(flow, operation), now)
        self._note_transfer(flow.transfer, operation, flow.source, flow.asked_s, now)
        self._share(flow.transfer.links, now)
        return super()._arrive(operation, now)

    def _queue(self, flow: _Flow, consumer: Operation) -> deque[Operation]:
        return self._queues[flow.source, self._device(consumer)]

    def _next_of_pair(self, queue: deque[Operation], now: float) -> None:
        queue.popleft()
        if queue:
            flow = self._on_their_way[queue[0]]
            self._announce(queue[0], flow, max(flow.since_s, now))

    def _announce(self, consumer: Operation, flow: _Flow, moment_s: float) -> None:
        flow.end_s = moment_s
        heapq.heappush(self.heap, (moment_s, consumer, True))

    def _share(self, changed: Iterable[Link], now: float) -> None:
        """Update the rates of all flows that a change on some links can affect."""
        flows = self._reached(changed)
        used = {link for flow in flows.values() for link in flow.transfer.links}
        capacity = {link: self._cluster.links[link[0]].bandwidth_gb_per_s for link in used}
        wishes = [(flow.transfer.links, flow.most) for flow in flows.values()]
        rates = fair_rates(wishes, capacity)
        for (consumer, flow), rate in zip(flows.items(), rates, strict=True):
            flow.gigabytes -= flow.rate * (now - flow.since_s)
            flow.since_s = now
            if rate != flow.rate:
                flow.rate = rate
                self._announce(consumer, flow, now + max(0.0, flow.gigabytes) / rate)

    def _reached(self, links: Iterable[Link]) -> dict[Operation, _Flow]:
        """Return flows over these links, flows that share a link with them, and so on."""
        found: dict[Operation, _Flow] = {}
        seen: set[Link] = set()
        left = list(links)
        while left:
            link = left.pop()
            if link in seen:
                continue
            seen.add(link)
            for consumer, flow in self._flowing[link].items():
                if consumer not in found:
                    found[consumer] = flow
                    left += flow.transfer.links
        return found
