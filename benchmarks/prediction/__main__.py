"""Predicted against measured: iteration times and memory of plans whose layers were profiled.

Usage:
    python -m benchmarks.prediction [--models NAMES] [--steps N] [--output PATH] [--json]
    python -m benchmarks.prediction --short --json
    python -m benchmarks.prediction --model module:factory [--set NAME=VALUE ...] [--samples N]

Five plans of every model are trained in turns, by two ranks on two cores and by four that share
these, and predicted from profiles of the model's layers between the turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.catalogue import PREDICTION_BARS
from benchmarks.prediction import run as full
from benchmarks.prediction.plans import MODELS, Model
from benchmarks.prediction.run import Row, report, rows_of
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_claims_option,
    begin,
    details,
    tell,
)
from benchmarks.reporting.report import write_table
from planner.errors import PipeplanError
from planner.job import Job, job_with

SOURCE = "our prediction from a profile; our own bar"


def entries(rows: Sequence[full.Row]) -> Iterator[Entry]:
    """Claims and the table of rows; what is left out of all models."""
    for bar in full.bars(rows):
        yield Claim(
            claim=bar.what,
            source=SOURCE,
            sense="at most",
            bar=bar.bar,
            figure=bar.value,
            unit="%",
            regime=f"{len(rows)} plans",
        )
    yield details("Plans", full.COLUMNS, [full.cells(row) for row in rows])
    ran = {row.model for row in rows}
    left = [model.name for model in MODELS if model.name not in ran]
    if left:
        yield LeftOut(text="models " + ", ".join(left))


SHORT = ("gpt", "unet")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--models", help="of " + ", ".join(model.name for model in MODELS))
    found.add_argument("--model", metavar="MODULE:FACTORY", help="any model, in place of those")
    found.add_argument("--set", action="append", metavar="NAME=VALUE", help="of --model")
    found.add_argument("--samples", type=int, default=1, help="of a microbatch of --model")
    found.add_argument("--ranks", type=int, action="append", help="2, 4 or both (default)")
    found.add_argument("--turns", type=int, default=10, help="of each plan (default: 10)")
    found.add_argument("--steps", type=int, default=3, help="of each turn (default: 3)")
    found.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="of our plan")
    found.add_argument("--short", action="store_true", help=f"only {', '.join(SHORT)}")
    found.add_argument("--json", action="store_true", help="a line a model and plan")
    add_claims_option(found)
    found.add_argument("--output", type=Path, help="write the table to this file")
    return found


def chosen(options: argparse.Namespace) -> list[Model]:
    """Return the models that the command line names.

    Raises:
        PipeplanError: for an unknown name or a wrong setting.
    """
    if options.model:
        arguments = job_with(Job(), options.set or []).model_arguments
        return [Model(options.model, options.model, options.samples, arguments)]
    known = {model.name: model for model in MODELS}
    names = options.models.split(",") if options.models else SHORT if options.short else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PipeplanError(
            f"--models: {', '.join(unknown)} is not known; choose from {', '.join(known)}"
        )
    return [known[name] for name in names]


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    options = parser().parse_args(words)
    turns = 3 if options.short else options.turns
    rows: list[Row] = []
    try:
        if options.claims:
            begin(options.claims)
        for model in chosen(options):
            for ranks in options.ranks or PREDICTION_BARS:
                for row in rows_of(
                    model,
                    ranks=ranks,
                    turns=turns,
                    steps=options.steps,
                    time_limit_s=options.time_limit,
                ):
                    rows.append(row)
                    if options.json:
                        print(json.dumps(row.data()), flush=True)
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    given = " ".join(sys.argv[1:]) if words is None else " ".join(words)
    if options.claims:
        tell(entries(rows), options.claims)
    if options.output or not (options.json or options.claims):
        write_table(
            report(rows, f"python -m benchmarks.prediction {given}".strip()), options.output
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
