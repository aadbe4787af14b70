"""Bytes that tensors hold, as torch's CPU allocator tells torch's profiler."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


@dataclass
class Change:
    """What a block of code allocated: more bytes at its end, and the most in between."""

    bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def allocated() -> Iterator[Change]:
    """Count inside; what was allocated before and is freed inside does not count."""
    change = Change()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield change
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    rows = [event for event in events if event.get("name") == "[memory]"]
    for row in sorted(rows, key=lambda event: event["ts"]):
        change.bytes += row["args"]["Bytes"]
        change.peak_bytes = max(change.peak_bytes, change.bytes)
