"""The best placement and the best bound so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.placement.solver.blocks import Blocks, block_loads
from benchmarks.placement.solver.evaluator import assignment_problems, objective
from benchmarks.placement.solver.instance import LoadInstance
from benchmarks.placement.solver.result import LoadResult, Progress, Status
from planner.search.budget import Clock


class Incumbent:
    """The best results of several searches, each checked by the evaluator.

    Attributes:
        value: its largest load in steps; ``worst`` before there is one.
        bound: no placement's largest load is below, in steps.

    Args:
        instance: the graph.
        blocks: its blocks, the finest that searches use.
        contiguous: whether stages must be contiguous.
        clock: tells the time of progress.
    """

    def __init__(
        self, instance: LoadInstance, blocks: Blocks, contiguous: bool, clock: Clock
    ) -> None:
        self._instance, self._blocks = instance, blocks
        self._contiguous, self._clock = contiguous, clock
        longest = sum(max(column) for column in zip(*blocks.times, strict=True))
        self.worst: int = 1 + longest + sum(net.cost for net in blocks.nets)
        self.value: int = self.worst
        self.bound: int = 0
        self._number = _numbers(instance, blocks)
        self._assignment: tuple[int, ...] | None = None
        self._objective: float | None = None
        self._history: list[Progress] = []

    @property
    def devices(self) -> tuple[int, ...] | None:
        """The device of every block; None before there is a placement."""
        if self._assignment is None:
            return None
        of_number = {number: device for device, number in enumerate(self._number)}
        return self._blocks.gathered(of_number[number] for number in self._assignment)

    @property
    def is_proved(self) -> bool:
        """Whether the best placement is proved optimal."""
        return self.bound >= self.value

    def offer(self, devices: Sequence[int], blocks: Blocks) -> None:
        """Take a placement of blocks if it is better.

        Raises:
            AssertionError: if it breaks a rule; no search may find such a placement.
        """
        value = int(block_loads(blocks, np.array(devices)).max())
        if value >= self.value:
            return
        assignment = blocks.spread(self._number[device] for device in devices)
        problems = assignment_problems(self._instance, assignment, contiguous=self._contiguous)
        problem = next(problems, None)
        if problem is not None:
            raise AssertionError(f"a search found a placement that does not hold: {problem}")
        self.value, self._assignment = value, assignment
        self._objective = objective(self._instance, assignment)
        self._note()

    def raise_bound(self, bound: int) -> None:
        """Take a bound if it is better."""
        if bound > self.bound:
            self.bound = min(bound, self.value)
            self._note()

    def _note(self) -> None:
        self._history.append(Progress(self._clock.elapsed_s, self._objective, self._bound()))

    def _bound(self) -> float:
        if self._objective is not None and self.is_proved:
            return self._objective
        return self.bound * self._blocks.step

    def result(self) -> LoadResult:
        """Return the results so far."""
        status: Status
        if self._assignment is None:
            status = "infeasible" if self.is_proved else "unknown"
        else:
            status = "optimal" if self.is_proved else "feasible"
        bound = float("inf") if status == "infeasible" else self._bound()
        return LoadResult(self._objective, bound, status, self._assignment, tuple(self._history))


def _numbers(instance: LoadInstance, blocks: Blocks) -> list[int]:
    """The instance's number of each device: the blocks leave out those that no block can use."""
    numbers: list[int] = []
    start = 0
    for kind, used in zip(instance.classes, blocks.classes, strict=True):
        numbers += range(start, start + used.count)
        start += kind.count
    return numbers
