"""Plans that use every freedom at once, trained for real over the testbed's links.

Usage:
    python -m benchmarks.executor.freedoms [--cases NAMES] [--keep FOLDER]

Each plan is the planner's own: split backwards, two stages on a device, replicas, and gradients
that are reduced in buckets while the last backwards run. Its ranks compute every operation, wait
until its predicted time is over, and send real messages over shaped links. Losses, gradients and
weights are compared with a single process in plain torch, the times of steps with the prediction.
Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.executor.on_testbed import CLUSTERS
from benchmarks.executor.single_process import TOLERANCE
from benchmarks.testbed.network import Testbed
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
    """The problem of a case, which allows every freedom but recomputation."""
    job = Job(
        name=case.name,
        samples_per_microbatch=case.samples,
        precision=case.precision,
        optimizer="sgd_momentum",
        learning_rate=0.01,
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


@dataclass(frozen=True)
class Row:
    """A plan that was trained.

    Attributes:
        case: its problem.
        ranks, stages: of the plan.
        uses: the freedoms that it uses.
        overlapped: stages whose reduction really set off before their last backward had ended, in
            every iteration that counts.
        predicted_s: the plan's iteration time.
        medians_s: measured ones, of each training.
        errors: the largest relative errors of all trainings: of a loss, of all gradients as one
            vector, and of a weight or loss after the whole training.
        excess: the largest error of gradients over what is allowed.
        problems: what is no matter of rounding.
    """

    case: Case
    ranks: int
    stages: int
    uses: Uses
    overlapped: int
    predicted_s: float
    medians_s: tuple[float, ...]
    errors: tuple[float, float, float]
    excess: float
    problems: tuple[str, ...]

    @property
    def measured_s(self) -> float:
        """The median of the trainings' medians."""
        return statistics.median(self.medians_s)

    @property
    def error(self) -> float:
        """Measured over predicted, less one."""
        return self.measured_s / self.predicted_s - 1

    @property
    def trains_alike(self) -> bool:
        """Whether everything is within the tolerance of its precision."""
        bar = TOLERANCE[self.case.precision]
        return max(self.errors) <= bar and self.excess <= 1 and not self.problems

    @property
    def cells(self) -> list[str]:
        """The row's cells, in the order of :data:`COLUMNS`."""
        shares = dict.fromkeys("+".join(map(str, row)) for row in self.uses.shares.values())
        errors = [f"{median_s / self.predicted_s - 1:+.1%}" for median_s in self.medians_s]
        return [
            *(self.case.cluster, self.case.model, self.case.precision, str(self.ranks)),
            f"{self.stages} ({self.uses.chunks})",
            f"{self.uses.split} of {self.uses.backwards}",
            ", ".join(shares),
            f"{self.uses.early} of {self.uses.buckets} ({self.overlapped})",
            *(f"{error:.1e}" for error in self.errors),
            "yes" if self.trains_alike else "**no**",
            f"{self.predicted_s * 1e3:.0f}",
            f"{self.measured_s * 1e3:.0f}",
            f"{self.error:+.1%}",
            ", ".join(errors),
        ]


COLUMNS = (
    *("cluster", "model", "precision", "ranks", "stages (devices with two)", "split backwards"),
    *("microbatches of replicas", "buckets ahead (stages, measured)", "loss", "gradients"),
    *("whole training", "as one process", "predicted ms", "measured ms", "error"),
    "of each training",
)


def rows(cases: Sequence[Case], keep: Path | None = None) -> Iterator[Row]:
    """Plan and train every case, each on a testbed of its own.

    Args:
        cases: some of :data:`CASES`.
        keep: a folder in which plans and reports stay.

    Raises:
        PipeplanError: if a plan does not use every freedom, or a run fails.
    """
    for case in cases:
        plan = plan_of(case)
        with tempfile.TemporaryDirectory() as folder:
            row = _row(case, plan, _report(plan, keep or Path(folder), case.name.replace("/", "-")))
        print(json.dumps(row.cells), file=sys.stderr, flush=True)
        yield row


def _report(plan: Plan, folder: Path, name: str) -> dict[str, Any]:
    """Train by a plan; what its first rank reports."""
    path, report = folder / f"{name}.json", folder / f"{name}.report.json"
    plan.save(path)
    worker = [sys.executable, "-m", "benchmarks.executor.freedoms_worker", str(path), str(report)]
    with Testbed(plan.cluster) as testbed:
        outcome = testbed.run(worker, plan.ranks, timeout_s=_TIMEOUT_S)
    if outcome.status != 0:
        raise PipeplanError(f"{name} failed:\n" + "\n".join(outcome.outputs))
    return json.loads(report.read_text())


def _row(case: Case, plan: Plan, report: Mapping[str, Any]) -> Row:
    errors = report["errors"]
    # By training, the stages that were ahead on some rank.
    ahead = [set().union(*ranks) for ranks in zip(*report["overlapped"], strict=True)]
    return Row(
        case,
        len(plan.ranks),
        len(plan.stages),
        Uses.of(plan),
        len(set.intersection(*ahead)),
        plan.predicted.iteration_time_s,
        tuple(statistics.median(times) for times in report["times_s"]),
        (
            max(row["loss"] for row in errors),
            max(row["whole"] for row in errors),
            max(report["trainings"]),
        ),
        max(row["excess"] for row in errors),
        tuple(problem for row in errors for problem in row["problems"]),
    )


def table_rows() -> list[list[str]]:
    """A line for each case, and the extremes."""
    found = list(rows(CASES))
    alike = sum(row.trains_alike for row in found)
    worst = max((row.error for row in found), key=abs)
    blank = [""] * 10
    return [
        *(row.cells for row in found),
        ["**of all**", *blank, f"**{alike} of {len(found)}**", "", "", f"**{worst:+.1%}**", ""],
    ]


def main() -> int:
    """Print the cells of each case as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", default=",".join(names), help="MODEL/CLUSTER,…")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep plans and reports here")
    options = parser.parse_args()
    wanted = options.cases.split(",")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    try:
        for _ in rows([case for case in CASES if case.name in wanted], options.keep):
            pass
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
