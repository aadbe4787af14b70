"""Where received and sent tensors take as much memory as stashes do, schedules still fit."""

import random
from itertools import pairwise

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, pipeline

from planner.costs.placed_pipeline import PlacedPipeline
from planner.search.budget import Clock, Settings
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.classics import one_by_one
from planner.search.schedule.heuristic import (
    Schedule,
    best_heuristic_schedule,
    fits_memory,
    quick_estimate_s,
)
from planner.search.schedule.solve import ScheduleTask, improve_schedule
from planner.simulation.simulator import simulate

GIB = 2**30


def tight(seed: int) -> PlacedPipeline:
    """Stashes of 2 GiB, tensors of 1 GiB that take a second on their way, room for a few."""
    draw = random.Random(seed)
    count = draw.choice((3, 4))
    names = [f"l{number}" for number in range(count)]
    devices = [f"d{number}" for number in range(count)]
    rows = [
        layer(name, draw.randint(1, 4), draw.randint(2, 6), stash_bytes=2 * GIB) for name in names
    ]
    cuts = [boundary(u, v, bytes_=GIB) for u, v in pairwise(names)]
    types = {"unit": device_type(memory_gib=draw.choice((9, 10.5, 12, 13.5)))}
    links = [link(u, v) for u, v in pairwise(devices)]
    stages = [((name,), (device,)) for name, device in zip(names, devices, strict=True)]
    return pipeline(graph(rows, cuts), cluster(devices, links, types=types), stages, microbatches=5)


def no_pipelining(pipe: PlacedPipeline) -> Schedule:
    orders = one_by_one(pipe, balanced_assignment(pipe))
    return Schedule(orders, simulate(pipe, orders), "one by one")


@pytest.mark.parametrize("seed", range(6))
def test_cp_sat_keeps_room_for_tensors_on_their_way(seed: int) -> None:
    pipe = tight(seed)
    start = no_pipelining(pipe)
    assert fits_memory(start.timeline)
    task = ScheduleTask(Settings(deterministic=True), Clock(2, deterministic=True))
    found = improve_schedule(pipe, start, task, 5)
    assert fits_memory(found.timeline)
    assert found.lower_bound_s <= found.iteration_time_s < 0.9 * start.iteration_time_s


@pytest.mark.parametrize("seed", range(12))
def test_quick_schedules_keep_it_too(seed: int) -> None:
    pipe = tight(seed)
    quick = best_heuristic_schedule(pipe)
    assert quick is not None
    assert fits_memory(quick.timeline)
    assert quick.iteration_time_s < 0.9 * no_pipelining(pipe).iteration_time_s


@pytest.mark.parametrize("seed", range(12))
def test_an_estimate_is_near_the_best_quick_schedule(seed: int) -> None:
    pipe = tight(seed)
    quick = best_heuristic_schedule(pipe)
    assert quick is not None
    assert quick_estimate_s(pipe) == pytest.approx(quick.iteration_time_s, rel=0.05)
