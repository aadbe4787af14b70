"""Selective recomputation: the core of attention runs again in the backward and keeps no scores.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5:
from query, key and value to their mixture, which are kept, are many bytes and few FLOPs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from torch import fx

from planner.errors import PipeplanError
from planner.tracing.measure import ATTENTION, Measurement, OperationCost
from planner.tracing.operators import MATRIX_PRODUCTS
from planner.tracing.products import is_batched
from planner.tracing.sharing import operator_name

_SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))


def with_attention_again(measured: Measurement) -> Measurement:
    """Return the counts of a step in which every trained core of attention runs again.

    Its forward is added to its input gradient. What only its own operations save is not kept,
    unless it was made before: query, key and value stay, and the mixture where a later operation
    saves it.

    Args:
        measured: counts of the step as it is.

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
    again = {key: measured.saved[key] for key in _made_again(measured, inside)}
    kept = {key: row for key, row in measured.saved.items() if key not in again}
    return replace(
        measured,
        cost={n: _twice(cost) if n in inside else cost for n, cost in measured.cost.items()},
        saved=_inputs(measured, inside) | kept,
        again=again,
    )


def _inputs(measured: Measurement, inside: frozenset[fx.Node]) -> dict[int, tuple[fx.Node, int]]:
    """Return the storages that recomputed operations start from, each with the first of them."""
    makers = _makers(measured)
    found: dict[int, tuple[fx.Node, int]] = {}
    for user in (node for node in measured.storage if node in inside):
        for node in user.all_input_nodes:
            key = measured.storage.get(node)
            if node not in inside and key is not None:
                value = makers[key].meta["val"]
                found.setdefault(key, (user, value.numel() * value.element_size()))
    return found


def _makers(measured: Measurement) -> dict[int, fx.Node]:
    """Return the first operation whose value has each storage."""
    found: dict[int, fx.Node] = {}
    for node, key in measured.storage.items():
        found.setdefault(key, node)
    return found


def _made_again(measured: Measurement, inside: frozenset[fx.Node]) -> Iterator[int]:
    """Yield the storages that only recomputed operations make and save."""
    makers = _makers(measured)
    for key in measured.saved:
        is_inner = key not in makers or makers[key] in inside
        if is_inner and measured.savers[key] <= inside:
            yield key


def _twice(cost: OperationCost) -> OperationCost:
    return replace(
        cost,
        input_gradient_flops=cost.input_gradient_flops + cost.forward_flops,
        input_gradient_traffic_bytes=cost.input_gradient_traffic_bytes + cost.forward_traffic_bytes,
        gradients=cost.gradients + 1,
    )


def attention_cores(nodes: Iterable[fx.Node]) -> Iterator[frozenset[fx.Node]]:
    """Yield the operations of each attention from its scores to the mixture of its values.

    That is a fused one; or what lies between the two batched products before and behind a softmax,
    with both of them.

    Args:
        nodes: operations of a step.
    """
    for node in nodes:
        if node.target is ATTENTION:
            yield frozenset((node,))
        elif node.op == "call_function" and operator_name(node) in _SOFTMAX:
            yield from _unfused(node)


def _unfused(softmax: fx.Node) -> Iterator[frozenset[fx.Node]]:
    _, before = _reached(softmax, lambda node: node.all_input_nodes)
    _, behind = _reached(softmax, lambda node: list(node.users))
    if len(before) != 1 or len(behind) != 1 or not all(map(is_batched, (*before, *behind))):
        return
    (scores,), (mixture,) = before, behind
    made, _ = _reached(scores, lambda node: list(node.users))
    needed, _ = _reached(mixture, lambda node: node.all_input_nodes)
    yield frozenset((scores, mixture, *(made & needed)))


def _reached(
    start: fx.Node, following: Callable[[fx.Node], list[fx.Node]]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the operations on all ways from one up to matrix products, and these products."""
    between: set[fx.Node] = set()
    products: set[fx.Node] = set()
    waiting = deque(following(start))
    while waiting:
        node = waiting.popleft()
        if node.op != "call_function" or node in between:
            continue
        if operator_name(node) in MATRIX_PRODUCTS:
            products.add(node)
        else:
            between.add(node)
            waiting.extend(following(node))
    return between, products
