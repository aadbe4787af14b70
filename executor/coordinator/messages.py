"""The messages between ranks and the coordinator, as JSON.

Messages are level-triggered: a rank that got no answer sends the same again, and gets the same
answer. ``incarnation_id`` names one incarnation of a pipeline; a restarted one has another.

Which generation of a process group all its members use.

A rank keeps the process groups of the last sets of members it was in. Whoever meets a set again
has to know whether all others have kept theirs too: the coordinator, which tells every rank its
groups in order, works out what each has kept.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from planner.errors import PipeplanError, shorten
from planner.records.document import Count, Record

MAX_MESSAGE_BYTES = 4096
Nonce = Annotated[str, Field(pattern="^[0-9a-zA-Z]{1,64}$")]


class _FromARank(Record):
    """Which rank says it: the place of a pipeline, in one of its incarnations."""

    pipeline: Count
    place: Count
    incarnation_id: Nonce

    @property
    def queue(self) -> str:
        """Name of the queue from which the rank reads its answers."""
        return answers_of(self.pipeline, self.place, self.incarnation_id)


class Hello(_FromARank):
    """The rank has its model and wants to take part."""

    kind: Literal["hello"] = "hello"


class Take(_FromARank):
    """The rank is done with the step before and asks for the share of the next.

    Attributes:
        step: of its pipeline, from 1.
        reduced: whether the reductions of the step before succeeded, if there were any.
    """

    kind: Literal["take"] = "take"
    step: Annotated[int, Field(ge=1, lt=2**63)]
    reduced: bool = True


class Ask(_FromARank):
    """The rank has done its local step and asks whom to average with.

    Attributes:
        step: that it has done.
        reduced: whether its last average succeeded, if nobody else says so: where averages run
            overlapped with computation, the next step's share is taken before they have ended.
    """

    kind: Literal["ask"] = "ask"
    step: Annotated[int, Field(ge=1, lt=2**63)]
    reduced: bool = True

    @property
    def queue(self) -> str:
        """Name of the queue of the rank's groups, which another thread may read."""
        return groups_of(self.pipeline, self.place, self.incarnation_id)


class Lost(Record):
    """The coordinator's own finding: an incarnation of a pipeline gives no sign any more."""

    kind: Literal["lost"] = "lost"
    pipeline: Count
    incarnation_id: Nonce


class Late(Record):
    """The coordinator's own finding: a moment that it waits for has come."""

    kind: Literal["late"] = "late"


Message = Hello | Take | Ask | Lost | Late
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


@dataclass(frozen=True)
class Answer:
    """An answer to one rank."""

    queue: str
    body: dict[str, Any]


def answers_of(pipeline: int, place: int, incarnation_id: str) -> str:
    """The queue of a rank's answers, but for its groups."""
    return f"answers/{pipeline}.{place}.{incarnation_id}"


def groups_of(pipeline: int, place: int, incarnation_id: str) -> str:
    """The queue of a rank's groups."""
    return f"groups/{pipeline}.{place}.{incarnation_id}"


def read_message(data: bytes) -> Message:
    """Check a message that anybody may have put into the queue.

    Raises:
        PipeplanError: if it is none.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise PipeplanError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        return _ADAPTER.validate_json(data)
    except (ValidationError, RecursionError):
        raise PipeplanError(f"no message of a rank: {shorten(data)}") from None


def write_message(message: Message) -> bytes:
    """A message as JSON."""
    return message.model_dump_json().encode()


def read_answer(data: bytes) -> dict[str, Any]:
    """An answer's body."""
    body = json.loads(data)
    assert isinstance(body, dict)
    return body


KEPT = 32
"""Process groups that a rank keeps: each has connections to all its members, and a thread."""
Incarnations = tuple[tuple[int, int], ...]


class Generations:
    """Counts up for a set of members when one of them has dropped its process group."""

    def __init__(self) -> None:
        self._generation: dict[tuple[int, Incarnations], int] = defaultdict(int)
        self._kept: dict[tuple[int, int], OrderedDict[Incarnations, None]] = defaultdict(
            OrderedDict
        )

    def of(self, place: int, members: Incarnations) -> int:
        """The generation to use now by all of them.

        Args:
            place: of the pipelines.
            members: pipelines with their incarnations.
        """
        if len(members) < 2:
            return 0
        for number, _ in members:
            for dropped in keep(self._kept[number, place], members):
                self._generation[place, dropped] += 1
        return self._generation[place, members]

    def raise_(self, place: int, members: Incarnations) -> None:
        """A reduction of theirs failed: all make a new process group the next time."""
        self._generation[place, members] += 1


def keep(kept: OrderedDict[Incarnations, None], members: Incarnations) -> list[Incarnations]:
    """Note that a set is used; returns those that are dropped for it, the least recently used."""
    kept[members] = None
    kept.move_to_end(members)
    return [kept.popitem(last=False)[0] for _ in range(max(0, len(kept) - KEPT))]
