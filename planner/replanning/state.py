"""The training state on each device: parameters and their optimizer state, by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.moves import Move, Moves
from planner.plan.plan import Plan
from planner.search.walk.starts import Start

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
MOST_BYTES = 2**62
"""The most bytes of all state: each sum over it fits 64 bits."""


class State:
    """Parameters with their optimizer state, and which devices hold which of them.

    A parameter's state is its weights and, if it is trained, the optimizer's moments with the
    float32 master of a low-precision weight; gradients are made in each iteration. N layers, P
    parameters, D devices.

    Args:
        plan: that training ran by; if it has tensor-parallel groups, with these as devices.
        survivors: its devices that are left.
        devices: all devices there are now; None: those of the plan.

    Attributes:
        names: FQNs of the parameters.
        bytes: P; of each parameter's state.
        devices: names of the devices.
        held: D x P; which parameters each device holds.
        used: N + 1 x P; how many of the first n layers use each parameter.
    """

    def __init__(
        self, plan: Plan, survivors: Collection[str], devices: Sequence[str] | None = None
    ) -> None:
        graph = LayerGraph.from_record(plan.model.graph)
        rows = list(graph.parameters.values())
        self.names = tuple(parameter.name for parameter in rows)
        self.bytes = _state_bytes(graph, plan.job.optimizer_bytes_per_element)
        place = {name: number for number, name in enumerate(self.names)}
        uses = np.zeros((len(graph.layers) + 1, len(rows)), dtype=np.int64)
        self._layer_of = {name: number for number, name in enumerate(graph.layers)}
        for name, number in self._layer_of.items():
            uses[number + 1, [place[p.name] for p in graph.parameters_of([name])]] = 1
        self.used: IntArray = uses.cumsum(axis=0)
        self.devices = plan.cluster.device_names if devices is None else tuple(devices)
        self.held: BoolArray = np.zeros((len(self.devices), len(rows)), dtype=bool)
        number_of = {name: number for number, name in enumerate(self.devices)}
        for stage in plan.stages:
            for device in set(stage.devices).intersection(survivors).intersection(self.devices):
                self.held[number_of[device]] |= self.of_layers(stage.layers)

    def of_layers(self, layers: Iterable[str]) -> BoolArray:
        """Return which parameters some layers use."""
        numbers = [self._layer_of[name] for name in layers]
        return np.asarray(np.diff(self.used, axis=0)[numbers].any(axis=0))

    def size(self, parameters: BoolArray) -> int:
        """Return the bytes of the state of some parameters."""
        return int(self.bytes[parameters].sum())

    def needed(self, start: Start) -> BoolArray:
        """Return which parameters each device needs for stages: D x P."""
        found = np.zeros_like(self.held)
        begin = 0
        for end, devices in zip(start.ends, start.devices, strict=True):
            found[list(devices)] |= self.used[end] > self.used[begin]
            begin = end
        return found

    def lacking_bytes(self, needed: BoolArray) -> int:
        """Return the bytes that devices do not hold yet of what each needs: D x P."""
        return int(((needed & ~self.held) @ self.bytes).sum())


def _state_bytes(graph: LayerGraph, per_element: float) -> IntArray:
    rows = graph.parameters.values()
    sizes = [int(p.bytes + (per_element * p.elements if p.trainable else 0)) for p in rows]
    if sum(sizes) >= MOST_BYTES:
        raise PipeplanError(
            f"model.graph.parameters: their state is {sum(sizes)} bytes, and more than "
            f"{MOST_BYTES} cannot be; correct their bytes and elements"
        )
    return np.array(sizes, dtype=np.int64)


def moves_between(old: Plan, new: Plan, state: State) -> Moves:
    """Return what the devices of a new plan lack, each part from its soonest sender.

    Tensor-parallel groups send to groups: each device its own share to that of the same place.

    Args:
        old: plan that training ran by.
        new: plan of the same model.
        state: what the devices that are left hold under the old one.
    """
    placed = new.on_groups
    moving = _Moving(placed, state)
    rows = list(moving.rows())
    from_devices = sum(row.bytes for row in rows if row.source is not None)
    return Moves(
        old_plan=old.execution_digest,
        new_plan=new.execution_digest,
        moves=tuple(rows),
        bytes_between_devices=from_devices,
        bytes_from_checkpoint=sum(row.bytes for row in rows) - from_devices,
        seconds=_together_s(placed.cluster, rows),
        resume_bytes=sum(map(state.size, moving.wanted.values())),
    )


class _Moving:
    """Chooses sources: the quickest path, then the device that has sent least.

    Attributes:
        wanted: the parameters that each device needs, by rank.
    """

    def __init__(self, plan: Plan, state: State) -> None:
        self._cluster, self._state = plan.cluster, state
        self._sent: Counter[str] = Counter()
        self._users = {layer.name: set(layer.parameters) for layer in plan.model.graph.layers}
        self._layers: dict[str, list[str]] = {device: [] for device in plan.ranks}
        for stage in plan.stages:
            for device in stage.devices:
                self._layers[device] += stage.layers
        self.wanted = {name: state.of_layers(rows) for name, rows in self._layers.items()}

    def rows(self) -> Iterator[Move]:
        """Return the moves by target in the order of ranks, each source once."""
        held = dict(zip(self._state.devices, self._state.held, strict=True))
        for device, needed in self.wanted.items():
            lacking = needed & ~held[device]
            parts: dict[str | None, BoolArray] = {}
            for holders, part in self._by_holders(lacking):
                source = self._source(device, holders, self._state.size(part))
                parts[source] = parts[source] | part if source in parts else part
            for source, part in parts.items():
                yield self._move(source, device, part)

    def _by_holders(self, lacking: BoolArray) -> Iterator[tuple[tuple[str, ...], BoolArray]]:
        """Group parameters by the devices that hold them."""
        groups: dict[tuple[int, ...], BoolArray] = {}
        for place in np.flatnonzero(lacking).tolist():
            holders = tuple(np.flatnonzero(self._state.held[:, place]).tolist())
            groups.setdefault(holders, np.zeros_like(lacking))[place] = True
        for holders, part in groups.items():
            yield tuple(self._state.devices[number] for number in holders), part

    def _source(self, device: str, holders: Sequence[str], bytes_: int) -> str | None:
        """Return the soonest sender; None where no path leads from any holder."""
        number = self._cluster.numbers
        found = []
        for holder in holders:
            route = self._cluster.route(holder, device)
            if route is not None:
                found.append((route.seconds(bytes_), self._sent[holder], number[holder], holder))
        if not found:
            return None
        source = min(found)[-1]
        self._sent[source] += bytes_
        return source

    def _move(self, source: str | None, device: str, part: BoolArray) -> Move:
        names = [self._state.names[place] for place in np.flatnonzero(part).tolist()]
        moved, bytes_ = set(names), self._state.size(part)
        route = None if source is None else self._cluster.route(source, device)
        return Move(
            source=source,
            target=device,
            bytes=bytes_,
            layers=tuple(n for n in self._layers[device] if not moved.isdisjoint(self._users[n])),
            parameters=tuple(names),
            seconds=None if route is None else route.seconds(bytes_),
        )


def _together_s(cluster: Cluster, moves: Sequence[Move]) -> float:
    """Estimate all moves at once: the most loaded link, or the longest single move."""
    loads: Counter[tuple[int, int]] = Counter()
    for move in moves:
        route = None if move.source is None else cluster.route(move.source, move.target)
        loads.update(dict.fromkeys(() if route is None else route.links, move.bytes))
    gb_per_s = {link: cluster.links[link[0]].bandwidth_gb_per_s for link in loads}
    alone_s = (move.seconds or 0.0 for move in moves)
    return max([0.0, *alone_s, *(bytes_ / (gb_per_s[x] * 1e9) for x, bytes_ in loads.items())])
