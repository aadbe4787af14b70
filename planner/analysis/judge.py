"""Stages judged by the compiled list schedules of the walk, and simulated in the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from planner.costs.network_table import NetworkTable
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.plan.plan import Sync
from planner.plan.problem import Problem
from planner.search.finish import starts_of
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.plans import timeline_of
from planner.search.walk.walker import Candidate, Walker
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


class Judge:
    """List schedules of the stages of one problem, by compiled code.

    Args:
        problem: nothing in its job is left open.
        sync: how gradients are reduced.
    """

    def __init__(self, problem: Problem, sync: Sync | None = None) -> None:
        self.problem, self._sync = problem, sync or Sync()
        self._table = StageTable(problem)

    @cached_property
    def _walker(self) -> Walker:
        network, freedoms = NetworkTable.of(self.problem.cluster), freedoms_of(self.problem)
        return Walker(self.problem, self._table, network, freedoms, 1)

    @property
    def tasks_done(self) -> int:
        """Tasks that were replayed, a measure of work that is the same on every machine."""
        return self._walker.tasks_done

    def judged(self, stages: Sequence[StageSpec]) -> Candidate | None:
        """Return the best list schedule of stages, which recompute as little as they must.

        Returns:
            None if the stages are no intervals, if the job has no room for them, or if no list
            schedule fits memory.
        """
        start = next(starts_of(self.problem, [stages]), None)
        return None if start is None else self._walker.start(start)

    def timeline(self, judged: Candidate) -> Timeline:
        """Return the simulation of a list schedule, without replicas that run no microbatch."""
        found = timeline_of(self._walker.layout(judged)[1], self._table)
        if self._sync == Sync():
            return found
        specs = [stage.spec for stage in found.pipeline.stages]
        return simulate(place(self.problem, specs, self._sync), found.orders)
