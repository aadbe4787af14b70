"""The choice between a faster plan and one that leaves more in place.

The same plan on devices of the same kind that hold more of what it needs.

A search treats interchangeable devices as equal and uses the first of them. Here the stages of a
plan go to those that hold most of their state: whole groups of devices on one switch are
exchanged first (nodes), then the devices in each. Both are assignment problems, solved exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from planner.cluster.cluster import Cluster
from planner.costs.placement import is_connected, place
from planner.replanning.state import BoolArray, State
from planner.search.partition.chain import Chain, IntArray, Partition
from planner.search.schedule.heuristic import Schedule, fits_memory
from planner.search.state import Candidate, Search
from planner.simulation.simulator import simulate

SLOWER = 1e-9
"""Devices are only exchanged if the iteration takes no longer, but for rounding."""
Images = dict[str, str]


@dataclass(frozen=True)
class Kept:
    """An exchange of devices, and the bytes it moves.

    Attributes:
        images: the devices to use, by those of the plan.
        moved_bytes: what would be moved then.
    """

    images: Images
    moved_bytes: int


def exchanges_for(chain: Chain, state: State, partition: Partition) -> list[Kept]:
    """Return exchanges of devices, the fewest bytes first; the last keeps all as they are.

    Whether an exchange leaves the plan as fast as it was is checked by :func:`renamed`.
    """
    wanted = state.wanted(chain, partition)
    as_it_is = Kept({device: device for device in wanted}, state.lacking_bytes(wanted))
    found = [
        Kept(images, state.lacking_bytes({images[d]: needed for d, needed in wanted.items()}))
        for images in _exchanges(chain.problem.cluster, state, wanted)
    ]
    better = [kept for kept in found if kept.moved_bytes < as_it_is.moved_bytes]
    return [*sorted(better, key=lambda kept: kept.moved_bytes), as_it_is]


def _exchanges(
    cluster: Cluster, state: State, wanted: Mapping[str, BoolArray]
) -> tuple[Images, ...]:
    """Return new devices by old ones: with nodes exchanged, and within nodes alone."""
    blocks = _blocks(cluster)
    contents = [[device for device in block if device in wanted] for block in blocks]
    alone = _within(state, wanted, contents, blocks)
    costs, images = _between(cluster, state, wanted, contents, blocks)
    exchanged: Images = {}
    for row, column in enumerate(_assignment(costs)):
        if (row, column) not in images:  # Sizes beyond the range of the costs.
            return (alone,)
        exchanged |= images[row, column]
    return exchanged, alone


def _blocks(cluster: Cluster) -> list[list[str]]:
    """Return devices in blocks of one type that are joined to everything else alike."""
    found: dict[Hashable, list[str]] = {}
    for device in cluster.device_names:
        key = (cluster.type_of(device), cluster.attachment(device))
        found.setdefault(key, []).append(device)
    return list(found.values())


def _within(
    state: State,
    wanted: Mapping[str, BoolArray],
    contents: Sequence[Sequence[str]],
    blocks: Sequence[Sequence[str]],
) -> Images:
    images: Images = {}
    for held, block in zip(contents, blocks, strict=True):
        images |= _placed(state, wanted, held, block)[1]
    return images


def _between(
    cluster: Cluster,
    state: State,
    wanted: Mapping[str, BoolArray],
    contents: Sequence[Sequence[str]],
    blocks: Sequence[Sequence[str]],
) -> tuple[IntArray, dict[tuple[int, int], Images]]:
    """Return the bytes to move if one block's contents go to another of its kind."""
    kinds = [_kind(cluster, block) for block in blocks]
    costs = np.full((len(blocks), len(blocks)), FORBIDDEN, dtype=np.int64)
    images: dict[tuple[int, int], Images] = {}
    for row, held in enumerate(contents):
        for column, block in enumerate(blocks):
            if kinds[row] == kinds[column] and len(held) <= len(block):
                cost, images[row, column] = _placed(state, wanted, held, block)
                costs[row, column] = min(cost, FORBIDDEN)
    return costs, images


def _kind(cluster: Cluster, block: Sequence[str]) -> Hashable:
    """Return type and own link of a block's devices; others are a kind of their own."""
    at = cluster.attachment(block[0])
    figures = at[1:] if isinstance(at, tuple) else at
    return cluster.type_of(block[0]), figures


FORBIDDEN = 2**45
"""More bytes than devices hold; sums of them stay far from the solver's largest number."""


def _placed(
    state: State,
    wanted: Mapping[str, BoolArray],
    held: Sequence[str],
    block: Sequence[str],
) -> tuple[int, Images]:
    """Put the contents of some devices on a block's, moving the fewest bytes."""
    costs = state.missing_bytes([wanted[device] for device in held], block)
    square = np.zeros((len(block), len(block)), dtype=np.int64)
    square[: len(held)] = np.minimum(costs, FORBIDDEN)
    chosen = _assignment(square)[: len(held)]
    images = {device: block[column] for device, column in zip(held, chosen, strict=True)}
    return int(sum(costs[row, column] for row, column in enumerate(chosen))), images


def _assignment(costs: IntArray) -> list[int]:
    """Return the column of each row in an assignment of the least sum; costs are square."""
    from ortools.graph.python import linear_sum_assignment

    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    count = len(costs)
    if not count:
        return []
    rows, columns = np.divmod(np.arange(count * count), count)
    solver.add_arcs_with_cost(rows, columns, costs.ravel())
    status = solver.solve()
    assert status == solver.OPTIMAL, "every row and column has an arc to every other"
    return [solver.right_mate(row) for row in range(count)]


def renamed(chain: Chain, schedule: Schedule, images: Images) -> Schedule | None:
    """Return a schedule on other devices; None if it is slower there or cannot run."""
    number = chain.problem.cluster.numbers.__getitem__
    if all(device == image for device, image in images.items()):
        return schedule
    specs = [
        replace(spec, devices=tuple(sorted((images[d] for d in spec.devices), key=number)))
        for spec in (stage.spec for stage in schedule.timeline.pipeline.stages)
    ]
    orders = {images[device]: order for device, order in schedule.orders.items()}
    pipeline = place(chain.problem, specs)
    if not is_connected(pipeline):  # Devices of one kind need not have links to the same ones.
        return None
    timeline = simulate(pipeline, orders)
    is_slower = timeline.iteration_time_s > schedule.iteration_time_s * (1 + SLOWER)
    if is_slower or not fits_memory(timeline):
        return None
    return replace(schedule, orders=orders, timeline=timeline)


Role = Literal["chosen", "fastest found", "fewest bytes"]


@dataclass(frozen=True)
class Alternative:
    """A plan that was found.

    Attributes:
        role: why it is named.
        schedule: of it.
        moved_bytes: that its devices do not hold yet.
    """

    role: Role
    schedule: Schedule
    moved_bytes: int

    @property
    def iteration_time_s(self) -> float:
        """Predicted time of one iteration."""
        return self.schedule.iteration_time_s


def choose(search: Search, state: State, slack: float) -> tuple[Alternative, ...]:
    """Choose the plan that moves least of those at most ``slack`` slower than the fastest.

    Args:
        search: that found a plan.
        state: what devices hold.
        slack: a share of the fastest plan's iteration time.

    Returns:
        The choice, the fastest plan found, and the one of all that moves the fewest bytes.
    """
    ranked = search.ranked()
    longest_s = (1 + slack) * search.best_s
    near = [c for c in ranked if c.schedule.iteration_time_s <= longest_s]
    return (
        _least_moving(search, state, near, "chosen"),
        _least_moving(search, state, ranked[:1], "fastest found"),
        _least_moving(search, state, ranked, "fewest bytes"),
    )


def _least_moving(
    search: Search, state: State, candidates: list[Candidate], role: Role
) -> Alternative:
    """Choose the candidate that moves the fewest bytes; of equally many the fastest."""
    rows: list[tuple[int, int, Candidate, Kept]] = [
        (kept.moved_bytes, place, candidate, kept)
        for place, candidate in enumerate(candidates)
        for kept in exchanges_for(search.chain, state, candidate.partition)
    ]
    for moved_bytes, _, candidate, kept in sorted(rows, key=lambda row: row[:2]):
        schedule = renamed(search.chain, candidate.schedule, kept.images)
        if schedule is not None:
            return Alternative(role, schedule, moved_bytes)
    raise AssertionError("a candidate on its own devices is as fast as it is")
