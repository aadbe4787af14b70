"""The training step as each member of a tensor-parallel group runs it.

It has the form of an exported step, with layers, so that it is cut into stages like any other. Its
group is the attribute :data:`GROUP`, one for shapes alone; a rank's runner puts its own there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.distributed.expert_rows import Members
from executor.distributed.member_group import (
    MemberShare,
    TensorParallelGroup,
    member_shares,
)
from executor.split.attention import Cores
from planner.errors import PipeplanError
from planner.model.split_record import SplitRecord
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import FakeRunner, like
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharding.local import LocalStep
from planner.tracing.sharding.split import Split, split_step
from planner.tracing.torch_private import FakeTensorMode

GROUP = "tensor_parallel_group"
"""Name of the attribute of a graph's module that holds the group."""


@dataclass(frozen=True)
class MemberStep:
    """A training step as a member of a tensor-parallel group runs it, or a single device.

    Attributes:
        exported: its parameters are the whole ones still, of which :class:`ParameterShares` gives
            a member's.
        layers: of its operations.
        takes_gradient: names of the values that the backward reaches.
        place_of: of each operation, that of the value in the whole step which it makes, a part of
            it or communicates.
        shared: of operations whose results members have shares of by positions, the dimension.
        cores: the operations of each core of attention that runs again in the backward.
    """

    exported: ExportedStep
    layers: LayerAssignment
    takes_gradient: frozenset[str]
    place_of: Mapping[fx.Node, int]
    shared: Mapping[fx.Node, int]
    cores: Cores


def member_step(
    exported: ExportedStep, layers: LayerAssignment, planned: SplitRecord, cores: Cores = ()
) -> MemberStep:
    """Return what each member of a group runs; it is the same for all.

    Args:
        exported: the whole training step.
        layers: of its operations.
        planned: how the plan splits it.
        cores: of attention in the whole step that run again in the backward.

    Raises:
        PipeplanError: if the step does not split as the plan says, or an operation draws random
            numbers of which a share is not known.
    """
    assert planned.degree is not None
    split = split_step(
        exported, layers, planned.degree, sequence=planned.sequence, experts=planned.experts
    )
    _require_planned(split, planned)
    local = LocalStep(exported, split)
    module = _with_group(exported, local.graph, local.group, planned.degree)
    _Shapes(module, exported, planned).find()
    places = {node: place for place, node in enumerate(exported.graph.nodes)}
    core_of = {value: number for number, core in enumerate(cores) for value in core}
    own_cores: dict[int, set[fx.Node]] = {}
    layer_of: dict[fx.Node, str] = {}
    place_of: dict[fx.Node, int] = {}
    static, takes_gradient = set(), set()
    for node in module.graph.nodes:
        value, layer = local.made.get(node, (None, ""))
        if node.op.startswith("call_") and value in layers.static:
            static.add(node)
        elif node.op.startswith("call_"):
            layer_of[node] = layer
        if value is not None:
            place_of[node] = places[value]
        if value in split.gradients:
            takes_gradient.add(node.name)
        if value in core_of:
            own_cores.setdefault(core_of[value], set()).add(node)
    return MemberStep(
        ExportedStep(module, exported.names),
        LayerAssignment(
            layers.names,
            layer_of,
            frozenset(static),
            tuple(module.graph.find_nodes(op="placeholder")),
        ),
        frozenset(takes_gradient),
        place_of,
        _shared(local.made, split),
        tuple(map(frozenset, own_cores.values())),
    )


def _shared(made: Mapping[fx.Node, tuple[fx.Node, str]], split: Split) -> dict[fx.Node, int]:
    """Return the dimension of positions of each operation that makes a contiguous share of them."""
    found = {}
    for node, (value, _) in made.items():
        share = split.positions.get(value)
        local, whole = node.meta.get("val"), value.meta.get("val")
        if share is None or not isinstance(local, Tensor) or not isinstance(whole, Tensor):
            continue
        if len(share.parts) == 1 and local.shape != whole.shape:
            found[node] = share.dimension
    return found


def _with_group(
    exported: ExportedStep, graph: fx.Graph, group: fx.Node, degree: int
) -> fx.GraphModule:
    """Return the graph's module, its group an attribute instead of an input."""
    with graph.inserting_before(group):
        held = graph.create_node("get_attr", GROUP)
    group.replace_all_uses_with(held)
    graph.erase_node(group)
    attributes: dict[str, Any] = {
        str(node.target): exported.attribute(node)
        for node in graph.find_nodes(op="get_attr")
        if node is not held
    }
    attributes[GROUP] = TensorParallelGroup(Members(degree))
    return fx.GraphModule(attributes, graph)


class _Shapes(FakeRunner):
    """Notes the values of a member's graph, as fake tensors, in its nodes' ``meta``."""

    def __init__(self, module: fx.GraphModule, exported: ExportedStep, split: SplitRecord) -> None:
        super().__init__(module)
        self._names, self._shares = exported.names, member_shares(split, 0)

    def find(self) -> None:
        """Run the graph without computing anything."""
        with FakeTensorMode(), torch.no_grad():
            inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
            self.run(*[like(node.meta["val"]) for node in inputs])

    def fake_of(self, target: str, value: Tensor) -> Tensor:
        """Return a parameter or buffer as a fake tensor of the member's shape."""
        share = self._shares.get(self._names.get(target, ""))
        return like(value) if share is None else share.of(like(value))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note its value."""
        value = super().run_node(n)
        n.meta["val"] = value
        return value


def _require_planned(split: Split, planned: SplitRecord) -> None:
    own, wanted = split.parameters, planned.parameters
    different = {name for name in own.keys() | wanted.keys() if own.get(name) != wanted.get(name)}
    different |= split.summed.symmetric_difference(planned.summed_parameters)
    if different:
        raise PipeplanError(
            f"the model splits differently over {planned.degree} devices than the plan says, first "
            f"in {', '.join(sorted(different)[:3])}; trace the model with this version and plan "
            "again"
        )


class ParameterShares:
    """Gives a member its shares of the model's parameters, each once: a tied one stays one.

    Args:
        exported: whose parameters they are.
        shares: of the member, by the parameters' names.
    """

    def __init__(self, exported: ExportedStep, shares: Mapping[str, MemberShare]) -> None:
        self._shares = {
            id(exported.attribute(node)): shares[name]
            for node in exported.graph.find_nodes(op="get_attr")
            if (name := exported.names.get(str(node.target), "")) in shares
        }
        self._made: dict[int, nn.Parameter] = {}

    def __call__(self, value: Tensor) -> Tensor:
        """Return what is held in place of a parameter or buffer: a share, or the value itself."""
        if id(value) not in self._shares:
            return value
        if id(value) not in self._made:
            own = self._shares[id(value)].of(value.detach())
            self._made[id(value)] = nn.Parameter(own, requires_grad=value.requires_grad)
        return self._made[id(value)]
