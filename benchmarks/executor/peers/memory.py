"""How many bytes tensors hold: what torch's CPU allocator tells torch's profiler.

Counted are all allocations from before a runtime is made until after it is gone, so the figure has
its weights and whatever buffers it keeps. A peak is the most that is held during one later step.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.profiler import ProfilerActivity, profile, record_function

_STEPS = 3
_MARK = "measured step"


class Runtime(Protocol):
    """One rank of something that trains."""

    def step(self) -> float:
        """Forwards and backwards of one iteration."""


@dataclass(frozen=True)
class Held:
    """Bytes in tensors.

    Attributes:
        before_bytes: when a step begins, with weights and the gradients of the step before.
        peak_bytes: the most during the step.
        left_bytes: once the runtime is gone; what is not nothing was not counted to its end.
    """

    before_bytes: int
    peak_bytes: int
    left_bytes: int


def held_memory(make: Callable[[], Runtime]) -> Held:
    """Make a runtime, let it run some steps, and tell what the last of them held."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        runtime = make()
        for _ in range(_STEPS - 1):
            runtime.step()
        gc.collect()
        with record_function(_MARK):
            runtime.step()
        del runtime
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _held(events)


def _held(events: Iterable[dict[str, Any]]) -> Held:
    rows = list(events)
    mark = next(row for row in rows if row.get("name") == _MARK)
    begin, end = mark["ts"], mark["ts"] + mark["dur"]
    changes = [row for row in rows if row.get("name") == "[memory]"]
    held = before = peak = 0
    for row in sorted(changes, key=lambda row: row["ts"]):
        held += row["args"]["Bytes"]
        if row["ts"] < begin:
            before = peak = held
        elif row["ts"] <= end:
            peak = max(peak, held)
    return Held(before, peak, held)
