"""The executor beside torch.distributed.pipelining: the same order of the same work.

Usage:
    python -m benchmarks.executor.compare_peers [--rounds N] [--launches N] [--ranks N] [--json]

Both runtimes live in the same processes, of one thread each, and take turns of one step: forwards
and backwards of all microbatches and the mean loss, without the optimizer. The plan's orders are
those of torch's own schedule objects. Beside the time of a step stands the time that the ranks'
cores were at work in it, which tells more on a machine that does other things too. torch gets
modules of whole blocks, as its users split them, and the executor's own cuts as well; the row is
against the faster of the two, and against the one that needs less memory. Memory is what torch's
CPU allocator has handed out during a step, weights and standing buffers included
(:mod:`benchmarks.executor.peers.memory`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.executor.peers.cases import FACTORIES, SCHEDULES, Case
from benchmarks.reporting.report import heading, table, write_table

OURS = "executor"
COLUMNS = (
    *("model", "schedule", "ranks", "step ms, torch", "time over torch's", "quartiles"),
    *("core time over torch's", "quartiles", "peak MiB, torch"),
    *("memory over torch's, each rank", "largest error of a gradient"),
)
TIMEOUT_S = 1800.0
QUIET = {"KINETO_LOG_LEVEL": "6"}
"""Its profiler tells of every start and stop."""
MIB = 2**20


@dataclass(frozen=True)
class Ratios:
    """Ours over torch's, round by round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Both are the ratio itself if there is only one."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def cells(self) -> list[str]:
        """The row's cells, in the order of :data:`COLUMNS`."""
        return [f"{self.median:.3f}", "{:.3f} to {:.3f}".format(*self.quartiles)]


@dataclass(frozen=True)
class PeerRow:
    """One model under one schedule.

    Attributes:
        model, schedule, ranks: what ran.
        peer: which of torch's set-ups was the faster one.
        torch_step_s: median seconds of its step.
        step_time: seconds of a step, over its.
        core_time: seconds that all ranks' cores were at work in a step, over its; what else runs
            on the machine hardly changes it.
        torch_peak_bytes: by rank, of torch's set-up that needs less there.
        memory_ratios: our peak over that, by rank.
        worst_error: relative, of the gradient that differs most between any two runtimes.
        worst_loss_error: relative.
        orders: of each rank, as both ran it.
    """

    model: str
    schedule: str
    ranks: int
    peer: str
    torch_step_s: float
    step_time: Ratios
    core_time: Ratios
    torch_peak_bytes: tuple[int, ...]
    memory_ratios: tuple[float, ...]
    worst_error: float
    worst_loss_error: float
    orders: tuple[str, ...]

    @property
    def memory_ratio(self) -> float:
        """The memory ratio of the rank where it is largest."""
        return max(self.memory_ratios)

    @property
    def cells(self) -> list[str]:
        """The row's cells, in the order of :data:`COLUMNS`."""
        return [
            self.model,
            self.schedule,
            str(self.ranks),
            f"{self.torch_step_s * 1e3:.0f} ({self.peer})",
            *self.step_time.cells,
            *self.core_time.cells,
            ", ".join(f"{peak / MIB:.1f}" for peak in self.torch_peak_bytes),
            ", ".join(f"{ratio:.3f}" for ratio in self.memory_ratios),
            f"{self.worst_error:.1e}",
        ]


def mid_size_cases(ranks: int = 2) -> list[Case]:
    """Every schedule of two models."""
    return [Case.mid_size(model, schedule, ranks) for model in FACTORIES for schedule in SCHEDULES]


def peers(
    cases: Sequence[Case] | None = None, rounds: int = 10, launches: int = 2, steps: int = 1
) -> list[PeerRow]:
    """Run cases, by default those of :func:`mid_size_cases`, each number of ranks together.

    Where a process happens to lay its tensors makes one runtime a few percent slower than the
    other for as long as it lives; hence several launches, whose rounds count alike.

    Args:
        cases: what to run.
        rounds: turns of each runtime in a launch, after one that is not counted.
        launches: of all processes.
        steps: of a turn.
    """
    wanted = mid_size_cases() if cases is None else list(cases)
    rows = []
    for ranks in sorted({case.ranks for case in wanted}):
        chosen = [case for case in wanted if case.ranks == ranks]
        found = [_answers(chosen, ranks, rounds, steps) for _ in range(launches)]
        rows += [_row(_together(answers)) for answers in zip(*found, strict=True)]
    return rows


def rows() -> list[list[str]]:
    """The lines of :func:`peers` for a table with :data:`COLUMNS`."""
    return [row.cells for row in peers()]


def _answers(
    cases: Sequence[Case], ranks: int, rounds: int, steps: int
) -> Iterable[Mapping[str, Any]]:
    request = {"cases": [case.as_data() for case in cases], "rounds": rounds, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answers.jsonl"
        asked.write_text(json.dumps(request))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        worker = ["-m", "benchmarks.executor.peers.worker", str(asked), str(answered)]
        subprocess.run(
            [*launch, "--nproc-per-node", str(ranks), *worker],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **QUIET},
            stdout=sys.stderr,
            timeout=TIMEOUT_S,
            check=True,
        )
        return [json.loads(line) for line in answered.read_text().splitlines()]


def _together(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The rounds of all launches, and what else the first one found."""
    pooled = {
        what: {name: [s for a in answers for s in a[what][name]] for name in answers[0][what]}
        for what in ("seconds", "busy_seconds")
    }
    worst = {name: max(a["errors"][name] for a in answers) for name in answers[0]["errors"]}
    return {**answers[0], **pooled, "errors": worst}


def _row(answer: Mapping[str, Any]) -> PeerRow:
    case, seconds, busy = answer["case"], answer["seconds"], answer["busy_seconds"]
    others = [name for name in seconds if name != OURS]
    peer = min(others, key=lambda name: statistics.median(seconds[name]))
    peaks = [min(rank[name]["peak_bytes"] for name in others) for rank in answer["memory"]]
    ours = [rank[OURS]["peak_bytes"] for rank in answer["memory"]]
    loss = answer["losses"][OURS]
    return PeerRow(
        model=case["model"],
        schedule=case["schedule"],
        ranks=case["ranks"],
        peer=peer,
        torch_step_s=statistics.median(seconds[peer]),
        step_time=_ratios(seconds, peer),
        core_time=_ratios(busy, peer),
        torch_peak_bytes=tuple(peaks),
        memory_ratios=tuple(a / b for a, b in zip(ours, peaks, strict=True)),
        worst_error=max(answer["errors"].values()),
        worst_loss_error=max(abs(found / loss - 1) for found in answer["losses"].values()),
        orders=tuple(answer["orders"]),
    )


def _ratios(values: Mapping[str, Sequence[float]], peer: str) -> Ratios:
    return Ratios(tuple(a / b for a, b in zip(values[OURS], values[peer], strict=True)))


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="of a launch")
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--output", type=Path, help="write the table to this file")
    options = parser.parse_args(words)
    found = peers(mid_size_cases(options.ranks), options.rounds, options.launches)
    if options.json:
        write_table("\n".join(json.dumps(asdict(row)) for row in found), options.output)
        return 0
    title = heading(
        "The executor and torch's pipelining", "python -m benchmarks.executor.compare_peers"
    )
    write_table(f"{title}\n{table(COLUMNS, [row.cells for row in found])}", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
