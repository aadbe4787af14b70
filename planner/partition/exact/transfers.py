"""How long activations and gradients travel between neighbouring stages."""

from __future__ import annotations

import networkx as nx
from ortools.sat.python import cp_model

from planner.partition.exact.decisions import Decisions
from planner.partition.exact.fixed_point import SCALE, ByteUnit, fixed_point
from planner.partition.exact.layer_stages import Expression

Route = tuple[float, float]
"""Latency in seconds and bandwidth in GB/s: all that tells one route from another."""
Routes = dict[tuple[int, int], Route | None]


class StageTransfers:
    """Transfer times in ticks.

    Attributes:
        send, back: activations of stage j to the next, gradients back, over their best pair of
            devices. Pairs without a path are excluded.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._d = decisions
        self._model = decisions.model
        self._there = self._find_routes()
        forwards = [tensor.bytes for tensor in decisions.tensors]
        backwards = [tensor.gradient_bytes for tensor in decisions.tensors]
        self._unit = ByteUnit.for_total(sum(forwards))
        for j in decisions.stages[:-1]:
            self._exclude_unconnected(j)
        home = {(u, v): self._there[v, u] for u, v in self._there}
        self.send = self._times(forwards, self._there, "send")
        same = forwards == backwards and home == self._there
        self.back = self.send if same else self._times(backwards, home, "back")

    def _find_routes(self) -> Routes:
        """Routes between different devices, by their numbers; None where there is no path."""
        routes: Routes = {}
        for u, source in enumerate(self._d.devices):
            for v, target in enumerate(self._d.devices):
                if u != v:
                    found = self._d.cluster.route(source, target)
                    routes[u, v] = (found.latency_s, found.bandwidth_gb_per_s) if found else None
        return routes

    def _exclude_unconnected(self, j: int) -> None:
        for (u, v), route in self._there.items():
            if route is None:
                self._model.add_bool_or([~self._d.on[j, u], ~self._d.on[j + 1, v]])

    def _times(self, sizes: list[int], routes: Routes, name: str) -> list[cp_model.IntVar]:
        """Of every channel, over the route of the pair of devices that is picked."""
        units, joined = self._unit.floor(sizes), self._joins_all(sizes)
        times = []
        for j in self._d.stages[:-1]:
            value = self._d.time(f"{name} {j}")
            crossing = self._d.layers.crossing(units, j + 1) if any(units) else 0
            some = 1 if joined else self._crosses_any(sizes, j + 1)
            sender, receiver = self._any_device(j), self._any_device(j + 1)
            for (u, v), route in routes.items():
                if route is not None:
                    time = self._scaled(route, crossing, sum(units), some)
                    self._model.add(value * SCALE + SCALE - 1 >= time).only_enforce_if(
                        [sender[u], receiver[v]]
                    )
            times.append(value)
        return times

    def _scaled(self, route: Route, units: Expression, most: int, some: Expression) -> Expression:
        latency_s, bandwidth_gb_per_s = route
        each_s = self._unit.bytes / (bandwidth_gb_per_s * 1e9)
        per_unit = fixed_point(each_s / self._d.tick_s, most)
        return per_unit * units + fixed_point(latency_s / self._d.tick_s) * some

    def _joins_all(self, sizes: list[int]) -> bool:
        """Whether something crosses every cut."""
        graph = nx.Graph()
        graph.add_nodes_from(range(self._d.chain.length))
        for tensor, size in zip(self._d.tensors, sizes, strict=True):
            if size:
                graph.add_edges_from((tensor.producer, user) for user in tensor.users)
        return bool(nx.is_connected(graph))

    def _crosses_any(self, sizes: list[int], j: int) -> cp_model.IntVar:
        """Whether anything crosses the cut before stage j: without, there is no latency."""
        some = self._model.new_bool_var("")
        count = self._d.layers.crossing([int(size > 0) for size in sizes], j)
        self._model.add(count <= len(sizes) * some)
        return some

    def _any_device(self, j: int) -> list[cp_model.IntVar]:
        """One device of stage j, free to choose; without replication, the only one."""
        numbers = range(len(self._d.devices))
        if not self._d.job.replication:
            return [self._d.on[j, d] for d in numbers]
        picks = [self._model.new_bool_var("") for _ in numbers]
        for d in numbers:
            self._model.add_implication(picks[d], self._d.on[j, d])
        self._model.add(sum(picks) == 1).only_enforce_if(self._d.active[j])
        return picks

    def exclusive(self, j: int) -> list[cp_model.IntVar]:
        """Condition that transfers of channel j wait for each other: no shared links only."""
        if not any(self._is_shared(*pair) for pair in self._there):
            return []
        literal = self._model.new_bool_var(f"exclusive channel {j}")
        for (u, v), route in self._there.items():
            if route is not None and not self._is_shared(u, v):
                self._model.add_bool_or([literal, ~self._d.on[j, u], ~self._d.on[j + 1, v]])
        return [literal]

    def _is_shared(self, u: int, v: int) -> bool:
        route = self._d.cluster.route(self._d.devices[u], self._d.devices[v])
        return route is not None and not route.links
