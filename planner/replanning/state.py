"""The training state on each device: parameters and their optimizer state, by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.moves import Move, Moves
from planner.plan.plan import Plan
from planner.search.partition.chain import Chain, IntArray, Partition

BoolArray = NDArray[np.bool_]
MOST_BYTES = 2**62
"""The most bytes of all state: each sum over it fits 64 bits."""


class State:
    """Parameters with their optimizer state, and which devices hold which of them.

    A parameter's state is its weights and, if it is trained, the optimizer's moments with the
    float32 master of a low-precision weight; gradients are made in each iteration.

    Args:
        plan: that training ran by; if it has tensor-parallel groups, with these as devices.
        survivors: its devices that are still there.

    Attributes:
        names: FQNs of the parameters.
        bytes: of each parameter's state.
        holders: by surviving device in use, which parameters it holds.
    """

    def __init__(self, plan: Plan, survivors: Collection[str]) -> None:
        graph = LayerGraph.from_record(plan.model.graph)
        per_element = plan.job.optimizer_bytes_per_element
        rows = list(graph.parameters.values())
        self._graph = graph
        self.names = tuple(parameter.name for parameter in rows)
        self._place = {name: place for place, name in enumerate(self.names)}
        sizes = [p.bytes + (per_element * p.elements if p.trainable else 0) for p in rows]
        if sum(sizes) >= MOST_BYTES:
            raise PipeplanError(
                f"model.graph.parameters: their state is {sum(sizes)} bytes, and more than "
                f"{MOST_BYTES} cannot be; correct their bytes and elements"
            )
        self.bytes: IntArray = np.array(sizes, dtype=np.int64)
        self.holders: dict[str, BoolArray] = {}
        for stage in plan.stages:
            held = self.of_layers(stage.layers)
            for device in set(stage.devices).intersection(survivors):
                self.holders[device] = self.held(device) | held

    def of_layers(self, layers: Iterable[str]) -> BoolArray:
        """Return which parameters some layers use."""
        used = np.zeros(len(self.names), dtype=bool)
        used[[self._place[p.name] for p in self._graph.parameters_of(list(layers))]] = True
        return used

    def held(self, device: str) -> BoolArray:
        """Return which parameters a device holds: none if it is new."""
        found = self.holders.get(device)
        return np.zeros(len(self.names), dtype=bool) if found is None else found

    def size(self, parameters: BoolArray) -> int:
        """Return the bytes of the state of some parameters."""
        return int(self.bytes[parameters].sum())

    def missing_bytes(self, contents: Sequence[BoolArray], devices: Sequence[str]) -> IntArray:
        """Return what each content lacks on each device: a row a content, a column a device."""
        if not contents or not devices:
            return np.zeros((len(contents), len(devices)), dtype=np.int64)
        wanted = np.array(contents) * self.bytes
        lacking = ~np.array([self.held(device) for device in devices])
        return np.asarray(wanted @ lacking.T.astype(np.int64))

    def lacking_bytes(self, wanted: Mapping[str, BoolArray]) -> int:
        """Return the bytes that devices do not hold yet of what each needs."""
        return sum(self.size(needed & ~self.held(device)) for device, needed in wanted.items())

    def wanted(self, chain: Chain, partition: Partition) -> dict[str, BoolArray]:
        """Return which parameters each device of a partition needs."""
        found: dict[str, BoolArray] = {}
        for stage in partition:
            needed = self.of_layers(chain.names[stage.begin : stage.end])
            for device in stage.devices:
                found[device] = found[device] | needed if device in found else needed
        return found

    def moved_bytes(self, chain: Chain, partition: Partition) -> int:
        """Return the bytes that the devices of a partition do not hold yet."""
        return self.lacking_bytes(self.wanted(chain, partition))


def moves_between(old: Plan, new: Plan, state: State) -> Moves:
    """Return what the devices of a new plan lack, each part from its soonest sender.

    Tensor-parallel groups send to groups: each device its own share to that of the same place.

    Args:
        old: plan that training ran by.
        new: plan of the same model.
        state: what the devices that are left hold under the old one.
    """
    placed = new.on_groups
    rows = list(_Moving(placed, state).rows())
    wanted = _wanted(placed, state)
    seconds = _together_s(placed.cluster, rows)
    from_devices = sum(row.bytes for row in rows if row.source is not None)
    return Moves(
        old_plan=old.execution_digest,
        new_plan=new.execution_digest,
        moves=tuple(rows),
        bytes_between_devices=from_devices,
        bytes_from_checkpoint=sum(row.bytes for row in rows) - from_devices,
        seconds=seconds,
        resume_bytes=sum(map(state.size, wanted.values())),
    )


def _wanted(plan: Plan, state: State) -> dict[str, BoolArray]:
    """Return the parameters that each device of a plan needs, by rank."""
    found = {device: np.zeros(len(state.names), dtype=bool) for device in plan.ranks}
    for stage in plan.stages:
        needed = state.of_layers(stage.layers)
        for device in stage.devices:
            found[device] = found[device] | needed
    return found


class _Moving:
    """Chooses sources: the quickest path, then the device that has sent least."""

    def __init__(self, plan: Plan, state: State) -> None:
        self._plan = plan
        self._state = state
        self._sent: Counter[str] = Counter()
        self._layers = {device: _layers_on(plan, device) for device in plan.ranks}
        self._users = {layer.name: set(layer.parameters) for layer in plan.model.graph.layers}

    def rows(self) -> Iterator[Move]:
        """Return the moves by target in the order of ranks, each source once."""
        for device, needed in _wanted(self._plan, self._state).items():
            lacking = needed & ~self._state.held(device)
            parts: dict[str | None, BoolArray] = {}
            for holders, part in self._by_holders(lacking):
                source = self._source(device, holders, self._state.size(part))
                parts[source] = parts[source] | part if source in parts else part
            for source, part in parts.items():
                yield self._move(source, device, part)

    def _by_holders(self, lacking: BoolArray) -> Iterator[tuple[tuple[str, ...], BoolArray]]:
        """Group parameters by the devices that hold them."""
        devices = list(self._state.holders)
        table = np.array([self._state.held(device) for device in devices]).reshape(
            len(devices), len(lacking)
        )
        groups: dict[tuple[str, ...], list[int]] = {}
        for place in np.flatnonzero(lacking).tolist():
            holders = tuple(d for d, has in zip(devices, table[:, place], strict=True) if has)
            groups.setdefault(holders, []).append(place)
        for holders, places in groups.items():
            part = np.zeros_like(lacking)
            part[places] = True
            yield holders, part

    def _source(self, device: str, holders: Sequence[str], bytes_: int) -> str | None:
        """Return the soonest sender; None where no path leads from any holder."""
        number = self._plan.cluster.numbers
        found = []
        for holder in holders:
            route = self._plan.cluster.route(holder, device)
            if route is not None:
                seconds = route.seconds(bytes_)
                found.append((seconds, self._sent[holder], number[holder], holder))
        if not found:
            return None
        source = min(found)[-1]
        self._sent[source] += bytes_
        return source

    def _move(self, source: str | None, device: str, part: BoolArray) -> Move:
        names = [self._state.names[place] for place in np.flatnonzero(part).tolist()]
        moved, bytes_ = set(names), self._state.size(part)
        route = None if source is None else self._plan.cluster.route(source, device)
        return Move(
            source=source,
            target=device,
            bytes=bytes_,
            layers=tuple(n for n in self._layers[device] if not moved.isdisjoint(self._users[n])),
            parameters=tuple(names),
            seconds=None if route is None else route.seconds(bytes_),
        )


def _layers_on(plan: Plan, device: str) -> list[str]:
    return [name for stage in plan.stages if device in stage.devices for name in stage.layers]


def _together_s(cluster: Cluster, moves: Sequence[Move]) -> float:
    """Estimate all moves at once: the most loaded link, or the longest single move."""
    loads: Counter[tuple[int, int]] = Counter()
    longest_s = 0.0
    for move in moves:
        route = None if move.source is None else cluster.route(move.source, move.target)
        if route is not None:
            longest_s = max(longest_s, route.seconds(move.bytes))
            for link in route.links:
                loads[link] += move.bytes
    return max([longest_s, *_link_seconds(cluster, loads)])


def _link_seconds(cluster: Cluster, loads: Mapping[tuple[int, int], int]) -> Iterator[float]:
    for (index, _), bytes_ in loads.items():
        yield bytes_ / (cluster.links[index].bandwidth_gb_per_s * 1e9)
