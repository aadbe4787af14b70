"""Other people's published runs, predicted from their own layer times and links.

Usage:
    python -m benchmarks.published [--data FOLDER] [--runtime theirs] [--output PATH]
    python -m benchmarks.published --short [--claims FILE]

FOLDER has checkouts of github.com/eth-easl/sailor (``sailor``) and github.com/DachengLi1/AMP
(``AMP``); without it only the rows whose figures are printed in a paper run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.catalogue import PUBLISHED_MEDIAN_BAR, PUBLISHED_WORST_BAR
from benchmarks.published import amp, sailor, zero_bubble
from benchmarks.published.run import (
    COLUMNS,
    Prediction,
    PublishedRun,
    Summary,
    cells,
    host_times,
    predict,
    report,
    scored,
)
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_short_options,
    details,
    is_short,
    tell,
)
from benchmarks.reporting.report import data_folder, write_table
from planner.errors import PipeplanError

SHORT_STAGES = 16


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--data", type=data_folder, help="folder of checkouts")
    found.add_argument(
        "--runtime",
        choices=("ours", "theirs"),
        default="ours",
        help="whose runtime is replayed: our executor's, or the one that each source used, with "
        "the host time that one row of a source gives",
    )
    found.add_argument("--output", type=Path, help="write the page to this file")
    add_short_options(found)
    return found


def published_runs(data: Path | None) -> Iterator[PublishedRun]:
    """Yield all rows that there are figures for.

    Raises:
        PipeplanError: if the folder has no checkout, or a file in one cannot be read.
    """
    found = [] if data is None else [*sailor.runs(data), *amp.runs(data)]
    if data is not None and not found:
        raise PipeplanError(
            f"--data {data}: has neither {sailor.FOLDER} nor {amp.FOLDER}; clone "
            "github.com/eth-easl/sailor and github.com/DachengLi1/AMP into it"
        )
    yield from zero_bubble.runs()
    yield from found


def entries(rows: Sequence[Prediction]) -> Iterator[Entry]:
    """Return the claims and the table of rows."""
    whole = Summary.of(scored(rows))
    for name, bar, figure in (
        ("median", PUBLISHED_MEDIAN_BAR, whole.median),
        ("worst", PUBLISHED_WORST_BAR, whole.worst),
    ):
        yield Claim(
            claim=f"published runs of others, predicted from their own profiles: {name} error",
            source="our own bar",
            sense="below",
            bar=bar,
            figure=figure,
            unit="%",
            regime=f"{whole.rows} rows",
        )
    yield details("Published runs", COLUMNS, map(cells, rows))


def short_entries() -> Iterator[Entry]:
    """Return the claims on the rows of few stages that need no checkout."""
    runs = [run for run in zero_bubble.runs() if (run.pipeline_size or 0) <= SHORT_STAGES]
    hosts = host_times(runs)
    yield from entries([predict(run, by_runtime=True, hosts=hosts) for run in runs])
    yield LeftOut(text=f"pipelines of more than {SHORT_STAGES} stages")
    yield LeftOut(text="runs of Sailor and AMP, which take --data")


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    found = parser()
    options = found.parse_args(words)
    try:
        if is_short(found, options):
            tell(short_entries(), options.claims)
            return 0
        by_runtime = options.runtime == "theirs"
        runs = list(published_runs(options.data))
        hosts = host_times(runs) if by_runtime else {}
        rows = [predict(run, by_runtime=by_runtime, hosts=hosts) for run in runs]
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    given = "" if options.data is None else " --data DATA"
    command = f"python -m benchmarks.published{given} --runtime {options.runtime}"
    page = report(rows, command, by_runtime=by_runtime, hosts=hosts)
    write_table(page, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
