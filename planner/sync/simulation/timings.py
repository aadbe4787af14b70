"""When workers in step may go on: all-reduce in its forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from planner.artifacts.link_table import FloatArray
from planner.sync.simulation.rounds import Round, Rounded
from planner.sync.simulation.world import Place, Reduction, World

MOST_BUCKETS = 256
"""Of a place; larger models are divided into so many equal ones."""


def bucket_count(place: Place, bucket_mib: float) -> int:
    """Collectives for a place's gradients: at least one."""
    wanted = math.ceil(place.parameter_bytes / (bucket_mib * 2**20))
    return min(max(wanted, 1), MOST_BUCKETS)


class Network:
    """What collectives of everybody wait for: their place's last one, and the card.

    All workers take part in each, so that their cards are busy at the same times.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._place_free_s = [0.0] * len(world.places)
        self._card_free_s = [0.0] * world.cards

    def run(self, ready_s: float, key: int, reduction: Reduction) -> float:
        """When a collective ends that is asked for at ``ready_s``; ask in order of time."""
        card = self._world.places[key].network_card
        begin_s = max(ready_s, self._place_free_s[key])
        if reduction.card_s:
            begin_s = max(begin_s, self._card_free_s[card])
            self._card_free_s[card] = begin_s + reduction.card_s
        self._place_free_s[key] = begin_s + reduction.seconds
        return self._place_free_s[key]


Collective = Callable[[tuple[int, ...], float], Reduction]


class _Buckets:
    """Gradients of every place in equal buckets, the last layers' first."""

    def __init__(self, world: World, bucket_mib: float, *, overlap: bool) -> None:
        self.world = world
        self.network = Network(world)
        self.counts = [bucket_count(place, bucket_mib) for place in world.places]
        self._ready_s = [
            _bucket_ready_s(place, count, overlap=overlap)
            for place, count in zip(world.places, self.counts, strict=True)
        ]

    def bytes(self, key: int) -> float:
        """Of a bucket of a place."""
        return self.world.places[key].parameter_bytes / self.counts[key]

    def reduce(self, round_: Round, collective: Collective) -> tuple[list[list[float]], float]:
        """Ends of all buckets' collectives by place, and bytes sent."""
        asked = sorted(self._asked(round_))
        costs = [collective(round_.workers, self.bytes(key)) for key in range(len(self.counts))]
        ends_s: list[list[float]] = [[] for _ in self.counts]
        for ready_s, key, _ in asked:
            ends_s[key].append(self.network.run(ready_s, key, costs[key]))
        sent = (cost.sent_bytes * count for cost, count in zip(costs, self.counts, strict=True))
        return ends_s, sum(sent)

    def _asked(self, round_: Round) -> Iterator[tuple[float, int, int]]:
        """A bucket is asked for when the last worker has its gradients."""
        for key, offsets_s in enumerate(self._ready_s):
            times_s = round_.start_s[:, None] + round_.stretch[:, None] * offsets_s
            for index, ready_s in enumerate(times_s.max(axis=0).tolist()):
                yield ready_s, key, index


def _bucket_ready_s(place: Place, count: int, *, overlap: bool) -> FloatArray:
    """Seconds from the iteration's start until each bucket has its gradients."""
    if not overlap:
        return np.full(count, place.last_backward_s)
    left = 1 - np.arange(1, count + 1) / count
    return place.last_backward_s - place.backward_s * left


def next_starts_s(round_: Round, places: Iterable[Place], free_s: FloatArray) -> FloatArray:
    """As soon as every place is free when its turn comes.

    Args:
        round_: whose workers they are.
        places: of a pipeline.
        free_s: by worker and place.
    """
    needed_s = np.array([place.first_forward_s for place in places])
    starts: FloatArray = (free_s - needed_s * round_.next_stretch[:, None]).max(axis=1)
    return starts


def own_ends_s(round_: Round, places: Iterable[Place]) -> FloatArray:
    """When each place's last backward ends, by worker and place."""
    ends_s = np.array([place.last_backward_s for place in places])
    found: FloatArray = round_.start_s[:, None] + ends_s * round_.stretch[:, None]
    return found


class AllReduceTiming:
    """Buckets are reduced behind the backward (or after it), then comes the optimizer step."""

    def __init__(self, world: World, bucket_mib: float, *, overlap: bool = True) -> None:
        self._world = world
        self._buckets = _Buckets(world, bucket_mib, overlap=overlap)

    def run(self, round_: Round) -> Rounded:
        """Nobody goes on before the last bucket."""
        ends_s, sent_bytes = self._buckets.reduce(round_, self._world.all_reduce)
        reduced_s = np.array([max(row) for row in ends_s])
        steps_s = np.array([place.optimizer_s for place in self._world.places])
        free_s = reduced_s + steps_s * round_.stretch[:, None]
        starts_s = next_starts_s(round_, self._world.places, free_s)
        every = np.broadcast_to(reduced_s, free_s.shape)
        return Rounded(starts_s, every, float(free_s.max()), sent_bytes)


class DecoupledTiming:
    """DeAR (Zhang et al. 2023): reduce-scatter behind the backward, all-gather behind the forward.

    The all-gathers run in the order of the layers; a layer's optimizer step comes right before its
    first forward.
    """

    def __init__(self, world: World, bucket_mib: float) -> None:
        self._world = world
        self._buckets = _Buckets(world, bucket_mib, overlap=True)

    def run(self, round_: Round) -> Rounded:
        """The next iteration begins when no layer's parameters will come too late."""
        world, buckets = self._world, self._buckets
        scattered_s, sent_bytes = buckets.reduce(round_, world.half)
        starts_s = next_starts_s(round_, world.places, own_ends_s(round_, world.places))
        gathered_s = np.zeros(len(world.places))
        for key, place in enumerate(world.places):
            cost = world.half(round_.workers, buckets.bytes(key))
            sent_bytes += cost.sent_bytes * buckets.counts[key]
            for index in range(buckets.counts[key]):
                end_s = buckets.network.run(scattered_s[key][-1], key, cost)
                before_s = _until_layer_s(place, index, buckets.counts[key])
                starts_s = np.maximum(starts_s, end_s - before_s * round_.next_stretch)
                gathered_s[key] = end_s
        every = np.broadcast_to(gathered_s, (len(round_.workers), len(world.places)))
        return Rounded(starts_s, every, float(gathered_s.max()), sent_bytes)


def _until_layer_s(place: Place, index: int, count: int) -> float:
    """From the iteration's start until the optimizer step of the ``index``-th layers' bucket."""
    before = index / count
    steps_s = place.optimizer_s * (index + 1) / count
    return place.first_forward_s + before * place.forward_s - steps_s


class CrossIterationTiming:
    """The all-reduce of an iteration runs behind the next one, which does not wait for it."""

    def __init__(self, world: World, fusion_mib: float) -> None:
        self._world = world
        self._buckets = _Buckets(world, fusion_mib, overlap=True)
        self._last_s: FloatArray = np.zeros(len(world.places))

    def run(self, round_: Round) -> Rounded:
        """The iteration after the next needs this one's mean."""
        ends_s, sent_bytes = self._buckets.reduce(round_, self._world.all_reduce)
        steps_s = np.array([place.optimizer_s for place in self._world.places])
        own_s = own_ends_s(round_, self._world.places) + steps_s * round_.stretch[:, None]
        starts_s = next_starts_s(round_, self._world.places, np.maximum(own_s, self._last_s))
        updated_s = float(own_s.max())
        self._last_s = np.array([max(row) for row in ends_s])
        every = np.broadcast_to(self._last_s, own_s.shape)
        return Rounded(starts_s, every, updated_s, sent_bytes)


class SynchronousServerTiming:
    """Gradients queue at the servers; after the last one, parameters queue on their way out.

    Servers share the parameters evenly, and are as one that is so many times as wide. Only the
    servers' cards are queues; a worker's takes its own messages' time.
    """

    def __init__(self, world: World, servers: int) -> None:
        self._world, self._servers = world, servers
        self._bytes = np.array([place.parameter_bytes for place in world.places], dtype=float)

    def run(self, round_: Round) -> Rounded:
        """Who has its parameters back goes on."""
        world, count = self._world, len(round_.workers)
        link = world.link((0, world.workers - 1))
        moving_s = np.tile(self._bytes / (link.bandwidth_gb_per_s * 1e9), (count, 1))
        fixed_s = link.latency_s + world.collective_overhead_s
        asked_s = own_ends_s(round_, world.places)
        come_s = np.maximum(_queue_s(asked_s, moving_s / self._servers), asked_s + moving_s)
        steps_s = np.array([place.optimizer_s for place in world.places])
        moved_s = np.broadcast_to(come_s.max(axis=0) + fixed_s + steps_s, asked_s.shape)
        # Who came first is served first.
        order_s = moved_s + 1e-12 * come_s.argsort(axis=0).argsort(axis=0)
        back_s = np.maximum(_queue_s(order_s, moving_s / self._servers), moved_s + moving_s)
        back_s = back_s + fixed_s
        starts_s = next_starts_s(round_, world.places, back_s)
        sent_bytes = 2 * count * float(self._bytes.sum())
        return Rounded(starts_s, back_s, float(moved_s.max()), sent_bytes)


def _queue_s(asked_s: FloatArray, service_s: FloatArray) -> FloatArray:
    """When each request has been served, one after the other in the order of asking."""
    order = np.argsort(asked_s, axis=None, kind="stable")
    asked, service = asked_s.ravel()[order], service_s.ravel()[order]
    served = np.cumsum(service)
    # The queue empties and fills: the last moment at which it was empty decides.
    ends = served + np.maximum.accumulate(asked - served + service)
    found = np.empty_like(ends)
    found[order] = ends
    return found.reshape(asked_s.shape)
