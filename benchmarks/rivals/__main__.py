"""Pipeplan against the best of all published planners and schedules, on public profiles.

Usage:
    python -m benchmarks.rivals --data FOLDER [--time-limit S] [--every N] [--keep FILE]
        [--output FILE]
    python -m benchmarks.rivals --short [--data FOLDER] [--json] [--claims FILE]
    python -m benchmarks.rivals --spp --data FOLDER [--every N] [--output FILE]

FOLDER holds public profiles in folders pipedream and dapple. Every planner gets the fastest of all
schedules on its partition. It plans every 11th pair of a profile and a cluster, or every Nth with
--every. With --keep, rows are kept in a file as they are known, and a run that was stopped goes on
from there. With --short it prints claims for the same pairs with the short limit. With --spp it
compares SPP with the baselines of its own paper, each in its own schedule, and plans nothing else.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.catalogue import RIVALS_BAR, RIVALS_BASELINES_BAR, RIVALS_SPP_BAR
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    add_short_options,
    details,
    is_short,
    met,
    tell,
    without_data,
)
from benchmarks.reporting.report import data_folder, heading, table, write_table
from benchmarks.rivals import spp_claim
from benchmarks.rivals.pairs import (
    MICROBATCHES,
    RIVALS,
    STRIDE,
    Pair,
    PairRow,
    pairs,
    row_name,
    rows_of,
)
from planner import PipeplanError
from planner.search.settings import check_settings

LIMIT_S, SHORT_LIMIT_S = 10.0, 5.0
BUT_SPP = tuple(name for name in RIVALS if name != "spp")
CLASSIC = "even splits, PipeDream, DAPPLE, AutoPipe: the best of them; the bar is our own"
SPP = "SPP (INFOCOM 2022), near-optimal by its authors; the bar is our own"
EVERY = (
    "even splits, every even grid, PipeDream, DAPPLE, AutoPipe, SPP, each in its fastest schedule"
)
COLUMNS = (
    *("profile", "cluster", "devices", "ours, ms", "our schedule"),
    *("best rival", "its schedule", "rival, ms", "rival / ours"),
)
Ratio = Callable[[PairRow], float]
_MEANS: tuple[tuple[str, str, float, Ratio], ...] = (
    (
        "time of the best rival over ours, geometric mean",
        f"{EVERY}; the bar is our own",
        RIVALS_BAR,
        lambda row: row.ratio,
    ),
    (
        "time of the best classic planner but SPP over ours, geometric mean",
        CLASSIC,
        RIVALS_BASELINES_BAR,
        lambda row: row.ratio_of(BUT_SPP),
    ),
    (
        "time of SPP's plan over ours, geometric mean",
        SPP,
        RIVALS_SPP_BAR,
        lambda row: row.ratio_of(("spp",)),
    ),
)
_ALONE = "plans that no rival is faster than"
ROUNDING = 1e-9
"""Share of a time below which a difference is rounding."""


def claims(rows: Sequence[PairRow], time_limit_s: float) -> Iterator[Claim]:
    """Yield what the rows come to."""
    regime = (
        f"{len(rows)} pairs of a public profile and a cluster, {MICROBATCHES} microbatches, "
        f"{time_limit_s:g} deterministic s each, one simulator"
    )
    for said, source, bar, ratio in _MEANS:
        ratios = [ratio(row) for row in rows]
        yield Claim(claim=said, source=source, regime=regime, bar=bar, figure=mean(ratios))
    fine = sum(row.ratio >= 1 - ROUNDING for row in rows)
    yield met(_ALONE, f"{EVERY}; the bar is our own", fine, len(rows), regime=regime)


def mean(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean of the finite ones: a rival may find nothing that fits."""
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    return statistics.geometric_mean(finite) if finite else None


def short_entries(data: Path | None) -> Iterator[Entry]:
    """Yield claims and the table.

    Args:
        data: folder of the public profiles; None: the claims are told as not run.
    """
    if data is None:
        yield from (without_data(said, source) for said, source, _, _ in _MEANS)
        yield without_data(_ALONE, EVERY)
        return
    every = pairs(data)
    found = in_order(every[::STRIDE], SHORT_LIMIT_S, None)
    yield from claims(found, SHORT_LIMIT_S)
    yield details("Pairs", COLUMNS, map(cells, found))


def in_order(chosen: Sequence[Pair], limit_s: float, kept: Path | None) -> list[PairRow]:
    """Return the rows in the order of the pairs, each told as it is known."""
    found = {}
    for row in rows_of(chosen, limit_s, kept):
        found[row_name(row)] = row
        print(*cells(row), sep="  ", file=sys.stderr, flush=True)
    return [found[pair.name] for pair in chosen]


def cells(row: PairRow) -> list[str]:
    """Return a row of the table."""
    name, rival = row.best_rival
    return [
        *(row.profile, row.cluster, str(row.devices)),
        *(f"{row.ours.time_s * 1e3:.1f}", row.ours.schedule),
        *(name, rival.schedule, f"{rival.time_s * 1e3:.1f}", f"{row.ratio:.3f}"),
    ]


def planner_rows(rows: Sequence[PairRow]) -> Iterator[list[str]]:
    """Yield how each planner does by itself."""
    for name in rows[0].rivals:
        ratio = mean([row.ratio_of((name,)) for row in rows])
        best = sum(row.best_rival[0] == name for row in rows)
        nothing = sum(row.rivals[name] is None for row in rows)
        yield [name, "-" if ratio is None else f"{ratio:.3f}", str(best), str(nothing)]


def report(rows: Sequence[PairRow], time_limit_s: float, every: int) -> str:
    """Return the page."""
    told = "\n".join(
        f"- {claim.claim}: {claim.figure_cell} (bar {claim.bar_cell}), {claim.verdict}"
        for claim in claims(rows, time_limit_s)
    )
    stride = "" if every == STRIDE else f" --every {every}"
    command = f"python -m benchmarks.rivals --data FOLDER --time-limit {time_limit_s:g}{stride}"
    return "\n".join(
        [
            heading("Pipeplan against the best rival", command),
            f"{len(rows)} pairs of a public profile and a cluster, {MICROBATCHES} microbatches. "
            "Whole and split backwards, two stages a device, replicas and recomputation are "
            "allowed to all. Every planner's stages, and the same in two chunks a device, get the "
            "fastest of all published schedules; where memory is short, layers are recomputed and "
            "microbatches in flight limited as in our plans. Ours starts from theirs and searches "
            f"for {time_limit_s:g} deterministic seconds on one thread, so that it cannot be "
            "slower; the last column is a search of its own without their stages. One "
            "simulator.\n",
            f"{told}\n",
            table(COLUMNS, [cells(row) for row in rows]),
            "Each planner by itself:\n",
            table(
                ("planner", "over ours, geometric mean", "best rival of", "finds nothing"),
                [*planner_rows(rows)],
            ),
        ]
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--data", type=data_folder, help="folder of the public profiles")
    found.add_argument("--time-limit", type=float, default=LIMIT_S, metavar="S")
    found.add_argument("--every", type=int, default=STRIDE, metavar="N", help="every Nth pair")
    found.add_argument("--spp", action="store_true", help="SPP against its own baselines")
    found.add_argument("--keep", type=Path, metavar="FILE", help="keep rows; go on from them")
    found.add_argument("--output", type=Path, metavar="FILE", help="write the table to this file")
    found.add_argument("--json", action="store_true", help="print claims as JSON lines")
    add_short_options(found)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    arguments = parser().parse_args(words)
    if arguments.json and not arguments.short:
        parser().error("--json goes with --short")
    if arguments.data is None and not arguments.short:
        parser().error("--data FOLDER is needed, the folder of the public profiles")
    if arguments.every < 1:
        parser().error(f"--every {arguments.every}: expected a number of at least 1")
    try:
        check_settings(arguments.time_limit, 0.0, 0, 1)
        if is_short(parser(), arguments):
            tell(short_entries(arguments.data), arguments.claims, as_json=arguments.json)
            return 0
        chosen = pairs(arguments.data)[:: arguments.every]
        if arguments.spp:
            write_table(spp_claim.report(spp_claim.own_rows(chosen)), arguments.output)
            return 0
        rows = in_order(chosen, arguments.time_limit, arguments.keep)
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    write_table(report(rows, arguments.time_limit, arguments.every), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
