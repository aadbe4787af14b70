"""Llama 2 70B on 64 and 1,024 GPUs: `pipeplan trace`, `plan` and `verify`, a process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import ROOT
from benchmarks.catalogue import END_TO_END_LARGE_GB_BAR, END_TO_END_LARGE_S_BAR
from benchmarks.groups.cases import BIG, DEGREES, Machines, job_of
from planner import PipeplanError, Plan
from planner.job import WITHOUT_GROUPS

MODEL = "models.llama:llama2_70b"
COLUMNS = (
    *("cluster", "groups", "samples", "trace s", "GB", "plan s", "GB", "verify s", "GB"),
    *("all s", "bar", "core s", "largest GB", "bar"),
    *("groups x stages x replicas", "iteration s", "gap", "verified"),
)


@dataclass(frozen=True)
class Case:
    """A cluster to plan for.

    Attributes:
        nodes: machines of eight A100-80GB.
        samples: of an iteration, one a microbatch.
        groups: whether stages may be on tensor-parallel groups of any size.
    """

    nodes: int
    samples: int
    groups: bool

    @property
    def machines(self) -> Machines:
        """The cluster's machines."""
        return Machines(f"{self.nodes} nodes: {8 * self.nodes:,} A100-80GB", (BIG,) * self.nodes)

    def write(self, folder: Path) -> None:
        """Write the cluster and the job as files."""
        job = job_of(1, self.samples)
        if not self.groups:
            job = job.model_copy(update=WITHOUT_GROUPS)
        (folder / "cluster.json").write_text(self.machines.cluster.model_dump_json())
        (folder / "job.json").write_text(job.model_dump_json())


CASES = tuple(
    Case(nodes, samples, groups)
    for nodes, samples in ((8, 256), (128, 2048))
    for groups in (False, True)
)


@dataclass(frozen=True)
class Process:
    """A command that has ended.

    Attributes:
        status: it ended with.
        seconds: it took.
        core_s: seconds that cores were at work in it.
        peak_bytes: most memory that it held.
    """

    status: int
    seconds: float
    core_s: float
    peak_bytes: int


@dataclass(frozen=True)
class LargeRow:
    """A case, with the processes that led to a plan.

    Attributes:
        case: that was planned.
        steps: trace, plan and verify.
        plan: that was found.
    """

    case: Case
    steps: tuple[Process, ...]
    plan: Plan

    @property
    def seconds(self) -> float:
        """The sum over all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def peak_gb(self) -> float:
        """The most memory of a step."""
        return max(step.peak_bytes for step in self.steps) / 1e9

    @property
    def cells(self) -> list[str]:
        """A row of the table."""
        stages, found = self.plan.stages, self.plan.predicted
        replicas = sorted({len(stage.devices) for stage in stages})
        shape = [self.plan.degrees, (len(stages),), dict.fromkeys((replicas[0], replicas[-1]))]
        measured = [(f"{s.seconds:.1f}", f"{s.peak_bytes / 1e9:.2f}") for s in self.steps]
        return [
            *(self.case.machines.name, "any" if self.case.groups else "none"),
            *(str(self.case.samples), *(cell for cells in measured for cell in cells)),
            *(f"{self.seconds:.0f}", f"{END_TO_END_LARGE_S_BAR:.0f}"),
            f"{sum(step.core_s for step in self.steps):.0f}",
            *(f"{self.peak_gb:.2f}", f"{END_TO_END_LARGE_GB_BAR:.0f}"),
            " x ".join("-".join(map(str, numbers)) for numbers in shape),
            f"{found.iteration_time_s:.3f}",
            "-" if found.gap is None else f"{found.gap:.1%}",
            "yes" if self.steps[-1].status == 0 else "NO",
        ]


def large_rows(time_limit_s: float, cases: Sequence[Case] = CASES) -> Iterator[LargeRow]:
    """Yield a row for each case.

    Args:
        time_limit_s: of the search.
        cases: to plan.
    """
    for case in cases:
        with TemporaryDirectory() as name:
            folder = Path(name)
            case.write(folder)
            steps = [_run(folder, *words) for words in _commands(case, time_limit_s)]
            row = LargeRow(case, tuple(steps), Plan.load(folder / "plan.json"))
        print(*row.cells, sep="  ", file=sys.stderr, flush=True)
        yield row


def _commands(case: Case, time_limit_s: float) -> Iterator[Sequence[str]]:
    splits = [word for degree in DEGREES for word in ("--split", str(degree))]
    options = [*splits, "--sequence"] if case.groups else []
    yield ("trace", MODEL, "--job", "job.json", *options, "-o", "graph.json", "--json")
    told = ("--cluster", "cluster.json", "--job", "job.json", "--time-limit", f"{time_limit_s:g}")
    yield ("plan", "graph.json", *told, "-o", "plan.json", "--json")
    yield ("verify", "plan.json", "--json")


_MEASURED = """
import json, os, subprocess, sys
child = subprocess.Popen(sys.argv[2:])
_, status, used = os.wait4(child.pid, 0)
child.returncode = os.waitstatus_to_exitcode(status)
figures = [child.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]
open(sys.argv[1], "w").write(json.dumps(figures))
"""
"""Starts a command from a small process: Linux counts the memory of who starts one as its own."""


def _run(folder: Path, *words: str) -> Process:
    """Run a command of ``pipeplan`` in a folder; its peak memory is from the kernel."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output, used, begin = folder / f"{words[0]}.out", folder / "used.json", time.perf_counter()
    with output.open("w") as file:
        command = [sys.executable, "-m", "planner.cli", *words]
        around = [sys.executable, "-c", _MEASURED, str(used), *command]
        subprocess.run(around, cwd=folder, env=environment, stdout=file, check=True)
    seconds = time.perf_counter() - begin
    status, core_s, peak_bytes = json.loads(used.read_text())
    if status != 0 and words[0] != "verify":
        raise PipeplanError(f"pipeplan {' '.join(words)} ended with {status}: {output.read_text()}")
    return Process(status, seconds, core_s, peak_bytes)
