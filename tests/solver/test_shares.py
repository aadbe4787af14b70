"""Memory divided among the stages of a device: schedules keep to it, and are of use."""

import random

import pytest
from test_split_rules import run_each_once
from tiny_pipelines import TinyPipeline, draw_tiny

from benchmarks.schedule.instances import chunks
from planner.plan.operations import owners
from planner.search.budget import Clock, Settings
from planner.search.schedule.cp_sat.model import ScheduleModel
from planner.search.schedule.heuristic import fits_memory, quick_schedules
from planner.search.schedule.memory_shares import SharedSchedule, divides_memory, search_shares
from planner.search.schedule.solve import ScheduleTask, improve_schedule
from planner.search.schedule.ticks import in_ticks
from planner.simulation.simulator import replay_objects, simulate

SHAPES = [(0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1)]


def drawn(seed: int) -> TinyPipeline:
    rng = random.Random(seed)
    return draw_tiny(rng, rng.choice(SHAPES), rng.randint(1, 6), buffers=seed % 4 == 0)


def searched(placed, *, split: bool, lists: int = 40) -> SharedSchedule | None:
    left = iter(range(lists))
    return search_shares(
        placed,
        split=split,
        measure="makespan",
        seed=0,
        may_go_on=lambda operations: next(left, None) is not None,
    )


def keeps_shares(found: SharedSchedule) -> bool:
    """Whether each stage's stashes fit its share as each of its forwards starts."""
    timeline = found.schedule.timeline
    held = dict.fromkeys(found.shares, 0)
    for event in sorted(timeline.operations, key=lambda event: (event.start_s, event.end_s)):
        stage = timeline.pipeline.stages[event.operation.stage]
        key = (event.operation.stage, event.device)
        stash, late = stage.stash_bytes, stage.weight_stash_bytes
        change = {"F": stash, "B": -stash, "I": late - stash, "W": -late}
        held[key] += change[event.operation.kind]
        if event.operation.kind == "F" and held[key] > found.shares[key]:
            return False
    return True


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_schedules_keep_to_their_shares(seed: int, split: bool) -> None:
    placed = drawn(seed).placed
    assert divides_memory(placed)
    found = searched(placed, split=split)
    if found is None:
        return
    assert fits_memory(found.schedule.timeline)
    assert keeps_shares(found)
    replay = simulate(placed, found.schedule.orders)
    assert replay.iteration_time_s == found.schedule.iteration_time_s
    if split:
        assert run_each_once(found.schedule.timeline)


@pytest.mark.parametrize("split", [False, True])
def test_the_divided_model_takes_its_schedule_as_a_solution_and_proves_nothing(split: bool) -> None:
    placed = chunks(2, 4, "v", 3, whole=not split).pipeline()
    found = searched(placed, split=split)
    assert found is not None
    ticks = in_ticks(placed)
    replay = replay_objects(ticks, found.schedule.orders)
    model = ScheduleModel(
        ticks, replay, owners(found.schedule.orders), free=False, shares=found.shares
    )
    assert not model.is_exact
    solver = Settings(workers=1, deterministic=True).solver(2.0)
    solver.solve(model.model)
    assert solver.objective_value <= replay.iteration_time_s
    assert fits_memory(simulate(placed, model.orders(solver)))


@pytest.mark.parametrize(
    ("placement", "whole"), [("v", True), ("v", False), ("interleaved", False)]
)
def test_dividing_memory_beats_competing_for_it(placement: str, whole: bool) -> None:
    """With the same priorities; list schedules in an even rhythm have one of their own."""
    placed = chunks(4, 12, placement, 1, whole=whole, tapered=whole).pipeline()
    quick = quick_schedules(placed, backward="whole" if whole else "split")
    rivals = [s for s in quick if s.method != "list, even rhythm" and fits_memory(s.timeline)]
    best_s = min(s.iteration_time_s for s in rivals)
    found = searched(placed, split=not whole, lists=150)
    assert found is not None
    assert found.schedule.iteration_time_s < best_s


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_never_worse_and_the_same_every_time(seed: int) -> None:
    placed = drawn(seed).placed
    fitting = [s for s in quick_schedules(placed) if fits_memory(s.timeline)]
    if not fitting:
        return
    settings = Settings(workers=1, deterministic=True)
    found = [
        improve_schedule(placed, fitting[0], ScheduleTask(settings, Clock(0.3, True)), 0.3)
        for _ in range(2)
    ]
    assert found[0].orders == found[1].orders
    assert found[0].iteration_time_s <= fitting[0].iteration_time_s
