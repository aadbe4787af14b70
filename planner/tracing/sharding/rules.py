"""Which dimensions of an operation's operands and results correspond: one table, as einsum terms.

``linear`` is ``...k,nk,n->...n``. A split of ``n`` splits the weight's rows and the result's
columns; a split of ``k`` splits both factors, and the result is a partial sum. ``_`` is a dimension
that must be whole; ``+`` one that is divided into pieces or joined from them. Terms are aligned
with the last dimensions, and the last term holds for all further values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, repeat
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any

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
    if callable(rule):
        rank = len(shape_of(operands_of(node)[0]))
        rule = rule(node, ascii_lowercase[:rank], arguments_of(node))
    return tuple(_axes(node, rule or "...", among))


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

    def split(rows: _Labelled) -> tuple[Dimension, ...]:
        found = dict.fromkeys(own for _, own, size in rows if own and size > 1)
        return tuple(own for own in found if among is None or own[0] in among)

    for label in dict.fromkeys(label for label, _, _ in rows if label not in needed | {"_"}):
        read, made = ([row for row in rows if row[0] == label] for rows in (inputs, outputs))
        axis = Axis(split(read), split(made))
        if label == "+":
            ((_, joined, total),), parts = (read, made) if len(results) > 1 else (made, read)
            pieces = tuple((piece, Fraction(size, total)) for _, piece, size in parts)
            axis = replace(axis, whole=joined, pieces=pieces)
        yield axis


def _labelled(values: Iterable[tuple[fx.Node | None, Sequence[int]]], notation: str) -> _Labelled:
    terms, found = notation.split(","), _Labelled()
    for (value, shape), term in zip(values, chain(terms, repeat(terms[-1])), strict=False):
        before, dots, after = term.partition("...")
        count = max(0, len(shape) - len(before) - len(after)) if dots else 0
        labels = "_" * len(shape) + before + ascii_uppercase[26 - count :] + after
        own = enumerate(zip(labels[len(labels) - len(shape) :], shape, strict=True))
        found += [(label, (value, i) if value else None, size) for i, (label, size) in own]
    return found


# --- rules that depend on ranks, shapes or settings -----------------------------------------------
# Each takes the operation, a letter for each dimension of its first operand, and its arguments.

_Given = dict[str, Any]


def _marked(letters: str, given: _Given, mark: str) -> str:
    """Replace the letter of the argument ``dim``."""
    own = given["dim"] % len(letters) if letters else 0
    return letters[:own] + mark + letters[own + 1 :] if letters else ""


def _reordered(_: fx.Node, letters: str, given: _Given) -> str:
    order = [letters[own] for own in given.get("dims", ())] or [*letters]
    if "dims" not in given and len(order) > 1:
        first, second = given.get("dim0", 0), given.get("dim1", 1)
        order[first], order[second] = order[second], order[first]
    return f"{letters}->{''.join(order)}"


def _viewed(node: fx.Node, _: str, __: _Given) -> str:
    """Label the outermost dimensions of the shortest runs that have equally many elements.

    So features are split by whole heads.
    """
    shapes = shape_of(operands_of(node)[0]), shape_of(node)
    labels, starts = [["_"] * len(shape) for shape in shapes], [0, 0]
    for letter in ascii_lowercase:
        if any(start >= len(shape) for start, shape in zip(starts, shapes, strict=True)):
            break
        ends = [start + 1 for start in starts]
        while (
            sizes := [prod(x[a:b]) for x, a, b in zip(shapes, starts, ends, strict=True)]
        ) and sizes[0] != sizes[1]:
            ends[sizes[0] > sizes[1]] += 1
        for own, shape, start, end in zip(labels, shapes, starts, ends, strict=True):
            own[next((i for i in range(start, end) if shape[i] > 1), start)] = letter
        starts = ends
    return "->".join("".join(own) for own in labels)


def _normalised(_: fx.Node, letters: str, given: _Given) -> str:
    count = len(given["normalized_shape"])
    whole = letters[:-count] + "_" * count
    return f"{whole},_->{whole}"


def _inserted(node: fx.Node, letters: str, given: _Given) -> str:
    new = given["dim"] % len(shape_of(node))
    return f"{letters}->{letters[:new]}_{letters[new:]}"


def _selected(_: fx.Node, letters: str, given: _Given) -> str:
    marked = _marked(letters, given, "_")
    return f"{marked}->{marked.replace('_', '')}"


def _where_equal(node: fx.Node, letters: str) -> str:
    """Keep the letters of dimensions in which all values have the same size."""
    sizes = zip(letters, *map(shape_of, (*operands_of(node), node)), strict=True)
    return "".join("_" if len({*found}) > 1 else letter for letter, *found in sizes)


def _summed(_: fx.Node, letters: str, given: _Given, is_sum: bool = True) -> str:
    """Label a reduction; a sum over a split dimension is a partial one."""
    over = {letters[own] for own in given.get("dim") or range(len(letters))}
    gone = "_" if given.get("keepdim") else ""
    kept = "".join(gone if letter in over else letter for letter in letters)
    read = ("_" if letter in over and not is_sum else letter for letter in letters)
    return f"{''.join(read)}->{kept}"


def _indexed(_: fx.Node, letters: str, given: _Given) -> str:
    """Label a selection of rows by one index in the first dimension."""
    indices = given["indices"]
    if len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return "_"
    added = ascii_uppercase[: len(shape_of(indices[0]))]
    return f"_{letters[1:]},{added}->{added}{letters[1:]}"


def _product(node: fx.Node, _: str, given: _Given) -> str:
    bias = added_after(node)
    if min(len(shape_of(value)) for value in operands_of(node) if value not in bias) < 2:
        return "_"
    notation = "...mk,...kn->...mn"
    # A factor on the sum would not be on what is added after it.
    notation = notation.replace("k", "_") if node.kwargs else notation
    return f"...mn,{notation}" if "self" in given and "beta" in given else notation


def _grouped(node: fx.Node, _: str, __: _Given) -> str:
    """Label rows sorted by group, each multiplied by the matrix of its group."""
    ranks = [len(shape_of(value)) for value in operands_of(node)[:2]]
    return "_k,_kn,_->_n" if ranks == [2, 3] else "_"


def _attention(_: fx.Node, __: str, given: _Given) -> str:
    """Label samples and heads; and positions of queries, which a causal mask would count."""
    query = "_" if given["is_causal"] else "q"
    return f"...{query}_,...__,...__,...{query}_->...{query}_"


def _embedding(_: fx.Node, __: str, given: _Given) -> str:
    return "_d,...->...d" if given["sparse"] or given["scale_grad_by_freq"] else "vd,...->...d"


def _cross_entropy(_: fx.Node, __: str, given: _Given) -> str:
    """Label classes: three sums over the group join the ranks' shares of them."""
    ranks = [len(shape_of(given[name])) for name in ("self", "target")]
    is_plain = given["weight"] is None and given["label_smoothing"] == 0.0
    return "_c,_->_" if ranks == [2, 1] and is_plain else "_"


Rule = str | Callable[[fx.Node, str, _Given], str]
_BY_NAMES: dict[str, Rule] = {
    "where expand alias clone contiguous detach dropout to _to_copy type_as zeros_like "
    "lift_fresh_copy ones_like empty_like full_like": "...",
    "view reshape _unsafe_view flatten unflatten squeeze": _viewed,
    "softmax _softmax log_softmax _log_softmax topk sort cumsum": lambda _, x, a: _marked(
        x, a, "_"
    ),
    "chunk split split_with_sizes cat": lambda _, x, a: _marked(x, a, "+"),
    "layer_norm rms_norm": _normalised,
    "transpose t permute": _reordered,
    "stack unsqueeze": _inserted,
    "select": _selected,
    "slice": lambda node, x, _: _where_equal(node, x),
    "scatter gather": lambda node, x, a: _where_equal(node, _marked(x, a, "_")),
    "index": _indexed,
    "sum": _summed,
    "mean": lambda node, x, a: _summed(node, x, a, is_sum=False),
    "linear": "...k,nk,n->...n",
    "matmul mm bmm addmm baddbmm": _product,
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
