"""Each pair of a model and a cluster: the best even layout that is tried by hand, and our plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.groups.cases import Graphs, Machines, Model, batch_of, job_of
from planner import InfeasibleError, PipeplanError, Problem, solve, verify
from planner.baselines.even import GRID
from planner.baselines.layers import Layers
from planner.baselines.scheduled import ScheduledBaselines
from planner.costs.placed_pipeline import StageSpec
from planner.costs.stage_table import StageTable
from planner.records.document import Record
from planner.schedules.best import Scheduled
from planner.search.variants import Variant, variants_of

Setting = tuple[int, bool]
"""Samples of a microbatch, and whether replicas share the optimizer's state."""


class Layout(Record):
    """A plan in short.

    Attributes:
        degree: devices of a tensor-parallel group.
        replicas: of each stage, groups counted as one.
        samples: of a microbatch.
        shares_state: whether replicas share the optimizer's state (ZeRO-1).
        recomputed: number of layers that run again in the backward.
        schedule: the method that made it.
        time_s: of an iteration.
    """

    degree: int
    replicas: tuple[int, ...]
    samples: int
    shares_state: bool
    recomputed: int
    schedule: str
    time_s: float

    @property
    def words(self) -> str:
        """Tensor, pipeline and data parallelism, the microbatch, and what saves memory."""
        counts = sorted(set(self.replicas))
        data = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        zero = ", ZeRO" if self.shares_state else ""
        again = f", {self.recomputed} layers again" if self.recomputed else ""
        shape = f"{self.degree} x {len(self.replicas)} x {data}"
        return f"{shape}, {self.samples}{zero}{again}"


class PairRow(Record):
    """What the grid and our search make of a pair.

    Attributes:
        model, cluster: of the pair.
        is_even: whether all machines of the cluster are alike.
        devices: of the cluster.
        time_limit_s: of our search, in deterministic seconds.
        grid: the best even layout; null where none fits.
        ours: our plan; null where none was found.
        gap: of our plan: iteration time / bound - 1.
        cpu_s: that our search took.
    """

    model: str
    cluster: str
    is_even: bool
    devices: int
    time_limit_s: float
    grid: Layout | None
    ours: Layout | None
    gap: float | None
    cpu_s: float

    @property
    def ratio(self) -> float | None:
        """Time of the best even layout over ours; None where one of them is not there."""
        if self.grid is None or self.ours is None:
            return None
        return self.grid.time_s / self.ours.time_s


def problems_of(
    model: Model, machines: Machines, graphs: Graphs
) -> Iterator[tuple[Setting, Problem]]:
    """Yield the problem at every microbatch size, with shared optimizer state and without."""
    cluster = machines.cluster
    for shares_state in (True, False):
        for samples in model.sizes:
            job = job_of(samples, batch_of(cluster))
            job = job.model_copy(update={"shard_optimizer": shares_state})
            yield (samples, shares_state), Problem(graphs.of(model, samples), cluster, job)


def best_even(problems: Sequence[tuple[Setting, Problem]]) -> tuple[Layout | None, Problem]:
    """Return the fastest even layout of all problems, and its problem.

    Every number of devices in a group, of stages and of replicas, every published schedule of
    each, with fewer microbatches in flight and layers recomputed where memory is short. Where
    nothing fits, the problem is the first one.
    """
    rows = [
        (_least_s(variant.problem), number, variant, setting, problem)
        for number, (setting, problem) in enumerate(problems)
        for variant in variants_of(problem)
    ]
    best: Layout | None = None
    of_best = problems[0][1]
    # A fast layout soon: slower ones are not scheduled then.
    for least_s, _, variant, setting, problem in sorted(rows, key=lambda row: row[:2]):
        below_s = math.inf if best is None else best.time_s
        found = _even_schedule(variant, below_s) if least_s < below_s else None
        if found is not None:
            stages = [stage.spec for stage in found.timeline.pipeline.stages]
            best = _layout(variant, stages, setting, found.method, found.iteration_time_s)
            of_best = problem
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


def _layout(
    variant: Variant, stages: Sequence[StageSpec], setting: Setting, method: str, time_s: float
) -> Layout:
    return Layout(
        degree=1 if variant.parallel is None else variant.parallel.degrees[0],
        replicas=tuple(len(stage.devices) for stage in stages),
        samples=setting[0],
        shares_state=setting[1],
        recomputed=sum(len(stage.recompute) for stage in stages),
        schedule=method,
        time_s=time_s,
    )


def measured(model: Model, machines: Machines, graphs: Graphs, limit_s: float) -> PairRow:
    """Return the row of a pair.

    Our search has the setting of the best even layout, and does not know that layout.

    Raises:
        PipeplanError: if our plan does not hold.
    """
    rows = [*problems_of(model, machines, graphs)]
    begin = time.process_time()
    grid, ours, gap = None, None, None
    if _may_fit(rows[-1][1]):
        grid, problem = best_even(rows)
        begin = time.process_time()
        ours, gap = _ours(problem, limit_s)
    return PairRow(
        model=model.name,
        cluster=machines.name,
        is_even=machines.is_even,
        devices=len(machines.cluster.devices),
        time_limit_s=limit_s,
        grid=grid,
        ours=ours,
        gap=gap,
        cpu_s=time.process_time() - begin,
    )


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


def _ours(problem: Problem, limit_s: float) -> tuple[Layout | None, float | None]:
    try:
        found = solve(problem, time_limit_s=limit_s, deterministic=True)
    except InfeasibleError:
        return None, None
    wrong = verify(found.plan)
    if wrong:
        raise PipeplanError(wrong)
    plan, job = found.plan, problem.job
    layout = Layout(
        degree=max(plan.degrees),
        replicas=tuple(len(stage.devices) for stage in plan.stages),
        samples=job.samples_per_microbatch,
        shares_state=job.shards_state,
        recomputed=sum(len(stage.recompute) for stage in plan.stages),
        schedule=plan.provenance.solver.rpartition("schedule by ")[2].partition(";")[0],
        time_s=found.iteration_time_s,
    )
    return layout, found.gap


def read_rows(path: Path | None) -> list[PairRow]:
    """Return the rows of a file of JSON lines; none if there is no file."""
    if path is None or not path.exists():
        return []
    return [PairRow.model_validate_json(line) for line in path.read_text().splitlines()]
