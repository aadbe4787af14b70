"""Plans of tensor-parallel groups beside the best even layout that is tried by hand.

The grid of even layouts has every number of devices in a group, of stages that divides the blocks
and of replicas, in every published schedule, at every microbatch size, with and without shared
optimizer state (ZeRO-1), with fewer microbatches in flight and layers recomputed where memory is
short. Our search has the grid's best microbatch size and does not know its layout.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from functools import cache

from benchmarks.harness import Claim, Result, Row, counted
from benchmarks.rivals.kept import rows_of
from benchmarks.rivals.machines import (
    EVEN,
    MODELS,
    UNEVEN,
    Machines,
    Model,
    batch_of,
    graph_of,
    job_of,
    pairs,
)
from planner import InfeasibleError, PipeplanError, Problem, solve, verify
from planner.baselines.even import GRID
from planner.baselines.layers import Layers
from planner.baselines.scheduled import ScheduledBaselines
from planner.costs.placed_pipeline import StageSpec
from planner.costs.stage_table import StageTable
from planner.schedules.best import Scheduled
from planner.search.variants import Variant, variants_of

LIMIT_S, SHORT_LIMIT_S = 20.0, 5.0
ROUNDING = 1e-9
"""Share of a time below which a difference is rounding."""
_graph = cache(graph_of)


def section(options: argparse.Namespace) -> Result:
    """Tensor-parallel groups: Pipeplan against the best even layout."""
    limit_s = options.time_limit or (SHORT_LIMIT_S if options.short else LIMIT_S)
    chosen = list(pairs())
    if options.short:
        smallest = next(model for model in MODELS if "gpt" in model.factory)
        chosen = [(smallest, EVEN[0]), (smallest, UNEVEN[0])]
    kept = options.keep and options.keep / "groups.jsonl"
    rows = rows_of(
        chosen,
        lambda pair: {"model": pair[0].name, "cluster": pair[1].name},
        lambda missing: (_row(*pair, limit_s) for pair in missing),
        kept,
        limit_s,
    )
    ratios = {
        kind: [r["even / ours"] for r in rows if r["even / ours"] and r["even cluster"] == is_even]
        for kind, is_even in (("uneven", False), ("even", True))
    }
    claims = [
        Claim(
            f"time of the best even layout over ours, geometric mean, {kind} clusters",
            statistics.geometric_mean(found) if found else None,
            at_least=1.10 if kind == "uneven" else None,
        )
        for kind, found in ratios.items()
    ]
    fine = [ratio >= 1 - ROUNDING for found in ratios.values() for ratio in found]
    return Result(rows, [*claims, counted("plans not slower than the best even layout", fine)])


def _row(model: Model, machines: Machines, limit_s: float) -> Row:
    """Return the best even layout, our plan, and the ratio of their times; None where none fits."""
    problems = _problems_of(model, machines)
    grid, problem = _best_even(problems) if _may_fit(problems[-1]) else ({}, problems[-1])
    ours = _ours(problem, limit_s) if _may_fit(problems[-1]) else {}
    both = grid and ours
    return {
        "model": model.name,
        "cluster": machines.name,
        "even cluster": machines.is_even,
        "even layout": grid.get("layout"),
        "its schedule": grid.get("schedule"),
        "even layout, s": grid.get("s"),
        "ours": ours.get("layout"),
        "our schedule": ours.get("schedule"),
        "ours, s": ours.get("s"),
        "ours, gap %": ours.get("gap %"),
        "even / ours": grid["s"] / ours["s"] if both else None,
    }


def _problems_of(model: Model, machines: Machines) -> list[Problem]:
    """Return the problem at every microbatch size, with shared optimizer state and without."""
    cluster = machines.cluster
    return [
        Problem(
            _graph(model, samples),
            cluster,
            job_of(samples, batch_of(cluster)).model_copy(update={"shard_optimizer": shares}),
        )
        for shares in (True, False)
        for samples in model.sizes
    ]


def _may_fit(problem: Problem) -> bool:
    """Return whether all devices together have room for weights, gradients and optimizer state.

    Args:
        problem: whose replicas do not share the state; shared state is as large in all.
    """
    cluster = problem.cluster
    room = sum(cluster.device_type(name).capacity_bytes for name in cluster.device_names)
    layers = Layers(StageTable(problem), recomputes=bool(problem.job.recompute))
    least = layers.static_bytes(1) + layers.stash_bytes
    return float(least.sum(axis=1).min()) <= room


def _best_even(problems: Sequence[Problem]) -> tuple[Row, Problem]:
    """Return the fastest even layout of all problems, and its problem; empty if none fits."""
    rows = [
        (_least_s(variant.problem), number, variant)
        for number, problem in enumerate(problems)
        for variant in variants_of(problem)
    ]
    best: Row = {}
    of_best, best_s = problems[0], math.inf
    # A fast layout soon: slower ones are not scheduled then.
    for least_s, number, variant in sorted(rows, key=lambda row: row[:2]):
        found = _even_schedule(variant, best_s) if least_s < best_s else None
        if found is not None:
            stages = [stage.spec for stage in found.timeline.pipeline.stages]
            degree = 1 if variant.parallel is None else variant.parallel.degrees[0]
            of_best, best_s = problems[number], found.iteration_time_s
            best = _layout(of_best, degree, stages, found.method, best_s)
    return best, of_best


def _least_s(problem: Problem) -> float:
    """Return the work of each layer on its fastest type, shared by all devices."""
    work_s = Layers(StageTable(problem)).work_s.min(axis=0).sum()
    return float(problem.job.microbatches * work_s) / len(problem.cluster.devices)


def _even_schedule(variant: Variant, below_s: float) -> Scheduled | None:
    try:
        return ScheduledBaselines(variant.problem).best(GRID, below_s)
    except InfeasibleError:
        return None


def _ours(problem: Problem, limit_s: float) -> Row:
    """Return our plan; empty if none is found.

    Raises:
        PipeplanError: if the verifier refuses it.
    """
    try:
        found = solve(problem, time_limit_s=limit_s, deterministic=True)
    except InfeasibleError:
        return {}
    wrong = verify(found.plan)
    if wrong:
        raise PipeplanError(wrong)
    plan = found.plan
    method = plan.provenance.solver.rpartition("schedule by ")[2].partition(";")[0]
    specs = [StageSpec(s.layers, s.devices, s.recompute) for s in plan.stages]
    layout = _layout(problem, max(plan.degrees), specs, method, found.iteration_time_s)
    return {**layout, "gap %": 100 * found.gap}


def _layout(
    problem: Problem, degree: int, stages: Sequence[StageSpec], method: str, time_s: float
) -> Row:
    """Return a plan in words: tensor x pipeline x data parallelism, and what saves memory."""
    job = problem.job
    counts = sorted({len(stage.devices) for stage in stages})
    data = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    words = [f"{degree} x {len(stages)} x {data}", f"{job.samples_per_microbatch}"]
    words += ["ZeRO"] if job.shards_state else []
    again = sum(len(stage.recompute) for stage in stages)
    words += [f"{again} layers again"] if again else []
    return {"layout": ", ".join(words), "schedule": method, "s": time_s}
