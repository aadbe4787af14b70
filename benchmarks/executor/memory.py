"""How many bytes tensors hold: what torch's CPU allocator tells torch's profiler.

Counted are all allocations from before a runtime is made until after it is gone, so the figure has
its weights and whatever buffers it keeps. A peak is the most that is held during one later step.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.profiler import ProfilerActivity, profile, record_function

_STEPS = 3
_MARK = "measured step"


class Runtime(Protocol):
    """One rank of something that trains."""

    def step(self) -> object:
        """Forwards and backwards of one iteration."""


def peak_bytes(make: Callable[[], Runtime]) -> int:
    """Make a runtime and let it run some steps; return the most that tensors held in the last."""
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
    return _peak(events)


def _peak(events: Sequence[dict[str, Any]]) -> int:
    mark = next(row for row in events if row.get("name") == _MARK)
    begin, end = mark["ts"], mark["ts"] + mark["dur"]
    changes = [row for row in events if row.get("name") == "[memory]"]
    held = peak = 0
    for row in sorted(changes, key=lambda row: row["ts"]):
        held += row["args"]["Bytes"]
        if row["ts"] <= end:
            peak = held if row["ts"] < begin else max(peak, held)
    return peak
