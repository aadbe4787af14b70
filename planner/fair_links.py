"""A plan replayed on links that pairs of devices share fairly, as their TCP connections do.

The simulator's links serve one message after the other, which is what a bound can be proved for.
In reality that holds for the messages of one sender to one receiver only: where those of several
pairs meet on a link, all are late. This replay tells how much that matters to a plan. Rates are
max-min fair (Bertsekas and Gallager, Data Networks, 6.5.2): all rise together until a link is
full, then those over other links rise on.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan
from planner.costs.placement import PlacedPipeline, Transfer, place_plan
from planner.simulator import FixedOrder, Orders, Policy, Replay, Timeline, owners

_LEFT = 1e-9
"""Share of a message that rounding may leave."""

Link = tuple[int, int]


def simulate_fair_links(pipeline: PlacedPipeline, orders: Orders) -> Timeline:
    """Replay given orders; all-reduces run as in :func:`planner.simulator.simulate`.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
    """
    return _FairReplay(pipeline, owners(orders), FixedOrder(orders)).run()


def simulate_plan_fair_links(plan: Plan) -> Timeline:
    """Replay a plan as ``planner.simulate`` does, but links share their bandwidth fairly.

    Args:
        plan: whose stages, orders and costs.

    Raises:
        DeadlockError: if the orders wait for each other.
    """
    return simulate_fair_links(place_plan(plan), plan.parsed_orders())


def fair_rates(
    flows: Sequence[tuple[Sequence[Link], float]], capacity: Mapping[Link, float]
) -> list[float]:
    """The max-min fair rate of each flow.

    Args:
        flows: the links of each and the most it can use; without links it gets that.
        capacity: of each link, in the same unit.
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
    """A message on its way.

    Attributes:
        transfer: the message.
        source: who sends it.
        asked_s: since when it is on its way.
        most: GB/s of its narrowest link.
        gigabytes: still to go at the last change.
        since_s: when that was; at first, when the first byte can arrive.
        rate: GB/s, from then on; none before the first byte arrives.
        end_s: when the next thing happens to it: its first byte, or its last at this rate; never
            while others of its pair go before.
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
    """Each message that begins or ends changes the rates of the others."""

    def __init__(
        self, pipeline: PlacedPipeline, owner: Mapping[tuple[int, int], str], policy: Policy
    ) -> None:
        super().__init__(pipeline, owner, policy)
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
        gigabytes = (transfer.seconds - route.latency_s) * bandwidth
        first_s = now + route.latency_s
        flow = _Flow(transfer, source, now, bandwidth, gigabytes, first_s)
        self._on_their_way[consumer] = flow
        queue = self._queue(flow, consumer)
        queue.append(consumer)
        if len(queue) == 1:
            self._announce(consumer, flow, first_s)

    def _arrive(self, operation: Operation, now: float) -> str | None:
        flow = self._on_their_way.get(operation)
        if flow is None:
            # A message over no link, or an end that was put off or brought forward since.
            return None if operation in self._received else super()._arrive(operation, now)
        if flow.end_s != now:
            return None
        if flow.rate == 0:
            for link in flow.transfer.links:
                self._flowing[link][operation] = flow
            self._share(flow.transfer.links, now)
            return None
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
        """Give everyone whom a change on some links can reach the rate of now."""
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
        """Flows over these links, those that share a link with them, and so on."""
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
