"""Replanning in a minute and a half: one training on 64 GPUs, every event."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import replan as full
from benchmarks.claims import Claim, Entry, LeftOut, details
from benchmarks.replan_cases import trainings

OURS = "ourselves"
MOST_S = 5.0


def entries(fresh_s: float) -> Iterator[Entry]:
    """Claims and tables.

    Args:
        fresh_s: of plans searched for anew.
    """
    first, *others = trainings()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(full.rows_of(first, Path(folder), fresh_s))
    regime = f"{first.name}, {len(rows)} events"
    slowest = max(rows, key=lambda row: row.wall_s)
    yield Claim(
        claim="`pipeplan replan`, the whole command, slowest event",
        source=OURS,
        sense="at most",
        bar=MOST_S,
        figure=slowest.wall_s,
        unit="s",
        regime=regime,
        note=f"{slowest.event}, {slowest.cpu_s:.1f} s of cores",
    )
    yield Claim(
        claim="bytes moved, over those of a plan searched for anew",
        source=OURS,
        sense="at most",
        figure=sum(r.moved_bytes for r in rows) / max(1, sum(r.anew_moved_bytes for r in rows)),
        regime=regime,
    )
    yield Claim(
        claim="iteration time, over that of a plan searched for anew, worst event",
        source=OURS,
        sense="at most",
        figure=max(row.new_s / row.anew_s for row in rows),
        regime=f"{regime}, {fresh_s:g} s anew",
    )
    yield details("Replanning", full.COLUMNS, [row.cells() for row in rows])
    yield LeftOut(text=f"{len(others)} of {len(others) + 1} trainings")
