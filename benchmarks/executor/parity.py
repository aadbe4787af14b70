"""Random trainings on real processes, compared with a single process in plain torch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks import ROOT
from benchmarks.executor.features import FEATURES
from benchmarks.executor.parity_worker import plan_files
from benchmarks.executor.plans import PRECISIONS, RANKS, random_training
from benchmarks.executor.single_process import TOLERANCE
from planner.plan.plan import Plan

WORKER = "benchmarks.executor.parity_worker"
TRAININGS = 60
"""Trainings of the whole table, each in every precision."""
LAUNCHES = 2
"""At a time; ranks often wait for each other."""
ERRORS = ("loss", "tensor", "whole", "buffer", "update", "own")
"""See :class:`benchmarks.executor.single_process.Errors`."""
WITHIN = ("loss", "buffer", "update")
"""These must be within the tolerance; of gradients ``excess`` says it."""
COLUMNS = (
    "precision",
    "trainings",
    "bar",
    "loss",
    "gradient of a tensor",
    "of all",
    "median of all",
    "buffer",
    "update",
    "plain torch's own",
    "failures",
)
Plans = tuple[Plan, ...]


@dataclass(frozen=True)
class Outcome:
    """The result of a training.

    Attributes:
        number: of the training, from 0.
        precision: of its weights.
        errors: by their names; empty if it did not run.
        problems: what is wrong; none if it trains as a single process does.
        features: that its plans have, of :data:`FEATURES`.
    """

    number: int
    precision: str
    errors: dict[str, float]
    problems: tuple[str, ...]
    features: tuple[str, ...] = ()


def parity(count: int, seed: int, precisions: Sequence[str] = PRECISIONS) -> list[Outcome]:
    """Draw trainings and run each in every precision; equal arguments draw equal trainings.

    Those of the next number of ranks are drawn while others run.

    Args:
        count: of the trainings.
        seed: of all that is drawn.
        precisions: of the weights.
    """
    generators = [random.Random(f"{seed}/{number}") for number in range(count)]
    ranks = [rng.choice(RANKS) for rng in generators]
    states = [rng.getstate() for rng in generators]

    def drawn(number: int, precision: str) -> Plans:
        generators[number].setstate(states[number])
        return random_training(generators[number], ranks[number], precision)

    with TemporaryDirectory() as folder, ThreadPoolExecutor(LAUNCHES) as pool:
        running = []
        for together in sorted(set(ranks), reverse=True):
            trainings = {
                f"{number:06d}.{precision}": drawn(number, precision)
                for number in range(count)
                for precision in precisions
                if ranks[number] == together
            }
            running.append(pool.submit(_run, trainings, together, Path(folder) / str(together)))
        found = [outcome for outcomes in running for outcome in outcomes.result()]
    return sorted(found, key=lambda outcome: (outcome.number, outcome.precision))


def _run(trainings: Mapping[str, Plans], ranks: int, folder: Path) -> list[Outcome]:
    """All these trainings, in one launch unless one of them ends it."""
    for name, plans in trainings.items():
        for plan, file in zip(plans, plan_files(folder, name), strict=False):
            file.parent.mkdir(parents=True, exist_ok=True)
            plan.save(file)
    reports: dict[str, dict[str, Any]] = {}
    while len(reports) < len(trainings):
        said = _launch(ranks, folder)
        reports |= _reports(folder / "report")
        missing = [name for name in trainings if name not in reports]
        if missing:
            # They run in their order: the first without a report is the one that failed.
            reports[missing[0]] = {"problems": [f"did not run: {said}"]}
            plan_files(folder, missing[0])[0].unlink()
    return [_outcome(name, plans, reports[name]) for name, plans in trainings.items()]


def _reports(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def _launch(ranks: int, folder: Path) -> str:
    """Run all trainings of a folder that have no report; what ranks said last if they failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), "-m", WORKER, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "Error" in line and "[rank" in line]
    return "; ".join(said[:3]) or done.stderr[-500:]


def _outcome(name: str, plans: Plans, report: dict[str, Any]) -> Outcome:
    number, _, precision = name.partition(".")
    errors = {name: report[name] for name in ERRORS if name in report}
    bar = TOLERANCE[precision]
    beyond = [
        f"relative error of {name}: {errors[name]:.2e}, allowed are {bar:g}"
        for name in WITHIN
        if name in errors and not errors[name] <= bar
    ]
    if not report.get("excess", 0.0) <= 1:
        beyond.append(
            f"gradients: {errors['tensor']:.2e} of {report['worst']}, {errors['whole']:.2e} of "
            f"all; {report['excess']:.2g} times what is allowed"
        )
    features = tuple(feature for feature, is_of in FEATURES.items() if is_of(plans))
    return Outcome(int(number), precision, errors, (*report["problems"], *beyond), features)


def summary(outcomes: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    """One JSON object of all trainings.

    ``max_relative_error`` is the largest of losses and of gradients, all of a training as one
    vector, by precision; ``largest`` has that of single tensors, and ``beyond_bar`` the trainings
    where one was beyond the bar, with plain torch's own error against float64; ``features`` counts
    the trainings that have each.
    """
    return {
        "trainings": len(outcomes),
        "max_relative_error": {
            precision: max(_errors(outcomes, precision, ("loss", "whole")), default=None)
            for precision in PRECISIONS
        },
        "failures": [
            {
                "training": outcome.number,
                "precision": outcome.precision,
                "problems": outcome.problems,
            }
            for outcome in outcomes
            if outcome.problems
        ],
        "largest": {
            precision: {
                name: max(_errors(outcomes, precision, (name,)), default=None) for name in ERRORS
            }
            for precision in PRECISIONS
        },
        "beyond_bar": [
            {"training": outcome.number, **outcome.errors}
            for outcome in outcomes
            if outcome.errors.get("own")
        ],
        "features": {
            name: sum(name in outcome.features for outcome in outcomes) for name in FEATURES
        },
        "seed": seed,
        "seconds": round(seconds, 1),
    }


def _errors(outcomes: Sequence[Outcome], precision: str, names: Sequence[str]) -> list[float]:
    rows = [outcome.errors for outcome in outcomes if outcome.precision == precision]
    return [errors[name] for errors in rows for name in names if name in errors]


def run_parity(count: int, seed: int, precisions: Sequence[str] = PRECISIONS) -> dict[str, Any]:
    """:func:`parity`, summed up."""
    start_s = perf_counter()
    outcomes = parity(count, seed, precisions)
    return summary(outcomes, seed, perf_counter() - start_s)


FEATURE_COLUMNS = ("with", *COLUMNS)


def feature_rows(count: int, seed: int) -> list[list[object]]:
    """Rows of all trainings and of those with each feature, one a precision."""
    outcomes = parity(count, seed)
    rows: list[list[object]] = [["any", *row] for row in rows_of(outcomes)]
    for feature in FEATURES:
        mine = [outcome for outcome in outcomes if feature in outcome.features]
        rows += [[feature, *row] for row in rows_of(mine)]
    return rows


def rows_of(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """A row of the table for each precision."""
    return [_row(outcomes, precision) for precision in PRECISIONS]


def _row(outcomes: Sequence[Outcome], precision: str) -> list[object]:
    mine = [outcome for outcome in outcomes if outcome.precision == precision]
    largest = [max(_errors(mine, precision, (name,)), default=0.0) for name in ERRORS]
    shown = [f"{error:.1e}" for error in largest]
    middle = median(_errors(mine, precision, ("whole",)) or [0.0])
    failures = sum(bool(outcome.problems) for outcome in mine)
    bar = f"{TOLERANCE[precision]:g}"
    return [precision, len(mine), bar, *shown[:3], f"{middle:.1e}", *shown[3:], failures]
