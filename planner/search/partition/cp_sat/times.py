"""How long the stages compute: by device type, and shared among replicas."""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx
from ortools.sat.python import cp_model

from planner.search.partition.cp_sat.decisions import Decisions
from planner.search.partition.cp_sat.recomputation import RecomputeDecisions
from planner.search.partition.cp_sat.stages import Expression
from planner.search.partition.cp_sat.tensors import SCALE, ByteUnit, fixed_point


class TypeShare(NamedTuple):
    """What a replica of one type at a stage runs; in ticks.

    Attributes:
        runs: that there is such a replica and it runs anything.
        forward, backward: of one microbatch, on the way or with all weight gradients.
        forwards, backwards: of all its microbatches.
    """

    runs: cp_model.IntVar
    forward: Expression
    backward: Expression
    forwards: Expression
    backwards: Expression


class StageTimes:
    """Compute times in ticks.

    Attributes:
        uses_type: ``uses_type[j, k]``: some replica of stage j is of device type k.
        forward, gradient: ``forward[k][j]``: one microbatch of stage j on type k; from its gradient
            to the one it sends back, which is all of a whole backward.
        last_backward: ``last_backward[k][j]``: the last operation of stage j on type k that adds to
            its gradients takes no longer on all layers but the last; rounded up.
        least_forward, least_gradient: per stage, one microbatch on its fastest replica.
        least_weight: what remains of a backward after its gradient, on the fastest replica.
        load: per stage, forwards and gradients of its most loaded replica if the microbatches are
            split best.
        work: the same with all of the backwards; ``load`` itself if all are whole.
        shares, work_shares: per stage, what replicas of each type run, gradients or all work.
    """

    def __init__(self, decisions: Decisions, recomputation: RecomputeDecisions | None) -> None:
        self._d = decisions
        self._model = decisions.model
        chain = decisions.chain
        self._kinds = range(len(chain.types))
        self._most_ticks = [self._whole(name) for name in chain.types]
        ticks = decisions.ticks
        self.forward = [decisions.sums(ticks(chain.forward_s(t))) for t in chain.types]
        self.gradient = [decisions.sums(ticks(chain.gradient_s(t))) for t in chain.types]
        self._backward = self.gradient
        if chain.splits:
            self._backward = [decisions.sums(ticks(chain.backward_s(t))) for t in chain.types]
        if recomputation is not None:
            for k, name in enumerate(chain.types):
                again = recomputation.sums(ticks(chain.again_s(name)))
                for table in (self.gradient, self._backward) if chain.splits else (self.gradient,):
                    for j in decisions.stages:
                        table[k][j] += again[j]
        self.last_backward = self._last_backwards(recomputation)
        self.uses_type = {
            (j, k): self._uses_type(j, k) for j in decisions.stages for k in self._kinds
        }
        self._keep_rules()
        self.least_forward = [self.least(self.forward, j) for j in decisions.stages]
        self.least_gradient = [self.least(self.gradient, j) for j in decisions.stages]
        self.least_weight: list[Expression] = [0 for _ in decisions.stages]
        self.load = [decisions.time(f"load {j}") for j in decisions.stages]
        self.work = self.load
        if chain.splits:
            weight = [decisions.sums(ticks(chain.weight_s(t))) for t in chain.types]
            self.least_weight = [self.least(weight, j) for j in decisions.stages]
            self.work = [decisions.time(f"work {j}") for j in decisions.stages]
        self.shares: list[list[TypeShare]] = [[] for _ in decisions.stages]
        self.work_shares = [[] for _ in decisions.stages] if chain.splits else self.shares
        for j in decisions.stages:
            if decisions.job.replication:
                self._split_microbatches(j)
            else:
                self._load_single_device(j)
            for shares, total in ((self.shares, self.load), (self.work_shares, self.work)):
                for share in shares[j]:
                    time = share.forwards + share.backwards
                    self._model.add(total[j] >= time).only_enforce_if(share.runs)

    def _whole(self, device_type: str) -> int:
        """Return the ticks of all layers, recomputed, on a device of a type."""
        chain = self._d.chain
        forward, backward = chain.forward_s(device_type), chain.backward_s(device_type)
        gradient = chain.gradient_s(device_type)
        return sum(map(sum, map(self._d.ticks, (forward, forward, backward, gradient))))

    def _last_backwards(self, recomputation: RecomputeDecisions | None) -> list[list[Expression]]:
        """Return by type the most ticks of a last backward before the last layer, rounded up."""
        chain, up = self._d.chain, self._d.ticks_up
        ticks = [up(chain.last_backward_s(name)) for name in chain.types]
        layers = self._d.layers
        table = [[layers.before_last(row, j) for j in self._d.stages] for row in ticks]
        if recomputation is not None:
            for row, name in zip(table, chain.types, strict=True):
                again = recomputation.sums(up(chain.again_s(name)))
                for j in self._d.stages:
                    row[j] += again[j]
        return table

    def _uses_type(self, j: int, k: int) -> cp_model.IntVar:
        literal = self._model.new_bool_var(f"stage {j} uses type {k}")
        self._model.add_max_equality(literal, self._d.holders(j, k))
        return literal

    def _keep_rules(self) -> None:
        """No layer in a stage with a device of a type that it may not run on."""
        for k, name in enumerate(self._d.chain.types):
            foreign = [int(x) for x in self._d.chain.foreign_layers(name)]
            if any(foreign):
                for j, inside in enumerate(self._d.sums(foreign)):
                    self._model.add(inside == 0).only_enforce_if(self.uses_type[j, k])

    def least(self, table: list[list[Expression]], j: int) -> Expression:
        """Return the smallest of a stage's figures over the device types that it uses."""
        if len(table) == 1:
            return table[0][j]
        value = self._d.time()
        picks = [self._model.new_bool_var("") for _ in table]
        self._model.add(sum(picks) == 1).only_enforce_if(self._d.active[j])
        for k, pick in enumerate(picks):
            self._model.add_implication(pick, self.uses_type[j, k])
            self._model.add(value >= table[k][j]).only_enforce_if(pick)
        return value

    def _load_single_device(self, j: int) -> None:
        count = self._d.job.microbatches
        for k in self._kinds:
            forward = self.forward[k][j]
            for shares, backward in self._counted(k, j):
                shares.append(
                    TypeShare(
                        self.uses_type[j, k], forward, backward, count * forward, count * backward
                    )
                )

    def _counted(self, k: int, j: int) -> list[tuple[list[TypeShare], Expression]]:
        """Return the shares of the load, and of the work if backwards may be split."""
        rows = [(self.shares[j], self.gradient[k][j])]
        if self.work is not self.load:
            rows.append((self.work_shares[j], self._backward[k][j]))
        return rows

    def _split_microbatches(self, j: int) -> None:
        """Replicas of one type take at most ``most`` microbatches each; together they take all."""
        count = self._d.job.microbatches
        taken = []
        for k in self._kinds:
            members = self._d.holders(j, k)
            works = self._model.new_bool_var(f"type {k} works at {j}")
            self._model.add_implication(works, self.uses_type[j, k])
            most = self._model.new_int_var(0, count, f"most {j} {k}")
            self._model.add(most == 0).only_enforce_if(~works)
            replicas = self._model.new_int_var(0, len(members), "")
            self._model.add(replicas == sum(members))
            product = self._model.new_int_var(0, count * len(members), "")
            self._model.add_multiplication_equality(product, [replicas, most])
            taken.append(product)
            forward = self.forward[k][j]
            forwards = self._multiplied(k, forward, most)
            for shares, backward in self._counted(k, j):
                backwards = self._multiplied(k, backward, most)
                shares.append(TypeShare(works, forward, backward, forwards, backwards))
        self._model.add(sum(taken) >= count).only_enforce_if(self._d.active[j])

    def _multiplied(self, k: int, each: Expression, most: cp_model.IntVar) -> cp_model.IntVar:
        """Return the ticks of all microbatches of a replica, given those of one.

        The seconds of one are exact even where a replica is too slow for any: with bounds alone
        the product of two variables is hard, and with an exact one it is linear once the layers of
        the stage are decided.
        """
        factor = self._model.new_int_var(0, self._most_ticks[k], "")
        self._model.add(factor == each)
        every = self._d.time()
        self._model.add_multiplication_equality(every, [most, factor])
        return every


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
        returning = {(u, v): self._there[v, u] for u, v in self._there}
        self.send = self._times(forwards, self._there, "send")
        same = forwards == backwards and returning == self._there
        self.back = self.send if same else self._times(backwards, returning, "back")

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
        """Return the time of every channel, over the route of the pair of devices picked."""
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
        """Return whether something crosses every cut."""
        graph = nx.Graph()
        graph.add_nodes_from(range(self._d.chain.length))
        for tensor, size in zip(self._d.tensors, sizes, strict=True):
            if size:
                graph.add_edges_from((tensor.producer, user) for user in tensor.users)
        return bool(nx.is_connected(graph))

    def _crosses_any(self, sizes: list[int], j: int) -> cp_model.IntVar:
        """Return whether anything crosses the cut before stage j: without, there is no latency."""
        some = self._model.new_bool_var("")
        count = self._d.layers.crossing([int(size > 0) for size in sizes], j)
        self._model.add(count <= len(sizes) * some)
        return some

    def _any_device(self, j: int) -> list[cp_model.IntVar]:
        """Return one device of stage j, free to choose; without replication, the only one."""
        numbers = range(len(self._d.devices))
        if not self._d.job.replication:
            return [self._d.on[j, d] for d in numbers]
        picks = [self._model.new_bool_var("") for _ in numbers]
        for d in numbers:
            self._model.add_implication(picks[d], self._d.on[j, d])
        self._model.add(sum(picks) == 1).only_enforce_if(self._d.active[j])
        return picks

    def exclusive(self, j: int) -> list[cp_model.IntVar]:
        """Return the condition that transfers of channel j wait for each other."""
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
