"""How the dimensions of an operation's operands and results correspond, in einsum notation.

``linear`` is ``...k,nk,n->...n``. A split of ``n`` splits the weight's rows and the result's
columns; a split of ``k`` splits both factors, and the result is a partial sum. ``_`` is a dimension
that must be whole; ``+`` one that is divided into pieces or joined from them. Terms are aligned
with the last dimensions, and the last term holds for all further values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain, repeat
from math import prod
from string import ascii_lowercase, ascii_uppercase

import torch
from torch import Tensor, fx

from planner.tracing.sharing import arguments_of, operator_name, shape_of
from planner.tracing.torch_private import OpOverload, tree_leaves

DISPATCH, OFFSETS, COMBINE = "dispatch_to_experts", "expert_offsets", "combine_experts"
ROUTING = frozenset((DISPATCH, OFFSETS, COMBINE))
"""Operations of :mod:`planner.tracing.expert_operations` around the experts' products."""
Dimension = tuple[fx.Node, int]
"""A dimension of a value, counted from the front."""


@dataclass(frozen=True)
class Axis:
    """Dimensions that are split together; those of size 1 are left out.

    Attributes:
        inputs: dimensions of operands.
        outputs: dimensions of results; none: the result is a partial sum, or a complete loss.
        whole: the dimension that an operation divides or joins, if it does.
        pieces: its pieces in order, with their fractions; None for a result that nothing reads.
    """

    inputs: tuple[Dimension, ...]
    outputs: tuple[Dimension, ...]
    whole: Dimension | None = None
    pieces: tuple[tuple[Dimension | None, Fraction], ...] = ()

    @property
    def members(self) -> tuple[Dimension, ...]:
        """All of its dimensions."""
        return self.inputs + self.outputs


def axes_of(node: fx.Node, among: Container[fx.Node] | None = None) -> tuple[Axis, ...] | None:
    """Return the axes of an operation among some values; None if it has no rule."""
    if not isinstance(node.target, OpOverload):
        return None
    rule = RULES.get(operator_name(node))
    if rule is None and torch.Tag.pointwise not in node.target.tags:
        return None
    return tuple(_axes(node, rule(node) if callable(rule) else rule or "...", among))


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the values that an operation reads, in the order of its schema."""
    leaves = tree_leaves(list(arguments_of(node).values()))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def results_of(node: fx.Node) -> dict[int, fx.Node]:
    """Return the tensors that an operation returns, by position, as far as they are used."""
    if isinstance(node.meta.get("val"), Tensor):
        return {0: node}
    parts = (user for user in node.users if user.target is operator.getitem)
    return {int(part.args[1]): part for part in parts}  # type: ignore[arg-type]


def added_after(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the bias of a product, which is added to its sum once and not by every rank."""
    name = operator_name(node)
    if name not in ("linear", "addmm", "baddbmm"):
        return ()
    bias = arguments_of(node)["bias" if name == "linear" else "self"]
    return (bias,) if isinstance(bias, fx.Node) else ()


_Labelled = list[tuple[str, Dimension | None, int]]
"""Label, dimension and size of dimensions of values."""


def _axes(node: fx.Node, notation: str, among: Container[fx.Node] | None) -> Iterator[Axis]:
    used, value = results_of(node), node.meta["val"]
    results = [value] if isinstance(value, Tensor) else value
    left, _, right = notation.partition("->")
    inputs = _labelled(((operand, shape_of(operand)) for operand in operands_of(node)), left)
    outputs = _labelled(((used.get(i), x.shape) for i, x in enumerate(results)), right or left)
    rows = (*inputs, *outputs)
    # Of an operand that is read twice, a dimension may be needed whole in one place.
    whole = {own for label, own, _ in rows if label == "_" and own}
    needed = {label for label, own, _ in rows if own in whole}
    for label in dict.fromkeys(label for label, _, _ in rows if label not in needed | {"_"}):
        read, made = ([row for row in rows if row[0] == label] for rows in (inputs, outputs))
        axis = Axis(_split(read, among), _split(made, among))
        if label == "+":
            ((_, joined, total),), parts = (read, made) if len(results) > 1 else (made, read)
            pieces = tuple((piece, Fraction(size, total)) for _, piece, size in parts)
            axis = replace(axis, whole=joined, pieces=pieces)
        yield axis


def _split(rows: _Labelled, among: Container[fx.Node] | None) -> tuple[Dimension, ...]:
    found = dict.fromkeys(found for _, found, size in rows if found and size > 1)
    return tuple(member for member in found if among is None or member[0] in among)


def _labelled(values: Iterable[tuple[fx.Node | None, Sequence[int]]], notation: str) -> _Labelled:
    terms = notation.split(",")
    return [
        (label, (value, own) if value else None, size)
        for (value, shape), term in zip(values, chain(terms, repeat(terms[-1])), strict=False)
        for own, (label, size) in enumerate(zip(_expanded(term, len(shape)), shape, strict=True))
    ]


def _expanded(term: str, rank: int) -> str:
    """Return a term with as many labels as dimensions, aligned with the last of them."""
    before, dots, after = term.partition("...")
    count = max(0, rank - len(before) - len(after)) if dots else 0
    labels = "_" * rank + before + ascii_uppercase[26 - count :] + after
    return labels[len(labels) - rank :]


# --- rules that depend on ranks, shapes or settings -----------------------------------------------


def _letters(node: fx.Node) -> list[str]:
    """Return a letter for each dimension of an operation's first operand."""
    return list(ascii_lowercase[: len(shape_of(operands_of(node)[0]))])


def _marked(node: fx.Node, mark: str) -> str:
    """Mark the argument ``dim``, of softmax, sort, chunk or cat."""
    letters = _letters(node)
    if letters:
        letters[arguments_of(node)["dim"]] = mark
    return "".join(letters)


def _reordered(node: fx.Node) -> str:
    letters, given = _letters(node), arguments_of(node)
    order = [letters[d] for d in given.get("dims", ())] or letters.copy()
    if "dims" not in given and len(order) > 1:
        first, second = given.get("dim0", 0), given.get("dim1", 1)
        order[first], order[second] = order[second], order[first]
    return f"{''.join(letters)}->{''.join(order)}"


def _viewed(node: fx.Node) -> str:
    """Label the outermost dimensions of runs of equal size: features are split by whole heads."""
    before, after = shape_of(operands_of(node)[0]), shape_of(node)
    left, right = ["_"] * len(before), ["_"] * len(after)
    for letter, runs in zip(ascii_lowercase, _equal_runs(before, after), strict=False):
        for labels, run, shape in zip((left, right), runs, (before, after), strict=True):
            labels[next((d for d in run if shape[d] > 1), run[0])] = letter
    return f"{''.join(left)}->{''.join(right)}"


def _equal_runs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the shortest runs of dimensions of two shapes with equal numbers of elements."""
    left = right = 0
    while left < len(before) and right < len(after):
        ends = [left + 1, right + 1]
        while (own := prod(before[left : ends[0]])) != (other := prod(after[right : ends[1]])):
            ends[own > other] += 1
        yield range(left, ends[0]), range(right, ends[1])
        left, right = ends


def _normalised(node: fx.Node) -> str:
    count = len(arguments_of(node)["normalized_shape"])
    whole = "".join(_letters(node)[:-count]) + "_" * count
    return f"{whole},_->{whole}"


def _inserted(node: fx.Node) -> str:
    letters, new = _letters(node), arguments_of(node)["dim"] % len(shape_of(node))
    return f"{''.join(letters)}->{''.join((*letters[:new], '_', *letters[new:]))}"


def _reduced(node: fx.Node, is_sum: bool) -> str:
    """Label a reduction; a sum over a split dimension is a partial one."""
    given, letters = arguments_of(node), _letters(node)
    over = {letters[d] for d in given.get("dim") or range(len(letters))}
    gone = "_" if given.get("keepdim") else ""
    kept = "".join(gone if letter in over else letter for letter in letters)
    read = ("_" if letter in over and not is_sum else letter for letter in letters)
    return f"{''.join(read)}->{kept}"


def _selected(node: fx.Node) -> str:
    marked = _marked(node, "_")
    return f"{marked}->{marked.replace('_', '')}"


def _where_equal(node: fx.Node, letters: Callable[[fx.Node], Iterable[str]]) -> str:
    """Label the dimensions in which all values have the same size."""
    shapes = [shape_of(value) for value in (*operands_of(node), node)]
    sizes = zip(letters(node), *shapes, strict=True)
    return "".join("_" if len({*found}) > 1 else letter for letter, *found in sizes)


def _indexed(node: fx.Node) -> str:
    """Label a selection of rows by one index in the first dimension."""
    indices = arguments_of(node)["indices"]
    if len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return "_"
    kept, added = "".join(_letters(node)[1:]), ascii_uppercase[: len(shape_of(indices[0]))]
    return f"_{kept},{added}->{added}{kept}"


def _product(node: fx.Node, notation: str) -> str:
    factors = [value for value in operands_of(node) if value not in added_after(node)]
    if min(len(shape_of(value)) for value in factors) < 2:
        return "_"
    # A factor on the sum would not be on what is added after it.
    return notation.replace("k", "_") if node.kwargs else notation


def _grouped(node: fx.Node) -> str:
    """Label rows sorted by group, each multiplied by the matrix of its group."""
    ranks = [len(shape_of(value)) for value in operands_of(node)[:2]]
    return "_k,_kn,_->_n" if ranks == [2, 3] else "_"


def _attention(node: fx.Node) -> str:
    """Label samples and heads; and positions of queries, which a causal mask would count."""
    query = "_" if arguments_of(node)["is_causal"] else "q"
    return f"...{query}_,...__,...__,...{query}_->...{query}_"


def _embedding(node: fx.Node) -> str:
    given = arguments_of(node)
    return "_d,...->...d" if given["sparse"] or given["scale_grad_by_freq"] else "vd,...->...d"


def _cross_entropy(node: fx.Node) -> str:
    """Label classes: three sums over the group join the ranks' shares of them."""
    given = arguments_of(node)
    ranks = [len(shape_of(given[name])) for name in ("self", "target")]
    is_plain = given["weight"] is None and given["label_smoothing"] == 0.0
    return "_c,_->_" if ranks == [2, 1] and is_plain else "_"


Rule = str | Callable[[fx.Node], str]
_BY_NAMES: Mapping[str, Rule] = {
    "where expand alias clone contiguous detach dropout to _to_copy type_as zeros_like "
    "lift_fresh_copy ones_like empty_like full_like": "...",
    "view reshape _unsafe_view flatten unflatten squeeze": _viewed,
    "softmax _softmax log_softmax _log_softmax topk sort cumsum": partial(_marked, mark="_"),
    "chunk split split_with_sizes cat": partial(_marked, mark="+"),
    "layer_norm rms_norm": _normalised,
    "transpose t permute": _reordered,
    "stack unsqueeze": _inserted,
    "select": _selected,
    "slice": partial(_where_equal, letters=_letters),
    "scatter gather": partial(_where_equal, letters=partial(_marked, mark="_")),
    "index": _indexed,
    "sum": partial(_reduced, is_sum=True),
    "mean": partial(_reduced, is_sum=False),
    "linear": "...k,nk,n->...n",
    "matmul mm bmm": partial(_product, notation="...mk,...kn->...mn"),
    "addmm baddbmm": partial(_product, notation="...mn,...mk,...kn->...mn"),
    "_grouped_mm grouped_mm_fallback": _grouped,
    "grouped_product": "ek,ekn,e->en",
    DISPATCH: "_->e_",
    OFFSETS: "_->e",
    COMBINE: "e_,_->_",
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
}
RULES = {name: rule for names, rule in _BY_NAMES.items() for name in names.split()}
"""Rules by the operator's name; elementwise operators have torch's tag instead."""
