"""Grouping of the exported operations into layers.

A layer is a run of consecutive operations of one call of a module: the module whose path first ends
in a number (``h.3``, ``layer2.0``), or else the outermost one without such modules inside
(``head``, ``transformer.wte`` next to ``transformer.h.3``). Operations outside these join the run
before them. A module that is called again is another layer, ``h.3#2``, with the same parameters.
Because runs follow the execution order, the layer graph has no cycle.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from planner.model.blocks import LOSS
from planner.tracing.export import ExportedStep
from planner.tracing.sharing import is_random, memory_of, written_by
from planner.tracing.torch_private import storage_key, tree_leaves


@dataclass(frozen=True)
class LayerAssignment:
    """The layer of every operation.

    Attributes:
        names: layers in executable order.
        layer_of: layer of each operation that has one.
        static: operations that depend on no input and no parameter (position tables, masks): every
            stage that needs one computes it itself, so it never crosses a boundary.
        inputs: entries of the batch.
    """

    names: tuple[str, ...]
    layer_of: Mapping[fx.Node, str]
    static: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...] = field(default=())

    @property
    def nodes_of(self) -> dict[str, list[fx.Node]]:
        """The operations of each layer, in executable order."""
        found: dict[str, list[fx.Node]] = {name: [] for name in self.names}
        for node, name in self.layer_of.items():
            found[name].append(node)
        return found

    def crossing_tensors(self) -> list[tuple[fx.Node, str, tuple[str, ...]]]:
        """Return values made in one layer and used in later ones: ``(node, producer, users)``."""
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
    static, outer = _static_nodes(exported), _outer_modules(exported)
    layer_of: dict[fx.Node, str] = {}
    calls: Counter[str] = Counter()
    key, layer = ("", ""), ""
    for node in exported.graph.nodes:
        if node.op != "call_function" or node in static:
            continue
        if node.target is operator.getitem and node.args[0] in layer_of:
            # The parts of a tuple stay with the operation that makes it.
            layer_of[node] = layer_of[node.args[0]]
            continue
        if (found := _call(node, outer)) not in (None, key):
            key = found
            calls[key[0]] += 1
            layer = key[0] + (f"#{calls[key[0]]}" if calls[key[0]] > 1 else "")
        layer_of[node] = layer
    # Operations before any layer belong to the first that follows.
    first = next((name for name in layer_of.values() if name), "model")
    layer_of = {node: name or first for node, name in layer_of.items()}
    inputs = tuple(exported.graph.find_nodes(op="placeholder"))
    return LayerAssignment(tuple(dict.fromkeys(layer_of.values())), layer_of, static, inputs)


def _call(node: fx.Node, outer: Set[str]) -> tuple[str, str] | None:
    """Return the layer's module by path, and which of its calls; None for what is around layers."""
    path = _module_path(node)
    if path is None:
        return LOSS, ""
    for length, part in enumerate(path, start=1):
        name = ".".join(path[:length])
        if part.isdigit() or name not in outer:
            # Behind ``@`` torch writes which call of a module it is.
            for key, (own, _) in node.meta["nn_module_stack"].items():
                if own.split("@")[0].partition(".")[2] == name:
                    return name, str(key).partition("@")[2]
            return name, ""
    return None


def _module_path(node: fx.Node) -> list[str] | None:
    """Return the parts of the module's path in the model; None outside it, in the loss."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    parts = [part.split("@")[0] for part in (paths or [""])[-1].split(".") if part]
    return parts[1:] if parts else None  # The first is the wrapper's name for the model.


def _outer_modules(exported: ExportedStep) -> frozenset[str]:
    """Return paths of the modules around numbered ones, each up to its first number."""
    outer: set[str] = set()
    for node in exported.graph.nodes:
        path = _module_path(node) or []
        numbered = next((i for i, part in enumerate(path) if part.isdigit()), 0)
        outer.update(".".join(path[:length]) for length in range(1, numbered + 1))
    return frozenset(outer)


def _static_nodes(exported: ExportedStep) -> frozenset[fx.Node]:
    """Return operations whose value is the same for every input and every trained parameter.

    None of them is random, and nothing writes into their memory or that of a buffer they read: a
    stage computes its copy when it first needs it.
    """
    memory = memory_of(exported.graph)
    # Every constant made in forward is detached in place, which changes no value.
    nodes = [n for n in exported.graph.nodes if n.target is not torch.ops.aten.detach_.default]
    writes = {node: values for node in nodes if (values := written_by(node))}
    written = {memory.get(value) for values in writes.values() for value in values}
    static: set[fx.Node] = set()
    for node in exported.graph.nodes:
        tensors = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        if not written.isdisjoint(map(storage_key, tensors)):
            continue
        if node.op == "get_attr":
            is_static = not isinstance(exported.attribute(node), nn.Parameter)
        else:
            is_static = node.op == "call_function" and not (is_random(node) or node in writes)
        if is_static and static.issuperset(node.all_input_nodes):
            static.add(node)
    return frozenset(node for node in static if node.op == "call_function")
