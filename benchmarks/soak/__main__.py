"""Pipelines that die and stop while they train: does training go on, and how long do others wait?

Usage:
    python -m benchmarks.soak [--events N] [--strategies NAMES] [--shapes 4x1,2x2] [--seed S]
                              [--torchrun N] [--folder DIR] [--output FILE | --json]
    python -m benchmarks.soak --short [--claims FILE] [--json]

Each case trains a small model as pipelines with jobs of their own and a coordinator. At random
moments, half of them as the ranks average, a random rank is killed (SIGKILL) or stopped (SIGSTOP)
for 0.2 to 3.5 s, and now and then the coordinator is killed. Killed ranks come back. It ends with
status 1 if a case hung, a pipeline ended to which nothing was done, or a share was lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.catalogue import SOAK_DETECTION_BAR_S, SOAK_LEAST_BAR_S, SOAK_REJOIN_BAR_S
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_claims_option,
    begin,
    details,
    met,
    tell,
)
from benchmarks.reporting.report import heading, table, write_table
from benchmarks.soak import run as full
from benchmarks.soak import waits
from benchmarks.soak.run import (
    COLUMNS,
    ITERATION_S,
    LONGEST,
    SHORT,
    STEPS_PER_EVENT,
    STEPS_PER_TORCHRUN_EVENT,
    STRATEGIES,
    TORCHRUN_STRATEGY,
    Row,
    run_cases,
)
from benchmarks.soak.world import GROUP_TIMEOUT_S, Case

OURS = "our own bar"
_WAITS = (
    f"All gaps over the members' bar, and of each strategy the {LONGEST} longest, with the waits "
    "of 0.25 s and more that lie in them: calls of others (`push`, `pull`, `state`), with who was "
    "called and, of a group's gradients, who came last or not at all; `loss`, until the "
    "coordinator gives somebody up; `share`, for the coordinator; a group, with the message that "
    "let it be told; an `average`. Threads may wait at once; `else` is the time without any wait."
)
_OTHERS = (
    "gaps between steps of pipelines that have nothing to exchange with a silent rank: within "
    f"max(3 iterations, {SOAK_LEAST_BAR_S:g} s)"
)
_MEMBERS = (
    "gaps between steps of pipelines that wait for a silent rank: within the group timeout of "
    f"{GROUP_TIMEOUT_S:g} s and {SOAK_LEAST_BAR_S:g} s"
)


def entries(rows: Sequence[full.Row]) -> Iterator[Entry]:
    """Claims and the table of rows."""
    events = sum(row.kills + row.stops + row.coordinators for row in rows)
    regime = f"{len(rows)} strategies, {events} kills and stops"
    for claim, good in (
        ("strategies that train on while ranks are killed and stopped", _goes_on),
        ("strategies with every share committed exactly once", lambda row: not row.faults),
    ):
        yield met(claim, OURS, sum(map(good, rows)), len(rows), regime=regime)
    yield _gaps(_OTHERS, rows, lambda row: (row.others_s, row.others_bar_s))
    yield _gaps(_MEMBERS, rows, lambda row: (row.members_s, row.members_bar_s))
    yield _longest("detecting a killed rank", [s for row in rows for s in row.detection_s], True)
    yield _longest("rejoining, from hello", [s for row in rows for s in row.rejoin_s], False)
    yield details("Soak", full.COLUMNS, [row.cells() for row in rows])
    left = [name for name in full.STRATEGIES if name not in {row.case.strategy for row in rows}]
    if left:
        yield LeftOut(text="strategies " + ", ".join(left))
    yield LeftOut(text="most of the events")
    yield LeftOut(text="pipelines of two places and restarts by torchrun")


def _goes_on(row: full.Row) -> bool:
    return not (row.hung or row.strange)


def _gaps(
    claim: str,
    rows: Sequence[full.Row],
    gaps: Callable[[full.Row], tuple[Sequence[float], float]],
) -> Claim:
    pairs = [(gap_s, bar_s) for row in rows for gaps_s, bar_s in (gaps(row),) for gap_s in gaps_s]
    within = sum(gap_s <= bar_s for gap_s, bar_s in pairs)
    longest = max((gap_s for gap_s, _ in pairs), default=0.0)
    return met(claim, OURS, within, len(pairs), note=f"longest {longest:.2f} s")


def _longest(claim: str, seconds: Sequence[float], is_detection: bool) -> Claim:
    bar_s = SOAK_DETECTION_BAR_S if is_detection else SOAK_REJOIN_BAR_S
    told = f"{claim}: longest"
    if not seconds:
        return Claim(claim=told, source=OURS, not_run="it did not happen in so few events")
    regime = f"{len(seconds)} times"
    figures = {"sense": "at most", "bar": bar_s, "figure": max(seconds), "unit": "s"}
    return Claim.model_validate({"claim": told, "source": OURS, "regime": regime, **figures})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    options = _options(argv)
    if options.claims:
        begin(options.claims)
    rows = []
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.folder or Path(temporary)
        for row in run_cases(list(_cases(options)), folder):
            print(_progress(row), file=sys.stderr, flush=True)
            rows.append(row)
    if options.claims:
        tell(entries(rows), options.claims)
    if options.json:
        print(json.dumps([{**asdict(row), "is_well": row.is_well} for row in rows]))
    elif options.output or not options.claims:
        write_table(_report(rows, options), options.output)
    return 0 if all(row.is_well for row in rows) else 1


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    strategies = options.strategies.split(";")
    for pipelines, places in options.shapes:
        for strategy in strategies:
            steps = options.steps_per_event * options.events
            yield Case(strategy, pipelines, places, options.events, steps, options.seed)
    if options.torchrun:
        steps = STEPS_PER_TORCHRUN_EVENT * options.torchrun
        yield Case(TORCHRUN_STRATEGY, 2, 2, options.torchrun, steps, options.seed, torchrun=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what it leaves open is that of the short form or of the full one."""
    options = _parser().parse_args(argv)
    full = (20, STRATEGIES, ((4, 1), (2, 2)))
    events, strategies, shapes = SHORT if options.short else full
    options.events = options.events or events
    options.strategies = options.strategies or ";".join(strategies)
    options.shapes = options.shapes or shapes
    return options


def _progress(row: Row) -> str:
    found = zip(COLUMNS, row.cells(), strict=True)
    return f"{row.wall_s:.0f} s  " + "  ".join(f"{name}: {cell}" for name, cell in found)


def _report(rows: Sequence[Row], options: argparse.Namespace) -> str:
    command = "python -m benchmarks.soak " + " ".join(sys.argv[1:])
    about = (
        "Ranks are processes of this machine with emulated compute "
        f"({ITERATION_S:g} s an iteration), forked from a process that has imported torch: "
        "times from start leave out the import, which torchrun's restarts pay for (the last row, "
        "if it says so). A gap is from the end of one step to the end of the next, the longest in "
        "the time from the hit until the pipeline is back; others have exchanged nothing with "
        "the rank that was hit while it was silent, members have, or were to. Each cell of times "
        f"has the median and the largest. Bars: others max(3 iterations, {SOAK_LEAST_BAR_S:g} s), "
        f"members the group timeout of {GROUP_TIMEOUT_S:g} s and {SOAK_LEAST_BAR_S:g} s, detection "
        f"{SOAK_DETECTION_BAR_S:g} s, rejoin {SOAK_REJOIN_BAR_S:g} s from hello."
    )
    cells = [list(row.cells()) for row in rows]
    gaps = [gap.cells(row.case.strategy) for row in rows for gap in row.long_gaps]
    return (
        f"{heading('Soak', command)}\n{about}\n\n{table(COLUMNS, cells)}\n\n"
        f"## What the long gaps waited for\n\n{_WAITS}\n\n{table(waits.COLUMNS, gaps)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--events", type=int, help="of each case (default 20)")
    parser.add_argument("--strategies", help="with semicolons between (default all)")
    parser.add_argument("--shapes", type=_shapes, help="such as 4x1,2x2 (the default)")
    parser.add_argument("--steps-per-event", type=int, default=STEPS_PER_EVENT)
    parser.add_argument("--torchrun", type=int, default=0, metavar="N", help="events by torchrun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the logs there")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--short", action="store_true", help="a few events of four strategies")
    add_claims_option(parser)
    parser.add_argument("--output", type=Path, help="write the report to this file")
    return parser


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        pipelines, _, places = part.partition("x")
        found.append((int(pipelines), int(places)))
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
