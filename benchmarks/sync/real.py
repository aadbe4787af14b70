"""Real trainings: processes over gloo, emulated compute, many trainings under one torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import ROOT
from benchmarks.sync.figures import Look, Measured, Step, measured
from benchmarks.testbed.network import Testbed
from executor.training.optimizer import MOMENTUM
from planner.errors import PipeplanError
from planner.measured.sync_trace import SyncTrace
from planner.plan.plan import Plan
from planner.sync.strategies import SYNCHRONOUS, parse_sync

LEARNING_RATE = 0.05
RATES = (0.025, LEARNING_RATE, 0.1, 0.2, 0.4)
"""Every strategy has its best of these, or all have :data:`LEARNING_RATE`."""
BUCKETS = {
    "all_reduce": "all_reduce:bucket_mib=0.1",
    "fused": "fused:fusion_mib=0.1",
    "decoupled": "decoupled:bucket_mib=0.1",
    "cross_iteration": "cross_iteration:fusion_mib=0.1",
}
"""For slow links: the small model would be one bucket of the usual size, which could hide behind
nothing. On loopback, where a collective costs more than its bytes, one bucket is faster: it is the
stronger rival there."""


@dataclass(frozen=True)
class Training:
    """One of the trainings of a launch.

    Attributes:
        name: that no other has.
        plan: name of its plan.
        sync: strategy and options.
        steps: of all pipelines on average.
        seed: of weights, data and pauses.
        slow: by rank, as text.
        sleep_probability, sleep_s: of a rank's iteration.
        learning_rate: of a step on the mean of all pipelines' gradients; asynchronous servers
            divide it by the pipelines themselves.
        momentum: of a step, which with an asynchronous server is on one gradient.
        sync_trace: whether to write a trace.
    """

    name: str
    plan: str
    sync: str
    steps: int
    seed: int
    slow: Mapping[str, float] = field(default_factory=dict)
    sleep_probability: float = 0.0
    sleep_s: float = 0.0
    learning_rate: float = LEARNING_RATE
    momentum: float = MOMENTUM
    sync_trace: bool = False

    @property
    def in_step(self) -> bool:
        """Whether all pipelines step together."""
        return parse_sync(self.sync).strategy in SYNCHRONOUS


@dataclass(frozen=True)
class Found:
    """The results of a launch, by training.

    Attributes:
        runs: figures.
        traces: of those that wrote one.
    """

    runs: Mapping[str, Measured]
    traces: Mapping[str, SyncTrace]


def train_all(
    plans: Mapping[str, Plan], trainings: Sequence[Training], testbed: Testbed | None = None
) -> Found:
    """Run trainings, one after the other, in the same processes.

    Args:
        plans: by name, of as many ranks each.
        trainings: of these plans.
        testbed: whose shaped links data goes over; None: loopback.

    Raises:
        PipeplanError: if the launch fails.
    """
    with tempfile.TemporaryDirectory(prefix="pipeplan-sync-") as name:
        folder = Path(name)
        for key, plan in plans.items():
            plan.save(folder / f"{key}.json")
        jobs = [{**asdict(training), "in_step": training.in_step} for training in trainings]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        _launch(folder, next(iter(plans.values())), testbed)
        runs = {t.name: _read(folder, plans[t.plan], t) for t in trainings}
        traced = [t.name for t in trainings if t.sync_trace]
        traces = {name: SyncTrace.load(folder / f"{name}.trace") for name in traced}
    return Found(runs, traces)


def _launch(folder: Path, plan: Plan, testbed: Testbed | None) -> None:
    words = ["-m", "benchmarks.sync.worker", str(folder)]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if testbed is not None:
        outcome = testbed.run(words, plan.ranks, with_torchrun=True, environment=own)
        if outcome.status:
            raise PipeplanError("a real run failed:\n" + "\n".join(outcome.outputs)[-4000:])
        return
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*agent, "--nproc-per-node", str(len(plan.ranks)), *words]
    # Standard output is for what was asked for.
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, stdout=sys.stderr)
    if done.returncode:
        raise PipeplanError(f"a real run ended with status {done.returncode}; see above")


def _read(folder: Path, plan: Plan, training: Training) -> Measured:
    files = [folder / f"{training.name}.{rank}.json" for rank in range(len(plan.ranks))]
    rows = [json.loads(path.read_text()) for path in files]
    stages = len(plan.stages)
    pipelines = len(plan.ranks) // stages
    # All ranks of a pipeline tell of the same steps.
    telling = rows[:1] if training.in_step else rows[::stages]
    steps = [[Step(*step) for step in row["rows"]] for row in telling]
    looks = [Look(*look) for look in rows[0]["looks"]]
    shares = pipelines if training.in_step else 1
    return measured(steps, shares, looks, rows[0]["held_out_loss"])
