"""The messages of ranks to the coordinator: one table of records, by which all are validated.

A rank that got no answer sends the same message again and gets the same answer, so that a lost
connection loses nothing. ``incarnation_id`` names one incarnation of a pipeline; a restarted
pipeline has another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from planner.errors import PipeplanError, shorten
from planner.records.document import Count, Record

MAX_MESSAGE_BYTES = 4096
Name = Annotated[str, Field(pattern="^[0-9a-zA-Z]{1,64}$")]
Step = Annotated[int, Field(ge=1, lt=2**63)]
Address = tuple[int, int, str]
"""Pipeline, place in the pipeline, and incarnation id of a rank."""


class _FromARank(Record):
    """A message of the rank at a place of a pipeline, in one of its incarnations."""

    pipeline: Count
    place: Count
    incarnation_id: Name

    @property
    def sender(self) -> Address:
        """The rank that the answer goes to."""
        return self.pipeline, self.place, self.incarnation_id


class Beat(_FromARank):
    """The rank is alive."""

    kind: Literal["beat"] = "beat"


class Hello(_FromARank):
    """The rank has its model and wants to take part.

    Attributes:
        address: ``host:port`` at which it serves tensors to other pipelines.
    """

    kind: Literal["hello"] = "hello"
    address: Annotated[str, Field(max_length=300)] = ""


class Take(_FromARank):
    """The rank is done with the step before and asks for the work unit of the next.

    Attributes:
        step: of its pipeline, from 1.
        reduced: whether the reductions of the step before succeeded, if there were any.
    """

    kind: Literal["take"] = "take"
    step: Step
    reduced: bool = True


class Ask(_FromARank):
    """The rank has done its local step and asks whom to average with.

    Attributes:
        step: that it has done.
        reduced: whether its last average succeeded, where averages run overlapped with computation:
            the next unit is taken before they have ended.
    """

    kind: Literal["ask"] = "ask"
    step: Step
    reduced: bool = True


class Loss(_FromARank):
    """The pipeline's loss of a step; the answer is the mean of the pipelines' last losses.

    Attributes:
        loss: None where it is not finite.
    """

    kind: Literal["loss"] = "loss"
    step: Step
    loss: float | None


class Write(_FromARank):
    """The pipeline wants to write the checkpoint of a step of the whole training."""

    kind: Literal["write"] = "write"
    step: Step


class Wrote(_FromARank):
    """The pipeline has ended its turn to write; ``done`` if the checkpoint is written."""

    kind: Literal["wrote"] = "wrote"
    step: Step
    done: bool


class Fault(_FromARank):
    """An injected fault is about to happen."""

    kind: Literal["fault"] = "fault"
    word: Annotated[str, Field(max_length=100)]


class Bye(_FromARank):
    """The rank has done all; the answer is the report on the whole training."""

    kind: Literal["bye"] = "bye"


class Lost(Record):
    """The server's own finding: an incarnation of a pipeline has lost a rank."""

    kind: Literal["lost"] = "lost"
    pipeline: Count
    incarnation_id: Name


class Late(Record):
    """The server's own finding: the deadline of the group scheduler has come."""

    kind: Literal["late"] = "late"


Question = Hello | Take | Ask | Loss | Write | Wrote | Fault | Bye
Message = Beat | Question | Lost | Late
_TABLE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


@dataclass(frozen=True)
class Answer:
    """An answer to one rank."""

    to: Address
    body: dict[str, Any]


def read_message(data: bytes) -> Message:
    """Validate a message.

    Raises:
        PipeplanError: if it is none.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise PipeplanError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        return _TABLE.validate_json(data)
    except (ValidationError, RecursionError):
        raise PipeplanError(f"no message of a rank: {shorten(data)}") from None


def write_message(message: Message) -> bytes:
    """Return a message as JSON."""
    return message.model_dump_json().encode()
