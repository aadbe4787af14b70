"""A bound from a device that holds at least the average share of the work."""

from __future__ import annotations

from ortools.sat.python import cp_model

from benchmarks.placement.solver.blocks import Blocks
from benchmarks.placement.solver.bounds import Prices, best_prices
from benchmarks.placement.solver.reduction import joined_followers
from benchmarks.placement.solver.separation import RELATIVE_PRECISION, tightened
from planner.search.budget import Clock, Settings, run_solver

STEP_SHARE = 0.25
"""Share of the time for one limit."""


def one_device_bound(
    blocks: Blocks, low: int, high: int, settings: Settings, clock: Clock, limit_s: float
) -> int:
    """Return a lower bound on the load: the least limit that is not refuted.

    With loads up to a limit, some device that pays transfers does at least the average of what
    the others leave to its kind. Whether some set of blocks is that much work within the limit is
    a much smaller problem than the whole, and one that counts the transfers across the device's
    border, which the average leaves out.

    Args:
        blocks: the problem.
        low: a bound already known.
        high: no limit from here on is tried, such as the best load known.
        settings: of CP-SAT.
        clock: books the time.
        limit_s: when to stop.
    """
    end_s = clock.left_s - limit_s
    while high - low > max(1, int(low * RELATIVE_PRECISION)) and clock.left_s > max(end_s, 0):
        middle = (low + high) // 2
        step_s = min(STEP_SHARE * limit_s, clock.left_s - end_s)
        found = _raised(blocks, low, middle, settings, clock, step_s)
        if found <= middle:
            high = middle
        low = max(low, found)
    return low


def _raised(
    blocks: Blocks, low: int, most: int, settings: Settings, clock: Clock, limit_s: float
) -> int:
    """The least load of a device with its share of the work, or what is proved of it in time.

    It is ``most + 1`` if there is no such device with a load up to ``most``.
    """
    joined = tightened(blocks, most, clock)
    if joined is None:
        return most + 1
    joined = joined_followers(joined, most)
    prices = best_prices(joined)
    share = _share(joined, prices, most)
    if share <= 0:
        return low
    solver = settings.solver(min(limit_s, clock.left_s))
    status = run_solver(solver, _model(joined, prices, share, low, most), clock)
    if status == cp_model.INFEASIBLE:
        return most + 1
    return round(solver.best_objective_bound)


def _share(blocks: Blocks, prices: Prices, most: int) -> int:
    """The least that one of the devices that pay has to do, in prices; 0 if there is none."""
    devices = sum(kind.count for kind in blocks.classes if kind.pays_transfers)
    free = tuple(0 if kind.pays_transfers else kind.count for kind in blocks.classes)
    work = sum(map(int, prices.weights)) - prices.budget(free, most)
    return -(-work // devices) if devices else 0


def _model(blocks: Blocks, prices: Prices, share: int, low: int, most: int) -> cp_model.CpModel:
    """The set of blocks with a share of the work and the least load, which is up to a limit.

    The objective matters even where only the limit is in question: it guides the search.
    """
    model = cp_model.CpModel()
    held = [model.new_bool_var("") for _ in range(blocks.size)]
    crossed = [_crossed(model, [held[pin] for pin in net.pins]) for net in blocks.nets]
    loads = []
    for block, literal in enumerate(held):
        time = _least_time(blocks, block)
        if time is None:
            model.add(literal == 0)
        loads.append(time or 0)
    load = cp_model.LinearExpr.weighted_sum(
        [*held, *crossed], [*loads, *(net.cost for net in blocks.nets)]
    )
    largest = model.new_int_var(low, most, "load")
    model.add(load <= largest)
    model.minimize(largest)
    work = cp_model.LinearExpr.weighted_sum(held, [int(weight) for weight in prices.weights])
    model.add(work >= share)
    return model


def _crossed(model: cp_model.CpModel, pins: list[cp_model.IntVar]) -> cp_model.IntVar:
    crossed = model.new_bool_var("")
    for pin in pins[1:]:
        model.add_bool_or(crossed, ~pins[0], pin)
        model.add_bool_or(crossed, pins[0], ~pin)
    return crossed


def _least_time(blocks: Blocks, block: int) -> int | None:
    """Return the least time on classes that pay transfers; None if none may run the block."""
    return min(
        (
            times[block]
            for kind, times, allowed in zip(
                blocks.classes, blocks.times, blocks.allowed, strict=True
            )
            if kind.count and kind.pays_transfers and allowed[block]
        ),
        default=None,
    )
