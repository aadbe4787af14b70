"""What ranks tell the coordinator, and its answers, as JSON.

Messages are level-triggered: a rank that got no answer sends the same again, and gets the same
answer. ``nonce`` names one life of a pipeline; a restarted one has another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from planner.artifacts.document import Count, Record
from planner.errors import PipeplanError, shorten

MAX_MESSAGE_BYTES = 4096
Nonce = Annotated[str, Field(pattern="^[0-9a-zA-Z]{1,64}$")]


class _FromARank(Record):
    """Which rank says it: the place of a pipeline, in one of its lives."""

    pipeline: Count
    place: Count
    nonce: Nonce

    @property
    def queue(self) -> str:
        """Where the rank reads its answers."""
        return answers_of(self.pipeline, self.place, self.nonce)


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
            behind the computation, the next step's share is taken before they have ended.
    """

    kind: Literal["ask"] = "ask"
    step: Annotated[int, Field(ge=1, lt=2**63)]
    reduced: bool = True

    @property
    def queue(self) -> str:
        """Where the rank reads of its groups, on a thread of its own perhaps."""
        return groups_of(self.pipeline, self.place, self.nonce)


class Lost(Record):
    """The coordinator's own finding: a life of a pipeline gives no sign of itself any more."""

    kind: Literal["lost"] = "lost"
    pipeline: Count
    nonce: Nonce


class Late(Record):
    """The coordinator's own finding: a moment that it waits for has come."""

    kind: Literal["late"] = "late"


Message = Hello | Take | Ask | Lost | Late
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


@dataclass(frozen=True)
class Answer:
    """What a rank is told."""

    queue: str
    body: dict[str, Any]


def answers_of(pipeline: int, place: int, nonce: str) -> str:
    """The queue of a rank's answers, but for its groups."""
    return f"answers/{pipeline}.{place}.{nonce}"


def groups_of(pipeline: int, place: int, nonce: str) -> str:
    """The queue of a rank's groups."""
    return f"groups/{pipeline}.{place}.{nonce}"


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
