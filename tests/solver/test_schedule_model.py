"""CP-SAT's schedule model: bounds and values enclose the best of all orders; windows improve."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_brute_force import brute_force, fits
from tiny_pipelines import A_LITTLE, SOLVED_SHAPES, TICK, TinyPipeline, draw_tiny

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders
from planner.search.cp_sat.plan_model import Effort
from planner.search.cp_sat.schedule_model import ScheduleInstance, improve, prove
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

WORK = Effort(2.0, deterministic=True)


def judge(placed: PlacedPipeline) -> Callable[[Orders], Timeline | None]:
    def replayed(orders: Orders) -> Timeline | None:
        try:
            found = simulate(placed, orders)
        except DeadlockError:
            return None
        return None if found.overflow_bytes else found

    return replayed


def slowest(tiny: TinyPipeline, *, split: bool) -> Timeline | None:
    """One microbatch after the other."""
    orders: dict[str, list[Operation]] = {}
    for microbatch in range(tiny.microbatches):
        rows = [(stage, "F") for stage in tiny.stages]
        for stage in reversed(tiny.stages):
            rows += [(stage, "I"), (stage, "W")] if split else [(stage, "B")]
        for stage, kind in rows:
            device = f"d{tiny.device[stage]}"
            orders.setdefault(device, []).append(Operation(stage, kind, microbatch))
    return judge(tiny.placed)(orders)


@pytest.mark.parametrize("shape", SOLVED_SHAPES, ids=str)
def test_bound_and_value_enclose_the_best_of_all_orders(shape: tuple) -> None:
    device, microbatches, split = shape
    proved = tried = 0
    for seed in range(2):
        tiny = draw_tiny(random.Random(seed), device, microbatches, optimizer=seed % 3 == 0)
        tiny = replace(tiny, backward="split" if split else "whole")
        least_s = brute_force(tiny, split=split).makespan
        start = slowest(tiny, split=split)
        if start is None:
            assert least_s == float("inf")
            continue
        found = prove(ScheduleInstance(start, splits=split), WORK, judge(tiny.placed))
        best = found.better or start
        assert found.bound_s <= least_s * A_LITTLE
        assert least_s <= best.iteration_time_s * A_LITTLE
        assert fits(tiny, {tuple(event.operation): event.start_s for event in best.operations})
        tried += 1
        proved += best.iteration_time_s <= found.bound_s * TICK
    assert proved >= 0.5 * tried


def test_windows_find_the_best_of_all_orders() -> None:
    """From one microbatch after the other."""
    slower = reached = 0
    for seed in range(12):
        tiny = replace(draw_tiny(random.Random(seed), (0, 1, 2), 3), backward="whole")
        start, least_s = slowest(tiny, split=False), brute_force(tiny, split=False).makespan
        if start is None or start.iteration_time_s <= least_s * A_LITTLE:
            continue
        left, times = iter(range(8)), [start.iteration_time_s]
        instance = ScheduleInstance(start, splits=False)
        found = improve(instance, WORK, judge(tiny.placed), lambda row=left: next(row, -1) >= 0)
        times += [row.iteration_time_s for row in found]
        assert times == sorted(times, reverse=True)
        slower += 1
        reached += times[-1] <= least_s * A_LITTLE
    assert slower >= 4
    assert reached >= slower - 1
