"""Programs whose devices choose what they run: the same schedules as the list scheduler's."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from agreement import require_equal
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Scheduled, behaviours, scheduled

from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.errors import DeadlockError
from planner.plan.operations import owners
from planner.plan.runtime_rules import RuntimeBehaviour, RuntimeRules
from planner.program.compiled import Block
from planner.program.lower.lower import lower_schedule
from planner.program.replay import operation, replay
from planner.program.schedule import (
    BACKWARD_FIRST,
    DUE_S,
    FORWARD_FIRST,
    IS_SPLIT,
    LIMIT,
    MOST_OWED,
    PERIOD_S,
    RESERVE_BYTES,
    RHYTHM,
    SHARE_BYTES,
    schedule_for,
    set_owner,
)
from planner.search.schedule import list_scheduler as old

PRIORITIES = {BACKWARD_FIRST: old.backward_first, FORWARD_FIRST: old.forward_first}


def schedule(
    placed: PlacedPipeline,
    owner: Mapping[tuple[int, int], str],
    rule: int,
    splits: frozenset[int],
    limits: Mapping[tuple[int, str], int],
    shares: Mapping[tuple[int, str], int] | None,
    reserves: Mapping[str, int],
) -> Block:
    pairs = [(s, name) for s, row in enumerate(placed.stages) for name in row.spec.devices]
    found = schedule_for(len(placed.stages), len(pairs), len(placed.devices), placed.microbatches)
    set_owner(found, owner, {pair: n for n, pair in enumerate(pairs)}, placed.microbatches)
    found.numbers["rule"], found.numbers["has_shares"] = rule, shares is not None
    found[IS_SPLIT][:] = [stage in splits for stage in range(len(placed.stages))]
    found[LIMIT][:] = [limits[pair] for pair in pairs]
    found[MOST_OWED][:] = [max(1.0, old._most_owed(placed, *pair)) for pair in pairs]
    found[SHARE_BYTES][:] = [0 if shares is None else shares[pair] for pair in pairs]
    found[RESERVE_BYTES][:] = [reserves.get(name, 0) for name in placed.devices]
    return found


def rhythm(placed: PlacedPipeline, found: Block, stretch: float, split: bool) -> None:
    """Write what is due when, as in_even_rhythm has it."""
    ways, period_s = PathBounds(placed, split), old._period_s(placed)
    turn_s = ways.head[-1] + ways.forward[-1]
    back = [turn_s + ways.back[-1] - way_s for way_s in ways.back]
    weights = [time_s + old.DEFERRED * period_s for time_s in back]
    rows = [back, ways.head, back, weights]
    found[DUE_S][:] = np.ravel([[stretch * x for x in row] for row in rows])
    found[PERIOD_S][0] = period_s


def reserves_of(placed: PlacedPipeline, fit: float) -> dict[str, int]:
    """What leaves room for so many of the largest stashes on each device."""
    largest = max(row.stash_bytes + row.weight_stash_bytes for row in placed.stages)
    return {
        name: placed.capacity_bytes(name) - placed.static_bytes(name) - int(fit * largest)
        for name in placed.devices
    }


@given(
    scheduled(slowed=True, links="fair", shards=True),
    behaviours().filter(lambda row: row.receive == "overlapped"),
    st.sampled_from([BACKWARD_FIRST, FORWARD_FIRST, RHYTHM]),
    st.booleans(),
    st.sampled_from([*old.TARGETS]),
    st.sampled_from([None, 1.0, 1.5, 3.0]),
    st.booleans(),
)
def test_as_the_list_scheduler(
    case: Scheduled,
    behaviour: RuntimeBehaviour,
    rule: int,
    split: bool,
    target: old.Target,
    fit: float | None,
    has_shares: bool,
) -> None:
    problem = replace(case.pipeline.problem, runtime=RuntimeRules(name="r", behaviour=behaviour))
    placed = place(problem, [row.spec for row in case.pipeline.stages], case.pipeline.sync)
    limits = next(old.in_flight_limits(placed, [target]), None)
    assume(limits is not None)
    owner = owners(case.orders)
    reserves = {} if fit is None else reserves_of(placed, fit)
    shares = None
    if has_shares:
        shares = {pair: 3 * placed.stages[pair[0]].stash_bytes for pair in limits}
    splits = frozenset[int]()
    if split:
        splits = frozenset(range(len(placed.stages))) if shares else old.split_stages(placed)
    priority = PRIORITIES.get(rule) or old.in_even_rhythm(placed, 2.5, split=split)
    expected = old.list_schedule(
        placed, owner, limits, priority, split=split, shares=shares, reserves=reserves
    )
    found = schedule(placed, owner, rule, splits, limits, shares, reserves)
    rhythm(placed, found, 2.5, split)
    lowered = lower_schedule(placed, found)
    try:
        times = replay(lowered.program)
    except DeadlockError:
        assert expected is None
        return
    assert expected is not None
    orders = {
        name: [operation(lowered.program, n) for n in times.order[row["order"] : row["order_end"]]]
        for name, row in zip(placed.devices, lowered.program.devices, strict=True)
    }
    assert orders == expected.orders
    require_equal(lowered, times, expected)
