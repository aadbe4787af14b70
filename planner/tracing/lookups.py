"""Limits on the values of a batch's entries, found as index lookups in an exported step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from planner.job import KINDS_OF_BYTES, Job, text_problem
from planner.tracing.export import ExportedStep
from planner.tracing.sharing import arguments_of, operator_name, shape_of
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
        takes_negative: whether indices from -count on count from the end.
    """

    entry: str
    count: int
    what: str
    ignored: int | None = None
    takes_negative: bool = False

    @property
    def takes_bytes(self) -> bool:
        """Whether every byte is one of its values."""
        return all(byte == self.ignored for byte in range(self.count, KINDS_OF_BYTES))

    def problem(self, batch: Mapping[str, Tensor]) -> str | None:
        """Return what a batch has that cannot be looked up, with its place; None if all can.

        A batch on a GPU is not looked at, which the host would wait for.
        """
        if self.entry not in batch or batch[self.entry].device.type != "cpu":
            return None
        values = batch[self.entry].numpy()
        least = -self.count if self.takes_negative else 0
        wrong = (values < least) | (values >= self.count)
        if self.ignored is not None:
            wrong &= values != self.ignored
        if not wrong.any():
            return None
        place = [int(row[0]) for row in wrong.nonzero()]
        return (
            f"{self.entry}{place} is {values[tuple(place)]}, and {self.what} of the model "
            f"takes {least} to {self.count - 1}"
        )


def lookups(exported: ExportedStep) -> tuple[Lookup, ...]:
    """Return lookups that use entries of the batch directly as indices.

    Values computed by the model before a lookup (a remainder, say) are not followed, so every
    lookup returned is a real limit.
    """
    found: list[Lookup] = []
    for entry in exported.graph.find_nodes(op="placeholder"):
        same = [entry]  # The entry, and it in other shapes.
        for value in same:
            for user in value.users:
                found += _lookup(exported, str(entry.target), user, value)
                name = operator_name(user)
                is_same = name in _SAME_VALUES and user.args[:1] == (value,)
                if (is_same or "getitem" in name) and user not in same:
                    same.append(user)
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
    forms = {
        str(node.target): (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for node in exported.graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta["val"], Tensor)
    }
    return text_problem(forms, job) or too_small_for_text(lookups(exported))


def _lookup(exported: ExportedStep, entry: str, node: fx.Node, index: fx.Node) -> Iterator[Lookup]:
    name = operator_name(node)
    given = arguments_of(node) if isinstance(node.target, OpOverload) else {}
    # Booleans select, and floats are probabilities.
    is_integer = getattr(index.meta["val"], "dtype", None) == torch.int64
    if name in ("embedding", "embedding_bag") and given["indices"] is index:
        table = given["weight"]
        yield Lookup(entry, shape_of(table)[0], exported.name_of(table))
    elif name == "index" and [*given["indices"]][:1] == [index] and is_integer:
        rows = shape_of(given["self"])[0]
        yield Lookup(entry, rows, exported.name_of(given["self"]), takes_negative=True)
    elif name == "one_hot" and given["num_classes"] > 0:
        yield Lookup(entry, given["num_classes"], "one_hot")
    elif name == "cross_entropy_loss" and given["target"] is index and is_integer:
        # Classes are the second dimension, or the first of a single sample.
        classes = shape_of(given["self"])[:2][-1]
        yield Lookup(entry, classes, "the loss", given["ignore_index"])
