"""The events of a measured timeline, one record each."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    Field,
    model_validator,
)

from planner.model.figures import Name
from planner.plan.operations import Operation, parse_operation
from planner.records.document import Count, Record, left_out

FORMAT = "pipeplan-timeline/2"
MOST_EVENTS = 2_000_000
"""Most events of a kind, in all steps."""
MOST_SECONDS = 2e6
"""Longest time of all steps together that a float holds to the nanosecond."""
_NS_PER_S = 1e9


def _to_nanosecond(seconds: float) -> float:
    return round(seconds * _NS_PER_S) / _NS_PER_S


def _named_operation(text: str) -> str:
    if parse_operation(text) is None:
        raise ValueError("expected an operation such as '2F0' (stage, one of F B I W, microbatch)")
    return text


Seconds = Annotated[float, Field(ge=0, le=1e5), AfterValidator(_to_nanosecond)]
"""A time, rounded to nanoseconds as in the file."""
Step = Annotated[int, Field(ge=1, lt=2**31)]
OperationName = Annotated[str, Field(max_length=20), AfterValidator(_named_operation)]


class MeasuredDevice(Record):
    """One process of the run: a device of the plan, its rank, and its hardware."""

    name: Name
    rank: Annotated[int, Field(ge=0, lt=2**31)]
    hardware: Name


class MeasuredStep(Record):
    """One iteration: its total time, and figures of devices where they are known.

    ``batch_wait_s`` is the time for which the host of a device loaded batches: before the first
    operation for a GPU, within forwards on a CPU.
    """

    step: Step
    iteration_time_s: Seconds
    peak_memory_bytes: dict[Name, Count] = Field(default_factory=dict)
    batch_wait_s: dict[Name, Seconds] = left_out({})


class TimedEvent(Record):
    """An event with a duration; seconds since the start of its step on a clock of all devices."""

    step: Step
    start_s: Seconds
    end_s: Seconds

    @model_validator(mode="after")
    def _ends_after_it_starts(self) -> Self:
        if self.end_s < self.start_s:
            raise ValueError(
                f"end_s: {self.end_s} is before start_s {self.start_s}; put the devices on one "
                "clock, and a time that its error makes negative to 0"
            )
        return self

    @property
    def seconds(self) -> float:
        """Duration of the event."""
        return self.end_s - self.start_s


class MeasuredOperation(TimedEvent):
    """A forward or backward that ran on a device, by its name such as ``2F0``.

    ``collective_s`` is how much of it collectives inside a tensor-parallel group took; None where
    there is none, or it was not measured.
    """

    device: Name
    operation: OperationName
    collective_s: Seconds | None = None

    @property
    def what(self) -> Operation:
        """Stage, kind and microbatch."""
        return _operation(self.operation)


class MeasuredTransfer(TimedEvent):
    """A message with activations (kind F) or gradients (kind B): all its tensors together.

    ``operation`` is the one of the stage that produced them. The transfer starts when the send is
    posted and ends when the receive is complete.
    """

    source: Name
    target: Name
    operation: OperationName
    bytes: Count

    @property
    def what(self) -> Operation:
        """Stage, kind and microbatch."""
        return _operation(self.operation)


class MeasuredReduction(TimedEvent):
    """An all-reduce of the gradients of some stages, as measured on one of the devices."""

    device: Name
    stages: Annotated[tuple[Count, ...], Field(min_length=1)]
    bytes: Count


class MeasuredOptimizerStep(TimedEvent):
    """A device's optimizer step."""

    device: Name


def _operation(name: str) -> Operation:
    operation = parse_operation(name)
    assert operation is not None  # Checked when the record was made.
    return operation
