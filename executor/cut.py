"""Cutting the exported training step into stages that keep the model's parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from executor.writes import InPlaceWrites
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses from one stage to the next."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class StageModule:
    """One stage as a module of its own.

    Attributes:
        index: of the stage.
        is_last: whether it returns the loss.
        module: called with the received tensors and then the model inputs; returns the tensors
            for the next stage, or the loss.
        receives, sends: what crosses its boundaries, in order.
        model_inputs: names of the batch's entries it reads.
        parameters: by the model's own names (FQNs).
        written: names of received tensors that its operations may write into.
    """

    index: int
    is_last: bool
    module: fx.GraphModule
    receives: tuple[BoundaryTensor, ...]
    sends: tuple[BoundaryTensor, ...]
    model_inputs: tuple[str, ...]
    parameters: Mapping[str, nn.Parameter]
    written: frozenset[str]


def cut(
    exported: ExportedStep, layers: LayerAssignment, plan: Plan, indices: Sequence[int]
) -> list[StageModule]:
    """Cut out the stages with the given indices.

    A value made at or before a boundary and used after it crosses it; skips are handed on stage
    by stage, so that only neighbours talk. Static operations are computed wherever needed.

    Raises:
        PipeplanError: if something other than a tensor would cross a boundary, or another stage
            would miss what an operation writes in place. All boundaries are checked, so that all
            ranks raise it.
    """
    stage_of = {layer: stage.index for stage in plan.stages for layer in stage.layers}
    cutter = _Cutter(exported, layers, stage_of, len(plan.stages), _gradients(plan))
    return [cutter.stage(index) for index in indices]


def _gradients(plan: Plan) -> dict[str, bool]:
    return {tensor.name: tensor.requires_grad for tensor in plan.model.graph.boundaries}


class _Cutter:
    def __init__(
        self,
        exported: ExportedStep,
        layers: LayerAssignment,
        stage_of: Mapping[str, int],
        count: int,
        requires_grad: Mapping[str, bool],
    ) -> None:
        self.exported = exported
        self.layers = layers
        self.count = count
        self.requires_grad = requires_grad
        self.node_stage = {node: stage_of[layer] for node, layer in layers.layer_of.items()}
        self.crossing = [self._crossing(index) for index in range(count - 1)]
        self.written = InPlaceWrites(exported, self.node_stage, self.crossing).into_received()

    def _crossing(self, index: int) -> list[fx.Node]:
        """Values alive at the boundary after stage ``index``, in graph order."""
        nodes = []
        for node, made in self.node_stage.items():
            used = max((self.node_stage.get(user, -1) for user in node.users), default=-1)
            if made <= index < used:
                if not isinstance(node.meta.get("val"), Tensor):
                    raise PipeplanError(
                        f"{node.name} ({node.target}) is not a tensor and would cross from stage "
                        f"{index} to {index + 1}; move the boundary"
                    )
                nodes.append(node)
        return nodes

    def stage(self, index: int) -> StageModule:
        """Build one stage."""
        is_last = index == self.count - 1
        received = self.crossing[index - 1] if index else []
        sent = [] if is_last else self.crossing[index]
        graph = _StageGraph(self, index, received)
        graph.copy_operations()
        graph.finish(sent)
        return StageModule(
            index=index,
            is_last=is_last,
            module=graph.module(),
            receives=tuple(self._boundary(node) for node in received),
            sends=tuple(self._boundary(node) for node in sent),
            model_inputs=tuple(graph.model_inputs),
            parameters=graph.parameters,
            written=self.written[index],
        )

    def _boundary(self, node: fx.Node) -> BoundaryTensor:
        value = node.meta["val"]
        return BoundaryTensor(
            node.name, tuple(value.shape), value.dtype, self.requires_grad[node.name]
        )


class _StageGraph:
    """The new graph of one stage, built node by node."""

    def __init__(self, cutter: _Cutter, index: int, received: list[fx.Node]) -> None:
        self.cutter = cutter
        self.index = index
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.model_inputs: list[str] = []
        self.root = nn.Module()
        for node in received:
            self.copies[node] = self.graph.placeholder(node.name)
        for node in self._inputs_read():
            self.copies[node] = self.graph.placeholder(node.name)
            self.model_inputs.append(str(node.target))

    def _inputs_read(self) -> list[fx.Node]:
        stage = self.cutter.node_stage
        return [
            node
            for node in self.cutter.layers.inputs
            if any(stage.get(user) == self.index for user in node.users)
        ]

    def copy_operations(self) -> None:
        for node, stage in self.cutter.node_stage.items():
            if stage == self.index:
                self.copies[node] = self.graph.node_copy(node, self._copy_of)

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            if node.op == "get_attr":
                self.copies[node] = self._attribute(node)
            elif node in self.cutter.layers.static:
                self.copies[node] = self.graph.node_copy(node, self._copy_of)
            else:
                raise AssertionError(f"{node} is used in stage {self.index} before it arrives")
        return self.copies[node]

    def _attribute(self, node: fx.Node) -> fx.Node:
        """Hold the tensor under its original name, so that state keeps the model's FQNs."""
        target = str(node.target)
        value = self.cutter.exported.attribute(node)
        name = self.cutter.exported.names.get(target, target)
        owner, _, leaf = name.rpartition(".")
        module = self.root
        for part in owner.split(".") if owner else []:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if isinstance(value, nn.Parameter):
            module.register_parameter(leaf, value)
            self.parameters[name] = value
        elif isinstance(value, Tensor):
            module.register_buffer(leaf, value)
        else:
            setattr(module, leaf, value)
        return self.graph.get_attr(name)

    def finish(self, sent: list[fx.Node]) -> None:
        if self.index == self.cutter.count - 1:
            output = next(n for n in self.cutter.exported.graph.nodes if n.op == "output")
            self.graph.output(self._copy_of(output.all_input_nodes[0]))
        else:
            self.graph.output(tuple(self._copy_of(node) for node in sent))

    def module(self) -> fx.GraphModule:
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)
