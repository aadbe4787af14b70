"""Plans that use every freedom at once, trained for real over the testbed's links.

Each plan is the planner's own: split backwards, two stages on a device, replicas, and gradients
that are reduced in buckets while the last backwards run. Its ranks compute every operation, wait
until its predicted time is over, and send real messages over shaped links. Losses, gradients and
weights are compared with a single process in plain torch, the times of steps with the prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.executor.on_testbed import CLUSTERS
from benchmarks.executor.single_process import TOLERANCE
from benchmarks.harness import Claim, Result, Row, counted, tell
from benchmarks.testbed import Testbed
from models import ZOO
from planner import Cluster, Job, ModelSource, Problem, solve, trace
from planner.errors import PipeplanError
from planner.job import Precision
from planner.plan.operations import owners
from planner.plan.plan import Plan, Sync
from planner.prediction import with_strategy
from planner.simulation.simulator import simulate_plan
from planner.verification import require_valid

DEVICES_SLOWER, LINKS_SLOWER = 128, 8
"""So much slower than in the cluster files: what ranks compute is little beside what they wait."""
STAGES_A_DEVICE = 2
SEARCH_LIMIT_S = 2.0
"""Seconds of deterministic time, for the same plans on every machine."""
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """A problem whose plan is to use everything.

    Attributes:
        model: of the zoo.
        cluster: of the testbed.
        arguments: of the model's factory.
        precision: of the weights.
        samples: of a microbatch.
        max_stages: the most stages; with fewer than two for each device some have replicas.
        bucket_mib: about a layer's gradients.
    """

    model: str
    cluster: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = "float32"
    samples: int = 1
    max_stages: int | None = None
    bucket_mib: float = 0.1

    @property
    def name(self) -> str:
        """Model and cluster."""
        return f"{self.model}/{self.cluster}"


CASES = (
    Case("gpt_tiny", "uniform", {"layers": 8}, max_stages=4),
    Case("gpt_tiny", "irregular", {"layers": 10}, max_stages=6),
    Case("llama_tiny", "two_nodes", {"layers": 6}),
    Case("bert_tiny", "slow_leg", {"layers": 8, "width": 64}, "float64", samples=3, max_stages=5),
    Case("mixtral_tiny", "two_nodes", {"layers": 6}, samples=8, max_stages=4, bucket_mib=0.05),
    Case("llama_tiny", "irregular", {"layers": 8}, max_stages=6),
)


def problem_of(case: Case) -> Problem:
    """The problem of a case: split backwards, and every other freedom but recomputation."""
    job = Job(
        name=case.name,
        samples_per_microbatch=case.samples,
        precision=case.precision,
        optimizer="sgd_momentum",
        learning_rate=0.01,
        backward="split",
        max_stages_per_device=STAGES_A_DEVICE,
        max_stages=case.max_stages,
        recompute=False,
        model_arguments=dict(case.arguments),
    )
    factory = ZOO[case.model]
    source = ModelSource(factory, job.model_arguments)
    return Problem(trace(factory, job), slower(case.cluster), job, source)


def slower(name: str) -> Cluster:
    """A cluster of the testbed with slower devices and links, as fast in float64 as in float32."""
    data = Cluster.load(CLUSTERS / f"{name}.toml").model_dump(mode="json")
    for kind in data["device_types"].values():
        peak = kind["peak_tflop_per_s"]["float32"] / DEVICES_SLOWER
        kind["peak_tflop_per_s"] = {"float32": peak, "float64": peak}
        kind["memory_bandwidth_gb_per_s"] /= DEVICES_SLOWER
    for link in data["links"]:
        link["bandwidth_gb_per_s"] /= LINKS_SLOWER
    return Cluster.parse(data, name)


def plan_of(case: Case) -> Plan:
    """The planner's plan.

    Raises:
        PipeplanError: if it does not use every freedom.
    """
    problem = problem_of(case)
    found = solve(problem, time_limit_s=SEARCH_LIMIT_S, deterministic=True).plan
    plan = with_strategy(found, Sync(options={"bucket_mib": case.bucket_mib}))
    require_valid(plan)
    missing = Uses.of(plan).missing
    if missing:
        raise PipeplanError(f"{case.name}: the plan has no {', no '.join(missing)}")
    return plan


@dataclass(frozen=True)
class Uses:
    """The freedoms that a plan uses.

    Attributes:
        split: number of split backwards.
        backwards: of all backwards.
        chunks: devices with several stages.
        shares: microbatches of each replica that has some, by stage with replicas.
        early: buckets that are reduced before the last backward of their stage has ended.
        buckets: of all buckets of one stage.
    """

    split: int
    backwards: int
    chunks: int
    shares: Mapping[int, tuple[int, ...]]
    early: int
    buckets: int

    @classmethod
    def of(cls, plan: Plan) -> Uses:
        """Count them, those of reductions in the plan's replay."""
        orders = plan.parsed_orders()
        kinds = Counter(operation.kind for order in orders.values() for operation in order)
        held = Counter(device for stage in plan.stages for device in stage.devices)
        shares: dict[int, Counter[str]] = {}
        for (stage, _), device in owners(orders).items():
            shares.setdefault(stage, Counter())[device] += 1
        early = list(_early_buckets(plan))
        return cls(
            kinds["I"],
            kinds["I"] + kinds["B"],
            sum(count > 1 for count in held.values()),
            {s: tuple(shares[s].values()) for s in sorted(shares) if len(shares[s]) > 1},
            sum(early),
            len(early),
        )

    @property
    def missing(self) -> list[str]:
        """Names of those that it does not use."""
        used = {
            "split backwards": self.split,
            "device with several stages": self.chunks,
            "replicas": self.shares,
            "overlapped reduction": self.early,
        }
        return [name for name, found in used.items() if not found]


def _early_buckets(plan: Plan) -> Iterator[bool]:
    """Yield whether each bucket of a stage is reduced before its last backward has ended."""
    timeline = simulate_plan(plan)
    ends: dict[int, float] = {}
    for event in timeline.operations:
        if event.operation.kind in "BW":
            ends[event.operation.stage] = max(ends.get(event.operation.stage, 0.0), event.end_s)
    for row in timeline.synchronisations:
        if len(row.synchronisation.stages) == 1:
            yield row.start_s < ends[row.synchronisation.stages[0]]


def section(options: argparse.Namespace) -> Result:
    """Everything at once, trained for real."""
    rows = []
    for case in CASES[:1] if options.short else CASES:
        rows.append(_row(case, plan_of(case)))
        tell(json.dumps(rows[-1]))
    worst = max(abs(row["error %"]) for row in rows)
    text = "plans with every freedom that train as one process"
    return Result(
        rows,
        [
            counted(text, (row["as one process"] for row in rows), "one process, plain torch"),
            Claim("their iterations against the prediction: worst", worst, at_most=5.0, unit="%"),
        ],
    )


def _row(case: Case, plan: Plan) -> Row:
    """Train by a plan on a testbed of its own, and compare."""
    uses, report = Uses.of(plan), _report(plan, case.name)
    found, bar = report["errors"], TOLERANCE[case.precision]
    errors = {
        "loss": max(row["loss"] for row in found),
        "gradients": max(row["whole"] for row in found),
        "whole training": max(report["trainings"]),
    }
    is_exact = max(row["excess"] for row in found) <= 1 and not any(r["problems"] for r in found)
    measured_s = statistics.median(map(statistics.median, report["times_s"]))
    predicted_s = plan.predicted.iteration_time_s
    # By training, the stages of which some rank began to reduce before its last backward ended.
    ahead = [set().union(*ranks) for ranks in zip(*report["overlapped"], strict=True)]
    return {
        **{"cluster": case.cluster, "model": case.model, "precision": case.precision},
        **{"ranks": len(plan.ranks), "stages": len(plan.stages), "devices with two": uses.chunks},
        "split backwards": f"{uses.split} of {uses.backwards}",
        "microbatches of replicas": ", ".join("+".join(map(str, s)) for s in uses.shares.values()),
        "buckets ahead": f"{uses.early} of {uses.buckets}",
        "stages ahead, measured": len(set.intersection(*ahead)),
        **errors,
        "as one process": max(errors.values()) <= bar and is_exact,
        **{"predicted ms": 1e3 * predicted_s, "measured ms": 1e3 * measured_s},
        "error %": 100 * (measured_s / predicted_s - 1),
    }


def _report(plan: Plan, name: str) -> dict[str, Any]:
    """Train by a plan; return what its first rank reports.

    Raises:
        PipeplanError: if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "plan.json", Path(folder) / "report.json"
        plan.save(path)
        worker = [
            sys.executable,
            "-m",
            "benchmarks.executor.freedoms_worker",
            str(path),
            str(report),
        ]
        with Testbed(plan.cluster) as testbed:
            outcome = testbed.run(worker, plan.ranks, timeout_s=_TIMEOUT_S)
        if outcome.status != 0:
            raise PipeplanError(f"{name} failed:\n" + "\n".join(outcome.outputs))
        return json.loads(report.read_text())
