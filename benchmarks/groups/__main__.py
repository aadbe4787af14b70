"""Plans of tensor-parallel groups against the best even layout.

Usage:
    python -m benchmarks.groups [--time-limit S] [--keep FOLDER]
        [--only-kept] [--output FILE]
    python -m benchmarks.groups --short [--json] [--claims FILE]

The grid that people try by hand has every even number of devices in a group, of stages and of
replicas, in every published schedule, at every microbatch size, with and without shared optimizer
state. Our search has the grid's best microbatch size. With --keep, layer graphs and rows are kept
in a folder, and a run that was stopped goes on from there; --only-kept makes the page of what is in
the folder, and names what is missing. With --short it plans the smallest model on two clusters.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.catalogue import GROUPS_UNEVEN_BAR
from benchmarks.groups.against_grid import PairRow, measured, read_rows
from benchmarks.groups.cases import EVEN, MODELS, UNEVEN, Graphs, pairs
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_short_options,
    details,
    is_short,
    met,
    tell,
)
from benchmarks.reporting.report import heading, table, write_table
from planner import PipeplanError
from planner.search.settings import check_settings
from planner.units import plural

LIMIT_S, SHORT_LIMIT_S = 20.0, 5.0
ROUNDING = 1e-9
"""Share of a time below which a difference is rounding."""
BAR = "the bar is our own"
COLUMNS = (
    *("model", "cluster", "even layout", "its schedule", "s"),
    *("ours", "our schedule", "s", "gap", "even / ours"),
)


def grid_rows(kept: Path | None, limit_s: float, *, plans: bool) -> list[PairRow]:
    """Return the rows of pairs, those that an earlier run kept and others as they are planned.

    Args:
        kept: folder of graphs and rows; None: nothing is kept.
        limit_s: of each of our searches, in deterministic seconds.
        plans: whether pairs that are not kept are planned, or left out.
    """
    path, graphs = kept and kept / "pairs.jsonl", Graphs(kept)
    known = {
        (row.model, row.cluster): row for row in read_rows(path) if row.time_limit_s == limit_s
    }
    rows: list[PairRow] = []
    for model, machines in pairs():
        row = known.get((model.name, machines.name))
        if row is None:
            if not plans:
                continue
            row = measured(model, machines, graphs, limit_s)
            if path is not None:
                with path.open("a") as file:
                    print(row.model_dump_json(), file=file)
            print(*cells(row), sep="  ", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def cells(row: PairRow) -> list[str]:
    """Return a row of the table."""
    found: list[str] = [row.model, row.cluster]
    for layout in (row.grid, row.ours):
        if layout is None:
            found += ["nothing fits", "-", "-"]
        else:
            found += [layout.words, layout.schedule, f"{layout.time_s:.3f}"]
    gap = "-" if row.gap is None else f"{row.gap:.1%}"
    return [*found, gap, "-" if row.ratio is None else f"{row.ratio:.3f}"]


def mean(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    return statistics.geometric_mean(ratios) if ratios else None


def grid_claims(rows: Sequence[PairRow], limit_s: float) -> Iterator[Claim]:
    """Yield what the pairs come to."""
    regime = f"{plural(len(rows), 'pair')}, {limit_s:g} deterministic s each, one simulator"
    said = "time of the best even layout over ours, geometric mean"
    for where, is_even, bar in (("uneven", False, GROUPS_UNEVEN_BAR), ("even", True, None)):
        ratios = [row.ratio for row in rows if row.is_even == is_even and row.ratio is not None]
        yield Claim(
            claim=f"{said}, {where} clusters",
            source=BAR if bar else "no bar",
            regime=regime,
            bar=bar,
            figure=mean(ratios),
        )
    ratios = [row.ratio for row in rows if row.ratio is not None]
    never = sum(ratio >= 1 - ROUNDING for ratio in ratios)
    yield met("plans that are not slower than the best even layout", BAR, never, len(ratios))


def short_entries() -> Iterator[Entry]:
    """Yield claims on the smallest model, on an even cluster and an uneven one."""
    graphs, model = Graphs(None), min(MODELS, key=lambda row: "gpt" not in row.factory)
    rows = [measured(model, row, graphs, SHORT_LIMIT_S) for row in (EVEN[0], UNEVEN[0])]
    yield from grid_claims(rows, SHORT_LIMIT_S)
    yield details("Pairs", COLUMNS, map(cells, rows))
    yield LeftOut(text="larger models and six clusters")


def report(arguments: argparse.Namespace) -> str:
    """Plan all pairs and return the page."""
    command = f"python -m benchmarks.groups --time-limit {arguments.time_limit:g}"
    rows = grid_rows(arguments.keep, arguments.time_limit, plans=not arguments.only_kept)
    return "\n".join([heading("Plans of tensor-parallel groups", command), *_grid_section(rows)])


def _grid_section(rows: Sequence[PairRow]) -> Iterator[str]:
    limit_s = rows[0].time_limit_s if rows else LIMIT_S
    yield "## Against the best even layout\n"
    yield (
        "Layouts are tensor x pipeline x data parallelism, then samples of a microbatch, ZeRO "
        "where replicas share the optimizer's state, and how many layers run again in the "
        "backward. The even layout is the best of every number of devices in a group (1, 2, 4, "
        "8), of stages that divides the blocks and of replicas, at each microbatch size (1, 2, "
        "4; GPT-2 also 8), with and without ZeRO, in every published schedule, microbatches in "
        "flight limited and layers recomputed only as memory requires; where types of devices "
        "differ, also on the fastest types alone. Ours is `plan --set tensor_parallel=any` at that "
        f"microbatch size, for {limit_s:g} deterministic seconds on one thread, without being "
        "told that layout. An iteration has 64 samples, 128 on more than 24 devices; float16, "
        "sequence parallelism inside groups, one stage a device. One simulator.\n"
    )
    yield _told(grid_claims(rows, limit_s))
    yield table(COLUMNS, [cells(row) for row in rows])
    known = {(row.model, row.cluster) for row in rows}
    missing = [(m.name, c.name) for m, c in pairs() if (m.name, c.name) not in known]
    if missing:
        named = "; ".join(f"{model} on {cluster}" for model, cluster in missing)
        yield f"Not run ({len(missing)} of {len(missing) + len(rows)} pairs): {named}.\n"


def _told(claims: Iterator[Claim]) -> str:
    lines = (
        f"- {claim.claim}: {claim.figure_cell} (bar {claim.bar_cell}), {claim.verdict}"
        for claim in claims
    )
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.groups",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--time-limit", type=float, default=LIMIT_S, metavar="S")
    found.add_argument("--keep", type=Path, metavar="FOLDER", help="keep graphs and rows there")
    found.add_argument("--only-kept", action="store_true", help="plan nothing that is not kept")
    found.add_argument("--output", type=Path, metavar="FILE", help="write the page to this file")
    found.add_argument("--json", action="store_true", help="print claims as JSON lines")
    add_short_options(found)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    arguments = parser().parse_args(words)
    if arguments.json and not arguments.short:
        parser().error("--json goes with --short")
    try:
        check_settings(arguments.time_limit, 0.0, 0, 1)
        if is_short(parser(), arguments):
            tell(short_entries(), arguments.claims, as_json=arguments.json)
            return 0
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True, exist_ok=True)
        write_table(report(arguments), arguments.output)
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
