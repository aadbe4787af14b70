"""Replanning after a change of the machines, against planning anew for a minute.

Usage: python -m benchmarks.replan [--time-limit S] [--json FILE] [--output FILE]
       python -m benchmarks.replan --short [--time-limit S] [--claims FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.catalogue import REPLAN_COMMAND_BAR_S
from benchmarks.replan import run as full
from benchmarks.replan.cases import trainings
from benchmarks.replan.run import COLUMNS, FRESH_S, NOTES, SHORT_S, Row, rows_of
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_short_options,
    details,
    is_short,
    tell,
)
from benchmarks.reporting.report import heading, table, write_table

OURS = "ourselves"


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
        bar=REPLAN_COMMAND_BAR_S,
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


def main() -> None:
    """Measure, print the report, and write it if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replan", description=__doc__)
    add_short_options(parser)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    parser.add_argument("--time-limit", type=float, metavar="S", help="of plans made anew")
    options = parser.parse_args()
    if is_short(parser, options):
        tell(entries(options.time_limit or SHORT_S), options.claims)
        return
    loads = [os.getloadavg()[0]]
    fresh_s = options.time_limit or FRESH_S
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for training in trainings():
            for row in rows_of(training, Path(folder), fresh_s):
                print(*row.cells(), sep="  ", file=sys.stderr, flush=True)
                rows.append(row)
    loads.append(os.getloadavg()[0])
    words = f" --time-limit {options.time_limit:g}" if options.time_limit else ""
    parts = [
        heading("Replanning", f"python -m benchmarks.replan{words}"),
        NOTES.format(fresh=fresh_s, begin=loads[0], end=loads[1], cores=os.cpu_count()),
        table(COLUMNS, [row.cells() for row in rows]),
    ]
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    write_table("\n".join(parts), options.output)


if __name__ == "__main__":
    sys.exit(main())
