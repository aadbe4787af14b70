"""Selective recomputation: the core of attention runs again in the backward and keeps no scores.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5:
from query, key and value to their mixture, which are kept, are many bytes and few FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from torch import fx

from planner.errors import PipeplanError
from planner.model.figures import Work
from planner.tracing.measure import ATTENTION, MATRIX_PRODUCTS, Measurement, Saved, is_batched
from planner.tracing.sharing import bytes_of, operator_name

_SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))


def with_attention_again(measured: Measurement) -> Measurement:
    """Return the counts of a step in which every trained core of attention runs again.

    Its forward is added to its input gradient. What only its own operations save is not kept,
    unless it was made before: query, key and value stay, and the mixture where a later operation
    saves it.

    Raises:
        PipeplanError: if the step has no trained attention whose core is known.
    """
    cores = [core for core in attention_cores(measured.storage) if core & measured.requires_grad]
    inside = frozenset[fx.Node]().union(*cores)
    if not inside:
        raise PipeplanError(
            "job.recompute_attention: true, but the model has no trained attention whose core is "
            "known, scaled_dot_product_attention or a softmax between two batched products; set it "
            "to false"
        )
    maker: dict[int, fx.Node] = {}
    for node, key in measured.storage.items():
        maker.setdefault(key, node)
    saved, again, inputs = dict[int, Saved](), dict[int, Saved](), dict[int, Saved]()
    for key, row in measured.saved.items():
        is_inner = (key not in maker or maker[key] in inside) and inside.issuperset(row.nodes)
        (again if is_inner else saved)[key] = row
    for user in (node for node in measured.storage if node in inside):
        for node in set(user.all_input_nodes) & measured.storage.keys() - inside:
            key = measured.storage[node]
            inputs.setdefault(key, Saved(bytes_of(maker[key]), [user]))
    work = {n: _twice(rows) if n in inside else rows for n, rows in measured.work.items()}
    return replace(measured, work=work, saved=inputs | saved, again=again)


def _twice(rows: tuple[Work, ...]) -> tuple[Work, ...]:
    """Return an operation's work with its forward also in the backward."""
    forward = next((row for row in rows if row.phase == "forward"), None)
    gradient = next((row for row in rows if row.phase == "input_gradient"), None)
    if forward is None:
        return rows
    figures = ("operations", "flops", "traffic_bytes")
    sums = {name: getattr(forward, name) + getattr(gradient, name, 0) for name in figures}
    again = forward.model_copy(update={"phase": "input_gradient", **sums})
    return (forward, again, *(row for row in rows if row not in (forward, gradient)))


def attention_cores(nodes: Iterable[fx.Node]) -> Iterator[frozenset[fx.Node]]:
    """Yield the operations of each attention from its scores to the mixture of its values.

    That is a fused one; or what lies between the two batched products before and behind a softmax,
    with both of them.
    """
    for node in nodes:
        if node.target is ATTENTION:
            yield frozenset((node,))
        elif node.op == "call_function" and operator_name(node) in _SOFTMAX:
            (_, before), (_, behind) = _reached(node, _operands), _reached(node, _users)
            if len(before) == len(behind) == 1 and all(map(is_batched, before | behind)):
                (scores,), (mixture,) = before, behind
                between = _reached(scores, _users)[0] & _reached(mixture, _operands)[0]
                yield between | {scores, mixture}


_operands, _users = attrgetter("all_input_nodes"), attrgetter("users")


def _reached(
    start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]]
) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """Return the operations on all ways from one up to matrix products, and these products."""
    between, products, ahead = set[fx.Node](), set[fx.Node](), [*following(start)]
    while ahead:
        node = ahead.pop()
        if node.op != "call_function" or node in between:
            continue
        if operator_name(node) in MATRIX_PRODUCTS:
            products.add(node)
        else:
            between.add(node)
            ahead += following(node)
    return frozenset(between), frozenset(products)
