"""The operations of a step that are the core of attention that runs again in the backward.

They are those that the trace counts so (:mod:`planner.tracing.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from planner.errors import PipeplanError
from planner.tracing.attention import attention_cores
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharing import is_random, memory_of, written_by

CORE = "attention_core"
"""Key of the :class:`CoreMark` in the ``meta`` of a node."""
Cores = tuple[frozenset[fx.Node], ...]


class CoreMark(NamedTuple):
    """The core that an operation is part of.

    Attributes:
        number: of the core in the step.
        is_random: whether the core draws random numbers.
    """

    number: int
    is_random: bool


def cores_of(exported: ExportedStep) -> Cores:
    """Return the operations of each core of attention in a step, with what checks their values."""
    return tuple(core | _checks(core) for core in attention_cores(exported.graph.nodes))


def _checks(core: frozenset[fx.Node]) -> set[fx.Node]:
    """Return operations that read a core's values and make none, such as those behind a cast."""
    users = {user for node in core for user in node.users if user.op == "call_function"}
    return {node for node in users if not node.users and core.issuperset(node.all_input_nodes)}


def core_marks(
    exported: ExportedStep, layers: LayerAssignment, cores: Cores
) -> dict[fx.Node, CoreMark]:
    """Return the marks of operations that run again with the core that they are part of.

    Args:
        exported: the step that is cut.
        layers: of its operations.
        cores: of the step.

    Raises:
        PipeplanError: naming a layer whose core cannot run as one operation, where its last one
            stands, or not once more.
    """
    nodes = list(exported.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    memory = memory_of(exported.graph)
    found: dict[fx.Node, CoreMark] = {}
    for number, core in enumerate(cores):
        held = sorted(core, key=places.__getitem__)
        names = dict.fromkeys(layers.layer_of.get(node) for node in held)
        reasons = ["it spans several layers"] if len(names) > 1 else []
        reasons += _obstacles(nodes[places[held[0]] :], held, memory)
        if reasons:
            raise PipeplanError(
                f"job.recompute_attention: true, but the attention of layer {next(iter(names))!r} "
                f"cannot run again: {reasons[0]}; set it to false and plan again"
            )
        draws = any(map(is_random, held))
        found |= dict.fromkeys(held, CoreMark(number, draws))
    return found


def _obstacles(
    following: Sequence[fx.Node], core: Sequence[fx.Node], memory: Mapping[fx.Node, int]
) -> Iterator[str]:
    """Yield what keeps a core from running once more, alone.

    Args:
        following: the core's first operation and all behind it, in order.
        core: in order.
        memory: of values; equal numbers may share memory.
    """
    inside = set(core)
    read = {n for node in core for n in node.all_input_nodes} - inside
    written = {memory.get(value) for node in following for value in written_by(node)}
    if any(memory.get(node) in written - {None} for node in read):
        yield "what it reads is written in place"
    between = [n for n in following[: following.index(core[-1])] if n not in inside]
    if any(not inside.isdisjoint(node.all_input_nodes) for node in between):
        yield "what it makes is used before it ends"
    if any(map(is_random, core)) and any(map(is_random, between)):
        yield "others draw random numbers meanwhile"
