"""Random plans on real processes, compared with a single process in plain torch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks import ROOT
from benchmarks.executor.group_plans import random_group_plan, random_sizes
from benchmarks.executor.plans import MAX_RANKS, MIN_RANKS, PRECISIONS, random_plan
from benchmarks.executor.single_process import TOLERANCE
from planner.plan.plan import Plan

WORKER = "benchmarks.executor.parity_worker"
PLANS = 200
"""Plans of the whole table."""
LAUNCHES = 2
"""At a time; ranks often wait for each other."""
ERRORS = ("loss", "tensor", "whole", "buffer", "update", "own")
"""See :class:`benchmarks.executor.single_process.Errors`."""
WITHIN = ("loss", "buffer", "update")
"""These must be within the tolerance; of gradients ``excess`` says it."""
COLUMNS = (
    "precision",
    "plans",
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


@dataclass(frozen=True)
class Outcome:
    """The result of running a plan.

    Attributes:
        number: of the plan, from 0.
        precision: of its weights.
        errors: by their names; empty if it did not run.
        problems: what is wrong; none if it trains as a single process does.
        kinds: of plans of groups that it belongs to.
    """

    number: int
    precision: str
    errors: dict[str, float]
    problems: tuple[str, ...]
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawing:
    """A plan to be drawn, whatever the others.

    Attributes:
        ranks: that run it.
        plan: draws the rest.
    """

    ranks: int
    plan: Callable[[], Plan]


def parity(count: int, seed: int, draw: Callable[[random.Random], Drawing]) -> list[Outcome]:
    """Draw plans and run each; equal arguments draw equal plans.

    Plans of the next number of ranks are drawn while others run.

    Args:
        count: of the plans.
        seed: of all that is drawn.
        draw: :func:`of_devices` or :func:`of_groups`.
    """
    drawings = [draw(random.Random(f"{seed}/{number}")) for number in range(count)]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(LAUNCHES) as pool:
        running = []
        for ranks in sorted({row.ranks for row in drawings}, reverse=True):
            plans = {
                number: row.plan() for number, row in enumerate(drawings) if row.ranks == ranks
            }
            running.append(pool.submit(_run, plans, ranks, Path(folder) / str(ranks)))
        found = [outcome for outcomes in running for outcome in outcomes.result()]
    return sorted(found, key=lambda outcome: outcome.number)


def of_devices(rng: random.Random) -> Drawing:
    """Return a plan of single devices."""
    ranks = rng.randint(MIN_RANKS, MAX_RANKS)
    return Drawing(ranks, partial(random_plan, rng, ranks))


def of_groups(rng: random.Random) -> Drawing:
    """Return a plan of tensor-parallel groups."""
    sizes = random_sizes(rng)
    return Drawing(sum(sizes), partial(random_group_plan, rng, sizes))


def _run(plans: Mapping[int, Plan], ranks: int, folder: Path) -> list[Outcome]:
    """All these plans, in one launch unless one of them ends it."""
    folder.mkdir()
    for number, plan in plans.items():
        plan.save(_file(folder, number))
    reports: dict[int, dict[str, Any]] = {}
    while len(reports) < len(plans):
        said = _launch(ranks, folder)
        reports |= _reports(folder / "report")
        missing = [number for number in plans if number not in reports]
        if missing:
            # Plans run in their order: the first without a report is the one that failed.
            reports[missing[0]] = {"problems": [f"did not run: {said}"]}
            _file(folder, missing[0]).unlink()
    return [_outcome(number, plan, reports[number]) for number, plan in plans.items()]


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _reports(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def _launch(ranks: int, folder: Path) -> str:
    """Run all plans of the folder that have no report; the last the ranks said if they failed."""
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


def _outcome(number: int, plan: Plan, report: dict[str, Any]) -> Outcome:
    errors = {name: report[name] for name in ERRORS if name in report}
    bar = TOLERANCE[plan.job.precision]
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
    kinds = tuple(kind for kind, is_of in _KINDS.items() if is_of(plan))
    return Outcome(number, plan.job.precision, errors, (*report["problems"], *beyond), kinds)


def summary(outcomes: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    """One JSON object of all plans.

    ``max_relative_error`` is the largest of losses and of gradients, all of a plan as one vector,
    by precision; ``largest`` has that of single tensors, and ``beyond_bar`` the plans where
    one was beyond the bar, with plain torch's own error against float64.
    """
    return {
        "plans": len(outcomes),
        "max_relative_error": {
            precision: max(_errors(outcomes, precision, ("loss", "whole")), default=None)
            for precision in PRECISIONS
        },
        "failures": [
            {"plan": outcome.number, "precision": outcome.precision, "problems": outcome.problems}
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
            {"plan": outcome.number, **outcome.errors}
            for outcome in outcomes
            if outcome.errors.get("own")
        ],
        "seed": seed,
        "seconds": round(seconds, 1),
    }


def _errors(outcomes: Sequence[Outcome], precision: str, names: Sequence[str]) -> list[float]:
    rows = [outcome.errors for outcome in outcomes if outcome.precision == precision]
    return [errors[name] for errors in rows for name in names if name in errors]


def run_parity(count: int, seed: int, draw: Callable[[random.Random], Drawing]) -> dict[str, Any]:
    """:func:`parity`, summed up."""
    start_s = perf_counter()
    outcomes = parity(count, seed, draw)
    return summary(outcomes, seed, perf_counter() - start_s)


def parity_rows(count: int, seed: int) -> list[list[object]]:
    """A row of the table for each precision."""
    return rows_of(parity(count, seed, of_devices))


GROUP_COLUMNS = ("plans of groups", *COLUMNS)
_KINDS: Mapping[str, Callable[[Plan], bool]] = {
    "of 2": lambda plan: plan.degrees == (2,),
    "of 4": lambda plan: plan.degrees == (4,),
    "of several sizes": lambda plan: len(plan.degrees) > 1,
    "sharing positions": lambda plan: plan.job.sequence_parallel,
    "with experts": lambda plan: "mixtral" in plan.model.name,
    "sharing optimizer state": lambda plan: plan.job.shards_state and _has_replicas(plan),
    "with replicas": lambda plan: _has_replicas(plan),
    "with several stages a group": lambda plan: len(plan.stages) > len(plan.ranks),
    "with split backwards": lambda plan: any("W" in order for order in plan.orders.values()),
}


def _has_replicas(plan: Plan) -> bool:
    return any(len(stage.devices) > 1 for stage in plan.stages)


def group_rows(count: int, seed: int) -> list[list[object]]:
    """Rows for each kind of plans of groups, one a precision; plans are of several kinds."""
    outcomes = parity(count, seed, of_groups)
    return [
        [kind, *row]
        for kind in _KINDS
        for row in rows_of([outcome for outcome in outcomes if kind in outcome.kinds])
        if row[1]
    ]


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
