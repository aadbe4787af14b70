"""Limits on the values of a batch's entries, found as index lookups in an exported step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from planner.job import KINDS_OF_BYTES, Job, text_problem
from planner.tracing.export import ExportedStep
from planner.tracing.torch_private import OpOverload

_SAME_VALUES = frozenset(
    "view _unsafe_view reshape flatten unflatten unsqueeze squeeze slice select transpose permute "
    "t expand contiguous clone alias detach to _to_copy lift_fresh_copy split chunk".split()
)
"""Operators whose results contain values of their first argument only."""


@dataclass(frozen=True)
class Lookup:
    """An operation that fails if a value of a batch's entry is too large.

    Attributes:
        entry: the entry of the batch.
        count: its values are 0 to count - 1, apart from ``ignored``.
        what: what is looked up, for messages.
        ignored: a value that is not an index, if there is one.
    """

    entry: str
    count: int
    what: str
    ignored: int | None = None

    @property
    def takes_bytes(self) -> bool:
        """Whether every byte is one of its values."""
        return all(byte == self.ignored for byte in range(self.count, KINDS_OF_BYTES))


def lookups(exported: ExportedStep) -> tuple[Lookup, ...]:
    """Return lookups that use entries of the batch directly as indices.

    Values computed by the model before a lookup (a remainder, say) are not followed, so every
    lookup returned is a real limit.
    """
    found = []
    for node in exported.graph.find_nodes(op="placeholder"):
        for user, argument in _users(node):
            found += list(_lookup(exported, str(node.target), user, argument))
    return tuple(found)


def too_small_for_text(found: tuple[Lookup, ...]) -> str | None:
    """Return the lookup that is too small for text, without a remedy; None if there is none."""
    for row in found:
        if not row.takes_bytes:
            return (
                f"{row.what} of the model takes {row.entry!r} below {row.count} only, but --data "
                f"text has {KINDS_OF_BYTES} kinds of bytes"
            )
    return None


def text_problem_of_step(exported: ExportedStep, job: Job) -> str | None:
    """Return why the executor's text cannot train the model, without a remedy; None if it can."""
    forms = {}
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            forms[str(node.target)] = (dtype, tuple(value.shape))
    return text_problem(forms, job) or too_small_for_text(lookups(exported))


def _users(entry: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield users of an entry, and of it in other shapes, each with the value it uses."""
    pending, seen = [entry], {entry}
    while pending:
        node = pending.pop()
        for user in node.users:
            yield user, node
            kept = _operator(user) in _SAME_VALUES and user.args[:1] == (node,)
            if (kept or _operator(user) == "getitem") and user not in seen:
                seen.add(user)
                pending.append(user)


def _operator(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", ""))


def _lookup(exported: ExportedStep, entry: str, node: fx.Node, index: fx.Node) -> Iterator[Lookup]:
    operator, arguments = _operator(node), node.args
    if _is_table_read(operator, arguments, index):
        yield Lookup(entry, _size(arguments[0], 0), _name(exported, arguments[0]))
    elif operator == "one_hot" and isinstance(arguments[-1], int) and arguments[-1] > 0:
        yield Lookup(entry, arguments[-1], "one_hot")
    elif operator == "cross_entropy_loss" and arguments[1] is index and _has_indices(index):
        yield _classes(entry, node)


def _is_table_read(operator: str, arguments: Sequence[object], index: fx.Node) -> bool:
    """Return whether rows of the first argument are selected by the second."""
    if operator in ("embedding", "embedding_bag"):
        return arguments[1] is index
    indices = arguments[1] if operator == "index" else ()
    first = indices[0] if isinstance(indices, Sequence) and indices else None
    return first is index and _has_indices(index)


def _classes(entry: str, node: fx.Node) -> Lookup:
    """Return the lookup of a cross entropy's target among its classes.

    Classes are the second dimension of the logits, or the first of a single sample.
    """
    logits = node.args[0]
    assert isinstance(logits, fx.Node)
    dimension = 1 if logits.meta["val"].ndim > 1 else 0
    ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
    assert isinstance(ignored, int)
    return Lookup(entry, _size(logits, dimension), "the loss", ignored)


def _size(argument: object, dimension: int) -> int:
    assert isinstance(argument, fx.Node)
    return int(argument.meta["val"].shape[dimension])


def _has_indices(node: fx.Node) -> bool:
    """Return whether a tensor contains integers: booleans select, and floats are probabilities."""
    return bool(node.meta["val"].dtype == torch.int64)


def _name(exported: ExportedStep, table: object) -> str:
    assert isinstance(table, fx.Node)
    return exported.names.get(str(table.target), str(table))
