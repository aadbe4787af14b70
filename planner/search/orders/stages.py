"""Given stages in the memory of a search over orders: their list schedules and annealing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from planner.costs.network_table import NetworkTable
from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders
from planner.program.lower.placed import stage_rows
from planner.program.lower.room import room_for
from planner.program.lower.wires import wires_of
from planner.program.program import KINDS
from planner.program.schedule import (
    BACKWARD_FIRST,
    FORWARD_FIRST,
    ORDER_CODES,
    ORDER_START,
    OWNER,
    RHYTHM,
    fixed_orders,
    schedule_for,
)
from planner.schedules.assignment import Assignment, assignments
from planner.schedules.pipelines import pipelines_of
from planner.search.orders.anneal import anneal
from planner.search.orders.lists import ONE_F_ONE_B, list_schedule, replay_order
from planner.search.orders.memory import BEST_CODES, RANDOM, OrderMemory, seed_random
from planner.search.orders.replay import replay_schedule

FACTORS = (2.0, 1.0, 1.5, 1.25, 3.0, np.inf)
"""Limits in flight, as multiples of 1F1B's."""
STRETCHES = (1.5, 2.5, 4.0)
"""Multiples of a microbatch's least way that it takes among others, in an even rhythm."""


class StageOrders:
    """Schedules of given stages.

    Args:
        placed: the stages on their devices.
        seed: of random numbers.
    """

    def __init__(self, placed: PlacedPipeline, seed: int = 0) -> None:
        self.placed = placed
        rows, wires = stage_rows(placed), wires_of(NetworkTable.of(placed.problem.cluster))
        program, room = room_for(rows, wires, placed.devices)
        self._is_alike = placed.problem.job.has_pipelines and placed.has_replicas
        self._devices = [stage.spec.devices for stage in placed.stages]
        replicas = sum(map(len, self._devices))
        counts = (len(placed.stages), replicas, len(placed.devices), placed.microbatches)
        self._schedule = schedule_for(*counts)
        self._memory = OrderMemory(rows, self._schedule, wires, program, room, replay_schedule)
        self._memory.numbers["blocks"] = placed.behaviour.blocks
        self._memory.numbers["equal"] = self._is_alike
        seed_random(self._memory, RANDOM, seed)

    @property
    def tasks_done(self) -> int:
        """Work that was done, in tasks replayed."""
        return int(self._memory.numbers["tasks"])

    # --- list schedules -------------------------------------------------------------------------

    def lists(self, *, splits: bool, may_stay_whole: bool) -> Iterator[tuple[float, Orders]]:
        """Yield the times and the orders of list schedules that fit.

        Where replicas have to form equal pipelines, the slowest is scheduled and all do the same.

        Args:
            splits: whether backwards are split.
            may_stay_whole: whether some may stay whole then, for want of memory.
        """
        if not self._is_alike:
            yield from self._lists(splits, may_stay_whole)
            return
        pipelines = pipelines_of(self.placed)
        if pipelines is None:
            return
        for _, orders in StageOrders(pipelines.first)._lists(splits, may_stay_whole):
            spread = pipelines.spread(orders)
            if (time_s := self.replay(spread)) < np.inf:
                yield time_s, spread

    def _lists(self, splits: bool, may_stay_whole: bool) -> Iterator[tuple[float, Orders]]:
        for owner in assignments(self.placed):
            for rule, factor, stretch in self._rules(splits=splits):
                self._own(owner)
                numbers = (rule, factor, stretch, splits, may_stay_whole)
                time_s = float(list_schedule(self._memory.header, *numbers))
                if time_s < np.inf:
                    yield time_s, self._orders(self._schedule[ORDER_CODES])

    def _own(self, owner: Assignment) -> None:
        """Write the replica of each (stage, microbatch)."""
        pairs = [(s, name) for s, names in enumerate(self._devices) for name in names]
        replicas = {pair: number for number, pair in enumerate(pairs)}
        for (stage, microbatch), name in owner.items():
            at = stage * self.placed.microbatches + microbatch
            self._schedule[OWNER][at] = replicas[stage, name]

    def _rules(self, *, splits: bool) -> Iterator[tuple[int, float, float]]:
        if not splits:
            yield ONE_F_ONE_B, 1.0, 0.0
        if self.placed.problem.job.order == "1f1b":
            return
        for factor, rule in product(FACTORS, (BACKWARD_FIRST, FORWARD_FIRST)):
            yield rule, factor, 0.0
        if self.placed.shares_devices:
            for factor, stretch in product((np.inf, 2.0), STRETCHES):
                yield RHYTHM, factor, stretch

    # --- given orders ---------------------------------------------------------------------------

    def replay(self, orders: Orders) -> float:
        """Return the time of orders, infinite if they do not fit memory or deadlock.

        Annealing goes on from them.

        Raises:
            DeadlockError: if an operation can never run.
        """
        placed = self.placed
        given = fixed_orders(orders, self._devices, placed.devices, placed.microbatches)
        for table in (OWNER, ORDER_START, ORDER_CODES):
            self._schedule[table][:] = given[table]
        self._schedule.numbers["rule"] = given.numbers["rule"]
        return float(replay_order(self._memory.header))

    def anneal(self, heat: float, tries: int) -> float:
        """Change the order at random; return the time of the best one since it was given.

        Args:
            heat: see :func:`planner.search.orders.anneal.anneal`.
            tries: number of changes.
        """
        return float(anneal(self._memory.header, heat, tries))

    @property
    def annealed(self) -> Orders:
        """The best order that annealing has found."""
        return self._orders(self._memory[BEST_CODES])

    def _orders(self, codes: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Orders:
        starts = self._schedule[ORDER_START].tolist()
        return {
            name: tuple(map(self._operation, codes[begin:end].tolist()))
            for name, (begin, end) in zip(self.placed.devices, pairwise(starts), strict=True)
        }

    def _operation(self, code: int) -> Operation:
        what, microbatch = divmod(code, self.placed.microbatches)
        return Operation(what // 4, KINDS[what % 4], microbatch)  # type: ignore[arg-type]
