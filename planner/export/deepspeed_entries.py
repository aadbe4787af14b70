"""What the entries of a sequential list must do that a plan's layers do not say by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile

from planner.artifacts.blocks import block_name
from planner.artifacts.graph_record import Boundary, Layer
from planner.artifacts.plan import Plan
from planner.export.cuts import layers_in_order

MOST_NAMED = 4


def entry_notes(plan: Plan) -> Iterator[str]:
    """Layers that need more than the output of the one before, or may look up something else.

    Args:
        plan: whose layers, in its order of execution, are the entries of a list.
    """
    order = [name for held in layers_in_order(plan) for name in held]
    given = _given(plan)
    taken = [
        _taken(name, before, given[name])
        for before, name in pairwise(order)
        if any(tensor.producer != before for tensor in given[name]) or not given[name]
    ]
    if taken:
        yield (
            f"{_some(taken, '; ')}: an entry of `layers`, as loss_fn, is given only what the one "
            "before it returns, so those before it return tuples to hand on what it needs"
        )
    tables = _tables(plan, order, given)
    if tables:
        yield (
            f"{_some(list(map(repr, tables)), ', ')}: in the plan's graph such a layer is its "
            "module together with the operations that follow it in the model's forward; if the "
            "module looks up something of its own (positions, types of tokens), its entry "
            "adds that to what it is given and returns the sum"
        )


def _given(plan: Plan) -> dict[str, list[Boundary]]:
    """The tensors that each layer uses of others."""
    graph = plan.model.graph
    given: dict[str, list[Boundary]] = {layer.name: [] for layer in graph.layers}
    for tensor in graph.boundaries:
        for user in tensor.users:
            given[user].append(tensor)
    return given


def _taken(name: str, before: str, tensors: Sequence[Boundary]) -> str:
    if not tensors:
        return f"{name!r} takes nothing of {before!r} before it"
    makers = dict.fromkeys(tensor.producer for tensor in tensors if tensor.producer != before)
    beside = "beside" if any(tensor.producer == before for tensor in tensors) else "in place of"
    told = _some([repr(maker) for maker in makers], ", ")
    return f"{name!r} takes what {told} made, {beside} the output of {before!r}"


def _tables(plan: Plan, order: Sequence[str], given: Mapping[str, Sequence[Boundary]]) -> list[str]:
    """Later layers of the embedding that may be tables: a graph does not say what they look up.

    They have weights but multiply nothing, and run more than one operation: a lookup and a sum.
    """
    layers = {layer.name: layer for layer in plan.model.graph.layers}
    before_blocks = list(takewhile(lambda name: block_name(name) is None, order))
    if len(before_blocks) == len(order):
        return []
    return [name for name in before_blocks[1:] if given[name] and _may_be_table(layers[name])]


def _may_be_table(layer: Layer) -> bool:
    forwards = [row for row in layer.work if row.phase == "forward"]
    is_one = bool(forwards) and sum(row.operations for row in forwards) == 1
    return bool(layer.parameters) and not layer.forward_flops and not is_one


def _some(phrases: Sequence[str], between: str) -> str:
    more = f"{between}and {len(phrases) - MOST_NAMED} more" if len(phrases) > MOST_NAMED else ""
    return between.join(phrases[:MOST_NAMED]) + more
