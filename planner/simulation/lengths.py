"""Iteration times where microbatches have several lengths.

The iteration that a timeline shows, in which all microbatches take the mean time, is never run.
What is run are iterations whose microbatches have the lengths that the job says
(:mod:`planner.lengths`), in the same orders of operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.lengths import Lengths
from planner.model.layer_graph import LayerGraph
from planner.model.length_graph import record_at
from planner.plan.plan import LengthPrediction
from planner.simulation.noise import replay_times_s
from planner.simulation.simulator import simulate
from planner.simulation.timeline import (
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
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
        place(replace(problem, graph=graph, job=job), specs, pipeline.sync, pipeline.groups)
        for graph in graphs
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
    rows = np.array(list(lengths.of_iterations(timeline.pipeline.microbatches)))
    times_s = replay_times_s(timeline, _LengthFactors(timeline.pipeline, placed, rows))
    return EstimatedTimes(float(times_s.mean()), float(np.percentile(times_s, 95)))


class _LengthFactors:
    """How many times as long as in the mean everything takes, by iteration.

    Args:
        pipeline: with mean times.
        placed: with those of each length.
        rows: the length of each microbatch: iterations x microbatches.
    """

    def __init__(
        self, pipeline: PlacedPipeline, placed: Sequence[PlacedPipeline], rows: np.ndarray
    ) -> None:
        self._pipeline, self._placed, self._rows = pipeline, placed, rows
        self._ones = np.ones(len(rows))
        self._known: dict[tuple[object, ...], FloatArray] = {}

    def operation(self, event: OperationEvent) -> FloatArray:
        stage, kind, microbatch = event.operation
        key = stage, kind, event.device
        if key not in self._known:
            self._known[key] = _shares(
                self._pipeline.seconds(*key), [row.seconds(*key) for row in self._placed]
            )
        return self._of(key, microbatch)

    def transfer(self, event: TransferEvent) -> FloatArray:
        stage, kind, microbatch = event.operation
        key = stage, kind, event.source, event.target
        if key not in self._known:
            mean, *others = (
                (row.forward_transfer if kind == "F" else row.backward_transfer)(
                    stage, event.source, event.target
                ).seconds
                for row in (self._pipeline, *self._placed)
            )
            self._known[key] = _shares(mean, others)
        return self._of(key, microbatch)

    def _of(self, key: tuple[object, ...], microbatch: int) -> FloatArray:
        factors: FloatArray = self._known[key][self._rows[:, microbatch]]
        return factors

    def synchronisation(self, event: SynchronisationEvent) -> FloatArray:
        return self._ones

    def optimizer_step(self, device: str) -> FloatArray:
        return self._ones


def _shares(mean: float, others: Sequence[float]) -> FloatArray:
    return np.array(others) / mean if mean > 0 else np.ones(len(others))
