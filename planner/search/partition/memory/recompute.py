"""The choice of layers to recompute, so that a stage fits at the least extra time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.partition.memory.knapsack import Cover, cheapest_cover
from planner.search.partition.stash import JointTensor, StageStash, StashModel

if TYPE_CHECKING:
    from planner.search.partition.chain import Chain

MOST_NODES = 2000
"""Most nodes of the search over joint tensors, times the layers; a few skips need a handful."""


Growth = Callable[[Collection[int]], int]
"""Bytes by which recomputing layers, by position, adds to the workspace."""


@dataclass(frozen=True)
class Holding:
    """A stage's share of a device's memory: its layers, its replicas, its microbatches in flight.

    Attributes:
        begin, end: positions of its layers, ``end`` exclusive.
        types: device types of its replicas, with repetition.
        in_flight: stashes held at a time.
    """

    begin: int
    end: int
    types: tuple[str, ...]
    in_flight: int = 1


@dataclass(frozen=True)
class Recomputation:
    """The layers to recompute, by position.

    Attributes:
        layers: ascending.
        stash_bytes: of all stages concerned, with their microbatches in flight.
        grown_bytes: by which their largest workspace is more than if nothing is recomputed.
        extra_s: seconds more in the backward of a microbatch, averaged over the replicas as they
            count for their common speed.
        is_least: whether no other choice that fits takes less time (to a millionth).
    """

    layers: tuple[int, ...]
    stash_bytes: int
    grown_bytes: int
    extra_s: float
    is_least: bool = True

    @property
    def held_bytes(self) -> int:
        """What has to find room."""
        return self.stash_bytes + self.grown_bytes


class RecomputeChooser:
    """Choices for stages of one chain, remembered for all rooms they are best for.

    Args:
        chain: the layers.
        counts_workspace: whether room is needed for what layers hold while they run again.
        on_any_type: stashes count at least as on any type, instead of exactly as on those given.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        counts_workspace: bool = True,
        on_any_type: bool = False,
    ) -> None:
        self._chain = chain
        self._on_any_type = on_any_type
        self._counts_workspace = counts_workspace
        self._again = {name: chain.again_s(name) for name in chain.types}
        self._total = {name: chain.backward_s(name) + chain.forward_s(name) for name in chain.types}
        self._known: dict[tuple[Holding, ...], list[tuple[int, Recomputation]]] = {}
        self._too_small: dict[tuple[Holding, ...], int] = {}
        self._undecided: set[tuple[tuple[Holding, ...], int]] = set()

    def choose(self, holdings: Sequence[Holding], room_bytes: int) -> Recomputation | None:
        """Return the choice of least extra time whose stashes fit the room; None if none was found.

        Args:
            holdings: the stages that share the room, one unless a device holds several.
            room_bytes: for all their stashes, and what recomputing adds to their workspace.
        """
        key = tuple(holdings)
        if room_bytes <= self._too_small.get(key, -1) or (key, room_bytes) in self._undecided:
            return None
        for most, known in self._known.get(key, ()):
            if known.held_bytes <= room_bytes <= most:
                return known
        return self._search(key, room_bytes)

    def again_s(self, device_type: str, layers: Sequence[int]) -> float:
        """Return seconds that running these layers' forwards again takes on a device type."""
        return float(self._again[device_type][list(layers)].sum())

    def fits_never(self, holding: Holding, room_bytes: int) -> bool:
        """Return whether it is proved that no choice brings one stash into the room."""
        one = replace(holding, in_flight=1)
        return self.choose([one], room_bytes) is None and (
            room_bytes < 0 or room_bytes <= self._too_small.get((one,), -1)
        )

    def _search(self, key: tuple[Holding, ...], room_bytes: int) -> Recomputation | None:
        search = _Search(*self._demand(key), self._growth(key))
        found = search.least(room_bytes)
        if found is not None:
            self._known.setdefault(key, []).append((room_bytes, found))
        elif search.is_complete:
            self._too_small[key] = max(room_bytes, self._too_small.get(key, -1))
        else:
            self._undecided.add((key, room_bytes))
        return found

    def _growth(self, key: tuple[Holding, ...]) -> Growth:
        """Return how much the largest workspace grows by recomputing."""
        if not self._counts_workspace:
            return lambda _: 0

        def most(layers: Collection[int]) -> int:
            return max(
                self._stashes(row).workspace_bytes(row.begin, row.end, layers) for row in key
            )

        least = most(())
        return lambda layers: most(layers) - least

    def _stashes(self, holding: Holding) -> StashModel:
        """Return what stages keep on the types of a holding, which are alike in that."""
        chain = self._chain if self._on_any_type else self._chain.on(holding.types[0])
        return chain.stashes

    def _demand(self, key: tuple[Holding, ...]) -> tuple[NDArray[np.float64], StageStash]:
        """Costs by layer, and one stash of all holdings with their microbatches in flight."""
        begin, end = min(h.begin for h in key), max(h.end for h in key)
        cost = np.zeros(end - begin)
        saving = [0] * (end - begin)
        fixed, joint = 0, []
        for holding in key:
            inside = slice(holding.begin - begin, holding.end - begin)
            cost[inside] = self._cost(holding)
            stash = self._stashes(holding).stage(holding.begin, holding.end)
            saving[inside] = [holding.in_flight * x for x in stash.saving_bytes]
            fixed += holding.in_flight * stash.fixed_bytes
            joint += [replace(t, bytes=holding.in_flight * t.bytes) for t in stash.joint]
        return cost, StageStash(begin, fixed, tuple(saving), tuple(joint))

    def _cost(self, holding: Holding) -> NDArray[np.float64]:
        """Return extra seconds of each layer.

        Replicas of r speeds together take 1 / sum(1/t) a microbatch; to first order a second more
        on one of them adds in proportion to 1/t^2.
        """
        inside = slice(holding.begin, holding.end)
        kinds = sorted(set(holding.types))
        if len(kinds) == 1:
            return self._again[kinds[0]][inside]
        times = np.array([max(float(self._total[kind][inside].sum()), 1e-15) for kind in kinds])
        weights = np.array([holding.types.count(kind) for kind in kinds]) / (times / times[0]) ** 2
        rows = np.array([self._again[kind][inside] for kind in kinds])
        return np.asarray(weights @ rows / weights.sum(), dtype=np.float64)


class _Search:
    """Best first over the joint tensors.

    Without them the least cost is a minimum knapsack. A node pays for some of them and bars some
    layers from recomputation; its knapsack ignores all others, so it is a lower bound. Where the
    knapsack's choice keeps an unpaid tensor and does not fit, one of these must hold: the tensor
    is paid, its saver is not recomputed, or none of its users is. Where that takes too many nodes
    a good choice is taken instead of the least. So it is where the least choice does not fit for
    what it holds while its layers run again: the knapsack ignores this too.
    """

    def __init__(self, cost: NDArray[np.float64], stash: StageStash, growth: Growth) -> None:
        self.cost = cost
        self.stash = stash
        self.growth = growth
        self.saving = np.array(stash.saving_bytes, dtype=np.int64)
        self.is_complete = True
        self._numbers = count()
        self._heap: list[tuple[float, int, _Node]] = []

    def least(self, room_bytes: int) -> Recomputation | None:
        """Return the cheapest choice that fits; None if none does or the search was cut off."""
        self._push(frozenset(), frozenset(), room_bytes)
        for _ in range(max(4, MOST_NODES // len(self.cost))):
            if not self._heap:
                return None
            node = heapq.heappop(self._heap)[2]
            layers = self._layers(node)
            if self._held_bytes(layers) <= room_bytes:
                return self._recomputation(layers, is_least=node.cover.is_least)
            found = self._open_tensor(node, layers)
            if found is None:
                break
            for paid, barred in _branches(found):
                self._push(node.paid | paid, node.barred | barred, room_bytes)
        self.is_complete = False
        return self._good(room_bytes)

    def _held_bytes(self, layers: frozenset[int]) -> int:
        return self.stash.bytes(layers) + self.growth(layers)

    def _good(self, room_bytes: int) -> Recomputation | None:
        """The better of two choices from which no layer can be dropped; None if neither fits."""
        every = frozenset(self.stash.begin + int(i) for i in np.flatnonzero(self.saving > 0))
        found = [
            self._recomputation(self._dropped(layers, room_bytes), is_least=False)
            for layers in (every, self._dive(room_bytes))
            if layers is not None and self._held_bytes(layers) <= room_bytes
        ]
        return min(found, key=lambda choice: choice.extra_s, default=None)

    def _dive(self, room_bytes: int) -> frozenset[int] | None:
        """Return pay for all that is kept, and for the workspace, until it fits."""
        reserve = 0
        node = self._solved(frozenset(), frozenset(), room_bytes)
        while node is not None:
            layers = self._layers(node)
            if self._held_bytes(layers) <= room_bytes:
                return layers
            kept = {tensor for tensor in self.stash.joint if tensor.is_kept(layers)}
            reserve = max(reserve, self.growth(layers))
            node = self._solved(node.paid | kept, node.barred, room_bytes - reserve)
        return None

    def _dropped(self, layers: frozenset[int], room_bytes: int) -> frozenset[int]:
        """Return the layers without the dearest that are not needed to fit."""
        for layer in sorted(layers, key=lambda x: -self.cost[x - self.stash.begin]):
            if self._held_bytes(layers - {layer}) <= room_bytes:
                layers -= {layer}
        return layers

    def _push(self, paid: frozenset[JointTensor], barred: frozenset[int], room_bytes: int) -> None:
        node = self._solved(paid, barred, room_bytes)
        if node is not None:
            heapq.heappush(self._heap, (node.cover.cost, next(self._numbers), node))

    def _solved(
        self, paid: frozenset[JointTensor], barred: frozenset[int], room_bytes: int
    ) -> _Node | None:
        need = self.stash.fixed_bytes + sum(tensor.bytes for tensor in paid) - room_bytes
        saving = self.saving.copy()
        saving[[layer - self.stash.begin for layer in barred]] = 0
        cover = cheapest_cover(self.cost, saving, need)
        return None if cover is None else _Node(paid, barred, cover)

    def _open_tensor(self, node: _Node, layers: frozenset[int]) -> JointTensor | None:
        """Return the largest tensor that is kept and not paid."""
        open_ = (t for t in self.stash.joint if t not in node.paid and t.is_kept(layers))
        return max(open_, key=lambda tensor: tensor.bytes, default=None)

    def _layers(self, node: _Node) -> frozenset[int]:
        return frozenset(self.stash.begin + item for item in node.cover.items)

    def _recomputation(self, layers: frozenset[int], *, is_least: bool) -> Recomputation:
        chosen = tuple(sorted(layers))
        extra_s = float(sum(self.cost[layer - self.stash.begin] for layer in chosen))
        return Recomputation(
            chosen, self.stash.bytes(layers), self.growth(layers), extra_s, is_least
        )


@dataclass(frozen=True)
class _Node:
    paid: frozenset[JointTensor]
    barred: frozenset[int]
    cover: Cover


def _branches(
    tensor: JointTensor,
) -> list[tuple[frozenset[JointTensor], frozenset[int]]]:
    nothing: frozenset[JointTensor] = frozenset()
    ways = [(frozenset({tensor}), frozenset[int]()), (nothing, tensor.users)]
    if tensor.saver is not None:
        ways.append((nothing, frozenset({tensor.saver})))
    return ways
