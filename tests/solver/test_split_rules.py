"""Schedules with weight gradients apart run all operations once, within the memory they keep to."""

import random
from collections import Counter
from collections.abc import Collection

import pytest
from tiny_pipelines import TinyPipeline, draw_tiny

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.heuristic import (
    best_heuristic_schedule,
    quick_schedules,
)
from planner.search.schedule.list_scheduler import (
    backward_first,
    forward_first,
    in_flight_limits,
    list_schedule,
    split_stages,
)
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

SHAPES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)]


def drawn(seed: int) -> TinyPipeline:
    rng = random.Random(seed)
    options = {"zeros": seed % 3 == 0, "buffers": seed % 4 == 0}
    return draw_tiny(rng, rng.choice(SHAPES), rng.randint(1, 7), **options)


def run_each_once(timeline: Timeline, wholes: Collection[int] = ()) -> bool:
    """Whether all operations run, those of stages with whole backwards among them."""
    pipeline = timeline.pipeline
    wanted = {
        Operation(stage, kind, microbatch)
        for stage in range(len(pipeline.stages))
        for kind in ("FB" if stage in wholes else "FIW")
        for microbatch in range(pipeline.microbatches)
    }
    return Counter(event.operation for event in timeline.operations) == Counter(wanted)


def forwards_fit(timeline: Timeline) -> bool:
    """Whether stashes, what weight gradients need and the output fit as each forward starts."""
    pipeline: PlacedPipeline = timeline.pipeline
    held = {device: pipeline.static_bytes(device) for device in pipeline.devices}
    for event in timeline.operations:
        stage = pipeline.stages[event.operation.stage]
        stash, late = stage.stash_bytes, stage.weight_stash_bytes
        change = {"F": stash, "B": -stash, "I": late - stash, "W": -late}
        held[event.device] += change[event.operation.kind]
        if event.operation.kind == "F":
            beside = held[event.device] + stage.output_bytes
            if beside > pipeline.capacity_bytes(event.device):
                return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_quick_schedules_take_the_times_of_their_orders(seed):
    placed = drawn(seed).placed
    for schedule in quick_schedules(placed, backward="any"):
        replay = simulate(placed, schedule.orders)
        assert set(replay.operations) == set(schedule.timeline.operations)
        assert replay.end_s == schedule.timeline.end_s


@pytest.mark.parametrize("seed", range(60))
def test_list_schedules_of_split_backwards_keep_their_memory(seed):
    placed = drawn(seed).placed
    owner = balanced_assignment(placed)
    for limits in in_flight_limits(placed):
        for priority in (backward_first, forward_first):
            timeline = list_schedule(placed, owner, limits, priority, split=True)
            if timeline is not None:
                wholes = set(range(len(placed.stages))) - split_stages(placed)
                assert run_each_once(timeline, wholes)
                assert forwards_fit(timeline)


def test_backwards_are_split_where_memory_has_room() -> None:
    """The second stage's weight gradients need more than its device has beside one stash."""
    placed = TinyPipeline(
        forward=(2, 2, 2),
        input_gradient=(2, 2, 2),
        weight_gradient=(2, 2, 2),
        send=(1, 1),
        kept=(1, 1, 1),
        kept_for_weights=(1, 30, 1),
        cut=(1, 1),
        device=(0, 1, 2),
        room=(20, 20, 20),
        optimizer=(0, 0, 0),
        microbatches=6,
    ).placed
    assert split_stages(placed) == {0, 2}
    found = best_heuristic_schedule(placed, backward="any")
    assert found is not None
    kinds = {(event.operation.stage, event.operation.kind) for event in found.timeline.operations}
    assert {(0, "I"), (1, "B"), (2, "I")} <= kinds
    whole = best_heuristic_schedule(placed, backward="whole")
    assert whole is not None
    assert found.iteration_time_s < whole.iteration_time_s
