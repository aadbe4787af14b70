"""Why no plan keeps the rules: a smallest set of them that cannot be kept together.

A relaxation of all plans, decided for groups of devices that rules and memory cannot tell apart:
literals that a group has a stage of the layers [b, e), and how many of its devices are used. Where
it has no solution under some rules, no plan keeps them. Each rule is enforced by a literal that
CP-SAT may assume; from the assumptions that it blames, rules are left out one by one as long as the
rest are still in conflict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from planner.cluster.cluster import node_of
from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.plan.kept_rules import devices_for
from planner.search.cp_sat.decisions import MILLIONTHS
from planner.search.cp_sat.plan_model import Effort

MEMORY = "the devices' memory"
DEVICES = "the number of devices"


def conflict(table: StageTable, network: NetworkTable, effort: Effort) -> tuple[str, ...]:
    """Return the names of rules that no plan keeps together, fewest that were found.

    Args:
        table: of the problem, whose job has the rules.
        network: of its cluster.
        effort: of each of the few solves.

    Returns:
        Fields of ``job.rules``, with :data:`MEMORY` or :data:`DEVICES` where these are in it; empty
        if none was proved.
    """
    model = _Conflicts(table, network)
    blamed = model.blamed(model.names, effort)
    for name in blamed or ():
        fewer = [other for other in blamed or () if other != name]
        found = model.blamed(fewer, effort)
        if found is not None:
            blamed = found
    return tuple(blamed or ())


@dataclass(frozen=True)
class _Group:
    """Devices of one type and node that may hold the same layers."""

    kind: int
    node: str
    price: int
    may_hold: tuple[bool, ...]


class _Conflicts:
    def __init__(self, table: StageTable, network: NetworkTable) -> None:
        self._table, self._network = table, network
        self._problem = table.problem
        self._rules = table.problem.job.rules
        self._model = cp_model.CpModel()
        self._literals: dict[str, cp_model.IntVar] = {}
        self._place_layers = list(self._rules.place)
        self._groups = self._grouped()
        self._stages = self._stage_literals()
        self._used = [self._model.new_int_var(0, count, "") for count in self._groups.values()]
        self._cover()
        self._count_devices()
        self._add_rules()

    @property
    def names(self) -> list[str]:
        """All rules, by their field."""
        return list(self._literals)

    def blamed(self, names: Sequence[str], effort: Effort) -> list[str] | None:
        """Return those of some rules that are in conflict; None if they are not proved to be."""
        self._model.clear_assumptions()
        self._model.add_assumptions([self._literals[name] for name in names])
        solver = effort.solver()
        if solver.solve(self._model) != cp_model.INFEASIBLE:
            return None
        indices = {*solver.sufficient_assumptions_for_infeasibility()}
        return [name for name in names if self._literals[name].index in indices]

    def _rule(self, name: str) -> cp_model.IntVar:
        return self._literals.setdefault(name, self._model.new_bool_var(name))

    def _grouped(self) -> dict[_Group, int]:
        cluster, found = self._problem.cluster, dict[_Group, int]()
        prices = cluster.prices_per_hour
        for d, name in enumerate(self._network.devices):
            group = _Group(
                int(self._network.type_of[d]),
                node_of(name),
                int(MILLIONTHS * (prices[name] or 0.0)),
                tuple(
                    name in devices_for(layer, self._rules, cluster) for layer in self._place_layers
                ),
            )
            found[group] = found.get(group, 0) + 1
        return found

    def _stage_literals(self) -> dict[tuple[int, int, int], cp_model.IntVar]:
        """Return the literals that a group has a stage of some layers, each layer once."""
        layers, cuts = self._table.layers, self._problem.job.cuts
        begins = [n for n, name in enumerate(layers) if n == 0 or cuts is None or name in cuts]
        places = [*begins, len(layers)]
        return {
            (g, b, e): self._model.new_bool_var("")
            for g in range(len(self._groups))
            for i, b in enumerate(begins)
            for e in places[i + 1 :]
        }

    def _cover(self) -> None:
        places = sorted({place for _, *pair in self._stages for place in pair})
        for place in places:
            ends = [y for (_, _, e), y in self._stages.items() if e == place]
            begins = [y for (_, b, _), y in self._stages.items() if b == place]
            if place == 0:
                self._model.add_exactly_one(begins)
            elif place == len(self._table.layers):
                self._model.add_exactly_one(ends)
            else:
                self._model.add(sum(ends) == sum(begins))

    def _count_devices(self) -> None:
        job = self._problem.job
        each = job.max_stages_per_device
        for g, size in enumerate(self._groups.values()):
            mine = [y for (group, *_), y in self._stages.items() if group == g]
            self._model.add(sum(mine) <= each * self._used[g])
            self._model.add(self._used[g] <= size)
        if job.max_stages is not None or job.min_stages > 1:
            rule, total = self._rule(DEVICES), sum(self._stages.values())
            most = len(self._stages) if job.max_stages is None else job.max_stages
            self._model.add(total <= most).only_enforce_if(rule)
            self._model.add(total >= job.min_stages).only_enforce_if(rule)

    def _add_rules(self) -> None:
        rules, groups = self._rules, list(self._groups)
        memory, too_large = self._rule(MEMORY), self._too_large()
        for (g, b, e), y in self._stages.items():
            if too_large[groups[g].kind, b, e]:
                self._model.add_bool_or([~y, ~memory])
            for n, layer in enumerate(self._place_layers):
                inside = b <= self._table.layers.index(layer) < e
                if inside and not groups[g].may_hold[n]:
                    self._model.add_bool_or([~y, ~self._rule(f"place.{layer}")])
            for n, names in enumerate(rules.together):
                held = [b <= self._table.layers.index(name) < e for name in names]
                if any(held) and not all(held):
                    self._model.add_bool_or([~y, ~self._rule(f"together[{n}]")])
        if rules.most_nodes is not None:
            self._add_most_nodes(rules.most_nodes)
        if rules.most_price_per_hour is not None:
            price = sum(row.price * used for row, used in zip(groups, self._used, strict=True))
            self._model.add(
                price <= int(MILLIONTHS * rules.most_price_per_hour * (1 + 1e-9))
            ).only_enforce_if(self._rule("most_price_per_hour"))

    def _add_most_nodes(self, most: int) -> None:
        nodes = {group.node: self._model.new_bool_var("") for group in self._groups}
        for group, used in zip(self._groups, self._used, strict=True):
            self._model.add(used == 0).only_enforce_if(~nodes[group.node])
        self._model.add(sum(nodes.values()) <= most).only_enforce_if(self._rule("most_nodes"))

    def _too_large(self) -> NDArray[np.bool_]:
        """Return which stages no type can hold, whatever is recomputed or offloaded.

        A stage holds its weights and, while a layer runs, what that layer needs.
        """
        job, network = self._problem.job, self._network
        holders = len(network.devices) if job.shards_state else 1
        rows = self._table.all_figures(holders=holders)
        peaks, kinds = self._table.arrays.peak, len(self._table.types)
        count = peaks.shape[1]
        most = np.zeros((kinds, count, count + 1), dtype=np.int64)
        for first in range(count):
            most[:, first, first + 1 :] = np.maximum.accumulate(peaks[:, first:], axis=1)
        capacity = np.zeros(kinds, dtype=np.int64)
        capacity[network.type_of] = network.capacity_bytes
        needs = rows["static_bytes"] + most
        return np.asarray((needs > capacity[:, None, None]) | (rows["may_run"] == 0))
