"""Times of the operations of a round, by the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

Run = Callable[[int], None]
"""Runs the operation at a place."""


def timed_round(run: Run, operations: int, device: torch.device) -> list[float]:
    """Run the operations of a round one after the other.

    Args:
        run: one of them, by its place.
        operations: how many.
        device: that computes.

    Returns:
        Seconds of each.
    """
    if device.type == "cuda":
        return _by_events(run, operations, device)
    times = [time.perf_counter()]
    for place in range(operations):
        run(place)
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]


def _by_events(run: Run, operations: int, device: torch.device) -> list[float]:
    """A GPU works behind: its own marks between the operations, read when all are done."""
    marks = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(operations + 1)
    ]
    torch.cuda.synchronize(device)
    marks[0].record()
    for place in range(operations):
        run(place)
        marks[place + 1].record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
