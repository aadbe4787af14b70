"""Shared memory, writes in place and randomness of values in an exported graph."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import PipeplanError
from planner.tracing.torch_private import (
    HigherOrderOperator,
    OpOverload,
    schema_arguments,
    schema_name,
    storage_key,
    tree_leaves,
)


@dataclass(frozen=True)
class ExportedStep:
    """The graph of one forward with its loss.

    Attributes:
        module: an ``fx.GraphModule``; ``get_attr`` nodes hold parameters and buffers.
        names: the model's own name (FQN) of each ``get_attr`` target; tied ones share a name.
        notes: what the step leaves out although it changes no gradient.
    """

    module: fx.GraphModule
    names: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The nodes in executable order."""
        return self.module.graph

    def name_of(self, node: fx.Node) -> str:
        """Return the model's own name of what a ``get_attr`` node holds."""
        return self.names.get(str(node.target), str(node.target))

    def attribute(self, node: fx.Node) -> object:
        """Return the parameter, buffer or constant of a ``get_attr`` node."""
        return attribute_of(self.module, str(node.target))


def attribute_of(owner: Any, path: str) -> object:
    """Return the attribute of a dotted path such as ``h.0.weight``."""
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


# --- operators and values -------------------------------------------------------------------------


def operator_name(node: fx.Node) -> str:
    """Return an operator's name without namespace and overload, such as ``linear``."""
    if isinstance(node.target, OpOverload):
        return schema_name(node.target).partition("::")[2]
    return str(node.target)


def is_check(node: fx.Node) -> bool:
    """Return whether an operation checks a value and makes none."""
    return operator_name(node) == "_assert_tensor_metadata"


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema, defaults included."""
    assert isinstance(node.target, OpOverload)
    arguments = schema_arguments(node.target)
    given = {argument.name: argument.default_value for argument in arguments}
    given.update(zip((argument.name for argument in arguments), node.args, strict=False))
    return {**given, **node.kwargs}


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a tensor; of anything else the empty one."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a tensor; of anything else 0."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


# With nothing to drop these return their argument itself, but a copy while they are exported.
_MAY_RETURN_ARGUMENT = frozenset(
    f"aten::{name}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


def memory_of(graph: fx.Graph) -> Mapping[fx.Node, int]:
    """Return a number for each tensor; equal numbers may share memory."""
    memory: dict[fx.Node, int] = {}
    same: dict[int, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        storage = storage_key(value)
        is_operator = isinstance(node.target, OpOverload)
        if is_operator and schema_name(node.target) in _MAY_RETURN_ARGUMENT:
            same[storage] = memory[node.all_input_nodes[0]]
        memory[node] = same.get(storage, storage)
    return memory


# --- randomness -----------------------------------------------------------------------------------


def is_random(node: fx.Node) -> bool:
    """Return whether running the operation again may give another result."""
    if isinstance(node.target, HigherOrderOperator):
        graphs = _graphs(node)
        return not graphs or any(is_random(inner) for graph in graphs for inner in graph.nodes)
    if not isinstance(node.target, OpOverload):
        return False
    given = arguments_of(node)
    is_dropout = schema_name(node.target) in _MAY_RETURN_ARGUMENT
    rate = given.get("p") if is_dropout else given.get("dropout_p", given.get("dropout"))
    drops_nothing = rate == 0 or (rate is not None and given.get("train") is False)
    return torch.Tag.nondeterministic_seeded in node.target.tags and not drops_nothing


def _graphs(node: fx.Node) -> list[fx.Graph]:
    """Return the graphs that a higher-order operator runs."""
    owner = node.graph.owning_module
    named = [n for n in node.all_input_nodes if n.op == "get_attr"]
    modules = [attribute_of(owner, str(n.target)) for n in named]
    return [module.graph for module in modules if isinstance(module, fx.GraphModule)]


# --- writes ---------------------------------------------------------------------------------------

# These write their running statistics if the argument named here is true; their schemas do not say.
_STATISTICS = ("running_mean", "running_var")
_WRITES_STATISTICS_IF = {"aten::batch_norm": "training", "aten::instance_norm": "use_input_stats"}


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the values that an operation writes into; empty if it changes no argument.

    A higher-order operator writes what its graphs write into; one with unknown graphs may write
    into every argument.
    """
    if isinstance(node.target, HigherOrderOperator):
        values: Any = list(_written_inside(node))
    elif isinstance(node.target, OpOverload):
        given, arguments = arguments_of(node), schema_arguments(node.target)
        names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        if given.get(_WRITES_STATISTICS_IF.get(schema_name(node.target), "")):
            names.update(_STATISTICS)
        values = [value for name, value in given.items() if name in names]
    else:
        return []
    return [value for value in tree_leaves(values) if isinstance(value, fx.Node)]


def _written_inside(node: fx.Node) -> Iterator[Any]:
    arguments, graphs = tree_leaves([node.args, node.kwargs]), _graphs(node)
    if not graphs:
        yield from arguments
    for graph in graphs:
        memory = memory_of(graph)
        written = {memory.get(value) for inner in graph.nodes for value in written_by(inner)}
        # The graph's operands come last.
        entrances = reversed(graph.find_nodes(op="placeholder"))
        for entrance, operand in zip(entrances, reversed(arguments), strict=False):
            if memory.get(entrance) in written:
                yield operand


def returns_what_it_wrote(node: fx.Node) -> bool:
    """Return whether an operation such as ``aten::mul_`` returns the only argument it changes."""
    return operator_name(node).endswith("_") and len(written_by(node)) == 1


def is_noted_normalisation(node: fx.Node) -> bool:
    """A normalisation that writes running statistics, which are buffers of the model."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    written = written_by(node)
    is_normalisation = schema_name(node.target) in _WRITES_STATISTICS_IF
    return is_normalisation and bool(written) and all(n.op == "get_attr" for n in written)


def is_counter(node: fx.Node) -> bool:
    """``buffer.add_(1)`` of an integer buffer whose value nothing else uses."""
    if not _adds_number(node):
        return False
    buffer: Any = node.args[0]
    value = buffer.meta.get("val")
    if buffer.op != "get_attr" or not isinstance(value, Tensor) or value.is_floating_point():
        return False
    return all(_adds_number(user) for user in buffer.users)


def _adds_number(node: fx.Node) -> bool:
    is_add = node.target is torch.ops.aten.add_.Tensor and len(node.args) == 2
    return is_add and isinstance(node.args[1], int) and not node.users


def buffers_written(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield operations that write a buffer whose value depends on the microbatches before.

    With each comes the node of the buffer. Running statistics and counters are left out: their
    changes may be noted and applied later.
    """
    for node in nodes:
        for value in written_by(node):
            is_noted = is_noted_normalisation(node) or is_counter(node)
            if value.op == "get_attr" and not is_noted:
                yield node, value


def require_no_writes(exported: ExportedStep) -> None:
    """Refuse a step that writes buffers, such as running statistics, at several lengths.

    Raises:
        PipeplanError: naming a buffer.
    """
    for node in exported.graph.nodes:
        for value in written_by(node):
            if value.op == "get_attr":
                raise PipeplanError(
                    f"lengths: the model writes buffer {exported.name_of(value)!r} in its "
                    "forward, which microbatches of several lengths cannot share yet; remove "
                    "lengths from the job and plan again"
                )
