"""What has to be moved to go on with a training by another plan: from where, to where, and what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.artifacts.document import Record, read_json, write_atomically
from planner.artifacts.formats import check_format

FORMAT = "pipeplan-moves/1"
CHECKPOINT = "checkpoint"
"""The source where no device that is left holds the state."""
TotalBytes = Annotated[int, Field(ge=0, lt=2**120)]
NonNegative = Annotated[float, Field(ge=0)]


class Move(Record):
    """State that one device lacks and one source has.

    Attributes:
        source: a device, or null for the checkpoint.
        target: the device that lacks it.
        bytes: of the parameters with what goes with them.
        layers: those that use the parameters on the target.
        parameters: FQNs; with each goes its optimizer state, and the float32 master of a
            low-precision weight.
        seconds: over the links if nothing else used them; null from the checkpoint, whose speed no
            cluster file tells.
    """

    source: str | None
    target: str
    bytes: TotalBytes
    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    seconds: NonNegative | None


class Moves(Record):
    """All moves from one plan to another.

    Attributes:
        format: says what the file is.
        old_plan, new_plan: the plans' execution digests.
        moves: by target in the order of the new plan's ranks, each source once.
        bytes_between_devices: of all moves whose source is a device.
        bytes_from_checkpoint: of all others.
        seconds: all moves between devices take at least so long together, by the most loaded link.
        resume_bytes: what all ranks read of a checkpoint if each reads all of its state, as
            ``--resume`` does.
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
        """All that moves."""
        return self.bytes_between_devices + self.bytes_from_checkpoint

    @classmethod
    def load(cls, path: str | Path) -> Moves:
        """Read a file of moves.

        Raises:
            PipeplanError: naming every wrong field.
        """
        data: Any = check_format(read_json(path), FORMAT, str(path))
        return cls.parse(data, str(path))

    def save(self, path: str | Path) -> None:
        """Write the moves as JSON, atomically."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")
