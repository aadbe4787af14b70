"""How long activations and gradients travel between neighbouring stages."""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from planner.partition.chain import IntArray
from planner.partition.exact.decisions import Decisions

Route = tuple[float, float]
"""Latency in seconds and bandwidth in GB/s: all that tells one route from another."""


class StageTransfers:
    """Transfer times in ticks.

    Attributes:
        send, back: activations of stage j to the next, gradients back, over their best pair of
            devices. Pairs without a path are excluded.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._d = decisions
        self._model = decisions.model
        channels = range(len(decisions.stages) - 1)
        self.routes = self._find_routes()
        self.send = [decisions.time(f"send {j}") for j in channels]
        self.back = [decisions.time(f"back {j}") for j in channels]
        chain = decisions.chain
        same = chain.cut_bytes.tolist() == chain.cut_gradient_bytes.tolist()
        for j in channels:
            self._exclude_unconnected(j)
            self._over_best_pair(j, self.send[j], chain.cut_bytes)
            if same:
                self._model.add(self.back[j] == self.send[j])
            else:
                self._over_best_pair(j, self.back[j], chain.cut_gradient_bytes)

    def _find_routes(self) -> dict[tuple[int, int], Route | None]:
        """Routes between different devices, by their numbers; None where there is no path."""
        routes: dict[tuple[int, int], Route | None] = {}
        for u, source in enumerate(self._d.devices):
            for v, target in enumerate(self._d.devices):
                if u != v:
                    found = self._d.cluster.route(source, target)
                    routes[u, v] = (found.latency_s, found.bandwidth_gb_per_s) if found else None
        return routes

    def _exclude_unconnected(self, j: int) -> None:
        for (u, v), route in self.routes.items():
            if route is None:
                self._model.add_bool_or([~self._d.on[j, u], ~self._d.on[j + 1, v]])

    def _over_best_pair(self, j: int, value: cp_model.IntVar, bytes_: IntArray) -> None:
        distinct = {route for route in self.routes.values() if route is not None}
        ticks = {route: self._d.at(self._table(bytes_, route), j + 1) for route in sorted(distinct)}
        sender, receiver = self._any_device(j), self._any_device(j + 1)
        for (u, v), route in self.routes.items():
            if route is not None:
                pair = [sender[u], receiver[v]]
                self._model.add(value >= ticks[route]).only_enforce_if(pair)

    def _table(self, bytes_: IntArray, route: Route) -> list[int]:
        latency_s, bandwidth_gb_per_s = route
        seconds = latency_s + bytes_.astype(float) / (bandwidth_gb_per_s * 1e9)
        return self._d.ticks(np.where(bytes_ == 0, 0.0, seconds))

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
        if not any(self._is_shared(*pair) for pair in self.routes):
            return []
        literal = self._model.new_bool_var(f"exclusive channel {j}")
        for (u, v), route in self.routes.items():
            if route is not None and not self._is_shared(u, v):
                self._model.add_bool_or([literal, ~self._d.on[j, u], ~self._d.on[j + 1, v]])
        return [literal]

    def _is_shared(self, u: int, v: int) -> bool:
        route = self._d.cluster.route(self._d.devices[u], self._d.devices[v])
        return route is not None and not route.links
