"""What the model decides: which layers each stage has, and which devices hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import StageSpec
from planner.errors import PipeplanError, shorten
from planner.search.partition.chain import Chain, FloatArray, StageChoice
from planner.search.partition.cp_sat.stages import (
    ChainCuts,
    Expression,
    LayersByStage,
    Literal,
)
from planner.search.partition.cp_sat.tensors import CutTensor, cut_tensors
from planner.search.partition.symmetry import interchangeable_devices

REPLICA_STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Replica counts at which the all-reduce bound is sharpened; in between it is weaker but valid."""


class DeviceSets:
    """Literals of devices and replica counts; one stage a device.

    Attributes:
        on: ``on[j, d]``: device number d (in cluster order) holds stage j.
        at_least: ``at_least[j, n]``: stage j has n replicas or more, for n of REPLICA_STEPS;
            empty if replication is not allowed.
    """

    def __init__(
        self,
        model: cp_model.CpModel,
        cluster: Cluster,
        active: Sequence[cp_model.IntVar],
        *,
        replication: bool,
    ) -> None:
        self._model = model
        self._devices = cluster.device_names
        self._stages = range(len(active))
        self.on = {
            (j, d): model.new_bool_var(f"stage {j} on {name}")
            for j in self._stages
            for d, name in enumerate(self._devices)
        }
        self._hold_stages(active, replication=replication)
        self.at_least: dict[tuple[int, int], cp_model.IntVar] = {}
        if replication:
            self._count_replicas()

    def _hold_stages(self, active: Sequence[cp_model.IntVar], *, replication: bool) -> None:
        numbers = range(len(self._devices))
        for d in numbers:
            self._model.add_at_most_one(self.on[j, d] for j in self._stages)
        for j in self._stages:
            held = [self.on[j, d] for d in numbers]
            self._model.add_bool_or([~active[j], *held])
            for literal in held:
                self._model.add_implication(literal, active[j])
            if not replication:
                self._model.add_at_most_one(held)

    def equalise(self, active: Sequence[cp_model.IntVar]) -> None:
        """Give all stages as many replicas."""
        replicas = self._model.new_int_var(1, len(self._devices), "replicas of every stage")
        for j in self._stages:
            held = sum(self.on[j, d] for d in range(len(self._devices)))
            self._model.add(held == replicas).only_enforce_if(active[j])

    def _count_replicas(self) -> None:
        for j in self._stages:
            replicas = sum(self.on[j, d] for d in range(len(self._devices)))
            for count in (step for step in REPLICA_STEPS if step <= len(self._devices)):
                literal = self._model.new_bool_var(f"stage {j} has {count} replicas or more")
                self._model.add(replicas >= count).only_enforce_if(literal)
                self._model.add(replicas <= count - 1).only_enforce_if(~literal)
                self.at_least[j, count] = literal

    def order(self, groups: Sequence[Sequence[str]]) -> None:
        """Let interchangeable devices hold stages in order, unused ones last."""
        count = len(self._stages)
        place = [
            sum(j * self.on[j, d] for j in self._stages)
            + count * (1 - sum(self.on[j, d] for j in self._stages))
            for d in range(len(self._devices))
        ]
        for group in groups:
            numbers = [self._devices.index(device) for device in group]
            for first, second in pairwise(numbers):
                self._model.add(place[first] <= place[second])


Stages = Sequence[StageChoice | StageSpec]
"""Stages by positions in the chain, or by layer names."""
OBJECTIVE_TICKS = 200_000
"""Ticks of the objective in the horizon. The search may raise its bound tick by tick."""
FINE = 2**12
"""Ticks of all other times in a tick of the objective: they are summed up, and rounded each."""


class Decisions:
    """The decision variables, and literals to state constraints of one's own with.

    Layers are named or given by their position in the file's order, devices are named. All
    durations are in ticks of ``tick_s``, rounded down so that bounds stay valid.

    Args:
        chain: the layers.
        horizon_s: the longest time to tell apart.
        max_stages: the largest number of stages.
        break_symmetry: let interchangeable devices hold stages in one order only. Constraints that
            name devices need it off.

    Attributes:
        model: the CP-SAT model, to add constraints to.
        stages: the stage numbers; those that exist come first.
        active: whether stage j exists.
        on: ``on[j, d]``: device number d (in cluster order) holds stage j.
        at_least: see :class:`DeviceSets`.
        layers: the decision on the layers.
        tensors: between the layers.
        tick_s: seconds of a tick.
        horizon: ticks that no time exceeds.
    """

    def __init__(
        self,
        chain: Chain,
        horizon_s: float,
        max_stages: int,
        *,
        break_symmetry: bool = True,
    ) -> None:
        self.chain = chain
        self.job = chain.problem.job
        self.cluster = chain.problem.cluster
        self.devices = self.cluster.device_names
        self.stages = range(max_stages)
        self.tick_s = horizon_s / (OBJECTIVE_TICKS * FINE)
        self.horizon = (OBJECTIVE_TICKS + 1) * FINE
        self.model = cp_model.CpModel()
        self.tensors: tuple[CutTensor, ...] = cut_tensors(chain.problem.graph)
        self.layers = ChainCuts(self.model, chain.length, self.tensors, max_stages, chain.cuts)
        self.active = self.layers.active
        sets = DeviceSets(self.model, self.cluster, self.active, replication=self.job.replication)
        if self.job.has_pipelines:
            sets.equalise(self.active)
        self.on, self.at_least = sets.on, sets.at_least
        self.interchangeable = interchangeable_devices(self.cluster) if break_symmetry else []
        sets.order(self.interchangeable)
        self._literals: dict[tuple[object, ...], cp_model.IntVar] = {}

    # --- literals for constraints ------------------------------------------------------------

    def holds(self, j: int, layer: str | int) -> Literal:
        """Return literal that stage j has a layer."""
        position = self.position(layer)
        done, before = (self.layers.done_by(x, position) for x in (j, j - 1))
        if j == 0:
            return done
        return self._once(("holds", j, position), lambda: self.all_of([done, ~before]))

    def holds_any(self, j: int, layers: Sequence[str | int]) -> Literal:
        """Return literal that stage j has one of some layers."""
        positions = tuple(self.position(layer) for layer in layers)
        return self._once(
            ("holds any", j, positions), lambda: self.any_of([self.holds(j, x) for x in positions])
        )

    def uses(self, j: int, device: str) -> Literal:
        """Return literal that a device holds stage j."""
        return self.on[j, self.number(device)]

    def is_used(self, device: str) -> Literal:
        """Return literal that a device holds any stage."""
        number = self.number(device)
        return self._once(
            ("is used", number), lambda: self.any_of([self.on[j, number] for j in self.stages])
        )

    def runs_on(self, layer: str | int, device: str) -> Literal:
        """Return literal that a device is one of those that hold a layer."""
        position, number = self.position(layer), self.number(device)

        def make() -> cp_model.IntVar:
            both = [[self.holds(j, position), self.on[j, number]] for j in self.stages]
            return self.any_of([self.all_of(pair) for pair in both])

        return self._once(("runs on", position, number), make)

    def same_stage(self, first: str | int, second: str | int) -> Literal:
        """Return literal that two layers are in one stage."""
        a, b = sorted((self.position(first), self.position(second)))

        def make() -> cp_model.IntVar:
            both = [[self.holds(j, a), self.holds(j, b)] for j in self.stages]
            return self.any_of([self.all_of(pair) for pair in both])

        return self._once(("same stage", a, b), make)

    def stage_of(self, layer: str | int) -> Expression:
        """Return the number of a layer's stage, a linear expression."""
        position = self.position(layer)
        return sum(1 - self.layers.done_by(j, position) for j in self.stages[:-1])

    def all_of(self, literals: Sequence[Literal]) -> cp_model.IntVar:
        """Return a literal that is true exactly if all are."""
        result = self.model.new_bool_var("")
        for literal in literals:
            self.model.add_implication(result, literal)
        self.model.add_bool_or([result, *(~literal for literal in literals)])
        return result

    def any_of(self, literals: Sequence[Literal]) -> cp_model.IntVar:
        """Return a literal that is true exactly if one of them is."""
        result = self.model.new_bool_var("")
        for literal in literals:
            self.model.add_implication(literal, result)
        self.model.add_bool_or([~result, *literals])
        return result

    def position(self, layer: str | int) -> int:
        """Return the place of a layer in the file's order.

        Raises:
            PipeplanError: if the graph has no such layer.
        """
        if isinstance(layer, int) and 0 <= layer < self.chain.length:
            return layer
        if layer not in self._positions:
            raise PipeplanError(
                f"layer {shorten(layer)} is not in layer graph {self.chain.problem.graph.name!r} "
                f"of {self.chain.length} layers, {self.chain.names[0]!r} to "
                f"{self.chain.names[-1]!r}; give a name or a position from 0"
            )
        return self._positions[layer]

    def number(self, device: str) -> int:
        """Return the place of a device in the cluster.

        Raises:
            PipeplanError: if the cluster has no such device.
        """
        if device not in self.cluster.numbers:
            raise PipeplanError(
                f"device {shorten(device)} is not in the cluster; it has {', '.join(self.devices)}"
            )
        return self.cluster.numbers[device]

    @cached_property
    def _positions(self) -> dict[str | int, int]:
        return {name: index for index, name in enumerate(self.chain.names)}

    def _once(
        self, key: tuple[object, ...], make: Callable[[], cp_model.IntVar]
    ) -> cp_model.IntVar:
        if key not in self._literals:
            self._literals[key] = make()
        return self._literals[key]

    def has(self, stages: Stages) -> bool:
        """Return whether these stages can be decided.

        They are intervals of the file's order, one a device, and no more than the model has.
        """
        devices = [device for stage in stages for device in stage.devices]
        if len(set(devices)) < len(devices) or len(stages) > len(self.stages):
            return False
        layers, _ = self.places(stages)
        return [layer for held in layers for layer in held] == list(range(self.chain.length))

    def values_of(self, stages: Stages) -> Iterator[tuple[cp_model.IntVar, int]]:
        """Yield the decisions that make these stages on these devices, with their values.

        The stages have to be among what is decided, see :meth:`has`.
        """
        layers, held = self.places(stages)
        yield from self.layers.hints(layers)
        for place, literal in self.on.items():
            yield literal, int(place in held)

    def places(self, stages: Stages) -> tuple[LayersByStage, set[tuple[int, int]]]:
        """Return layers by stage, and pairs of stage and device, like devices in order."""
        held: dict[str, int] = {}
        for j, stage in enumerate(stages):
            held.update(dict.fromkeys(stage.devices, j))
        for group in self.interchangeable:
            places = sorted(held.pop(device) for device in group if device in held)
            held.update(zip(group, places, strict=False))
        layers = [
            range(stage.begin, stage.end)
            if isinstance(stage, StageChoice)
            else sorted(self.position(layer) for layer in stage.layers)
            for stage in stages
        ]
        return layers, {(j, self.number(device)) for device, j in held.items()}

    # --- what the parts of the model are built with ------------------------------------------

    def holders(self, j: int, type_number: int | None = None) -> list[cp_model.IntVar]:
        """Return literals of the devices, all or of one type, to hold stage j."""
        return [
            self.on[j, d]
            for d, kind in enumerate(self.chain.kinds)
            if type_number is None or kind == type_number
        ]

    def is_replicated(self, j: int) -> list[cp_model.IntVar]:
        """Return the literal that stage j has several replicas; no literal if it never can."""
        return [self.at_least[j, 2]] if (j, 2) in self.at_least else []

    def time(self, name: str = "") -> cp_model.IntVar:
        """Return a duration in ticks."""
        return self.model.new_int_var(0, self.horizon, name)

    def ticks(self, seconds: FloatArray) -> list[int]:
        """Return durations in ticks, rounded down."""
        return [int(x) for x in np.minimum(np.floor(seconds / self.tick_s), self.horizon)]

    def ticks_up(self, seconds: FloatArray) -> list[int]:
        """Return durations in ticks, rounded up: those that are subtracted in a bound."""
        return [int(x) for x in np.minimum(np.ceil(seconds / self.tick_s), self.horizon)]

    def sums(self, per_layer: Sequence[int]) -> list[Expression]:
        """Return the sum of a figure over the layers of each stage."""
        at = [self.layers.before(per_layer, j) for j in range(len(self.stages) + 1)]
        return [at[j + 1] - at[j] for j in self.stages]
