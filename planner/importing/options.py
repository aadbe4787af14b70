"""What the user says about a file that does not say it itself."""

from __future__ import annotations

from dataclasses import dataclass

from planner.artifacts.hardware import DeviceType
from planner.artifacts.presets import DEVICES
from planner.errors import PipeplanError, shorten

MOST_SAMPLES = 2**20


@dataclass(frozen=True)
class ImportOptions:
    """How to read a file.

    Attributes:
        device_type: the preset of the device that the times were measured on.
        samples_per_microbatch: samples of the batch that was measured; None leaves it to the file.
        free_inputs: whether ``Input`` nodes of a profile take no time.

    Raises:
        PipeplanError: if the device type is no preset or the samples are no count.
    """

    device_type: str = "V100-16GB"
    samples_per_microbatch: int | None = None
    free_inputs: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.device_type not in DEVICES:
            problems.append(
                f"device_type: {shorten(self.device_type)} is unknown; use one of "
                + ", ".join(DEVICES)
            )
        samples = self.samples_per_microbatch
        if samples is not None and not 1 <= samples <= MOST_SAMPLES:
            problems.append(
                f"samples_per_microbatch: expected 1 to {MOST_SAMPLES}, found {shorten(samples)}"
            )
        if problems:
            raise PipeplanError(problems)

    @property
    def device(self) -> DeviceType:
        """The figures of the device type."""
        return DEVICES[self.device_type]
