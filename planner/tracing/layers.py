"""Grouping the exported operations into layers.

A layer is a run of consecutive operations of one module: the module whose path first ends in a
number (``h.3``, ``layer2.0``), or else the top-level child. Operations outside any child join the
run before them. Because runs follow the execution order, the layer graph has no cycle.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from planner.tracing.export import ExportedStep

LOSS = "loss"


@dataclass(frozen=True)
class LayerAssignment:
    """Which layer every operation belongs to.

    Attributes:
        names: layers in executable order.
        layer_of: layer of each operation that has one.
        static: operations that depend on no input and no parameter (position tables, masks):
            every stage that needs one computes it itself, so it never crosses a boundary.
    """

    names: tuple[str, ...]
    layer_of: Mapping[fx.Node, str]
    static: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...] = field(default=())

    def crossing_tensors(self) -> list[tuple[fx.Node, str, tuple[str, ...]]]:
        """Values made in one layer and used in later ones: ``(node, producer, users)``."""
        rank = {name: index for index, name in enumerate(self.names)}
        found = []
        for node, layer in self.layer_of.items():
            users = {self.layer_of[user] for user in node.users if user in self.layer_of}
            later = tuple(sorted(users - {layer}, key=rank.__getitem__))
            if later:
                found.append((node, layer, later))
        return found


def assign_layers(exported: ExportedStep) -> LayerAssignment:
    """Assign every operation of the exported step to a layer."""
    static = _static_nodes(exported)
    layer_of: dict[fx.Node, str] = {}
    used: dict[str, int] = {}
    previous_key, layer = None, ""
    for node in exported.graph.nodes:
        if node.op != "call_function" or node in static:
            continue
        if node.target is operator.getitem and node.args[0] in layer_of:
            # The parts of a tuple stay with the operation that makes it.
            layer_of[node] = layer_of[node.args[0]]
            continue
        key = _layer_key(node) or previous_key or ""
        if key != previous_key:
            layer = _unique(key, used)
            previous_key = key
        layer_of[node] = layer
    layer_of = _name_leading_run(layer_of)
    names = tuple(dict.fromkeys(layer_of.values()))
    inputs = tuple(node for node in exported.graph.nodes if node.op == "placeholder")
    return LayerAssignment(names, layer_of, static, inputs)


def _name_leading_run(layer_of: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """Operations before any child have no run to join: they join the first layer that follows."""
    following = next((name for name in layer_of.values() if name), "model")
    return {node: name or following for node, name in layer_of.items()}


def _unique(key: str, used: dict[str, int]) -> str:
    if not key:
        return key
    used[key] = used.get(key, 0) + 1
    return key if used[key] == 1 else f"{key}#{used[key]}"


def _layer_key(node: fx.Node) -> str | None:
    """The layer's name by module path; None for operations of the model's own forward."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    parts = [part.split("@")[0] for part in path.split(".") if part]
    if not parts:
        return LOSS  # Only the loss stands outside the model.
    parts = parts[1:]  # The wrapper's name for the model.
    if not parts:
        return None
    for length, part in enumerate(parts, start=1):
        if part.isdigit():
            return ".".join(parts[:length])
    return parts[0]


def _static_nodes(exported: ExportedStep) -> frozenset[fx.Node]:
    """Operations whose value is the same for every input and every trained parameter."""
    static: set[fx.Node] = set()
    constants: set[fx.Node] = set()
    mutated: list[fx.Node] = []
    for node in exported.graph.nodes:
        if node.op == "get_attr" and not isinstance(exported.attribute(node), nn.Parameter):
            constants.add(node)
        if node.op != "call_function":
            continue
        if _is_random_or_in_place(node):
            mutated += [source for source in node.all_input_nodes if source in static]
        elif all(source in static or source in constants for source in node.all_input_nodes):
            static.add(node)
    return frozenset(static - _related(mutated, static))


def _related(seeds: list[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """All of ``among`` that may share memory with a seed, which is changed in place."""
    related: set[fx.Node] = set()
    while seeds:
        node = seeds.pop()
        if node not in related:
            related.add(node)
            seeds += [n for n in (*node.all_input_nodes, *node.users) if n in among]
    return related


def _is_random_or_in_place(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
