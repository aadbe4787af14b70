"""Groups of layers that do the same work, so that one of them is measured for all."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.split.stage_module import memory_order
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment
from planner.tracing.torch_private import tree_map_only


def alike(signatures: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    """Layers whose signatures are equal at every size, in the order of the model.

    Args:
        signatures: of each microbatch size, by layer.
    """
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in signatures[0]:
        groups[tuple(rows[name] for rows in signatures)].append(name)
    return [tuple(names) for names in groups.values()]


def signatures_of(
    exported: ExportedStep, layers: LayerAssignment, takes_gradient: Set[str]
) -> dict[str, str]:
    """A digest of every layer's work: equal for layers of equal operations on equal forms.

    Names of parameters and of tensors do not count, those of the batch's entries do: what they may
    hold differs.

    Args:
        exported: the training step.
        layers: of its operations.
        takes_gradient: names of the tensors between layers that take one.
    """
    nodes: dict[str, list[fx.Node]] = defaultdict(list)
    for node, layer in layers.layer_of.items():
        nodes[layer].append(node)
    return {
        name: _Signature(exported, layers, takes_gradient).of(nodes[name]) for name in layers.names
    }


class _Signature:
    """Writes the operations of a layer down, with numbers in place of names."""

    def __init__(
        self, exported: ExportedStep, layers: LayerAssignment, takes_gradient: Set[str]
    ) -> None:
        self.exported = exported
        self.layers = layers
        self.takes_gradient = takes_gradient
        self.lines: list[str] = []
        self.numbers: dict[object, int] = {}

    def of(self, nodes: Sequence[fx.Node]) -> str:
        inside = set(nodes)
        for node in nodes:
            self._operation(node)
            if not inside.issuperset(node.users):
                self.lines.append(f"leaves {self.numbers[node]} {self._form(node)}")
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def _operation(self, node: fx.Node) -> None:
        arguments, keywords = tree_map_only(
            fx.Node, lambda value: f"%{self._number(value)}", (node.args, dict(node.kwargs))
        )
        line = f"{node.target} {arguments} {sorted(keywords.items())}"
        self._write(node, line)

    def _number(self, node: fx.Node) -> int:
        """Return the number of a value that the layer reads, given when it is met first."""
        key = self._identity(node)
        if key not in self.numbers:
            if node in self.layers.static:
                self._operation(node)
            else:
                self._write(key, self._entering(node))
        return self.numbers[key]

    def _identity(self, node: fx.Node) -> object:
        """Tied parameters are one, whatever the names they are read by."""
        if node.op != "get_attr":
            return node
        return self.exported.names.get(str(node.target), str(node.target))

    def _entering(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return f"batch {node.target} {self._form(node)}"
        if node.op == "get_attr":
            value = self.exported.attribute(node)
            trainable = isinstance(value, nn.Parameter) and value.requires_grad
            form = _tensor_form(value) if isinstance(value, Tensor) else repr(value)
            return f"held {form} {trainable}"
        return f"reads {self._form(node)}"

    def _form(self, node: fx.Node) -> str:
        return f"{_tensor_form(node.meta['val'])} {node.name in self.takes_gradient}"

    def _write(self, key: object, line: str) -> None:
        self.numbers[key] = len(self.numbers)
        self.lines.append(f"%{self.numbers[key]} = {line}")


def _tensor_form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {memory_order(value)}"
    return str([_tensor_form(part) for part in value]) if _is_tuple(value) else type(value).__name__


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple | list) and not isinstance(value, torch.Size)
