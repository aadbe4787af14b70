"""Bytes that a layer holds while it runs, as torch's own allocators tell."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "pipeplan operation"
Run = Callable[[int], None]
"""Runs the operation at a place."""


@dataclass(frozen=True)
class Held:
    """Bytes beside what was held before the first operation of a round, by operation.

    Attributes:
        peak: the most while it ran.
        after: once it had run.
    """

    peak: tuple[int, ...]
    after: tuple[int, ...]


def held_bytes(run: Run, operations: int, device: torch.device) -> Held:
    """Run the operations of a round, which have run before, and tell what they held.

    Args:
        run: one of them, by its place.
        operations: how many.
        device: that computes.
    """
    gc.collect()
    if device.type == "cuda":
        return _of_gpu(run, operations, device)
    return _of_cpu(run, operations)


def _of_gpu(run: Run, operations: int, device: torch.device) -> Held:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    peaks, after = [], []
    for place in range(operations):
        torch.cuda.reset_peak_memory_stats(device)
        run(place)
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        after.append(torch.cuda.memory_allocated(device) - before)
    return Held(tuple(peaks), tuple(after))


def _of_cpu(run: Run, operations: int) -> Held:
    # Torch's profiler says on standard error that it starts and stops, each time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for place in range(operations):
            with record_function(f"{_MARK} {place}"):
                run(place)
    with tempfile.TemporaryDirectory(prefix="pipeplan-") as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return _from_events(json.loads(path.read_text())["traceEvents"], operations)


def _from_events(events: Iterable[dict[str, Any]], operations: int) -> Held:
    """Changes up to the end of an operation are its own: nothing else runs between two."""
    rows = list(events)
    ends = {row["name"]: row["ts"] + row["dur"] for row in rows if row.get("ph") == "X"}
    changes = [(r["ts"], r["args"]["Bytes"]) for r in rows if r.get("name") == "[memory]"]
    changes.sort(key=lambda change: change[0])
    held, place, peaks, after = 0, 0, [], []
    for operation in range(operations):
        peak, end = held, ends[f"{_MARK} {operation}"]
        while place < len(changes) and changes[place][0] <= end:
            held += changes[place][1]
            peak, place = max(peak, held), place + 1
        peaks.append(peak)
        after.append(held)
    return Held(tuple(peaks), tuple(after))
