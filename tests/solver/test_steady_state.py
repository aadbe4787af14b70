"""Microbatches in flight for the shortest period, against every choice of them."""

import random
from itertools import product

import pytest
from tiny_problems import tiny_problem

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.search.partition.memory.steady_state import best_in_flight

Costs = list[list[float | None]]


def pipeline(seed: int) -> PlacedPipeline:
    problem = tiny_problem(seed, layers=3, devices=3, microbatches=5, replication=False)
    names = tuple(problem.graph.layers)
    return place(problem, [StageSpec((names[j],), (f"d{j}",)) for j in range(3)])


def costs(seed: int, of: PlacedPipeline) -> Costs:
    """Extra seconds by stage and microbatches in flight, none at first, no room at last."""
    rng = random.Random(seed)
    table: Costs = []
    for stage in of.stages:
        forward_s = next(iter(stage.times.values())).forward_s
        rising = sorted(rng.choice([0.0, rng.random() * forward_s]) for _ in range(5))
        room = rng.randint(1, 5)
        table.append([x if k < room else None for k, x in enumerate(rising)])
    return table


def period_s(of: PlacedPipeline, table: Costs, held: tuple[int, ...]) -> float:
    """The largest of each stage's work and its round trip by its microbatches in flight."""
    longest = way = 0.0
    for j in reversed(range(3)):
        extra = table[j][held[j] - 1]
        if extra is None:
            return float("inf")
        times = of.stages[j].times[f"d{j}"]
        work = times.forward_s + times.backward_s + extra
        if j < 2:
            way += of.forward_transfer(j, f"d{j}", f"d{j + 1}").seconds
            way += of.backward_transfer(j + 1, f"d{j + 1}", f"d{j}").seconds
        way += work
        # All five in flight: the stage never waits for memory.
        longest = max(longest, work, way / held[j] if held[j] < 5 else 0.0)
    return longest


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_has_a_clearly_shorter_period(seed: int) -> None:
    of = pipeline(seed)
    table = costs(seed, of)
    found = best_in_flight(of, lambda j, k: _by_device(j, table[j][k - 1]))
    assert found is not None
    best = min(period_s(of, table, held) for held in product(range(1, 6), repeat=3))
    assert period_s(of, table, (found[0], found[1], found[2])) <= best * 1.002


def _by_device(stage: int, extra_s: float | None) -> dict[str, float] | None:
    return None if extra_s is None else {f"d{stage}": extra_s}


def test_a_stage_without_room_has_no_period() -> None:
    assert best_in_flight(pipeline(0), lambda j, k: None if j == 1 else {f"d{j}": 0.0}) is None
