"""List schedules follow the plain rule, the most urgent of all that may run, at little work."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from builders import boundary, graph, layer, pipeline, star
from hypothesis import given
from hypothesis import strategies as st
from strategies import partitions, problems

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.errors import DeadlockError
from planner.plan.operations import Operation
from planner.plan.problem import Problem
from planner.schedules.assignment import balanced_assignment
from planner.search.schedule.list_scheduler import (
    Limits,
    Priority,
    backward_first,
    forward_first,
    in_even_rhythm,
    in_flight_limits,
    list_schedule,
)
from planner.simulation.simulator import run

PRIORITIES = (backward_first, forward_first)


class PlainRule:
    """Looks at every operation that can run, each time."""

    def __init__(self, pipeline: PlacedPipeline, priority: Priority, limits: Limits) -> None:
        self.pipeline = pipeline
        self.priority = priority
        self.limits = limits
        self.available: defaultdict[str, set[Operation]] = defaultdict(set)
        self.in_flight: Counter[tuple[int, str]] = Counter()
        self.unfinished_backwards = len(pipeline.stages) * pipeline.microbatches

    def offer(self, device: str, operation: Operation) -> None:
        self.available[device].add(operation)

    def choose(self, device: str, now_s: float) -> Operation | None:
        allowed = [op for op in self.available[device] if self.is_allowed(op, device)]
        if not allowed:
            return None
        best = min(allowed, key=self.priority)
        self.available[device].remove(best)
        self.in_flight[best.stage, device] += 1 if best.kind == "F" else -1
        self.unfinished_backwards -= best.kind == "B"
        return best

    def is_allowed(self, operation: Operation, device: str) -> bool:
        stage, kind, _ = operation
        if kind != "F":
            return kind == "B"
        if self.in_flight[stage, device] >= self.limits[stage, device]:
            return False
        return len(self.pipeline.stages_on[device]) == 1 or self.leaves_room(stage, device)

    def leaves_room(self, stage: int, device: str) -> bool:
        """Enough for this forward and for one microbatch of every later stage of the device."""
        needed = self.pipeline.static_bytes(device) + self.pipeline.stages[stage].output_bytes
        for other in self.pipeline.stages_on[device]:
            held = self.in_flight[other, device] + (1 if other == stage else 0)
            if other > stage:
                held = max(1, held)
            needed += held * self.pipeline.stages[other].stash_bytes
        return needed <= self.pipeline.capacity_bytes(device)

    def unfinished(self) -> str:
        return "some" if self.unfinished_backwards else ""


@pytest.mark.extensive
@given(st.data())
def test_schedules_are_those_of_the_plain_rule(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems())
    placed = place(problem, data.draw(partitions(problem)))
    owner = balanced_assignment(placed)
    limits = data.draw(st.sampled_from(list(in_flight_limits(placed)) or [None]))
    if limits is None:
        return  # Not even one microbatch fits.
    priority = data.draw(st.sampled_from(PRIORITIES))
    found = list_schedule(placed, owner, limits, priority)
    try:
        wanted = run(placed, owner, PlainRule(placed, priority, limits))
    except DeadlockError:
        assert found is None
        return
    assert found is not None
    assert found.operations == wanted.operations
    assert found.transfers == wanted.transfers


def test_an_even_rhythm_loops_faster_than_greedy_rules() -> None:
    """Interleaved stages, one a layer: neither early nor late stages are to wait for the others."""
    names = [f"l{i}" for i in range(16)]
    placed = pipeline(
        graph(
            [layer(name) for name in names],
            [boundary(*pair, bytes_=10**6) for pair in pairwise(names)],
        ),
        star(8),
        [([name], [f"d{i % 8}"]) for i, name in enumerate(names)],
        microbatches=16,
    )
    owner = balanced_assignment(placed)
    limits = {(stage, f"d{stage % 8}"): 16 for stage in range(16)}
    priorities = (*PRIORITIES, in_even_rhythm(placed, 2.5, split=False))
    found = [list_schedule(placed, owner, limits, priority) for priority in priorities]
    *greedy, even = [timeline.iteration_time_s for timeline in found if timeline is not None]
    work_s = 16 * 2 * 3
    assert work_s < even < min(greedy)


@pytest.mark.parametrize("priority", PRIORITIES)
def test_the_urgency_of_each_operation_is_looked_up_once(priority: Priority) -> None:
    """However many microbatches wait: what a device has to look at does not grow with them."""
    microbatches = 300
    placed = pipeline(
        graph([layer("a"), layer("b")], [boundary("a", "b")]),
        star(2),
        [(["a"], ["d0"]), (["b"], ["d1"])],
        microbatches=microbatches,
    )
    asked: Counter[Operation] = Counter()

    def counted(operation: Operation) -> tuple[int, ...]:
        asked[operation] += 1
        return priority(operation)

    limits = {(0, "d0"): microbatches, (1, "d1"): microbatches}
    assert list_schedule(placed, balanced_assignment(placed), limits, counted) is not None
    assert set(asked.values()) == {1}
    assert len(asked) == 2 * 2 * microbatches
