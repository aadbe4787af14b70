"""The moves file: the state that has to be moved to continue a training with another plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.records.document import Record
from planner.records.formats import JsonFile

CHECKPOINT = "checkpoint"
"""Name of the source of state that no remaining device holds."""
TotalBytes = Annotated[int, Field(ge=0, lt=2**120)]
NonNegative = Annotated[float, Field(ge=0)]


class Move(Record):
    """State that one device lacks and one source has.

    Attributes:
        source: Device, or null for the checkpoint; in plans of tensor-parallel groups a group, each
            of whose devices sends its share.
        target: Device or group that lacks the state.
        bytes: Bytes of the parameters and their state.
        layers: Layers on the target that use the parameters.
        parameters: FQNs; optimizer state and float32 masters move with them.
        seconds: Time over otherwise idle links; null from the checkpoint.
    """

    source: str | None
    target: str
    bytes: TotalBytes
    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    seconds: NonNegative | None


class Moves(JsonFile):
    """All moves from one plan to another.

    Attributes:
        format: ``pipeplan-moves/1``.
        old_plan: Execution digest of the old plan.
        new_plan: Execution digest of the new plan.
        moves: Moves by target in rank order, each source once.
        bytes_between_devices: Bytes of all moves between devices.
        bytes_from_checkpoint: Bytes of all other moves.
        seconds: Least total time of the moves between devices, by the most loaded link.
        resume_bytes: Bytes that all ranks read if each reads its whole state from the checkpoint,
            as ``--resume`` does.
    """

    format: Literal["pipeplan-moves/1"] = "pipeplan-moves/1"
    old_plan: str
    new_plan: str
    moves: tuple[Move, ...]
    bytes_between_devices: TotalBytes
    bytes_from_checkpoint: TotalBytes
    seconds: NonNegative
    resume_bytes: TotalBytes

    @property
    def bytes(self) -> int:
        """Bytes of all moves."""
        return self.bytes_between_devices + self.bytes_from_checkpoint
