"""Real pipelines of one process each, with emulated compute, in settings with slow workers.

A step takes 100 ms by the clock, whatever the machine, and the model learns for real. All trainings
run one after the other in the same eight processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import ROOT
from benchmarks.harness import Claim, Result
from benchmarks.sync.figures import OVERLAPPED, PLAIN, Look, Measured, Runs, rows_of, steady_rate
from planner import Cluster, Job, ModelSource, Problem, trace
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.schedules.best import best_schedule
from planner.sync.simulation.comparison import ALL_STRATEGIES, learner_of
from planner.sync.strategies import SYNCHRONOUS, parse_sync, sync_name

PIPELINES, ITERATION_S, SAMPLES = 8, 0.1, 32
FACTORY = "benchmarks.sync.model:student"
LEARNING_RATE = 0.05
RATES = (0.025, LEARNING_RATE, 0.1, 0.2, 0.4)
"""Each strategy has its best of these; in the short form all have :data:`LEARNING_RATE`."""
STRATEGIES = tuple(sync_name(sync) for sync in ALL_STRATEGIES)
SHORT_STRATEGIES = (PLAIN, OVERLAPPED, "semi_decentralized", "semi_decentralized:overlap=true")
PARTIAL = ("partial_all_reduce", "semi_decentralized")
"""How the names of strategies begin whose pipelines average in groups as they become ready."""
EQUAL_LOSS = 1.01
"""A strategy counts only if its held-out loss after equal work is at most this of all-reduce's."""


@dataclass(frozen=True)
class Setting:
    """The differences between the pipelines.

    Attributes:
        bar: for the throughput of the best partial strategy over overlapped all-reduce's.
        slow: by rank.
        sleep_probability, sleep_s: of an iteration.
    """

    bar: float | None
    slow: Mapping[str, float] = field(default_factory=dict)
    sleep_probability: float = 0.0
    sleep_s: float = 0.0


SETTINGS = {
    "homogeneous": Setting(1.05),
    "one_2x_slow": Setting(1.7, {"0": 2.0}),
    "one_4x_slow": Setting(3.0, {"0": 4.0}),
    "one_5x_slow": Setting(None, {"0": 5.0}),
    "random_sleeps": Setting(2.0, {}, 0.1, 0.3),
}
SHORT_SETTINGS = ("homogeneous", "one_4x_slow")


@dataclass(frozen=True)
class Training:
    """One of the trainings of a launch.

    Attributes:
        name: that no other has.
        sync: strategy and options.
        steps: of all pipelines on average.
        seed: of weights, data and pauses.
        setting: how slow each pipeline is.
        learning_rate: of a step on the mean of all pipelines' gradients; asynchronous servers
            divide it by the pipelines themselves.
    """

    name: str
    sync: str
    steps: int
    seed: int
    setting: Setting
    learning_rate: float = LEARNING_RATE

    @property
    def in_step(self) -> bool:
        """Whether all pipelines step together."""
        return parse_sync(self.sync).strategy in SYNCHRONOUS


def section(options: argparse.Namespace) -> Result:
    """Eight real pipelines on loopback."""
    seeds = options.seeds or (1 if options.short else 3)
    steps = options.steps or 30
    strategies = SHORT_STRATEGIES if options.short else STRATEGIES
    settings = options.settings or (SHORT_SETTINGS if options.short else tuple(SETTINGS))
    rates = dict.fromkeys(strategies, LEARNING_RATE)
    if not options.short:
        rates = _tuned(strategies, steps, seeds)
    trainings = {
        (name, strategy, seed): Training(
            f"{name}.{number}.{seed}", strategy, steps, seed, SETTINGS[name], rates[strategy]
        )
        for name in settings
        for number, strategy in enumerate(strategies)
        for seed in range(seeds)
    }
    found = train_all(list(trainings.values()))
    rows, claims = [], []
    for name in settings:
        runs: Runs = {
            s: [found[trainings[name, s, seed].name] for seed in range(seeds)] for s in strategies
        }
        of_setting = [{**r, "rate": rates[r["strategy"]]} for r in rows_of(name, runs)]
        rows += of_setting
        fine = [
            row["against overlapped"]
            for row in of_setting
            if row["strategy"].startswith(PARTIAL)
            and row["held-out loss, over overlapped's"] <= EQUAL_LOSS
        ]
        text = f"real throughput, best partial strategy over overlapped all-reduce: {name}"
        best = max(fine, default=None)
        claims.append(Claim(text, best, "Ripples, Prague", at_least=SETTINGS[name].bar))
    return Result(rows, claims)


def _tuned(strategies: Sequence[str], steps: int, seed: int) -> dict[str, float]:
    """Return the learning rate of the least final loss, of equal pipelines with an unused seed.

    Strategies that compute the same weights have the same.
    """
    learners = {name: sync_name(learner_of(parse_sync(name))) for name in strategies}
    tried = {
        (learner, rate): Training(
            f"tuning.{number}.{rate}", learner, steps, seed, Setting(None), rate
        )
        for number, learner in enumerate(dict.fromkeys(learners.values()))
        for rate in RATES
    }
    found = train_all(list(tried.values()))

    def loss(learner: str, rate: float) -> float:
        final = found[tried[learner, rate].name].final_loss
        return math.inf if math.isnan(final) else final

    return {
        name: min(RATES, key=lambda rate: loss(learner, rate)) for name, learner in learners.items()
    }


def train_all(trainings: Sequence[Training]) -> dict[str, Measured]:
    """Run trainings one after the other; return their figures by name.

    Raises:
        PipeplanError: if the launch fails.
    """
    with tempfile.TemporaryDirectory(prefix="pipeplan-sync-") as name:
        folder = Path(name)
        pipelines_plan().save(folder / "plan.json")
        jobs = [{**asdict(training), "in_step": training.in_step} for training in trainings]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        worker = ["-m", "benchmarks.sync.worker", str(folder)]
        done = subprocess.run(
            [*agent, "--nproc-per-node", str(PIPELINES), *worker],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=sys.stderr,
            check=False,
        )
        if done.returncode:
            raise PipeplanError(f"a real run ended with status {done.returncode}; see above")
        return {training.name: _read(folder, training) for training in trainings}


def _read(folder: Path, training: Training) -> Measured:
    files = [folder / f"{training.name}.{rank}.json" for rank in range(PIPELINES)]
    rows = [json.loads(path.read_text()) for path in files]
    # Where all run in step, every rank has the same steps.
    telling = rows[:1] if training.in_step else rows
    each = PIPELINES if training.in_step else 1
    ends_s = [[end_s for end_s, _ in row["rows"]] for row in telling]
    begin_s = min(end_s - step_s for row in telling for end_s, step_s in row["rows"][:1])
    looks = [Look(at_s - begin_s, each * steps, loss) for at_s, steps, loss in rows[0]["looks"]]
    return Measured(each * steady_rate(ends_s), looks, rows[0]["held_out_loss"])


def pipelines_plan() -> Plan:
    """Return the plan of one pipeline of one stage for each process, each with a microbatch."""
    busy_s = _plan(1e-3).predicted.devices["d0"].busy_s
    return _plan(1e-3 * busy_s / ITERATION_S)


def _plan(tflop_per_s: float) -> Plan:
    names = [f"d{number}" for number in range(PIPELINES)]
    kind = {
        "memory_gib": 16,
        "memory_bandwidth_gb_per_s": 1e6,
        "peak_tflop_per_s": {"float32": tflop_per_s},
        "efficiency": 1,
    }
    link = {"bandwidth_gb_per_s": 1.0, "latency_us": 50}
    cluster = Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "loopback",
            "device_types": {"device": kind},
            "devices": [{"name": name, "type": "device"} for name in names],
            "switches": ["loopback"],
            "links": [{"between": [name, "loopback"], **link} for name in names],
        }
    )
    job = Job(
        samples_per_microbatch=SAMPLES,
        microbatches=PIPELINES,
        optimizer="sgd_momentum",
        learning_rate=0.01,
        shard_optimizer=False,  # the optimizer is to have whole weights, which are looked at
    )
    graph = trace(FACTORY, job)
    pipeline = place(
        Problem(graph, cluster, job, ModelSource(FACTORY, {})),
        [StageSpec(tuple(graph.layers), tuple(names))],
    )
    schedule = best_schedule(pipeline, backward="whole")
    if schedule is None:
        raise PipeplanError("no schedule for the benchmark's plan")
    return plan_by_hand(pipeline, schedule.orders)
