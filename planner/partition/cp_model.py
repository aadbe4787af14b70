"""Stage boundaries, device sets and replica counts as one CP-SAT model over the chain of layers.

The "position" form: boundaries are integers, sums over layers are looked up by position. The
objective is planner.partition.bounds.schedule_bound_s, which holds for every schedule, so the
model's own bound holds for every plan with at most one stage a device. All durations are rounded
down and all relaxations lean the same way.

The model and its variables are public: add constraints to ``PartitionModel.model`` before solving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from planner.costs.collectives import inverse_bandwidth
from planner.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice
from planner.partition.relaxation import even_load_prices
from planner.partition.symmetry import interchangeable_devices

TICKS = 20_000_000
"""Ticks in the longest time the model has to tell apart."""
KIB = 1024
SCALE = 2**20
"""Fixed-point denominator of seconds a byte."""
REPLICA_STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Replica counts at which the all-reduce bound is sharpened; in between it is weaker but valid."""


@dataclass(frozen=True)
class _Fastest:
    """Lookup tables of one kind of route: ticks of a transfer at each position."""

    forward: list[int]
    backward: list[int]


class PartitionModel:
    """The partition model.

    Args:
        chain: the layers.
        horizon_s: time of a known plan; nothing slower is looked for.
        max_stages: the largest number of stages.

    Attributes:
        model: the CP-SAT model.
        boundary: ``boundary[j]`` is the first layer of stage j; ``boundary[max_stages]`` the end.
        active: whether stage j exists; existing stages come first.
        on: ``on[j, d]``: device number d (in cluster order) holds stage j.
        objective: the bound on the iteration time, in ticks of ``tick_s`` seconds.
    """

    def __init__(self, chain: Chain, horizon_s: float, max_stages: int) -> None:
        self.chain = chain
        self.cluster = chain.problem.cluster
        self.job = chain.problem.job
        self.count = max_stages
        self.tick_s = horizon_s / TICKS
        self.horizon = TICKS + 1
        self.model = cp_model.CpModel()
        self.devices = self.cluster.device_names
        self.type_index = [chain.types.index(self.cluster.type_of(d)) for d in self.devices]
        self._stages = range(self.count)
        self._comparisons: dict[tuple[int, int], cp_model.IntVar] = {}
        self._add_constraints()

    def _add_constraints(self) -> None:
        self._cut_chain()
        self._map_devices()
        self._break_symmetry()
        self._look_up_times()
        self._balance_replicas()
        self._look_up_transfers()
        self._fit_memory()
        self._reduce_gradients()
        self._bound_iteration_time()

    # --- decisions ---------------------------------------------------------------------------

    def _cut_chain(self) -> None:
        length = self.chain.length
        self.boundary = [
            self.model.new_int_var(0, length, f"boundary {j}") for j in range(self.count + 1)
        ]
        self.active = [self.model.new_bool_var(f"active {j}") for j in self._stages]
        self.model.add(self.boundary[0] == 0)
        self.model.add(self.boundary[self.count] == length)
        self.model.add(self.active[0] == 1)
        for j in self._stages:
            first, end, active = self.boundary[j], self.boundary[j + 1], self.active[j]
            self.model.add(end >= first + 1).only_enforce_if(active)
            self.model.add(first == length).only_enforce_if(~active)
            self.model.add(end == length).only_enforce_if(~active)
            if j:
                self.model.add_implication(active, self.active[j - 1])

    def _map_devices(self) -> None:
        numbers = range(len(self.devices))
        self.on = {
            (j, d): self.model.new_bool_var(f"stage {j} on {self.devices[d]}")
            for j in self._stages
            for d in numbers
        }
        for d in numbers:
            self.model.add_at_most_one(self.on[j, d] for j in self._stages)
        self.replicas = []
        for j in self._stages:
            held = [self.on[j, d] for d in numbers]
            self.model.add_bool_or([~self.active[j], *held])
            for literal in held:
                self.model.add_implication(literal, self.active[j])
            if not self.job.replication:
                self.model.add_at_most_one(held)
            self.replicas.append(sum(held))
        self.at_least: dict[tuple[int, int], cp_model.IntVar] = {}
        if self.job.replication:
            self._count_replicas()

    def _count_replicas(self) -> None:
        for j in self._stages:
            for count in (step for step in REPLICA_STEPS if step <= len(self.devices)):
                literal = self.model.new_bool_var(f"stage {j} has {count} replicas or more")
                self.model.add(self.replicas[j] >= count).only_enforce_if(literal)
                self.model.add(self.replicas[j] <= count - 1).only_enforce_if(~literal)
                self.at_least[j, count] = literal

    def _break_symmetry(self) -> None:
        """Interchangeable devices hold stages in order, unused ones last."""
        place = [
            sum(j * self.on[j, d] for j in self._stages)
            + self.count * (1 - sum(self.on[j, d] for j in self._stages))
            for d in range(len(self.devices))
        ]
        for group in interchangeable_devices(self.cluster):
            numbers = [self.devices.index(device) for device in group]
            for first, second in zip(numbers, numbers[1:], strict=False):
                self.model.add(place[first] <= place[second])

    # --- times -------------------------------------------------------------------------------

    def _floor(self, seconds: FloatArray) -> list[int]:
        return [int(x) for x in np.minimum(np.floor(seconds / self.tick_s), self.horizon)]

    def _sums(self, per_layer: Sequence[int]) -> list[cp_model.LinearExprT]:
        """Per stage, the sum of a figure over its layers."""
        prefix = [0, *np.cumsum(np.array(per_layer, dtype=np.int64)).tolist()]
        at = []
        for j in range(self.count + 1):
            value = self.model.new_int_var(0, prefix[-1], "")
            self.model.add_element(self.boundary[j], prefix, value)
            at.append(value)
        return [at[j + 1] - at[j] for j in self._stages]

    def _look_up_times(self) -> None:
        """Per stage and device type; then the least over the types in use."""
        kinds = range(len(self.chain.types))
        types = self.chain.types
        self.layer_seconds = [self.chain.forward_s(t) + self.chain.backward_s(t) for t in types]
        self.forward = {k: self._sums(self._floor(self.chain.forward_s(types[k]))) for k in kinds}
        self.backward = {k: self._sums(self._floor(self.chain.backward_s(types[k]))) for k in kinds}
        self.has_type = {}
        for j in self._stages:
            for k in kinds:
                members = [self.on[j, d] for d, t in enumerate(self.type_index) if t == k]
                literal = self.model.new_bool_var(f"stage {j} uses type {k}")
                self.model.add_max_equality(literal, members)
                self.has_type[j, k] = literal
        self.least_forward = [self._least(self.forward, j) for j in self._stages]
        self.least_backward = [self._least(self.backward, j) for j in self._stages]

    def _least(
        self, table: dict[int, list[cp_model.LinearExprT]], stage: int
    ) -> cp_model.LinearExprT:
        """The smallest over the device types a stage uses."""
        if len(table) == 1:
            return table[0][stage]
        value = self._time("least")
        picks = [self.model.new_bool_var("") for _ in table]
        self.model.add(sum(picks) == 1).only_enforce_if(self.active[stage])
        for k, pick in enumerate(picks):
            self.model.add_implication(pick, self.has_type[stage, k])
            self.model.add(value >= table[k][stage]).only_enforce_if(pick)
        return value

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, name)

    def _balance_replicas(self) -> None:
        """``load[j]``: the most loaded replica's work when the microbatches are split best."""
        self.load = [self._time(f"load {j}") for j in self._stages]
        for j in self._stages:
            if self.job.replication:
                self._split_microbatches(j)
                continue
            for k in self.forward:
                work = self.job.microbatches * (self.forward[k][j] + self.backward[k][j])
                self.model.add(self.load[j] >= work).only_enforce_if(self.has_type[j, k])

    def _split_microbatches(self, j: int) -> None:
        """Replicas of type k take at most ``most`` microbatches each; together they take all."""
        taken = []
        for k in self.forward:
            limit = self.job.microbatches
            members = [self.on[j, d] for d, t in enumerate(self.type_index) if t == k]
            most = self.model.new_int_var(0, limit, f"most {j} {k}")
            self.model.add(most == 0).only_enforce_if(~self.has_type[j, k])
            count = self.model.new_int_var(0, len(members), "")
            self.model.add(count == sum(members))
            product = self.model.new_int_var(0, limit * len(members), "")
            self.model.add_multiplication_equality(product, [count, most])
            taken.append(product)
            each = self._time("each")
            work = self.forward[k][j] + self.backward[k][j]
            self.model.add(each >= work).only_enforce_if(self.has_type[j, k])
            self.model.add_multiplication_equality(self._at_most(self.load[j]), [most, each])
        self.model.add(sum(taken) >= self.job.microbatches).only_enforce_if(self.active[j])

    def _at_most(self, limit: cp_model.IntVar) -> cp_model.IntVar:
        value = self._time("")
        self.model.add(value <= limit)
        return value

    # --- transfers ---------------------------------------------------------------------------

    def _look_up_transfers(self) -> None:
        """``send[j]``, ``back[j]``: between stage j and the next over their best pair."""
        self.send = [self._time(f"send {j}") for j in range(self.count - 1)]
        self.back = [self._time(f"back {j}") for j in range(self.count - 1)]
        self._route_tables()
        same = self.chain.cut_bytes.tolist() == self.chain.cut_gradient_bytes.tolist()
        for j in range(self.count - 1):
            send = {key: self._at(table.forward, j + 1) for key, table in self._tables.items()}
            self._best_pair(j, self.send[j], send)
            if same:
                self.model.add(self.back[j] == self.send[j])
            else:
                back = {key: self._at(table.backward, j + 1) for key, table in self._tables.items()}
                self._best_pair(j, self.back[j], back)

    def _route_tables(self) -> None:
        self._tables: dict[tuple[float, float], _Fastest] = {}
        self._route_key: dict[tuple[int, int], tuple[float, float] | None] = {}
        for u, source in enumerate(self.devices):
            for v, target in enumerate(self.devices):
                route = self.cluster.route(source, target)
                if u == v or route is None:
                    self._route_key[u, v] = None
                    continue
                key = (route.latency_s, route.bandwidth_gb_per_s)
                self._route_key[u, v] = key
                if key not in self._tables:
                    self._tables[key] = _Fastest(
                        self._transfer_ticks(self.chain.cut_bytes, *key),
                        self._transfer_ticks(self.chain.cut_gradient_bytes, *key),
                    )

    def _transfer_ticks(self, bytes_: IntArray, latency_s: float, bandwidth: float) -> list[int]:
        seconds = latency_s + bytes_.astype(float) / (bandwidth * 1e9)
        return self._floor(np.where(bytes_ == 0, 0.0, seconds))

    def _at(self, table: list[int], j: int) -> cp_model.IntVar:
        value = self.model.new_int_var(0, max(table), "")
        self.model.add_element(self.boundary[j], table, value)
        return value

    def _best_pair(
        self,
        j: int,
        value: cp_model.IntVar,
        ticks: dict[tuple[float, float], cp_model.IntVar],
    ) -> None:
        sender, receiver = self._pick_one(j), self._pick_one(j + 1)
        numbers = range(len(self.devices))
        for u in numbers:
            for v in numbers:
                key = self._route_key[u, v]
                if u == v:
                    continue
                if key is None:
                    self.model.add_bool_or([~self.on[j, u], ~self.on[j + 1, v]])
                else:
                    pair = [sender[u], receiver[v]]
                    self.model.add(value >= ticks[key]).only_enforce_if(pair)

    def _pick_one(self, j: int) -> list[cp_model.IntVar]:
        """One device of stage j, free to choose; with one device a stage, that one."""
        numbers = range(len(self.devices))
        if not self.job.replication:
            return [self.on[j, d] for d in numbers]
        picks = [self.model.new_bool_var("") for _ in numbers]
        for d in numbers:
            self.model.add_implication(picks[d], self.on[j, d])
        self.model.add(sum(picks) == 1).only_enforce_if(self.active[j])
        return picks

    # --- memory and gradients ----------------------------------------------------------------

    def _fit_memory(self) -> None:
        """Weights, gradients, optimizer state and the stash of one microbatch at least."""
        need = (self.chain.static_bytes + self.chain.stash_bytes) // KIB
        sums = self._sums([int(x) for x in need])
        for j in self._stages:
            for k, name in enumerate(self.chain.types):
                capacity = -(-self.cluster.device_types[name].capacity_bytes // KIB)
                self.model.add(sums[j] <= capacity).only_enforce_if(self.has_type[j, k])

    def _reduce_gradients(self) -> None:
        """``tail[j]``: all-reduces and optimizer step after stage j's last backward."""
        self.shared_extra = self._reduce_tied_parameters()
        gradients = self._sums([int(x) for x in self.chain.gradient_bytes // KIB])
        reduce = [self._time(f"reduce {j}") for j in self._stages]
        if self.job.replication:
            for j in self._stages:
                members = [self.on[j, d] for d in range(len(self.devices))]
                counts = {count: x for (stage, count), x in self.at_least.items() if stage == j}
                self._reduce_over(members, counts, gradients[j] + self.tied_inside[j], reduce[j])
        step = [self._optimizer_step(j) for j in self._stages]
        self.tail = [reduce[j] + self.shared_extra[j] + step[j] for j in self._stages]

    def _reduce_over(
        self,
        members: Sequence[cp_model.IntVar],
        at_least: dict[int, cp_model.IntVar],
        gradients: cp_model.LinearExprT,
        reduce: cp_model.IntVar,
    ) -> None:
        """An all-reduce among the member devices takes at least this long.

        Each member's best link to a fellow member carries 2(r-1)/r of the gradients.
        """
        for d, member in enumerate(members):
            inverse = {
                v: inverse_bandwidth(self.cluster, self.devices[d], self.devices[v])
                for v in range(len(members))
                if v != d
            }
            reachable = [members[v] for v, x in inverse.items() if not math.isinf(x)]
            self.model.add_bool_or([~member, ~at_least[2], *reachable])
            for level in sorted({x for x in inverse.values() if not math.isinf(x)}):
                better = [~members[v] for v, x in inverse.items() if x < level]
                for count, literal in at_least.items():
                    seconds = 2 * (count - 1) / count * level * KIB
                    factor = math.floor(seconds / self.tick_s * SCALE)
                    condition = [member, literal, *better]
                    bound = factor * gradients
                    self.model.add(reduce * SCALE >= bound).only_enforce_if(condition)

    def _reduce_tied_parameters(self) -> list[cp_model.LinearExprT]:
        """Extra tail of the stages that share a tied parameter with another stage."""
        extra: list[cp_model.LinearExprT] = [0 for _ in self._stages]
        self.tied_inside: list[cp_model.LinearExprT] = [0 for _ in self._stages]
        for layers, bytes_ in self.chain.tied_parameters.items():
            holds = [self._holds(j, layers) for j in self._stages]
            apart = self.model.new_bool_var(f"layers {layers} in several stages")
            self.model.add(sum(holds) >= 2).only_enforce_if(apart)
            self.model.add(sum(holds) <= 1).only_enforce_if(~apart)
            duration = self._time(f"reduce tied {layers}")
            members = self._members(holds)
            self._reduce_over(members, {2: apart}, bytes_ // KIB, duration)
            for j in self._stages:
                own = self._time("")
                self.model.add(own >= duration).only_enforce_if([holds[j], apart])
                extra[j] += own
                inside = self.model.new_int_var(0, bytes_ // KIB, "")
                self.model.add(inside == bytes_ // KIB).only_enforce_if([holds[j], ~apart])
                self.tied_inside[j] += inside
        return extra

    def _holds(self, j: int, layers: tuple[int, ...]) -> cp_model.IntVar:
        """Whether a stage has one of the layers."""
        inside = []
        for layer in layers:
            starts = self._compare(self.boundary[j], layer)
            ends = self._compare(self.boundary[j + 1], layer)
            literal = self.model.new_bool_var("")
            self.model.add_implication(literal, starts)
            self.model.add_implication(literal, ~ends)
            self.model.add_bool_or([literal, ~starts, ends])
            inside.append(literal)
        holds = self.model.new_bool_var(f"stage {j} has one of layers {layers}")
        self.model.add_max_equality(holds, inside)
        return holds

    def _compare(self, variable: cp_model.IntVar, value: int) -> cp_model.IntVar:
        """Literal of ``variable <= value``."""
        key = (variable.index, value)
        if key not in self._comparisons:
            literal = self.model.new_bool_var("")
            self.model.add(variable <= value).only_enforce_if(literal)
            self.model.add(variable >= value + 1).only_enforce_if(~literal)
            self._comparisons[key] = literal
        return self._comparisons[key]

    def _members(self, holds: list[cp_model.IntVar]) -> list[cp_model.IntVar]:
        """Devices of the stages in question."""
        members = []
        for d in range(len(self.devices)):
            member = self.model.new_bool_var("")
            both = []
            for j in self._stages:
                literal = self.model.new_bool_var("")
                self.model.add_bool_or([literal, ~self.on[j, d], ~holds[j]])
                self.model.add_implication(literal, self.on[j, d])
                self.model.add_implication(literal, holds[j])
                both.append(literal)
            self.model.add_max_equality(member, both)
            members.append(member)
        return members

    def _optimizer_step(self, j: int) -> cp_model.IntVar:
        """On the type with the widest memory among those the stage uses."""
        step = self._time(f"step {j}")
        widths = [self.cluster.device_types[n].memory_bandwidth_gb_per_s for n in self.chain.types]
        moved = np.array(self._optimizer_bytes(), dtype=float)
        for k, width in enumerate(widths):
            sums = self._optimizer_sums(k, moved / (width * 1e9))
            wider = [~self.has_type[j, other] for other, w in enumerate(widths) if w > width]
            self.model.add(step >= sums[j]).only_enforce_if([self.has_type[j, k], *wider])
        return step

    def _optimizer_sums(self, k: int, seconds: FloatArray) -> list[cp_model.LinearExprT]:
        if not hasattr(self, "_optimizer_cache"):
            self._optimizer_cache: dict[int, list[cp_model.LinearExprT]] = {}
        if k not in self._optimizer_cache:
            self._optimizer_cache[k] = self._sums(self._floor(seconds))
        return self._optimizer_cache[k]

    def _optimizer_bytes(self) -> list[int]:
        per_element = self.job.optimizer_bytes_per_element
        seen: set[str] = set()
        rows = []
        for layer in self.chain.names:
            new = [
                p
                for p in self.chain.problem.graph.parameters_of([layer])
                if p.trainable and p.name not in seen
            ]
            seen.update(p.name for p in new)
            rows.append(sum(3 * p.bytes + 2 * per_element * p.elements for p in new))
        return rows

    # --- objective ---------------------------------------------------------------------------

    def _bound_iteration_time(self) -> None:
        """The expression of planner.partition.bounds.schedule_bound_s, stage by stage."""
        self.objective = self._time("iteration time")
        head: cp_model.LinearExprT = 0
        down = self._way_down()
        home: cp_model.LinearExprT | None = None
        heads: list[cp_model.LinearExprT] = []
        homes: list[cp_model.LinearExprT] = []
        for j in self._stages:
            active = self.active[j]
            home = self._way_home(j, home)
            heads.append(head)
            homes.append(home)
            self.model.add(self.objective >= head + self.load[j] + home).only_enforce_if(active)
            if j + 1 < self.count:
                self._bound_channel(j, head, down[j + 1], home)
                next_head = self._time(f"head {j + 1}")
                self.model.add(next_head == head + self.least_forward[j] + self.send[j]).only_enforce_if(
                    self.active[j + 1]
                )
                head = next_head
        self._spread_work(heads, homes)
        self.model.minimize(self.objective)

    def _spread_work(
        self, heads: list[cp_model.LinearExprT], homes: list[cp_model.LinearExprT]
    ) -> None:
        """Redundant: the devices' time between head and home must hold all layers' work.

        Work is priced by the dual values of the even-load relaxation; without this constraint
        CP-SAT sees no connection between the stages' loads.
        """
        prices = [round(1000 * x) for x in _scaled(even_load_prices(self.chain))]
        work = 0
        for layer in range(self.chain.length):
            work += min(
                price * int(self._floor(self.layer_seconds[k])[layer])
                for k, price in enumerate(prices)
            )
        time = []
        for d, k in enumerate(self.type_index):
            free = self._time(f"time of {self.devices[d]}")
            self.model.add(free <= self.objective)
            self.model.add(free == 0).only_enforce_if([~self.on[j, d] for j in self._stages])
            for j in self._stages:
                limit = self.objective - heads[j] - homes[j]
                self.model.add(free <= limit).only_enforce_if(self.on[j, d])
            time.append(prices[k] * free)
        self.model.add(sum(time) >= self.job.microbatches * work)

    def _way_down(self) -> list[cp_model.LinearExprT]:
        """From a stage's forward through all later stages and back to its own backward."""
        down: list[cp_model.LinearExprT] = [0] * (self.count + 1)
        for j in reversed(self._stages):
            value = self._time(f"down {j}")
            there: cp_model.LinearExprT = self.least_forward[j] + self.least_backward[j]
            if j + 1 < self.count:
                further = there + self.send[j] + self.back[j] + down[j + 1]
                self.model.add(value >= further).only_enforce_if(self.active[j + 1])
            self.model.add(value >= there).only_enforce_if(self.active[j])
            down[j] = value
        return down

    def _way_home(self, j: int, before: cp_model.LinearExprT | None) -> cp_model.IntVar:
        """From a stage's last backward to the end of the iteration."""
        home = self._time(f"home {j}")
        self.model.add(home >= self.tail[j]).only_enforce_if(self.active[j])
        if before is not None:
            way = self.back[j - 1] + self.least_backward[j - 1] + before
            self.model.add(home >= way).only_enforce_if(self.active[j])
        return home

    def _bound_channel(
        self,
        j: int,
        head: cp_model.LinearExprT,
        down: cp_model.LinearExprT,
        home: cp_model.LinearExprT,
    ) -> None:
        """Between two single devices all microbatches pass one after the other."""
        condition = [self.active[j + 1]]
        if self.at_least:
            condition += [~self.at_least[j, 2], ~self.at_least[j + 1, 2]]
        if any(not link.shared for link in self.cluster.links) and self._some_shared_route():
            condition.append(self._exclusive_channel(j))
        count = self.job.microbatches
        last = self.back[j] + self.least_backward[j] + home
        begin = head + self.least_forward[j]
        forwards = begin + count * self.send[j] + down + last
        backwards = begin + self.send[j] + down + count * self.back[j] + last - self.back[j]
        if all(link.shared for link in self.cluster.links):
            return
        self.model.add(self.objective >= forwards).only_enforce_if(condition)
        self.model.add(self.objective >= backwards).only_enforce_if(condition)

    def _some_shared_route(self) -> bool:
        return any(self._is_shared(u, v) for u, v in self._route_key)

    def _is_shared(self, u: int, v: int) -> bool:
        route = self.cluster.route(self.devices[u], self.devices[v])
        return u != v and route is not None and not route.links

    def _exclusive_channel(self, j: int) -> cp_model.IntVar:
        """True where the two devices' route makes transfers wait for each other."""
        literal = self.model.new_bool_var(f"exclusive channel {j}")
        for (u, v), key in self._route_key.items():
            if key is not None and not self._is_shared(u, v):
                self.model.add_bool_or([literal, ~self.on[j, u], ~self.on[j + 1, v]])
        return literal

    # --- use ---------------------------------------------------------------------------------

    def forbid(self, partition: Partition) -> None:
        """Exclude one partition, to go on to the next best."""
        literals = []
        for j in self._stages:
            inside = j < len(partition)
            first = partition[j].begin if inside else self.chain.length
            held = set(partition[j].devices) if inside else set()
            if j:
                literals.append(self._differs(self.boundary[j], first))
            for d, device in enumerate(self.devices):
                literal = self.on[j, d]
                literals.append(~literal if device in held else literal)
        self.model.add_bool_or(literals)

    def _differs(self, variable: cp_model.IntVar, value: int) -> cp_model.IntVar:
        literal = self.model.new_bool_var("")
        self.model.add(variable != value).only_enforce_if(literal)
        return literal

    def hint(self, partition: Partition) -> None:
        """Suggest the decisions of a partition; complete the rest with a solve of its own."""
        self.model.clear_hints()
        for j in range(self.count + 1):
            first = partition[j].begin if j < len(partition) else self.chain.length
            self.model.add_hint(self.boundary[j], first)
        for (j, d), literal in self.on.items():
            held = j < len(partition) and self.devices[d] in partition[j].devices
            self.model.add_hint(literal, held)

    def complete_hint(self, solver: cp_model.CpSolver) -> bool:
        """Solve with the hinted decisions fixed and hint all variables of what comes out."""
        solver.parameters.fix_variables_to_their_hinted_value = True
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        values = list(solver.response_proto.solution)
        self.model.clear_hints()
        for index, value in enumerate(values):
            variable = self.model.get_int_var_from_proto_index(index)
            self.model.add_hint(variable, value)
        return True

    def partition(self, value: cp_model.CpSolver | cp_model.CpSolverSolutionCallback) -> Partition:
        """The partition of a solution."""
        stages = []
        for j in self._stages:
            begin = value.value(self.boundary[j])
            end = value.value(self.boundary[j + 1])
            if end > begin:
                held = [x for d, x in enumerate(self.devices) if value.value(self.on[j, d])]
                stages.append(StageChoice(begin, end, tuple(held)))
        return tuple(stages)


def _scaled(prices: FloatArray) -> list[float]:
    """Prices with the largest at 1."""
    return [float(price) for price in prices / prices.max()]
