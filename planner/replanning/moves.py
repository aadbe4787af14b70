"""Which device gets what from where, from one plan to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planner.artifacts.cluster import Cluster
from planner.artifacts.moves import Move, Moves
from planner.artifacts.plan import Plan
from planner.replanning.state import BoolArray, State


def moves_between(old: Plan, new: Plan, state: State) -> Moves:
    """What the devices of a new plan lack, each part from the device that sends it soonest.

    Args:
        old: plan that training ran by.
        new: plan of the same model.
        state: what the devices that are left hold under the old one.
    """
    rows = list(_Moving(new, state).rows())
    wanted = _wanted(new, state)
    seconds = _together_s(new.cluster, rows)
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
    """The parameters that each device of a plan needs, by rank."""
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
        """By target in the order of ranks, each source once."""
        for device, needed in _wanted(self._plan, self._state).items():
            lacking = needed & ~self._state.held(device)
            parts: dict[str | None, BoolArray] = {}
            for holders, part in self._by_holders(lacking):
                source = self._source(device, holders, self._state.size(part))
                parts[source] = parts[source] | part if source in parts else part
            for source, part in parts.items():
                yield self._move(source, device, part)

    def _by_holders(self, lacking: BoolArray) -> Iterator[tuple[tuple[str, ...], BoolArray]]:
        """Parameters that the same devices hold, together."""
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
        """None where no path leads from any holder."""
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
    """All moves between devices at once: the most loaded link, or the longest single move."""
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
