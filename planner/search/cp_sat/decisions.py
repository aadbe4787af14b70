"""The decisions of the plan model, and literals to state rules of one's own with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property

from ortools.sat.python import cp_model

from planner.cluster.cluster import Cluster, node_of
from planner.errors import PipeplanError, shorten
from planner.plan.kept_rules import devices_for
from planner.rules import Rules

Literal = cp_model.LiteralT
Constrain = Callable[["Decisions"], None]
"""A rule: a function that adds constraints to ``decisions.model``."""
Interval = tuple[int, int, int]
"""A stage's number, its first layer and the one after its last."""
MILLIONTHS = 1_000_000
"""Units of a price in the models: whole numbers, of any price that a file may state."""


class Decisions:
    """Which layers each stage has and which devices hold it, for one number of stages.

    Layers and devices are given by name; layers also by their place in the graph's order.

    Args:
        layers: names, in the graph's order.
        cluster: of the devices.
        stages: number of stages.
        cuts: places of the layers before which a stage may begin, ascending, from 1.

    Attributes:
        model: the CP-SAT model, to add constraints to.
        stages: the stage numbers.
        active: for every number that a stage may have, whether it exists: all do.
        intervals: literal that a stage is made of these layers.
        on: ``on[j, d]``: device number d holds stage j.
    """

    def __init__(
        self, layers: Sequence[str], cluster: Cluster, stages: int, cuts: Sequence[int]
    ) -> None:
        self.layers, self.cluster = tuple(layers), cluster
        self.devices = cluster.device_names
        self.stages = range(stages)
        self.model = cp_model.CpModel()
        self.active = [self.model.new_constant(1) for _ in self.stages]
        self.intervals: dict[Interval, cp_model.IntVar] = {}
        self._begin(list(cuts))
        self.on = {
            (j, d): self.model.new_bool_var(f"stage {j} on {name}")
            for j in self.stages
            for d, name in enumerate(self.devices)
        }
        for d in range(len(self.devices)):
            self.model.add_at_most_one(self.on[j, d] for j in self.stages)
        for j in self.stages:
            self.model.add_bool_or(self.on[j, d] for d in range(len(self.devices)))
        self._literals: dict[Hashable, cp_model.IntVar] = {}

    def _begin(self, cuts: list[int]) -> None:
        """Let every stage be one interval, which begins where the one before ends."""
        count, last = len(self.stages), self.stages[-1]
        places = [0, *cuts, len(self.layers)]
        for j in self.stages:
            end = len(places) - count + j
            for b in range(1) if j == 0 else range(j, end):
                for e in range(len(places) - 1 if j == last else b + 1, end + 1):
                    key = j, places[b], places[e]
                    self.intervals[key] = self.model.new_bool_var("")
        for j in self.stages:
            self.model.add_exactly_one(v for (s, *_), v in self.intervals.items() if s == j)
        for j in self.stages[:-1]:
            for place in places:
                ends = [y for (s, _, e), y in self.intervals.items() if (s, e) == (j, place)]
                begins = [y for (s, b, _), y in self.intervals.items() if (s, b) == (j + 1, place)]
                self.model.add(sum(ends) == sum(begins))

    def holds(self, j: int, layer: str | int) -> cp_model.IntVar:
        """Return the literal that stage j has a layer."""
        place = self.position(layer)

        def make() -> cp_model.IntVar:
            found = self.model.new_bool_var("")
            over = [v for (s, b, e), v in self.intervals.items() if s == j and b <= place < e]
            self.model.add(sum(over) == found)
            return found

        return self._once(("holds", j, place), make)

    def holds_any(self, j: int, layers: Sequence[str | int]) -> cp_model.IntVar:
        """Return the literal that stage j has one of some layers."""
        key = "holds any", j, tuple(map(self.position, layers))
        return self._once(key, lambda: self.any_of([self.holds(j, layer) for layer in layers]))

    def stage_of(self, layer: str | int) -> cp_model.LinearExprT:
        """Return the number of a layer's stage, a linear expression."""
        return sum(j * self.holds(j, layer) for j in self.stages)

    def same_stage(self, first: str | int, second: str | int) -> cp_model.IntVar:
        """Return the literal that two layers are in one stage."""
        a, b = sorted((self.position(first), self.position(second)))

        def make() -> cp_model.IntVar:
            found = self.model.new_bool_var("")
            over = [v for (_, s, e), v in self.intervals.items() if s <= a and b < e]
            self.model.add(sum(over) == found)
            return found

        return self._once(("same stage", a, b), make)

    def uses(self, j: int, device: str) -> cp_model.IntVar:
        """Return the literal that a device holds stage j; false where there is no such stage."""
        d = self.number(device)
        if j not in self.stages:
            return self._once("never", lambda: self.model.new_constant(0))
        return self.on[j, d]

    def is_used(self, device: str) -> cp_model.IntVar:
        """Return the literal that a device holds some stage."""
        d = self.number(device)
        return self._once(("is used", d), lambda: self.any_of([self.on[j, d] for j in self.stages]))

    def runs_on(self, layer: str | int, device: str) -> cp_model.IntVar:
        """Return the literal that a device is one of those that hold a layer."""
        place, d = self.position(layer), self.number(device)

        def make() -> cp_model.IntVar:
            both = [self.all_of([self.holds(j, place), self.on[j, d]]) for j in self.stages]
            return self.any_of(both)

        return self._once(("runs on", place, d), make)

    def all_of(self, literals: Sequence[Literal]) -> cp_model.IntVar:
        """Return a literal that is true exactly if all are."""
        found = self.model.new_bool_var("")
        for literal in literals:
            self.model.add_implication(found, literal)
        self.model.add_bool_or([found, *(~literal for literal in literals)])
        return found

    def any_of(self, literals: Sequence[Literal]) -> cp_model.IntVar:
        """Return a literal that is true exactly if one of them is."""
        found = self.model.new_bool_var("")
        for literal in literals:
            self.model.add_implication(literal, found)
        self.model.add_bool_or([~found, *literals])
        return found

    def position(self, layer: str | int) -> int:
        """Return the place of a layer in the graph's order.

        Raises:
            PipeplanError: if the graph has no such layer.
        """
        if isinstance(layer, int) and 0 <= layer < len(self.layers):
            return layer
        if layer not in self._places:
            raise PipeplanError(
                f"layer {shorten(layer)} is not one of the model's {len(self.layers)} layers, "
                f"{self.layers[0]!r} to {self.layers[-1]!r}; give a name or a position from 0"
            )
        return self._places[layer]

    def number(self, device: str) -> int:
        """Return the number of a device.

        Raises:
            PipeplanError: if the cluster has no such device.
        """
        if device not in self.cluster.numbers:
            raise PipeplanError(
                f"device {shorten(device)} is not in the cluster; it has {', '.join(self.devices)}"
            )
        return self.cluster.numbers[device]

    @cached_property
    def _places(self) -> dict[str | int, int]:
        return {name: n for n, name in enumerate(self.layers)}

    def _once(self, key: Hashable, make: Callable[[], cp_model.IntVar]) -> cp_model.IntVar:
        if key not in self._literals:
            self._literals[key] = make()
        return self._literals[key]


def rule_constraints(rules: Rules, cluster: Cluster) -> dict[str, Constrain]:
    """Return a job's rules as constraints, each by its name in the job file."""
    found: dict[str, Constrain] = {}
    if rules.most_nodes is not None:
        most = rules.most_nodes
        found["most_nodes"] = lambda x: _add_most_nodes(x, most)
    if rules.most_price_per_hour is not None:
        limit = rules.most_price_per_hour
        found["most_price_per_hour"] = lambda x: _add_most_price(x, limit)
    for n, names in enumerate(rules.together):
        found[f"together[{n}]"] = lambda x, row=names: _add_together(x, row)  # type: ignore[misc]
    for n, names in enumerate(rules.apart):
        found[f"apart[{n}]"] = lambda x, row=names: _add_apart(x, row)  # type: ignore[misc]
    for layer in rules.place:
        may = devices_for(layer, rules, cluster)
        found[f"place.{layer}"] = (
            lambda x, row=layer, on=may: _add_place(x, row, on)  # type: ignore[misc]
        )
    return found


def _add_most_nodes(x: Decisions, most: int) -> None:
    nodes = {node: x.model.new_bool_var(f"uses {node}") for node in map(node_of, x.devices)}
    for (_, d), literal in x.on.items():
        x.model.add_implication(literal, nodes[node_of(x.devices[d])])
    x.model.add(sum(nodes.values()) <= most)


def _add_most_price(x: Decisions, limit: float) -> None:
    prices = [x.cluster.prices_per_hour[name] or 0.0 for name in x.devices]
    rows = [round(MILLIONTHS * prices[d]) * literal for (_, d), literal in x.on.items()]
    x.model.add(sum(rows) <= int(MILLIONTHS * limit * (1 + 1e-9)))


def _add_together(x: Decisions, layers: Iterable[str]) -> None:
    places = sorted(map(x.position, layers))
    x.model.add(x.same_stage(places[0], places[-1]) == 1)


def _add_apart(x: Decisions, devices: Iterable[str]) -> None:
    # Searches of some of a cluster's devices keep the rules of all.
    held = [device for device in devices if device in x.devices]
    for j in x.stages:
        x.model.add_at_most_one(x.uses(j, device) for device in held)


def _add_place(x: Decisions, layer: str, may: frozenset[str]) -> None:
    for j in x.stages:
        for device in x.devices:
            if device not in may:
                x.model.add_bool_or([~x.holds(j, layer), ~x.uses(j, device)])
