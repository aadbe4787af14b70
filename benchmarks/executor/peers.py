"""The executor beside torch.distributed.pipelining: the same order of the same work.

Both runtimes live in the same processes, of one thread each, and take turns of one step: forwards
and backwards of all microbatches and the mean loss, without the optimizer. The plan's orders are
those of torch's own schedule objects, and torch's stages are modules of whole blocks, as its users
split them. Beside the time of a step stands the time that the ranks' cores were at work, which
depends less on what else the machine does. Memory is what torch's CPU allocator has handed out
during a step (:mod:`benchmarks.executor.memory`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import Claim, Result, Row
from planner.errors import PipeplanError

SCHEDULES = ("1f1b", "interleaved 1f1b", "interleaved zero bubble", "zb-v")
SHORT_SCHEDULES = ("1f1b", "zb-v")
RANKS, ROUNDS, LAUNCHES = 2, 10, 2
"""Where a process happens to lay its tensors makes one runtime a few percent slower than the other
for as long as it lives; hence several launches, whose rounds count alike."""
TIMEOUT_S = 1800.0
QUIET = {"KINETO_LOG_LEVEL": "6"}
"""Torch's profiler otherwise prints every start and stop."""
TORCH = "torch.distributed.pipelining, the same order of the same work"


def section(options: argparse.Namespace) -> Result:
    """The executor beside torch's own pipeline runtime."""
    schedules = SHORT_SCHEDULES if options.short else SCHEDULES
    launches = [_answers(schedules) for _ in range(LAUNCHES)]
    rows = [_row(answers) for answers in zip(*launches, strict=True)]
    claims = []
    for row in rows:
        text = f"over torch's: GPT, {row['schedule']}, {RANKS} ranks"
        claims.append(Claim(f"step time {text}", row["time over torch's"], TORCH, at_most=1.0))
        claims.append(Claim(f"peak memory {text}", row["memory over torch's"], TORCH, at_most=1.0))
    return Result(rows, claims)


def _answers(schedules: Sequence[str]) -> list[dict[str, Any]]:
    """Run all schedules in one launch.

    Raises:
        PipeplanError: if the launch fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        worker = ["-m", "benchmarks.executor.peers_worker", str(answers), str(ROUNDS), *schedules]
        done = subprocess.run(
            [sys.executable, *launch, *worker],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **QUIET},
            stdout=sys.stderr,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise PipeplanError(f"the runtimes ended with status {done.returncode}; see above")
        return [json.loads(line) for line in answers.read_text().splitlines()]


def _row(answers: Sequence[Mapping[str, Any]]) -> Row:
    """Return the row of a schedule, of the rounds of all launches."""
    times, cores = _ratios(answers, "seconds"), _ratios(answers, "busy_seconds")
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    memory = [rank["executor"] / rank["torch"] for rank in answers[0]["peak_bytes"]]
    step_s = statistics.median(s for answer in answers for s in answer["seconds"]["torch"])
    return {
        "schedule": answers[0]["schedule"],
        "step ms, torch": 1e3 * step_s,
        "time over torch's": statistics.median(times),
        "quartiles": f"{first:.3f} to {third:.3f}",
        "core time over torch's": statistics.median(cores),
        "memory over torch's": max(memory),
        "largest error of a gradient": max(answer["error"] for answer in answers),
    }


def _ratios(answers: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    return [
        ours / torchs
        for answer in answers
        for ours, torchs in zip(answer[what]["executor"], answer[what]["torch"], strict=True)
    ]
