"""Predicted against measured iterations on the testbed, and what plans are worth there.

Usage:
    python -m benchmarks.executor.on_testbed [--clusters NAMES] [--models NAMES] [--json]

For every cluster file of benchmarks/testbed/clusters it plans each model with Pipeplan, with even
splits under 1F1B, PipeDream and SPP, then runs each plan on the testbed with emulated compute:
operations take their predicted time, messages and all-reduces are real. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benchmarks.executor.emulated import emulated_times
from benchmarks.testbed.network import Testbed
from planner import Cluster, Job, ModelSource, Problem, solve, trace
from planner.assembly import plan_by_hand
from planner.baselines import BASELINES
from planner.baselines.scheduled import ScheduledBaselines
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.plan import Plan

CLUSTERS = Path(__file__).parents[1] / "testbed" / "clusters"
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt": ("models.gpt:gpt_tiny", {"layers": 12}),
    "gpt_head": ("models.gpt:gpt_tiny", {"layers": 6, "vocabulary": 2048}),
    "unet": ("models.unet:unet_tiny", {}),
}
"""Factory and arguments. The second has a head as heavy as two layers, the third is uneven in work
and in what it hands on."""
RIVALS = ("even", "pipedream", "spp")
OURS = "pipeplan"
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Row:
    """One plan on one cluster.

    Attributes:
        cluster, model, planner: their names.
        ranks: processes.
        digest: of what runs; two planners may find the same plan.
        predicted_s: the plan's iteration time.
        measured_s: median over the steps but the first two.
        spread: of the middle half of the steps, over the median.
    """

    cluster: str
    model: str
    planner: str
    ranks: int
    digest: str
    predicted_s: float
    measured_s: float
    spread: float

    @property
    def error(self) -> float:
        """Measured over predicted, less one."""
        return self.measured_s / self.predicted_s - 1

    @property
    def cells(self) -> list[str]:
        """The row's cells, in the order of the table's columns."""
        return [
            *(self.cluster, self.model, self.planner, str(self.ranks)),
            f"{self.predicted_s * 1e3:.1f}",
            f"{self.measured_s * 1e3:.1f}",
            f"{self.error:+.1%}",
            f"{self.spread:.1%}",
        ]


def rows(
    clusters: Sequence[str], models: Sequence[str], *, steps: int, time_limit_s: float
) -> Iterator[Row]:
    """Plan and run everything, cluster by cluster."""
    for name in clusters:
        cluster = Cluster.load(CLUSTERS / f"{name}.toml")
        plans = [
            (model, planner, plan)
            for model in models
            for planner, plan in plans_for(problem_of(model, cluster), time_limit_s)
        ]
        with Testbed(cluster) as testbed:
            for model, planner, plan in plans:
                yield measure(testbed, name, model, planner, plan, steps)


def problem_of(model: str, cluster: Cluster) -> Problem:
    """A model of :data:`MODELS` with the testbed's job."""
    factory, arguments = MODELS[model]
    job = Job.load(CLUSTERS.parent / "job.toml").model_copy(update={"model_arguments": arguments})
    graph = trace(factory, job)
    return Problem(graph, cluster, job, ModelSource(factory, arguments))


def plans_for(problem: Problem, time_limit_s: float) -> Iterator[tuple[str, Plan]]:
    """Ours and the classic planners' that find one; theirs in the fastest classic schedule."""
    yield OURS, solve(problem, time_limit_s=time_limit_s).plan
    schedules = ScheduledBaselines(problem)
    for name in RIVALS:
        with suppress(InfeasibleError):
            schedule = schedules.best(BASELINES[name])
            yield name, plan_by_hand(schedule.timeline.pipeline, schedule.orders, name)


def measure(
    testbed: Testbed, cluster: str, model: str, planner: str, plan: Plan, steps: int
) -> Row:
    """Run a plan with emulated compute.

    Raises:
        PipeplanError: if the run fails.
    """

    def launch(arguments: Sequence[str]) -> None:
        outcome = testbed.run(
            [sys.executable, *arguments],
            plan.ranks,
            environment={"OMP_NUM_THREADS": "1"},
            timeout_s=_TIMEOUT_S,
        )
        if outcome.status != 0:
            raise PipeplanError(f"{planner} on {cluster} failed:\n" + "\n".join(outcome.outputs))

    times = emulated_times(plan, steps, launch)
    quarters = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return Row(
        cluster,
        model,
        planner,
        len(plan.ranks),
        plan.execution_digest,
        plan.predicted.iteration_time_s,
        median,
        (quarters[2] - quarters[0]) / median,
    )


PREDICTION_COLUMNS = (
    *("cluster", "model", "planner", "ranks", "predicted ms", "measured ms", "error", "spread"),
)
SPEED_UP_COLUMNS = ("cluster", "model", "against", "predicted", "measured", "off by")


@cache
def measured_rows(steps: int, time_limit_s: float) -> tuple[Row, ...]:
    """Every plan on every cluster, once."""
    found = []
    for row in rows(known_clusters(), list(MODELS), steps=steps, time_limit_s=time_limit_s):
        print(json.dumps({**asdict(row), "error": row.error}), file=sys.stderr, flush=True)
        found.append(row)
    return tuple(found)


def known_clusters() -> list[str]:
    """Names of the cluster files."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def prediction_rows(found: Sequence[Row]) -> list[list[str]]:
    """A line for each plan, and the median and the worst error."""
    lines = [row.cells for row in found]
    errors = [abs(row.error) for row in found]
    blank = [""] * 5
    return [
        *lines,
        ["**median of all**", *blank, f"**{statistics.median(errors):.1%}**", "", ""],
        ["**worst of all**", *blank, f"**{max(errors):.1%}**", "", ""],
    ]


@dataclass(frozen=True)
class SpeedUp:
    """A rival's iteration over ours.

    Attributes:
        row: the rival's.
        same: whether it found our very plan: as fast then, whatever two runs of it take.
        predicted, measured: rival's seconds over ours.
    """

    row: Row
    same: bool
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """Measured over predicted, less one."""
        return self.measured / self.predicted - 1

    @property
    def cells(self) -> list[str]:
        """The row's cells, in the order of the table's columns."""
        note = " (same plan)" if self.same else ""
        return [
            *(self.row.cluster, self.row.model, self.row.planner + note),
            *(f"{self.predicted:.3f}", f"{self.measured:.3f}", f"{self.off:+.1%}"),
        ]


def speed_ups(found: Sequence[Row]) -> list[SpeedUp]:
    """Ours against each rival on the same cluster and model."""
    ours = {(row.cluster, row.model): row for row in found if row.planner == OURS}
    pairs = [(row, ours[row.cluster, row.model]) for row in found if row.planner != OURS]
    return [
        SpeedUp(row, True, 1.0, 1.0)
        if row.digest == own.digest
        else SpeedUp(
            row,
            False,
            row.predicted_s / own.predicted_s,
            row.measured_s / own.measured_s,
        )
        for row, own in pairs
    ]


def speed_up_rows(found: Sequence[Row]) -> list[list[str]]:
    """A line for each speed-up, and the extremes."""
    told = speed_ups(found)
    least = f"**least {min(one.measured for one in told):.3f}**"
    most = f"**most {max(abs(one.off) for one in told):.1%}**"
    return [*(one.cells for one in told), ["**of all**", "", "", "", least, most, ""]]


def main() -> int:
    """Print a line for each plan as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", default=",".join(known_clusters()))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        for row in rows(
            options.clusters.split(","),
            options.models.split(","),
            steps=options.steps,
            time_limit_s=options.time_limit,
        ):
            print(json.dumps({**asdict(row), "error": row.error}), flush=True)
    except PipeplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
