"""Stages judged by the compiled list schedules of the walk, and simulated in the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from planner.costs.network_table import NetworkTable
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.plan.operations import Orders
from planner.plan.plan import Sync
from planner.plan.problem import Problem
from planner.program.layout import Layout
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.starts import Start
from planner.search.walk.walker import Candidate, Walker
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


class Replayed(NamedTuple):
    """A simulation, and the operations of each device by which it was made."""

    timeline: Timeline
    orders: Orders

    @property
    def fits(self) -> bool:
        """Whether every device has memory enough."""
        return not self.timeline.overflow_bytes


class Judge:
    """List schedules of the stages of one problem, by compiled code.

    Args:
        problem: nothing in its job is left open.
        sync: how gradients are reduced.
    """

    def __init__(self, problem: Problem, sync: Sync | None = None) -> None:
        self.problem, self._sync = problem, sync or Sync()
        self.table = StageTable(problem)

    @cached_property
    def _walker(self) -> Walker:
        network, freedoms = NetworkTable.of(self.problem.cluster), freedoms_of(self.problem)
        return Walker(self.problem, self.table, network, freedoms, 1)

    @property
    def tasks_done(self) -> int:
        """Tasks that were replayed, a measure of work that is the same on every machine."""
        return self._walker.tasks_done

    def start_of(self, stages: Sequence[StageSpec]) -> Start | None:
        """Return stages by numbers; None if they are no intervals of layers on known devices."""
        number = self.problem.cluster.numbers
        layers = tuple(layer for stage in stages for layer in stage.layers)
        devices = {name for stage in stages for name in stage.devices}
        if layers != self.table.layers or not devices.issubset(number):
            return None
        ends, end = [], 0
        for stage in stages:
            end += len(stage.layers)
            ends.append(end)
        on = tuple(tuple(number[name] for name in stage.devices) for stage in stages)
        return Start(tuple(ends), on)

    def judged(self, stages: Sequence[StageSpec]) -> Candidate | None:
        """Return the best list schedule of stages, which recompute as little as they must.

        Returns:
            None if the stages are no intervals, if the job has no room for them, or if no list
            schedule fits memory.
        """
        start = self.start_of(stages)
        return None if start is None else self._walker.start(start)

    def replayed(self, judged: Candidate) -> Replayed:
        """Return the simulation of a list schedule."""
        return replayed(self._walker.layout(judged)[1], self.table, self._sync)


def replayed(layout: Layout, table: StageTable, sync: Sync | None = None) -> Replayed:
    """Return the simulation of a layout, without the replicas that run no microbatch.

    Args:
        layout: its stages and orders.
        table: of its problem.
        sync: how gradients are reduced.
    """
    orders = {name: row for name, row in layout.operations(table).items() if row}
    runs = {(row.stage, name) for name, order in orders.items() for row in order}
    stages = [
        replace(spec, devices=tuple(name for name in spec.devices if (stage, name) in runs))
        for stage, spec in enumerate(layout.specs(table))
    ]
    return Replayed(simulate(place(table.problem, stages, sync or Sync()), orders), orders)
