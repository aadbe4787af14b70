"""Bounds, reductions and the tables of the exact search, each against trying everything."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from loads.load_instances import chain, load_instances
from loads.load_oracle import best_load

from benchmarks.placement.solver.blocks import Blocks, block_loads
from benchmarks.placement.solver.bounds import average_bound, pigeonhole_bound, unplaceable
from benchmarks.placement.solver.contraction import contiguous_blocks, free_blocks
from benchmarks.placement.solver.ideals import all_ideals
from benchmarks.placement.solver.instance import LoadInstance
from benchmarks.placement.solver.one_device import one_device_bound
from benchmarks.placement.solver.orders import coarsened
from benchmarks.placement.solver.pair_loads import PairLoads
from benchmarks.placement.solver.reduction import joined_below, joined_followers
from benchmarks.placement.solver.separation import destructive_bound, tightened
from planner.search.budget import Clock, Settings


def clock() -> Clock:
    return Clock(60.0, deterministic=True)


def best_steps(blocks: Blocks) -> int | None:
    """The least largest load in steps over all placements of blocks, memory included."""
    kinds = [number for number, kind in enumerate(blocks.classes) for _ in range(kind.count)]
    best = None
    for devices in product(range(len(kinds)), repeat=blocks.size):
        held = [0] * len(kinds)
        for block, device in enumerate(devices):
            held[device] += blocks.memory[block]
        allowed = all(blocks.allowed[kinds[d]][b] for b, d in enumerate(devices))
        if allowed and all(h <= blocks.limits[k] for h, k in zip(held, kinds, strict=True)):
            load = int(block_loads(blocks, np.array(devices)).max())
            best = load if best is None else min(best, load)
    return best


@given(load_instances(most_nodes=5))
def test_no_placement_is_below_the_bounds(instance: LoadInstance) -> None:
    blocks = free_blocks(instance)
    best = best_steps(blocks)
    assume(best is not None)
    assert best is not None
    assert average_bound(blocks) <= best
    assert pigeonhole_bound(blocks) <= best
    assert destructive_bound(blocks, 0, 10 * best, clock()) <= best


@given(load_instances(most_nodes=5))
def test_no_placement_is_below_the_bound_of_one_device(instance: LoadInstance) -> None:
    blocks = free_blocks(instance)
    best = best_steps(blocks)
    assume(best is not None)
    assert best is not None
    settings = Settings(workers=1, deterministic=True)
    assert one_device_bound(blocks, 0, best, settings, clock(), 10.0) <= best
    assert one_device_bound(blocks, 0, 2 * best, settings, clock(), 10.0) <= best


def test_one_device_pays_for_its_border() -> None:
    """Two devices share a chain of 4 s; the one with half of it pays 1 s for the cheaper cut."""
    blocks = free_blocks(chain([1.0, 1.0, 1.0, 1.0], transfer_time=1.0))
    settings = Settings(workers=1, deterministic=True)
    bound = one_device_bound(blocks, 0, int(4 / blocks.step), settings, clock(), 10.0)
    assert bound * blocks.step == pytest.approx(3.0, rel=1e-3)
    assert average_bound(blocks) * blocks.step == pytest.approx(2.0)


@given(load_instances(most_nodes=5))
def test_steps_are_the_float_loads_rounded_down(instance: LoadInstance) -> None:
    blocks = free_blocks(instance)
    best, expected = best_steps(blocks), best_load(instance, contiguous=False)
    assert (best is None) == (expected is None)
    if best is not None and expected is not None:
        assert best * blocks.step <= expected <= best * blocks.step * (1 + 1e-9)


@given(load_instances(most_nodes=5), st.sampled_from([1.0, 1.2, 2.0]))
def test_reductions_lose_no_best_placement(instance: LoadInstance, slack: float) -> None:
    blocks = free_blocks(instance)
    best = best_steps(blocks)
    assume(best is not None)
    assert best is not None
    most = int(best * slack)
    assert best_steps(joined_below(blocks, most)) == best
    assert best_steps(joined_followers(blocks, most)) == best
    joined = tightened(blocks, most, clock())
    assert joined is not None
    assert best_steps(joined) == best


@given(load_instances(most_nodes=5))
def test_a_limit_below_the_best_is_never_met(instance: LoadInstance) -> None:
    blocks = free_blocks(instance)
    best = best_steps(blocks)
    assume(best is not None and best > 0)
    assert best is not None
    joined = joined_below(blocks, best - 1)
    found = None if unplaceable(joined) else best_steps(joined)
    assert found is None or found >= best


@given(load_instances(most_nodes=7))
def test_ideals_are_the_sets_closed_under_what_comes_before(instance: LoadInstance) -> None:
    blocks = contiguous_blocks(instance)
    closed = {
        chosen
        for chosen in product((False, True), repeat=blocks.size)
        if all(chosen[a] or not chosen[b] for a, b in blocks.precedences)
    }
    family = all_ideals(blocks, 1000, clock())
    assert family is not None
    assert len(family) == len(closed)
    assert set(map(tuple, family.tolist())) == closed
    assert all_ideals(blocks, len(closed) - 1, clock()) is None


@given(load_instances(most_nodes=6))
def test_loads_of_pairs_of_ideals_are_those_of_their_differences(instance: LoadInstance) -> None:
    blocks = contiguous_blocks(instance)
    family = all_ideals(blocks, 1000, clock())
    assert family is not None
    rows = np.arange(len(family))
    tables = PairLoads(blocks, family).between(rows, rows)
    starts = np.cumsum([0, *(kind.count for kind in blocks.classes)])
    for number, table in enumerate(tables):
        if not blocks.classes[number].count:
            continue
        for lower, upper in product(rows, rows):
            if (family[lower] & ~family[upper]).any():
                assert table[lower, upper] == np.inf
                continue
            stage = family[upper] & ~family[lower]
            rest = int(starts[number]) + 1 if sum(k.count for k in blocks.classes) > 1 else None
            expected = _stage_load(blocks, stage, int(starts[number]), rest, number)
            assert table[lower, upper] == expected


def _stage_load(
    blocks: Blocks, stage: np.ndarray, device: int, other: int | None, number: int
) -> float:
    if not all(blocks.allowed[number][block] for block in np.flatnonzero(stage)):
        return np.inf
    if sum(blocks.memory[block] for block in np.flatnonzero(stage)) > blocks.limits[number]:
        return np.inf
    load = sum(blocks.times[number][block] for block in np.flatnonzero(stage))
    if blocks.classes[number].pays_transfers:
        for net in blocks.nets:
            inside = [bool(stage[pin]) for pin in net.pins]
            load += net.cost * (any(inside) and not all(inside))
    return float(load)


@pytest.mark.parametrize("most", [3, 5])
def test_coarse_blocks_keep_an_order(most: int) -> None:
    blocks = contiguous_blocks(chain([float(1 + index % 3) for index in range(20)]))
    coarse = coarsened(blocks, most)
    assert coarse.size < blocks.size
    assert sorted(node for members in coarse.members for node in members) == list(range(20))
    assert all(a < b for a, b in coarse.precedences)
