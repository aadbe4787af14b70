"""Predicted against measured iterations on the testbed, and what plans are worth there.

Every model is planned by Pipeplan, by even splits under 1F1B, by PipeDream and by SPP for every
cluster file of ``benchmarks/testbed/clusters``. Each plan runs with emulated compute: operations
take their predicted time, messages and all-reduces are real.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from benchmarks.harness import Claim, Result, Row, tell
from benchmarks.testbed import Testbed
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
SHORT_CLUSTERS, SHORT_MODELS = ("shared_uplink",), ("gpt",)
RIVALS = ("even", "pipedream", "spp")
OURS = "pipeplan"
WARM_UP = 2
"""Steps that do not count."""
_TIMEOUT_S = 240.0


def prediction(options: argparse.Namespace) -> Result:
    """Predicted against measured on the testbed."""
    rows = _measured(options.short, options.steps, options.time_limit)
    errors = [abs(row["error %"]) for row in rows]
    claims = [
        Claim("median error of iterations on the testbed", statistics.median(errors), at_most=5.0),
        Claim("worst error of iterations on the testbed", max(errors), at_most=10.0),
    ]
    return Result(rows, [Claim(c.text, c.figure, at_most=c.at_most, unit="%") for c in claims])


def speed_up(options: argparse.Namespace) -> Result:
    """A rival's iteration over ours on the testbed."""
    found = _measured(options.short, options.steps, options.time_limit)
    ours = {(row["cluster"], row["model"]): row for row in found if row["planner"] == OURS}
    rows = []
    for row in found:
        own = ours[row["cluster"], row["model"]]
        if row is not own:
            # Two runs of one plan take different times; as plans they are equally fast.
            same = row["plan"] == own["plan"]
            predicted, real = (
                1.0 if same else row[name] / own[name] for name in ("predicted ms", "measured ms")
            )
            head = {"cluster": row["cluster"], "model": row["model"], "against": row["planner"]}
            ratios = {
                "predicted": predicted,
                "measured": real,
                "off %": 100 * real / predicted - 100,
            }
            rows.append({**head, **ratios, "same plan": same})
    least, most = min(r["measured"] for r in rows), max(abs(r["off %"]) for r in rows)
    return Result(
        rows,
        [
            Claim("a rival's measured iteration over ours: least", least, at_least=1.0),
            Claim("measured against predicted speed-up: worst", most, at_most=5.0, unit="%"),
        ],
    )


@cache
def _measured(short: bool, steps: int, time_limit_s: float) -> tuple[Row, ...]:
    """Plan and run everything, cluster by cluster."""
    rows = []
    names = SHORT_CLUSTERS if short else sorted(path.stem for path in CLUSTERS.glob("*.toml"))
    for name in names:
        cluster = Cluster.load(CLUSTERS / f"{name}.toml")
        plans = [
            (model, *plan)
            for model in (SHORT_MODELS if short else MODELS)
            for plan in _plans_for(_problem_of(model, cluster), time_limit_s)
        ]
        with Testbed(cluster) as testbed:
            for model, planner, plan in plans:
                head = {"cluster": name, "model": model, "planner": planner}
                rows.append({**head, **_timed(testbed, plan, steps)})
                tell(json.dumps(rows[-1]))
    return tuple(rows)


def _problem_of(model: str, cluster: Cluster) -> Problem:
    factory, arguments = MODELS[model]
    job = Job.load(CLUSTERS.parent / "job.toml").model_copy(update={"model_arguments": arguments})
    return Problem(trace(factory, job), cluster, job, ModelSource(factory, arguments))


def _plans_for(problem: Problem, time_limit_s: float) -> Iterator[tuple[str, Plan]]:
    """Ours and the rivals' that find one; theirs in the fastest published schedule."""
    yield OURS, solve(problem, time_limit_s=time_limit_s).plan
    schedules = ScheduledBaselines(problem)
    for name in RIVALS:
        with suppress(InfeasibleError):
            schedule = schedules.best(BASELINES[name])
            yield name, plan_by_hand(schedule.timeline.pipeline, schedule.orders, name)


def _timed(testbed: Testbed, plan: Plan, steps: int) -> Row:
    """Run a plan with emulated compute.

    Raises:
        PipeplanError: if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, metrics = Path(folder) / "plan.json", Path(folder) / "metrics.jsonl"
        plan.save(path)
        words = [sys.executable, "-m", "executor", str(path), "--emulate"]
        words += ["--steps", str(steps), "--metrics", str(metrics)]
        outcome = testbed.run(words, plan.ranks, timeout_s=_TIMEOUT_S)
        if outcome.status != 0:
            raise PipeplanError("a run failed:\n" + "\n".join(outcome.outputs))
        lines = metrics.read_text().splitlines()[WARM_UP:]
    times = [json.loads(line)["step_time_s"] for line in lines]
    first, middle, third = statistics.quantiles(times, n=4)
    predicted_s = plan.predicted.iteration_time_s
    return {
        "ranks": len(plan.ranks),
        "predicted ms": 1e3 * predicted_s,
        "measured ms": 1e3 * middle,
        "error %": 100 * (middle / predicted_s - 1),
        "spread %": 100 * (third - first) / middle,
        "plan": plan.execution_digest,
    }
