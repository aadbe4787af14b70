"""The choice between a faster plan and one that leaves more in place.

A search treats interchangeable devices as equal and uses the first of them. Here the stages of a
plan go to those that hold most of their state: whole groups of devices on one switch are
exchanged first (nodes), then the devices in each. Both are assignment problems, solved exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from planner.cluster.cluster import Cluster
from planner.costs.placement import is_connected, place
from planner.replanning.state import BoolArray, IntArray, State
from planner.search.walk.starts import Start
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

SLOWER = 1e-9
"""Devices are only exchanged if the iteration takes no longer, but for rounding."""
FORBIDDEN = 2**45
"""More bytes than devices hold; sums of them stay far from the solver's largest number."""
Images = dict[int, int]
"""The device to use, by the one that a plan has."""
Role = Literal["chosen", "fastest found", "fewest bytes"]


@dataclass(frozen=True)
class Candidate:
    """A plan that was found.

    Attributes:
        seconds: of an iteration.
        start: its stages.
        make: returns its simulation.
    """

    seconds: float
    start: Start
    make: Callable[[], Timeline]

    @cached_property
    def timeline(self) -> Timeline:
        """Its simulation."""
        return self.make()


@dataclass(frozen=True)
class Alternative:
    """A plan that may be chosen.

    Attributes:
        role: why it is named.
        timeline: its simulation.
        moved_bytes: that its devices do not hold yet.
    """

    role: Role
    timeline: Timeline
    moved_bytes: int

    @property
    def iteration_time_s(self) -> float:
        """Predicted time of one iteration."""
        return self.timeline.iteration_time_s


class _Offer(NamedTuple):
    """A candidate on some devices; those that move few bytes sort first, then the fast ones."""

    moved_bytes: int
    place: int
    is_as_found: bool
    images: Images


def choose(
    candidates: Sequence[Candidate], state: State, cluster: Cluster, slack: float
) -> tuple[Alternative, ...]:
    """Choose the plan that moves least of those at most ``slack`` slower than the fastest.

    Args:
        candidates: all plans that were found.
        state: what devices hold.
        cluster: the devices.
        slack: a share of the fastest plan's iteration time.

    Returns:
        The choice, the fastest plan found, and the one of all that moves the fewest bytes.
    """
    ranked = sorted(candidates, key=lambda row: row.seconds)
    longest_s = (1 + slack) * ranked[0].seconds
    near = [row for row in ranked if row.seconds <= longest_s]
    exchanges = Exchanges(state, cluster)
    return (
        _least_moving(exchanges, near, "chosen"),
        _least_moving(exchanges, ranked[:1], "fastest found"),
        _least_moving(exchanges, ranked, "fewest bytes"),
    )


def _least_moving(exchanges: Exchanges, ranked: Sequence[Candidate], role: Role) -> Alternative:
    """Choose the candidate that moves the fewest bytes; of equally many the fastest."""
    for offer in sorted(_offers(exchanges, ranked), key=lambda row: row[:3]):
        timeline = renamed(ranked[offer.place].timeline, offer.images, exchanges.cluster)
        if timeline is not None:
            return Alternative(role, timeline, offer.moved_bytes)
    raise AssertionError("a candidate on its own devices is as fast as it is")


def _offers(exchanges: Exchanges, ranked: Sequence[Candidate]) -> Iterator[_Offer]:
    """Yield all candidates as they are, and with those exchanges that may move the fewest bytes."""
    rows = []
    for number, row in enumerate(ranked):
        needed = exchanges.state.needed(row.start)
        moved = exchanges.state.lacking_bytes(needed)
        yield _Offer(moved, number, True, {})
        rows.append((exchanges.least_bytes(needed), moved, number, needed))
    least = min(row[1] for row in rows)
    for bound, moved, number, needed in sorted(rows, key=lambda row: row[:3]):
        if bound >= least:
            return
        for images in exchanges.of(needed):
            bytes_ = exchanges.moved_bytes(needed, images)
            if bytes_ < moved:
                yield _Offer(bytes_, number, False, images)
                least = min(least, bytes_)


class Exchanges:
    """Exchanges of interchangeable devices, by what they hold.

    Args:
        state: what devices hold.
        cluster: the devices.
    """

    def __init__(self, state: State, cluster: Cluster) -> None:
        self.state, self.cluster = state, cluster
        self._lacks = (~state.held).T * state.bytes[:, None].astype(float)
        blocks: dict[tuple[str, Hashable], list[int]] = {}
        for number, name in enumerate(cluster.device_names):
            at = cluster.attachment(name)
            blocks.setdefault((cluster.type_of(name), at), []).append(number)
        self._blocks = list(blocks.values())
        # Type and own link of a block's devices; those with other links are a kind of their own.
        self._kinds = [(kind, at[1:] if isinstance(at, tuple) else at) for kind, at in blocks]

    def moved_bytes(self, needed: BoolArray, images: Images) -> int:
        """Return the bytes that are moved if devices do the work of others."""
        found = np.zeros_like(needed)
        for device, image in images.items():
            found[image] = needed[device]
        return self.state.lacking_bytes(found)

    def least_bytes(self, needed: BoolArray) -> float:
        """Return a bound on the bytes that any exchange moves."""
        used = np.flatnonzero(needed.any(axis=1))
        return float((needed[used] @ self._lacks).min(axis=1).sum()) * (1 - SLOWER)

    def of(self, needed: BoolArray) -> Iterator[Images]:
        """Yield new devices by those of a plan: with nodes exchanged, and within nodes alone.

        Whether an exchange leaves the plan as fast as it was is checked by :func:`renamed`.
        """
        used = set(np.flatnonzero(needed.any(axis=1)).tolist())
        contents = [[device for device in block if device in used] for block in self._blocks]
        costs = np.full((len(contents), len(contents)), FORBIDDEN, dtype=np.int64)
        images: dict[tuple[int, int], Images] = {}
        for row, held in enumerate(contents):
            for column, block in enumerate(self._blocks):
                if self._kinds[row] == self._kinds[column] and len(held) <= len(block):
                    cost, images[row, column] = self._placed(needed, held, block)
                    costs[row, column] = min(cost, FORBIDDEN)
        between = list(enumerate(_assignment(costs)))
        if all(pair in images for pair in between):  # Sizes may be beyond the range of the costs.
            yield {device: image for pair in between for device, image in images[pair].items()}
        yield {d: i for row in range(len(contents)) for d, i in images[row, row].items()}

    def _placed(
        self, needed: BoolArray, held: Sequence[int], block: Sequence[int]
    ) -> tuple[int, Images]:
        """Put the contents of some devices on a block's, moving the fewest bytes."""
        if not held:
            return 0, {}
        square = np.zeros((len(block), len(block)), dtype=np.int64)
        costs = needed[list(held)] @ self._lacks[:, list(block)]
        square[: len(held)] = np.minimum(costs, FORBIDDEN)
        chosen = _assignment(square)[: len(held)]
        images = {device: block[column] for device, column in zip(held, chosen, strict=True)}
        return int(sum(square[row, column] for row, column in enumerate(chosen))), images


def _assignment(costs: IntArray) -> list[int]:
    """Return the column of each row in an assignment of the least sum; costs are square."""
    from ortools.graph.python import linear_sum_assignment

    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    count = len(costs)
    rows, columns = np.divmod(np.arange(count * count), count)
    solver.add_arcs_with_cost(rows, columns, costs.ravel())
    status = solver.solve()
    assert status == solver.OPTIMAL, "every row and column has an arc to every other"
    return [solver.right_mate(row) for row in range(count)]


def renamed(before: Timeline, images: Images, cluster: Cluster) -> Timeline | None:
    """Return a simulation on other devices; None if it is slower there or cannot run."""
    if all(device == image for device, image in images.items()):
        return before
    names, number = cluster.device_names, cluster.numbers
    image_of = {names[device]: names[image] for device, image in images.items()}
    specs = [
        replace(
            stage.spec,
            devices=tuple(
                sorted((image_of[d] for d in stage.spec.devices), key=number.__getitem__)
            ),
        )
        for stage in before.pipeline.stages
    ]
    pipeline = place(before.pipeline.problem, specs)
    if not is_connected(pipeline):  # Devices of one kind need not have links to the same ones.
        return None
    orders = {image_of[device]: order for device, order in before.orders.items()}
    found = simulate(pipeline, orders)
    is_slower = found.iteration_time_s > before.iteration_time_s * (1 + SLOWER)
    return None if is_slower or found.overflow_bytes else found
