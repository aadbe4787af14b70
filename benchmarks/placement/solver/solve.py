"""The solver: placements with the least largest load, with a bound or a proof."""

from __future__ import annotations

from benchmarks.placement.solver.blocks import Blocks
from benchmarks.placement.solver.bounds import average_bound, pigeonhole_bound, unplaceable
from benchmarks.placement.solver.chain_search import best_chain, is_searchable
from benchmarks.placement.solver.contraction import contiguous_blocks, free_blocks
from benchmarks.placement.solver.families import good_chain
from benchmarks.placement.solver.ideals import all_ideals
from benchmarks.placement.solver.incumbent import Incumbent
from benchmarks.placement.solver.instance import LoadInstance
from benchmarks.placement.solver.orders import coarsened
from benchmarks.placement.solver.reduction import joined_below, joined_followers
from benchmarks.placement.solver.result import LoadResult
from planner.search.budget import Clock, Settings

MOST_IDEALS = 250_000
MOST_CELLS = 4e8
"""Ideals times blocks of a family: the bytes of its table."""
MOST_BLOCKS = 4000
"""The most blocks of which the family of all ideals is made."""
MOST_COARSE_BLOCKS = 1500
"""More are coarsened for a first split."""
MOST_MODEL_CELLS = 200_000
"""Blocks and nets times devices of a CP-SAT model that is worth building."""


def solve_loads(
    instance: LoadInstance, *, contiguous: bool, settings: Settings, clock: Clock
) -> LoadResult:
    """Place the nodes so that the largest device load is least.

    Contiguous placements are those of the authors' exact dynamic program, with all its rules (see
    :func:`~benchmarks.placement.solver.contraction.contiguous_blocks`); the others those of their
    integer program. Loads are those of both (see
    :func:`~benchmarks.placement.solver.evaluator.device_loads`).

    Contiguous: a good split from few ideals, then the exact recursion over all ideals below it;
    where these are too many, CP-SAT. Free: CP-SAT, from the contiguous split.

    Args:
        instance: the graph and the devices.
        contiguous: whether the devices' parts must be stages in an order.
        settings: of CP-SAT; the seed also draws linear orders.
        clock: when to stop.
    """
    blocks = contiguous_blocks(instance) if contiguous else free_blocks(instance)
    best = Incumbent(instance, blocks, contiguous, clock)
    if unplaceable(blocks):
        best.raise_bound(best.worst)
        return best.result()
    best.raise_bound(max(average_bound(blocks), pigeonhole_bound(blocks)))
    if contiguous:
        _solve_contiguous(blocks, best, settings, clock)
    else:
        _solve_free(blocks, contiguous_blocks(instance), best, settings, clock)
    return best.result()


def _solve_contiguous(blocks: Blocks, best: Incumbent, settings: Settings, clock: Clock) -> None:
    _start_contiguous(blocks, best, settings, clock)
    if not best.is_proved and blocks.size <= MOST_BLOCKS:
        _search_all_ideals(blocks, best, clock)
    if not best.is_proved:
        _search_model(blocks, best, settings, clock)


def _start_contiguous(blocks: Blocks, best: Incumbent, settings: Settings, clock: Clock) -> None:
    """A good contiguous split, if one is found."""
    coarse = coarsened(blocks, MOST_COARSE_BLOCKS)
    if unplaceable(coarse):
        return
    chain = good_chain(coarse, best.value, settings.seed, clock)
    if chain is not None:
        best.offer(chain.devices(coarse), coarse)


def _search_all_ideals(blocks: Blocks, best: Incumbent, clock: Clock) -> None:
    """The best contiguous split, proved, unless there are too many ideals or time runs out."""
    most = best.value - 1
    reduced = joined_followers(joined_below(blocks, most), most)
    if unplaceable(reduced, most):
        best.raise_bound(best.value)
        return
    if not is_searchable(reduced):
        return
    family = all_ideals(reduced, int(min(MOST_IDEALS, MOST_CELLS / reduced.size)), clock)
    if family is None:
        return
    try:
        chain = best_chain(reduced, family, best.value, clock)
    except TimeoutError:
        return
    if chain is not None:
        best.offer(chain.devices(reduced), reduced)
    best.raise_bound(best.value)


def _solve_free(
    blocks: Blocks, stages: Blocks, best: Incumbent, settings: Settings, clock: Clock
) -> None:
    _start_contiguous(stages, best, settings, clock)
    if not best.is_proved:
        _search_model(blocks, best, settings, clock)


def _search_model(blocks: Blocks, best: Incumbent, settings: Settings, clock: Clock) -> None:
    devices = sum(kind.count for kind in blocks.classes)
    if clock.left_s <= 0 or (blocks.size + len(blocks.nets)) * devices > MOST_MODEL_CELLS:
        return
    # Here, for CP-SAT takes half a second to import and most problems do without it.
    from benchmarks.placement.solver.cp_search import search

    search(blocks, best, settings, clock)
