"""Predicted and measured iteration times and memory of the benchmark's plans."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.catalogue import (
    PREDICTION_LOW_BAR,
    PREDICTION_MEDIAN_BAR,
    PREDICTION_MEMORY_BAR,
    PREDICTION_WORST_BAR,
)
from benchmarks.prediction.plans import Model, plans_of, problem_of
from benchmarks.reporting.report import heading, table
from planner.errors import PipeplanError
from planner.model.measured_costs import Costs
from planner.plan.plan import Plan

METHOD = """\
Every model is profiled on one thread, then four plans of it are predicted from the profile and
trained by two ranks on two cores of this machine, each on one thread and one core.
"""
_TIMEOUT_S = 900.0
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One plan of one model.

    Attributes:
        model, plan: their names.
        predicted_s, measured_s: of an iteration; the median of the measured ones.
        spread: of the middle half of the iterations, over the median.
        predicted_bytes, measured_bytes: peak of the rank that holds most.
        lowest: of all ranks, the peak predicted over the one measured, less one, that is least.
    """

    model: str
    plan: str
    predicted_s: float
    measured_s: float
    spread: float
    predicted_bytes: int
    measured_bytes: int
    lowest: float

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    def data(self) -> dict[str, object]:
        """Return the row for ``--json``."""
        return {**asdict(self), "error": self.error, "memory_error": self.memory_error}


def rows_of(model: Model, *, steps: int, time_limit_s: float) -> Iterator[Row]:
    """Profile a model, and predict and run its plans."""
    with tempfile.TemporaryDirectory(prefix="pipeplan-") as folder:
        costs, took_s = profiled(model, Path(folder))
        print(f"{model.name}: profiled in {took_s:.0f} s", file=sys.stderr, flush=True)
        problem = problem_of(model, costs)
        for name, plan in plans_of(problem, time_limit_s=time_limit_s):
            yield measured(model.name, name, plan, steps, Path(folder))


def profiled(model: Model, folder: Path) -> tuple[Costs, float]:
    """The model's costs at its size, and the seconds that measuring took.

    Raises:
        PipeplanError: if it fails.
    """
    job, costs = folder / "job.json", folder / "costs.json"
    job.write_text(model.job.model_dump_json())
    words = ["-m", "executor.profiling", model.factory, "--job", str(job), "--threads", "1"]
    words += [
        "--device",
        "cpu",
        "--samples",
        str(model.samples),
        "--seconds",
        "3",
        "-o",
        str(costs),
    ]
    begin_s = time.monotonic()
    _run(["taskset", "-c", "0", sys.executable, *words], "the profile")
    return Costs.load(costs), time.monotonic() - begin_s


def measured(model: str, name: str, plan: Plan, steps: int, folder: Path) -> Row:
    """Train by a plan.

    Raises:
        PipeplanError: if it fails.
    """
    path, answer = folder / "plan.json", folder / "answer.json"
    plan.save(path)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = ["-m", "benchmarks.prediction.worker", str(path), str(steps), str(answer)]
    _run([*agent, "--nproc-per-node", str(len(plan.ranks)), *worker], f"{model}, {name}")
    found = json.loads(answer.read_text())
    low, median, high = statistics.quantiles(found["seconds"], n=4)
    predicted = [plan.predicted.devices[device].peak_memory_bytes for device in plan.ranks]
    pairs = list(zip(found["peak_bytes"], predicted, strict=True))
    most, expected = max(pairs)
    row = Row(
        model=model,
        plan=name,
        predicted_s=plan.predicted.iteration_time_s,
        measured_s=median,
        spread=(high - low) / median,
        predicted_bytes=expected,
        measured_bytes=most,
        lowest=min(ours / theirs - 1 for theirs, ours in pairs),
    )
    print(_line(row), file=sys.stderr, flush=True)
    return row


def _run(command: Sequence[str], what: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise PipeplanError(f"{what} failed with status {done.returncode}:\n{done.stderr[-3000:]}")


def _line(row: Row) -> str:
    return (
        f"{row.model}, {row.plan}: {row.predicted_s:.4f} s predicted, {row.measured_s:.4f} s "
        f"measured ({row.error:+.1%}); {row.predicted_bytes / _MIB:.1f} MiB predicted, "
        f"{row.measured_bytes / _MIB:.1f} MiB measured ({row.memory_error:+.1%})"
    )


COLUMNS = (
    *("model", "plan", "predicted ms", "measured ms", "spread", "error"),
    *("predicted MiB", "measured MiB", "error", "lowest of all ranks"),
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the row's cells, in the order of :data:`COLUMNS`."""
    return (
        *(row.model, row.plan, f"{1e3 * row.predicted_s:.1f}", f"{1e3 * row.measured_s:.1f}"),
        *(f"{row.spread:.0%}", f"{row.error:+.1%}"),
        *(f"{row.predicted_bytes / _MIB:.1f}", f"{row.measured_bytes / _MIB:.1f}"),
        *(f"{row.memory_error:+.1%}", f"{row.lowest:+.1%}"),
    )


def report(rows: Sequence[Row], command: str) -> str:
    """The table, and what it comes to."""
    return "\n".join(
        [
            heading("Predictions", command),
            METHOD,
            *(f"- {line}" for line in verdicts(rows)),
            "",
            table(COLUMNS, [cells(row) for row in rows]),
        ]
    )


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Each bar, with what was reached."""
    return [
        f"{found.what}: {found.value:.1%} (bar {found.bar:.0%}): "
        f"{'reached' if found.value <= found.bar else '**not reached**'}"
        for found in bars(rows)
    ]


class Bar(NamedTuple):
    """An error, what it is of, and what it may be at most."""

    what: str
    value: float
    bar: float


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the errors of iteration times and memory, with their bars."""
    errors = [abs(row.error) for row in rows]
    memory = [abs(row.memory_error) for row in rows]
    low = -min(row.lowest for row in rows)
    return [
        Bar("median error of the iteration time", statistics.median(errors), PREDICTION_MEDIAN_BAR),
        Bar("worst error of the iteration time", max(errors), PREDICTION_WORST_BAR),
        Bar("worst error of the heaviest rank's peak memory", max(memory), PREDICTION_MEMORY_BAR),
        Bar("furthest below a rank's peak memory", max(0.0, low), PREDICTION_LOW_BAR),
    ]
