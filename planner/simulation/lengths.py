"""Iteration times where microbatches have several lengths.

The iteration that a timeline shows, in which all microbatches take the mean time, is never run.
What is run are iterations whose microbatches have the lengths that the job says
(:mod:`planner.lengths`), in the same orders of operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.lengths import Lengths
from planner.model.layer_graph import LayerGraph
from planner.model.length_graph import record_at
from planner.plan.plan import LengthPrediction
from planner.simulation.noise import OrderedTimes
from planner.simulation.simulator import simulate
from planner.simulation.timeline import (
    Timeline,
)


def placed_by_length(pipeline: PlacedPipeline) -> tuple[PlacedPipeline, ...]:
    """Return the same stages with the times and messages of each length, ascending.

    What they hold in memory stays that of the longest.
    """
    problem = pipeline.problem
    record, specs = problem.graph.record, [stage.spec for stage in pipeline.stages]
    job = problem.job.model_copy(update={"lengths": None})
    graphs = (LayerGraph.from_record(record_at(record, k)) for k in range(len(record.lengths)))
    return tuple(
        place(replace(problem, graph=graph, job=job), specs, pipeline.sync) for graph in graphs
    )


def simulated_by_length(
    timeline: Timeline, iterations: Iterable[Sequence[int]]
) -> Iterator[Timeline]:
    """Replay iterations, each told by the number of each microbatch's length."""
    placed, orders = placed_by_length(timeline.pipeline), timeline.orders
    for row in iterations:
        yield simulate(timeline.pipeline, orders, [placed[number] for number in row])


def predicted_by_length(timeline: Timeline) -> LengthPrediction | None:
    """Return the times of a job's first iterations; None if all microbatches have one length."""
    lengths = timeline.pipeline.problem.job.lengths
    if lengths is None:
        return None
    rows = list(lengths.of_iterations(timeline.pipeline.microbatches))
    different = list(dict.fromkeys(rows))  # Iterations of sorted microbatches are often equal.
    found = simulated_by_length(timeline, different)
    known = dict(zip(different, (row.iteration_time_s for row in found), strict=True))
    times_s = [known[row] for row in rows]
    return LengthPrediction(
        iterations=len(times_s),
        expected_s=float(np.mean(times_s)),
        percentile_95_s=float(np.percentile(times_s, 95)),
        worst_s=max(times_s),
    )


@dataclass(frozen=True)
class EstimatedTimes:
    """Estimates of a schedule's iteration times over lengths, in seconds."""

    expected_s: float
    percentile_95_s: float

    @property
    def rank_s(self) -> float:
        """The mean of both, which is to be least."""
        return (self.expected_s + self.percentile_95_s) / 2


def estimated_times(
    timeline: Timeline, placed: Sequence[PlacedPipeline], lengths: Lengths
) -> EstimatedTimes:
    """Return quick estimates of the times that :func:`predicted_by_length` finds.

    All iterations are replayed at once; messages and reductions keep the orders and the shares of
    links that they have in the mean iteration.

    Args:
        timeline: of the mean iteration.
        placed: its stages by length.
        lengths: of the job, in the order that counts.
    """
    # As in :class:`OrderedTimes`: only who replays anything waits for numba.
    from planner.program.lower.lower import lower_orders

    pipeline, orders, count = timeline.pipeline, timeline.orders, timeline.pipeline.microbatches
    rows = np.array(list(lengths.of_iterations(count)))
    times = OrderedTimes(timeline)
    tasks = times.program.tasks
    lowered = (lower_orders(pipeline, orders, placed, [k] * count) for k in range(len(placed)))
    each_s = np.array([row.program.tasks["seconds"] for row in lowered])
    mean_s = tasks["seconds"]
    shares = np.divide(each_s, mean_s, out=np.ones_like(each_s), where=mean_s > 0)
    times_s = times.times_s(shares[rows[:, tasks["microbatch"]], np.arange(len(tasks))])
    return EstimatedTimes(float(times_s.mean()), float(np.percentile(times_s, 95)))
