"""The graph of a piece of a stage, and the parameters and buffers that its operations read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor, fx, nn

from executor.split.attention import CORE, CoreMark
from planner.tracing.export import ExportedStep
from planner.tracing.torch_private import tree_map_only

Filled = Callable[[Tensor], Tensor]
"""Gives a parameter or buffer that is held in place of the model's own."""


class HeldAttributes:
    """The parameters and buffers of one stage, held under the model's own names.

    Args:
        exported: the whole training step.
        filled: what is held in place of the model's own tensors; None: these.
    """

    def __init__(self, exported: ExportedStep, filled: Filled | None = None) -> None:
        self.exported = exported
        self.filled = filled
        self.module = nn.Module()
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}

    def name_of(self, node: fx.Node) -> str:
        """The model's own name (FQN) of a ``get_attr`` node."""
        target = str(node.target)
        return self.exported.names.get(target, target)

    def hold(self, node: fx.Node) -> str:
        """Hold the tensor of a ``get_attr`` node; its name in the stage."""
        value, name = self.exported.attribute(node), self.name_of(node)
        if name in self.parameters or name in self.buffers:
            return name
        if isinstance(value, Tensor) and self.filled is not None:
            value = self.filled(value)
        path, _, leaf = name.rpartition(".")
        owner = self._submodule(path)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(leaf, value)
            self.parameters[name] = value
        elif isinstance(value, Tensor):
            owner.register_buffer(leaf, value)
            self.buffers[name] = value
        else:
            setattr(owner, leaf, value)
        return name

    def _submodule(self, path: str) -> nn.Module:
        module = self.module
        for part in path.split(".") if path else []:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module


class PieceGraph:
    """The new graph of one piece, built node by node.

    Args:
        root: holds what the operations read of the model.
        static: operations that depend on no input: they are computed wherever needed.
        entering: values that the piece is called with, in order.
        device: of the tensors that operations make.
    """

    def __init__(
        self,
        root: HeldAttributes,
        static: Set[fx.Node],
        entering: Sequence[fx.Node],
        device: torch.device,
    ) -> None:
        self.root = root
        self.static = static
        self.device = device
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        for node in entering:
            self.copies[node] = self.graph.placeholder(node.name)
            self.copies[node].meta = dict(node.meta)

    def build(
        self,
        nodes: Sequence[fx.Node],
        leaving: Sequence[fx.Node],
        marks: Mapping[fx.Node, CoreMark],
    ) -> fx.GraphModule:
        """Copy the operations; the module returns the values ``leaving`` as a tuple.

        Args:
            nodes: the operations, in order.
            leaving: the values that are returned.
            marks: of those that run again in the backward with the core of attention.
        """
        for node in nodes:
            self.copies[node] = self._copy(node)
            if node in marks:
                self.copies[node].meta[CORE] = marks[node]
        self.graph.output(tuple(self._copy_of(node) for node in leaving))
        self.graph.lint()
        return fx.GraphModule(self.root.module, self.graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, self._copy_of)
        copy.args, copy.kwargs = tree_map_only(
            torch.device, lambda _: self.device, (copy.args, copy.kwargs)
        )
        return copy

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            if node.op == "get_attr":
                self.copies[node] = self.graph.get_attr(self.root.hold(node))
                self.copies[node].meta = dict(node.meta)
            elif node in self.static:
                self.copies[node] = self._copy(node)
            else:
                raise AssertionError(f"{node} is used before it arrives")
        return self.copies[node]
