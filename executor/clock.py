"""Moments in time: of the CPU, or of a GPU's stream, which runs behind it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments now and tells later when they were."""

    def mark(self) -> Any:
        """This moment."""

    def settle(self) -> None:
        """Wait until all marked moments have passed."""

    def seconds(self, mark: Any) -> float:
        """When it was, on the scale of :func:`time.perf_counter`; call :meth:`settle` first."""


class HostClock:
    """The CPU's: a call has ended when it returns."""

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing to wait for."""

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark


class CudaClock:
    """Events on the current stream of a GPU: what was queued before a mark has ended at it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.mark()
        torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """This place in the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def seconds(self, mark: torch.cuda.Event | float) -> float:
        """By the GPU's own clock since the origin; what the CPU saw is in seconds already."""
        if isinstance(mark, float):
            return mark
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock that times work on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
