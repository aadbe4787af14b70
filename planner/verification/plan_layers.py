"""The layers, tensors and parameters of each stage of a plan, and who shares them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property

from planner.model.graph_record import Boundary, Layer, Parameter
from planner.plan.plan import Plan


class PlanLayers:
    """The layers of a plan by stage, each with the figures of its stage's devices.

    Args:
        plan: of a form that holds: every layer in exactly one stage, no edge backwards.

    Attributes:
        plan: the same.
        graph: with the figures of single devices.
        graphs: of each stage, with those of its groups of devices.
        stage_of: stages by layer.
        rerun: layers that run again in their backward.
        made, used: tensors by the layer that makes them and by those that use them.
        parameters: by name.
        holders: stages that hold a parameter, by its name.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.graph = plan.model.graph
        self.graphs = [
            self.graph.on_types.get(plan.cluster.type_of(stage.devices[0]), self.graph)
            for stage in plan.stages
        ]
        self.stage_of = {name: stage.index for stage in plan.stages for name in stage.layers}
        self.rerun = {name for stage in plan.stages for name in stage.recompute}
        self.made: defaultdict[str, list[Boundary]] = defaultdict(list)
        self.used: defaultdict[str, list[Boundary]] = defaultdict(list)
        for graph in {id(graph): graph for graph in self.graphs}.values():
            own = {name for name, stage in self.stage_of.items() if self.graphs[stage] is graph}
            for tensor in graph.boundaries:
                if tensor.producer in own:
                    self.made[tensor.producer].append(tensor)
                for user in tensor.users:
                    if user in own:
                        self.used[user].append(tensor)
        # Stages that share a parameter have it on devices alike.
        sizes = [{row.name: row for row in graph.parameters} for graph in self.graphs]
        self.parameters = {
            name: sizes[self.stage_of[layer.name]][name]
            for layer in self.graph.layers
            for name in layer.parameters
        }
        self.holders: defaultdict[str, set[int]] = defaultdict(set)
        for layer in self.graph.layers:
            for name in layer.parameters:
                self.holders[name].add(self.stage_of[layer.name])

    def layers(self, stage: int) -> list[Layer]:
        """Return a stage's layers in the order of the layer graph."""
        rows = self.graphs[stage].layers
        return [row for row in rows if self.stage_of[row.name] == stage]

    def held(self, layers: Iterable[Layer]) -> list[Parameter]:
        """Return the parameters of layers, each once."""
        names = dict.fromkeys(name for layer in layers for name in layer.parameters)
        return [self.parameters[name] for name in names]

    def in_parts(self, stage: int) -> dict[str, list[Parameter]]:
        """Return the parameters, by layer, of which each replica of a stage has a part.

        They are trained, and no other layer uses them.
        """
        if not self.plan.job.shards_parameters or len(self.plan.stages[stage].devices) == 1:
            return {}
        found = {}
        for layer in self.layers(stage):
            rows = [self.parameters[n] for n in self.divided if n in layer.parameters]
            if any(row.bytes for row in rows):
                found[layer.name] = rows
        return found

    @cached_property
    def divided(self) -> set[str]:
        """Names of the parameters whose weights and gradients replicas divide, if there are any."""
        if not self.plan.job.shards_parameters:
            return set()
        used = Counter(name for row in self.graph.layers for name in set(row.parameters))
        return {n for n, count in used.items() if count == 1 and self.parameters[n].trainable}

    def in_turn(self, stages: Iterable[int]) -> bool:
        """Return whether replicas of each of several stages reduce a gradient before these do."""
        counts = [len(self.plan.stages[stage].devices) for stage in stages]
        return self.plan.runtime.tied == "in_turn" and len(counts) > 1 and len(set(counts)) == 1

    def devices_of(self, stages: Iterable[int]) -> set[str]:
        """Return the devices of several stages."""
        return {device for index in stages for device in self.plan.stages[index].devices}

    @cached_property
    def sharers(self) -> dict[str, int]:
        """How many devices share the optimizer's state of each parameter; none: nobody does."""
        if not self.plan.job.shards_state:
            return {}
        return {
            name: len(self.devices_of([min(stages)] if self.in_turn(stages) else stages))
            for name, stages in self.holders.items()
        }

    def crossing(self, cut: int, stage: int) -> list[Boundary]:
        """Tensors made before a cut and used behind it, with the bytes that a stage has of them."""
        return [
            tensor
            for tensor in self.graphs[stage].boundaries
            if self.stage_of[tensor.producer] < cut
            and any(self.stage_of[user] >= cut for user in tensor.users)
        ]

    def keeper(self, tensor: Boundary) -> int | None:
        """The stage that keeps a tensor in the stash of a layer that does not run again."""
        if tensor.saved_by is None or tensor.saved_by in self.rerun:
            return None
        return self.stage_of[tensor.saved_by]
