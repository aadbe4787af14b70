"""Predicted and measured iteration times and memory of the benchmark's plans."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.catalogue import PREDICTION_BARS, PREDICTION_LOW_BAR, PREDICTION_MEMORY_BAR
from benchmarks.prediction.plans import Model, plans_of, predicted_again, problem_of
from benchmarks.prediction.worker import ANSWER, COSTS
from benchmarks.reporting.report import heading, table
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.units import plural

METHOD = """\
The machine is measured (`pipeplan detect`) for each model, which is profiled (`pipeplan profile`)
and planned for it. Each plan is then trained in turns, by two ranks on two cores or by four that
share these, each rank on one thread. Before the first turn, between turns and after the last one
of the ranks, another each time, profiles the model's layers again while the others wait, since this
machine's speed drifts by a sixth within minutes. A turn is predicted by the mean of the profiles
before and after it, and its error is predicted over measured, the median of its steps; a row is the
median turn. Its spread is the distance between the quartiles of the turns' ratios.
"""
_TIMEOUT_S = 900.0
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One plan of one model.

    Attributes:
        model, plan: their names.
        ranks: that train.
        predicted_s, measured_s: of an iteration, in the median turn.
        spread: the distance between the quartiles of the turns' ratios of the two.
        predicted_bytes, measured_bytes: peak of the rank that holds most.
        lowest: of all ranks, the peak predicted over the one measured, less one, that is least.
    """

    model: str
    plan: str
    ranks: int
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


class Turn(NamedTuple):
    """Some steps of a plan, and what the profiles before and after them predict; seconds."""

    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s


def rows_of(
    model: Model, *, ranks: int, turns: int, steps: int, time_limit_s: float
) -> Iterator[Row]:
    """Plan a model, and run and predict its plans turn by turn."""
    with tempfile.TemporaryDirectory(prefix="pipeplan-") as name:
        folder, graph = Path(name), model.traced()
        cluster = detected(ranks, folder)
        problem = problem_of(model, graph, cluster, profiled(model, folder))
        for title, plan in plans_of(problem, time_limit_s=time_limit_s):
            seconds, peaks = trained(f"{model.name}, {title}", plan, turns, steps, folder)
            costs = [folder / COSTS.format(turn) for turn in range(turns + 1)]
            again = [predicted_again(plan, problem_of(model, graph, cluster, c)) for c in costs]
            expected_s = [found.predicted.iteration_time_s for found in again]
            rows = [
                Turn(statistics.fmean(around), statistics.median(measured))
                for around, measured in zip(pairwise(expected_s), seconds, strict=True)
            ]
            yield _row(model.name, title, plan, rows, peaks)


def _row(model: str, title: str, plan: Plan, turns: Sequence[Turn], peaks: Sequence[int]) -> Row:
    by_ratio = sorted(turns, key=lambda turn: turn.ratio)
    middle = by_ratio[len(turns) // 2]
    pairs = [
        (found, plan.predicted.devices[device].peak_memory_bytes)
        for found, device in zip(peaks, plan.ranks, strict=True)
    ]
    most, expected = max(pairs)
    row = Row(
        model=model,
        plan=title,
        ranks=len(plan.ranks),
        predicted_s=middle.predicted_s,
        measured_s=middle.measured_s,
        spread=spread([turn.ratio for turn in turns]),
        predicted_bytes=expected,
        measured_bytes=most,
        lowest=min(ours / theirs - 1 for theirs, ours in pairs),
    )
    print(
        f"{model}, {title}, {plural(row.ranks, 'rank')}: {row.predicted_s:.4f} s predicted, "
        f"{row.measured_s:.4f} s measured ({row.error:+.1%}, spread {row.spread:.0%})",
        file=sys.stderr,
        flush=True,
    )
    return row


def spread(ratios: Sequence[float]) -> float:
    """Return the distance between the quartiles; 0 of a single one."""
    if len(ratios) < 2:
        return 0.0
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return high - low


def detected(ranks: int, folder: Path) -> Cluster:
    """This machine as so many ranks.

    Raises:
        PipeplanError: if it cannot be measured.
    """
    path = folder / "cluster.toml"
    words = ["-m", "planner.cli", "detect", "--ranks", str(ranks), "--device", "cpu"]
    words += ["-o", str(path)]
    _run([sys.executable, *words], "pipeplan detect")
    return Cluster.load(path)


def profiled(model: Model, folder: Path) -> Path:
    """The file of the model's costs at its size.

    Raises:
        PipeplanError: if it fails.
    """
    job, costs = folder / "job.json", folder / "costs.json"
    costs.unlink(missing_ok=True)
    job.write_text(model.job.model_dump_json())
    words = ["-m", "executor.profiling", model.factory, "--job", str(job), "--threads", "1"]
    words += ["--device", "cpu", "--samples", str(model.samples), "-o", str(costs)]
    _run([sys.executable, *words], "the profile")
    return costs


def trained(
    name: str, plan: Plan, turns: int, steps: int, folder: Path
) -> tuple[list[list[float]], list[int]]:
    """Train by a plan, with costs of its layers before, between and after the turns in the folder.

    Returns:
        The seconds of every step by turn, and the peak bytes of each rank.

    Raises:
        PipeplanError: if it fails.
    """
    path = folder / "plan.json"
    plan.save(path)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = ["-m", "benchmarks.prediction.worker", str(path), str(steps), str(turns), str(folder)]
    _run([*agent, "--nproc-per-node", str(len(plan.ranks)), *worker], name)
    found = json.loads((folder / ANSWER).read_text())
    return found["seconds"], found["peak_bytes"]


def _run(command: Sequence[str], what: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise PipeplanError(f"{what} failed with status {done.returncode}:\n{done.stderr[-3000:]}")


COLUMNS = (
    *("model", "plan", "ranks", "predicted ms", "measured ms", "spread", "error"),
    *("predicted MiB", "measured MiB", "error", "lowest of all ranks"),
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the row's cells, in the order of :data:`COLUMNS`."""
    return (
        *(row.model, row.plan, str(row.ranks)),
        *(f"{1e3 * row.predicted_s:.1f}", f"{1e3 * row.measured_s:.1f}"),
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
    found = []
    for ranks, (middle, worst) in PREDICTION_BARS.items():
        errors = [abs(row.error) for row in rows if row.ranks == ranks]
        if errors:
            among = f"error of the iteration time, {ranks} ranks"
            found += [Bar(f"median {among}", statistics.median(errors), middle)]
            found += [Bar(f"worst {among}", max(errors), worst)]
    memory = [abs(row.memory_error) for row in rows]
    low = -min(row.lowest for row in rows)
    return [
        *found,
        Bar("worst error of the heaviest rank's peak memory", max(memory), PREDICTION_MEMORY_BAR),
        Bar("furthest below a rank's peak memory", max(0.0, low), PREDICTION_LOW_BAR),
    ]
