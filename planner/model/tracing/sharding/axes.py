"""Axes of an operation: dimensions of its operands and results that split together.

An axis is a name in einsum notation. ``linear`` has ``...k, nk -> ...n``: splitting ``n`` splits
rows of the weight and columns of the result; splitting ``k`` splits both operands, and the result
becomes a partial sum. A dimension without an axis must be whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import Tensor, fx

from planner.tracing.sharing import arguments_of as arguments_of
from planner.tracing.sharing import operator_name as operator_name
from planner.tracing.sharing import shape_of as shape_of
from planner.tracing.torch_private import OpOverload

DISPATCH, OFFSETS, COMBINE = "dispatch_to_experts", "expert_offsets", "combine_experts"
"""Operations of :mod:`planner.tracing.expert_operations` around the experts' products."""
Dimension = tuple[fx.Node, int]
"""A dimension of a value, counted from the front."""


@dataclass(frozen=True)
class Axis:
    """Dimensions that are split together, each into the same fractions.

    Attributes:
        inputs: dimensions of operands.
        outputs: dimensions of results; none: the result is a partial sum, or, of a loss, complete.
        pieces: of an operation that divides or joins a dimension, which is ``whole``: the others in
            order, with the fraction each is. A rank then has a share of every piece.
        whole: see ``pieces``.
    """

    inputs: tuple[Dimension, ...]
    outputs: tuple[Dimension, ...]
    pieces: tuple[tuple[Dimension | None, Fraction], ...] = ()
    whole: Dimension | None = None


Rule = Callable[[fx.Node], Iterator[Axis]]


def axes_of(node: fx.Node) -> tuple[Axis, ...] | None:
    """Return the axes of an operation; None if there is no rule for it."""
    if not isinstance(node.target, OpOverload):
        return None
    rule = RULES.get(operator_name(node))
    if rule is None and torch.Tag.pointwise in node.target.tags:
        rule = _pointwise
    return None if rule is None else tuple(rule(node))


def results_of(node: fx.Node) -> dict[int, fx.Node]:
    """Return the tensors an operation returns by position, as far as they are used."""
    if isinstance(node.meta.get("val"), Tensor):
        return {0: node}
    parts = (user for user in node.users if user.target is operator.getitem)
    return {int(part.args[1]): part for part in parts}  # type: ignore[arg-type]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [operand for operand in node.all_input_nodes if "val" in operand.meta]


def _first_two(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second = node.args[:2]
    assert isinstance(first, fx.Node)
    assert isinstance(second, fx.Node)
    return first, second


def _aligned(operands: Sequence[fx.Node], out: fx.Node) -> Iterator[Axis]:
    """Yield an axis for each dimension of a result that operands are broadcast to."""
    shape = shape_of(out)
    for dimension, size in enumerate(shape):
        inputs = []
        for operand in dict.fromkeys(operands):
            own = dimension - len(shape) + len(shape_of(operand))
            if own >= 0 and shape_of(operand)[own] == size:
                inputs.append((operand, own))
        yield Axis(tuple(inputs), ((out, dimension),))


def _pointwise(node: fx.Node) -> Iterator[Axis]:
    yield from _aligned(_tensors(node), node)


def _moved(node: fx.Node, order: Sequence[int | None]) -> Iterator[Axis]:
    """Yield axes of a result whose dimensions are those of the operand in another order."""
    operand = _tensors(node)[0]
    for dimension, source in enumerate(order):
        if source is not None:
            yield Axis(((operand, source),), ((node, dimension),))


def _transpose(node: fx.Node) -> Iterator[Axis]:
    order: list[int | None] = list(range(len(shape_of(node))))
    first, second = (node.args[1], node.args[2]) if len(node.args) > 2 else (0, 1)
    if len(order) > 1:
        order[int(first)], order[int(second)] = order[int(second)], order[int(first)]  # type: ignore[arg-type]
    yield from _moved(node, order)


def _permute(node: fx.Node) -> Iterator[Axis]:
    rank = len(shape_of(node))
    yield from _moved(node, [int(d) % rank for d in node.args[1]])  # type: ignore[union-attr, arg-type]


def _view(node: fx.Node) -> Iterator[Axis]:
    """Yield axes of a reshape: within a group of equal size, the outermost dimensions correspond.

    A width of heads * size splits by heads: contiguous features, whole heads.
    """
    operand = _tensors(node)[0]
    before, after = shape_of(operand), shape_of(node)
    for left, right in _equal_groups(before, after):
        outer_left = next((d for d in left if before[d] > 1), None)
        outer_right = next((d for d in right if after[d] > 1), None)
        if outer_left is not None and outer_right is not None:
            yield Axis(((operand, outer_left),), ((node, outer_right),))


def _equal_groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the shortest runs of dimensions of two shapes with equal numbers of elements."""
    left = right = 0
    while left < len(before) and right < len(after):
        end_left, end_right = left + 1, right + 1
        while prod(before[left:end_left]) != prod(after[right:end_right]):
            if prod(before[left:end_left]) < prod(after[right:end_right]):
                end_left += 1
            else:
                end_right += 1
        yield range(left, end_left), range(right, end_right)
        left, right = end_left, end_right


def _without(node: fx.Node, *whole: int) -> Iterator[Axis]:
    """Yield axes of an operation that needs some dimensions of its operand whole."""
    operand = _tensors(node)[0]
    rank = len(shape_of(operand))
    kept = set(range(rank)) - {dimension % rank for dimension in whole}
    for dimension in sorted(kept):
        size = shape_of(operand)[dimension]
        outputs = tuple(
            (result, dimension)
            for result in results_of(node).values()
            if shape_of(result)[dimension] == size
        )
        yield Axis(((operand, dimension),), outputs)


def _along(node: fx.Node) -> Iterator[Axis]:
    """Yield axes of an operation along its argument ``dim``: softmax, sort, the highest."""
    yield from _without(node, int(arguments_of(node)["dim"]))


def _norm(node: fx.Node) -> Iterator[Axis]:
    normalised = len(node.args[1])  # type: ignore[arg-type]
    yield from _without(node, *range(-normalised, 0))


def _linear(node: fx.Node) -> Iterator[Axis]:
    data, weight = _first_two(node)
    last = len(shape_of(data)) - 1
    for dimension in range(last):
        yield Axis(((data, dimension),), ((node, dimension),))
    added = ((bias, 0) for bias in added_after(node))
    yield Axis(((weight, 0), *added), ((node, last),))
    yield Axis(((data, last), (weight, 1)), ())


def _matmul(node: fx.Node) -> Iterator[Axis]:
    left, right = (n for n in node.args[-2:] if isinstance(n, fx.Node))
    if min(len(shape_of(left)), len(shape_of(right))) < 2:
        return
    rank, added = len(shape_of(node)), added_after(node)
    for dimension, size in enumerate(shape_of(node)):
        inputs = []
        skipped = {rank - 2: right, rank - 1: left}.get(dimension)
        for operand in (left, right, *added):
            own = dimension - rank + len(shape_of(operand))
            if operand is not skipped and own >= 0 and shape_of(operand)[own] == size:
                inputs.append((operand, own))
        yield Axis(tuple(inputs), ((node, dimension),))
    if not node.kwargs:  # A factor on the sum would not be on what is added after it.
        yield Axis(((left, len(shape_of(left)) - 1), (right, len(shape_of(right)) - 2)), ())


def _grouped_product(node: fx.Node) -> Iterator[Axis]:
    """Yield axes of rows sorted by group, each multiplied by the matrix of its group."""
    rows, matrices = _first_two(node)
    if (len(shape_of(rows)), len(shape_of(matrices))) == (2, 3):
        yield Axis(((matrices, 2),), ((node, 1),))
        yield Axis(((rows, 1), (matrices, 1)), ())


def _product_of_experts(node: fx.Node) -> Iterator[Axis]:
    """Yield the axes of :func:`_grouped_product`, and that of the experts with their rows."""
    rows, matrices, offsets = node.args
    yield from _grouped_product(node)
    yield Axis(((rows, 0), (matrices, 0), (offsets, 0)), ((node, 0),))  # type: ignore[arg-type]


def _routed(node: fx.Node) -> Iterator[Axis]:
    """Yield the axis of rows by expert, or of the experts: whose they are, the routing says."""
    yield Axis((), ((node, 0),))


def _combined(node: fx.Node) -> Iterator[Axis]:
    """Yield the axis of rows by expert: those of some experts give a partial sum."""
    rows: fx.Node = node.args[0]  # type: ignore[assignment]
    yield Axis(((rows, 0),), ())


def _attention(node: fx.Node) -> Iterator[Axis]:
    """Yield axes of attention: samples, heads (also grouped ones), and features of the values.

    Positions of the queries split too unless the mask is causal, which counts them.
    """
    given = arguments_of(node)
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    rank, is_causal = len(shape_of(node)), given["is_causal"]
    masks = [mask] if isinstance(mask, fx.Node) else []
    for dimension in range(rank - (2 if is_causal else 1)):
        size = shape_of(node)[dimension]
        sides = [query] if dimension == rank - 2 else [query, key, value]
        inputs = [(side, dimension) for side in sides if shape_of(side)[dimension] > 1]
        for side in masks:
            own = dimension - rank + len(shape_of(side))
            if own >= 0 and shape_of(side)[own] == size:
                inputs.append((side, own))
        yield Axis(tuple(dict.fromkeys(inputs)), ((node, dimension),))


def _embedding(node: fx.Node) -> Iterator[Axis]:
    weight, index = _first_two(node)
    for dimension in range(len(shape_of(index))):
        yield Axis(((index, dimension),), ((node, dimension),))
    yield Axis(((weight, 1),), ((node, len(shape_of(index))),))
    given = arguments_of(node)
    if not (given["sparse"] or given["scale_grad_by_freq"]):
        yield Axis(((weight, 0),), ())


def _cross_entropy(node: fx.Node) -> Iterator[Axis]:
    """Yield the axis of classes: each rank has some, and three sums over the group join them."""
    given = arguments_of(node)
    logits, target = given["self"], given["target"]
    has_indices = len(shape_of(target)) == 1 and len(shape_of(logits)) == 2
    if has_indices and given["weight"] is None and given["label_smoothing"] == 0.0:
        yield Axis(((logits, 1),), ())


def _divided(node: fx.Node) -> Iterator[Axis]:
    """Yield axes of chunk and split."""
    given = arguments_of(node)
    operand, dimension = given["self"], int(given["dim"]) % len(shape_of(given["self"]))
    results = results_of(node)
    sizes = [tensor.shape[dimension] for tensor in node.meta["val"]]
    for own in range(len(shape_of(operand))):
        outputs = tuple((result, own) for result in results.values())
        if own != dimension:
            yield Axis(((operand, own),), outputs)
        else:
            pieces = tuple(
                ((results[i], own) if i in results else None, Fraction(size, sum(sizes)))
                for i, size in enumerate(sizes)
            )
            yield Axis(((operand, own),), outputs, pieces, (operand, own))


def _cat(node: fx.Node) -> Iterator[Axis]:
    operands: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    rank = len(shape_of(node))
    joined = int(arguments_of(node)["dim"]) % rank
    for own in range(rank):
        inputs = tuple((operand, own) for operand in dict.fromkeys(operands))
        whole = (node, own)
        if own != joined:
            yield Axis(inputs, (whole,))
        else:
            size = shape_of(node)[own]
            pieces = tuple(((n, own), Fraction(shape_of(n)[own], size)) for n in operands)
            yield Axis(inputs, (whole,), pieces, whole)


def _stack(node: fx.Node) -> Iterator[Axis]:
    operands: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    rank = len(shape_of(node))
    new = int(arguments_of(node)["dim"]) % rank
    for own in range(rank - 1):
        inputs = tuple((operand, own) for operand in dict.fromkeys(operands))
        yield Axis(inputs, ((node, own + (own >= new)),))


def _sum(node: fx.Node) -> Iterator[Axis]:
    """Yield axes of a sum or mean over dimensions; a sum over a split one is partial."""
    given = arguments_of(node)
    operand, rank = given["self"], len(shape_of(given["self"]))
    over = {int(d) % rank for d in given.get("dim") or range(rank)}
    position = 0
    for own in range(rank):
        if own not in over:
            yield Axis(((operand, own),), ((node, position),))
        elif operator_name(node) == "sum":
            yield Axis(((operand, own),), ())
        position += own not in over or given["keepdim"]


def _select(node: fx.Node) -> Iterator[Axis]:
    operand = _tensors(node)[0]
    rank = len(shape_of(operand))
    gone = int(arguments_of(node)["dim"]) % rank
    yield from _moved(node, [own for own in range(rank) if own != gone])


def _slice(node: fx.Node) -> Iterator[Axis]:
    operand = _tensors(node)[0]
    pairs = enumerate(zip(shape_of(operand), shape_of(node), strict=True))
    yield from _moved(node, [own if before == after else None for own, (before, after) in pairs])


def _unsqueeze(node: fx.Node) -> Iterator[Axis]:
    rank = len(shape_of(node))
    new = int(arguments_of(node)["dim"]) % rank
    order = [None if own == new else own - (own > new) for own in range(rank)]
    yield from _moved(node, order)


def _index(node: fx.Node) -> Iterator[Axis]:
    """Yield axes of a selection of rows by one index in the first dimension."""
    operand: fx.Node = node.args[0]  # type: ignore[assignment]
    indices: Sequence[object] = node.args[1]  # type: ignore[assignment]
    first = indices[0] if len(indices) == 1 else None
    if isinstance(first, fx.Node):
        added = len(shape_of(first))
        for own in range(1, len(shape_of(operand))):
            yield Axis(((operand, own),), ((node, own - 1 + added),))
        for own in range(added):
            yield Axis(((first, own),), ((node, own),))


def _scatter(node: fx.Node) -> Iterator[Axis]:
    operands, rank = _tensors(node), len(shape_of(node))
    along = int(arguments_of(node)["dim"]) % rank
    for own in range(rank):
        sizes = {shape_of(operand)[own] for operand in (*operands, node)}
        if own != along and len(sizes) == 1:
            yield Axis(tuple((operand, own) for operand in operands), ((node, own),))


def added_after(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operand that a product adds to its sum: a bias, once and not by every rank."""
    name = operator_name(node)
    if name == "linear":
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    else:
        bias = node.args[0] if name in ("addmm", "baddbmm") else None
    return (bias,) if isinstance(bias, fx.Node) else ()


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "where expand alias clone contiguous detach dropout to _to_copy type_as zeros_like "
            "lift_fresh_copy ones_like empty_like full_like"
        ).split(),
        _pointwise,
    ),
    **dict.fromkeys("view reshape _unsafe_view flatten unflatten squeeze".split(), _view),
    **dict.fromkeys("softmax _softmax log_softmax _log_softmax topk sort cumsum".split(), _along),
    **dict.fromkeys("layer_norm rms_norm".split(), _norm),
    **dict.fromkeys("matmul mm bmm baddbmm addmm".split(), _matmul),
    **dict.fromkeys("_grouped_mm grouped_mm_fallback".split(), _grouped_product),
    **dict.fromkeys("chunk split split_with_sizes".split(), _divided),
    **dict.fromkeys("sum mean".split(), _sum),
    **dict.fromkeys("scatter gather".split(), _scatter),
    "transpose": _transpose,
    "t": _transpose,
    "permute": _permute,
    "grouped_product": _product_of_experts,
    DISPATCH: _routed,
    OFFSETS: _routed,
    COMBINE: _combined,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "cat": _cat,
    "stack": _stack,
    "select": _select,
    "slice": _slice,
    "unsqueeze": _unsqueeze,
    "index": _index,
}
"""Rules by the operator's name; elementwise operators have torch's tag instead."""
