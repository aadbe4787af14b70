"""Tasks of an iteration and what they wait for: the words of the checker's own lowering."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar

from planner.plan.operations import Operation
from planner.verification.routes import Lane

Node = TypeVar("Node", bound=Hashable)
What = Literal["operation", "message", "reduction", "gather", "copy", "step"]


class Key(NamedTuple):
    """Names a task.

    Attributes:
        what: it is. A copy is one of an offloaded stash, a gather one of parameters after the
            optimizer's step.
        of: the operation; of a message, the operation that needs it, of a gradient the whole
            backward; of a copy, the forward or the backward of the stash; the number of a reduction
            or of the reduction that a gather belongs to; the device of an optimizer step.
    """

    what: What
    of: Operation | int | str

    def __str__(self) -> str:
        return f"{self.what} {self.of}"

    @property
    def operation(self) -> Operation:
        """The operation that names the task, which is a computation, a message or a copy."""
        assert isinstance(self.of, Operation)
        return self.of


class Wait(NamedTuple):
    """Something that has to have happened before a task starts.

    Attributes:
        key: of another task.
        ahead_s: the seconds, alone, that may be left of it; only its start counts if infinite.
    """

    key: Key
    ahead_s: float = 0.0


@dataclass
class Task:
    """Something that takes time.

    Attributes:
        key: its name.
        devices: that compute it, or that send and receive it; a ring of devices in order.
        seconds: that it takes alone.
        waits: for what it waits; the order is that in which the critical path prefers them.
        lines: each serves one task at a time, in the order in which they have all they wait for.
        rank: which of two goes first in a line if both come at the same moment; empty if either.
        latency_s: of its seconds, those before its first byte moves; infinite of what moves none.
        bytes_per_s: at which it moves bytes alone.
        crossings: the links that it shares with others, and how often it crosses each.
        together: others that start at the same moment, once none of them waits any more.
    """

    key: Key
    devices: tuple[str, ...]
    seconds: float
    waits: list[Wait] = field(default_factory=list)
    lines: tuple[Hashable, ...] = ()
    rank: tuple[Any, ...] = ()
    latency_s: float = inf
    bytes_per_s: float = inf
    crossings: Mapping[Lane, int] = field(default_factory=dict)
    together: tuple[Key, ...] = ()


def operation_key(operation: Operation) -> Key:
    """Return the name of a computation."""
    return Key("operation", operation)


def message_needed_by(operation: Operation) -> Operation:
    """Return the message that brings the input of a forward or a gradient."""
    return operation if operation.kind == "F" else operation._replace(kind="B")


def in_circles(waits: Mapping[Node, Iterable[Node]]) -> set[Node]:
    """Return what waits in circles, and all that waits for these, for ever."""
    sorter, free = TopologicalSorter(waits), set[Node]()
    with suppress(CycleError):  # What is in no circle can be sorted all the same.
        sorter.prepare()
    while ready := sorter.get_ready():
        free.update(ready)
        sorter.done(*ready)
    return waits.keys() - free
