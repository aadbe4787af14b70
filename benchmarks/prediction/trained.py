"""Predicted and measured iteration times and memory of plans whose layers were profiled.

The machine is measured (`pipeplan detect`) for each model, which is profiled (`pipeplan profile`)
and planned for it. Each plan is then trained in turns, each rank on one thread. Before the first
turn, between turns and after the last one of the ranks, another each time, profiles the model's
layers again while the others wait, since a machine's speed may drift by a sixth within minutes. A
turn is predicted by the mean of the profiles before and after it; a row is the median turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import Claim, Result, Row, tell
from benchmarks.prediction.plans import MODELS, Model, plans_of, predicted_again, problem_of
from benchmarks.prediction.worker import ANSWER, COSTS
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.plan.plan import Plan

BARS = {2: (4.0, 10.0), 4: (8.0, 15.0)}
"""Median and worst error of iteration times in percent, by the number of ranks."""
MEMORY_BAR, LOW_BAR = 5.0, 3.0
"""Error of the heaviest rank's peak memory, and the most that any rank is above it, in percent."""
SHORT_MODELS = ("gpt", "unet")
TURNS, SHORT_TURNS = 10, 3
SOURCE = "our prediction from a profile; our own bar"
_TIMEOUT_S = 900.0
_MIB = 2**20


def section(options: argparse.Namespace) -> Result:
    """Iteration times and memory of real training."""
    names = options.models or (SHORT_MODELS if options.short else [m.name for m in MODELS])
    turns = options.turns or (SHORT_TURNS if options.short else TURNS)
    rows = [
        row
        for model in MODELS
        if model.name in names
        for ranks in BARS
        for row in _rows_of(model, ranks, turns, options)
    ]
    claims = []
    for ranks, (middle, worst) in BARS.items():
        errors = [abs(row["error %"]) for row in rows if row["ranks"] == ranks]
        text = f"error of the iteration time, {len(errors)} plans on {ranks} ranks"
        median = statistics.median(errors)
        claims.append(Claim(f"median {text}", median, SOURCE, at_most=middle, unit="%"))
        claims.append(Claim(f"worst {text}", max(errors), SOURCE, at_most=worst, unit="%"))
    memory = max(abs(row["memory error %"]) for row in rows)
    low = max(0.0, -min(row["lowest of all ranks %"] for row in rows))
    text = "worst error of the heaviest rank's peak memory"
    claims.append(Claim(text, memory, SOURCE, at_most=MEMORY_BAR, unit="%"))
    text = "furthest below a rank's peak memory"
    return Result(rows, [*claims, Claim(text, low, SOURCE, at_most=LOW_BAR, unit="%")])


def _rows_of(model: Model, ranks: int, turns: int, options: argparse.Namespace) -> Iterator[Row]:
    """Plan a model, and run and predict its plans turn by turn."""
    with tempfile.TemporaryDirectory(prefix="pipeplan-") as name:
        folder, graph = Path(name), model.traced()
        cluster = _detected(ranks, folder)
        problem = problem_of(model, graph, cluster, _profiled(model, folder))
        for title, plan in plans_of(problem, time_limit_s=options.time_limit):
            seconds, peaks = _trained(plan, turns, options.steps, folder)
            costs = [folder / COSTS.format(turn) for turn in range(turns + 1)]
            again = [predicted_again(plan, problem_of(model, graph, cluster, c)) for c in costs]
            expected_s = [found.predicted.iteration_time_s for found in again]
            found = [
                (statistics.fmean(around), statistics.median(measured))
                for around, measured in zip(pairwise(expected_s), seconds, strict=True)
            ]
            row = {"model": model.name, "plan": title, "ranks": ranks}
            yield {**row, **_times(found), **_memory(plan, peaks)}
            tell(f"{row}")


def _times(turns: Sequence[tuple[float, float]]) -> Row:
    """Return predicted and measured time of the median turn, and the spread of the turns."""
    ordered = sorted(turns, key=lambda turn: turn[0] / turn[1])
    predicted_s, measured_s = ordered[len(ordered) // 2]
    ratios = [a / b for a, b in turns]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "predicted ms": 1e3 * predicted_s,
        "measured ms": 1e3 * measured_s,
        "spread %": 100 * (high - low),
        "error %": 100 * (predicted_s / measured_s - 1),
    }


def _memory(plan: Plan, peaks: Sequence[int]) -> Row:
    """Return predicted and measured peaks of the heaviest rank, and the lowest prediction."""
    pairs = [
        (found, plan.predicted.devices[device].peak_memory_bytes)
        for found, device in zip(peaks, plan.ranks, strict=True)
    ]
    measured, predicted = max(pairs)
    return {
        "predicted MiB": predicted / _MIB,
        "measured MiB": measured / _MIB,
        "memory error %": 100 * (predicted / measured - 1),
        "lowest of all ranks %": 100 * min(ours / theirs - 1 for theirs, ours in pairs),
    }


def _detected(ranks: int, folder: Path) -> Cluster:
    """Measure this machine as so many ranks."""
    path = folder / "cluster.toml"
    words = ["planner.cli", "detect", "--ranks", str(ranks), "--device", "cpu", "-o", str(path)]
    _run(words, "pipeplan detect")
    return Cluster.load(path)


def _profiled(model: Model, folder: Path) -> Path:
    """Return the file of the model's costs at its size."""
    job, costs = folder / "job.json", folder / "costs.json"
    costs.unlink(missing_ok=True)
    job.write_text(model.job.model_dump_json())
    words = ["executor.profiling", model.factory, "--job", str(job), "--threads", "1"]
    words += ["--device", "cpu", "--samples", str(model.samples), "-o", str(costs)]
    _run(words, "the profile")
    return costs


def _trained(
    plan: Plan, turns: int, steps: int, folder: Path
) -> tuple[list[list[float]], list[int]]:
    """Train by a plan; costs of its layers between the turns go to the folder.

    Returns:
        The seconds of every step by turn, and the peak bytes of each rank.
    """
    path = folder / "plan.json"
    plan.save(path)
    agent = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(len(plan.ranks))]
    worker = ["-m", "benchmarks.prediction.worker", str(path), str(steps), str(turns), str(folder)]
    _run([*agent, *worker], "the training")
    found = json.loads((folder / ANSWER).read_text())
    return found["seconds"], found["peak_bytes"]


def _run(words: Sequence[str], what: str) -> None:
    """Run a module.

    Raises:
        PipeplanError: if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise PipeplanError(f"{what} failed with status {done.returncode}:\n{done.stderr[-3000:]}")
