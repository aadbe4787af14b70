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

_MARKS = ("pipeplan forward", "pipeplan backward")


@dataclass(frozen=True)
class Held:
    """Bytes beside what was held before: parameters, their gradients and the layer's input.

    Attributes:
        stash_bytes: between the forward and the backward.
        forward_bytes, backward_bytes: the most while each ran.
    """

    stash_bytes: int
    forward_bytes: int
    backward_bytes: int


def held_bytes(
    forward: Callable[[], None], backward: Callable[[], None], device: torch.device
) -> Held:
    """Run a forward and its backward, which have run before, and tell what they held."""
    gc.collect()
    if device.type == "cuda":
        return _of_gpu(forward, backward, device)
    return _of_cpu(forward, backward)


def _of_gpu(
    forward: Callable[[], None], backward: Callable[[], None], device: torch.device
) -> Held:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    peaks = []
    left = []
    for run in (forward, backward):
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        left.append(torch.cuda.memory_allocated(device) - before)
    return Held(left[0], peaks[0], peaks[1])


def _of_cpu(forward: Callable[[], None], backward: Callable[[], None]) -> Held:
    # Torch's profiler says on standard error that it starts and stops, each time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for mark, run in zip(_MARKS, (forward, backward), strict=True):
            with record_function(mark):
                run()
    with tempfile.TemporaryDirectory(prefix="pipeplan-") as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return _from_events(json.loads(path.read_text())["traceEvents"])


def _from_events(events: Iterable[dict[str, Any]]) -> Held:
    rows = [row for row in events if row.get("ph") in ("X", "i")]
    ends = {row["name"]: row["ts"] + row["dur"] for row in rows if row["name"] in _MARKS}
    changes = sorted((r for r in rows if r["name"] == "[memory]"), key=lambda row: row["ts"])
    held, stash, peaks = 0, 0, dict.fromkeys(_MARKS, 0)
    for row in changes:
        held += row["args"]["Bytes"]
        is_forward = row["ts"] <= ends[_MARKS[0]]
        mark = _MARKS[0] if is_forward else _MARKS[1]
        peaks[mark] = max(peaks[mark], held)
        stash = held if is_forward else stash
    return Held(max(0, stash), peaks[_MARKS[0]], max(peaks[_MARKS[1]], stash))
