"""Predicted and measured iteration times and memory of the benchmark's plans."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.catalogue import PREDICTION_BARS, PREDICTION_LOW_BAR, PREDICTION_MEMORY_BAR
from benchmarks.prediction.plans import Model, plans_of, predicted_again, problem_of
from benchmarks.reporting.report import heading, table
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.units import plural

METHOD = """\
In each of several rounds the machine is measured (`pipeplan detect`), and each plan of a model is
trained between two profiles of the model's layers on one thread: by two ranks on two cores, or by
four that share these, each rank on one thread. A plan's prediction is the mean of those by
the profile before and the one after, since this machine's speed drifts by a sixth within minutes;
the error is that of the median round, predicted over measured.
"""
_TIMEOUT_S = 900.0
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One plan of one model.

    Attributes:
        model, plan: their names.
        ranks: that train.
        predicted_s, measured_s: of an iteration, in the median round.
        spread: the largest ratio of the two in any round over the smallest, less one.
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


@dataclass(frozen=True)
class Round:
    """One prediction of a plan and the training that followed it."""

    predicted_s: float
    measured_s: float
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted_s / self.measured_s

    def between(self, predicted_s: float) -> Round:
        """Return the round predicted by the mean of its profile and one made after the training."""
        return replace(self, predicted_s=(self.predicted_s + predicted_s) / 2)


def rows_of(
    model: Model, *, ranks: int, rounds: int, steps: int, time_limit_s: float
) -> Iterator[Row]:
    """Profile a model, and predict and run its plans, round after round."""
    plans: dict[str, Plan] = {}
    found: defaultdict[str, list[Round]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="pipeplan-") as name:
        folder, graph = Path(name), model.traced()
        for number in range(rounds):
            cluster = detected(ranks, folder)
            before = problem_of(model, graph, cluster, profiled(model, folder))
            plans = plans or dict(plans_of(before, time_limit_s=time_limit_s))
            for title, plan in plans.items():
                what = f"{model.name}, {title}"
                run = measured(what, predicted_again(plan, before), steps, folder)
                after = problem_of(model, graph, cluster, profiled(model, folder))
                row = run.between(predicted_again(plan, after).predicted.iteration_time_s)
                before = after
                found[title].append(row)
                print(
                    f"{what}, {plural(ranks, 'rank')}, round {number + 1}: "
                    f"{row.predicted_s:.4f} s predicted, {row.measured_s:.4f} s measured "
                    f"({row.ratio - 1:+.1%})",
                    file=sys.stderr,
                    flush=True,
                )
        for title, of_plan in found.items():
            yield _row(model.name, title, ranks, of_plan)


def _row(model: str, plan: str, ranks: int, rounds: Sequence[Round]) -> Row:
    by_ratio = sorted(rounds, key=lambda row: row.ratio)
    middle = by_ratio[len(rounds) // 2]
    pairs = list(zip(middle.measured_bytes, middle.predicted_bytes, strict=True))
    most, expected = max(pairs)
    return Row(
        model=model,
        plan=plan,
        ranks=ranks,
        predicted_s=middle.predicted_s,
        measured_s=middle.measured_s,
        spread=by_ratio[-1].ratio / by_ratio[0].ratio - 1,
        predicted_bytes=expected,
        measured_bytes=most,
        lowest=min(ours / theirs - 1 for theirs, ours in pairs),
    )


def detected(ranks: int, folder: Path) -> Cluster:
    """This machine as so many ranks.

    Raises:
        PipeplanError: if it cannot be measured.
    """
    path = folder / "cluster.toml"
    words = ["-m", "planner.cli", "detect", "--ranks", str(ranks), "--device", "cpu"]
    words += ["--no-together", "-o", str(path)]
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


def measured(name: str, plan: Plan, steps: int, folder: Path) -> Round:
    """Train by a plan.

    Raises:
        PipeplanError: if it fails.
    """
    path, answer = folder / "plan.json", folder / "answer.json"
    plan.save(path)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = ["-m", "benchmarks.prediction.worker", str(path), str(steps), str(answer)]
    _run([*agent, "--nproc-per-node", str(len(plan.ranks)), *worker], name)
    found = json.loads(answer.read_text())
    return Round(
        plan.predicted.iteration_time_s,
        statistics.median(found["seconds"]),
        tuple(plan.predicted.devices[device].peak_memory_bytes for device in plan.ranks),
        tuple(found["peak_bytes"]),
    )


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
