"""A bound on every plan: all devices of a type are alike and may use the best links of all.

On such a cluster only the number of devices of each type in a stage matters. Whether a time T can
be reached is then decided exactly: for every cut and every number of devices used, dynamic
programming over stages that keep T finds the least sum of the next stage's head and of its way
back to the end of the iteration. The least T that can be reached is no more than the best plan's
iteration time. Stages may
be any interval of the chain, with one stage a device, whatever the schedule.

Where devices come in groups (nodes on a network), the program also counts how many groups the
devices used lie in at least, and has some cut or some stage cross the network for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from planner.artifacts.link_table import LinkTable, moving_s
from planner.costs.collectives import fewest_steps
from planner.partition.bisection import narrowed_s
from planner.partition.bounds.work import work_bound_s
from planner.partition.chain import Chain, FloatArray, IntArray
from planner.partition.intervals import MAX_CUTS, Counts, Intervals, coarse_cuts

ROUNDING = 1 + 1e-9
MAX_STATES = 60_000
MAX_WORK = 4e9
"""Numbers of devices by type, and steps of the program, beyond which it takes too long."""
MANY_STATES = 20_000
"""With so many states spare crossings of the network are no longer told apart from any number."""


@dataclass(frozen=True)
class _Option:
    """A stage on so many devices of each type; by cut and end, or by cut.

    Attributes:
        counts: devices by type.
        load_s: of the most loaded replica; infinite where memory does not suffice.
        end_s: reduction and optimizer step after it.
        path_s: one microbatch forward and back.
        crosses: whether it lies in several groups, and its all-reduce crosses the network.
    """

    counts: Counts
    load_s: FloatArray
    end_s: FloatArray
    path_s: FloatArray
    crosses: bool


@dataclass(frozen=True)
class _Frontier:
    """The states reached at a cut that may still keep the limit.

    Attributes:
        alive: states, with their spare crossings.
        limit_s: to keep.
        rest_s: what a microbatch needs behind the cut.
        head_s: earliest arrival of a microbatch at the cut.
    """

    cut: int
    alive: IntArray
    limit_s: float
    rest_s: float
    head_s: float


def is_tractable(chain: Chain) -> bool:
    """Whether the program is small enough to be run."""
    states = prod(count + 1 for count in chain.counts)
    options = states if chain.problem.job.replication else len(chain.counts)
    cuts = min(chain.length, MAX_CUTS)
    return states <= MAX_STATES and states * options * cuts * 8 <= MAX_WORK


class RelaxedCluster:
    """The relaxation of one problem.

    Args:
        chain: the layers.
        links: of the cluster.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self.chain = chain
        self.links = links
        self.intervals = Intervals(chain, coarse_cuts(chain), relaxed=True)
        self.kinds = np.array(chain.kinds)
        self.counts = chain.counts
        self._single = not chain.problem.job.replication
        self._shape = tuple(count + 1 for count in self.counts)
        self._used = np.array(list(product(*(range(size) for size in self._shape))))
        self._groups = links.groups
        self._needed_groups = self._count_groups()
        # Crossings beyond those needed so far; as many as the last count as any number.
        self._spare_end = min(int(self._needed_groups.max()) - 1, self._distinct_crossings())
        self._send = self._transfers()
        self._head_s = self.intervals.before(chain.least_forward_s)
        self._rest_s = self.intervals.behind(chain.least_work_s)
        # By the prices of the work bound: the work behind each cut, the devices left in each state.
        cheapest = (chain.load_prices[:, None] * chain.work_s).min(axis=0)
        work_left = self.intervals.behind(cheapest * self.intervals.microbatches)
        self._work_left = work_left / ROUNDING
        self._price_left = ((np.array(self.counts) - self._used) * chain.load_prices).sum(axis=1)

    def _distinct_crossings(self) -> int:
        distinct = MANY_STATES // len(self._used)
        # Large stages cross the network anyway; that they reduce over it is counted in any case.
        return distinct if distinct > 20 or not self._single else max(2, distinct)

    def bound_s(
        self,
        known_s: float,
        tolerance: float = 1e-4,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """No plan is faster; not more than the time of a known plan.

        Args:
            known_s: iteration time of any plan, or any valid time limit.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """
        self._options = list(self._all_options())
        low, high = work_bound_s(self.chain), known_s
        if low >= high or not self._is_reachable(high):
            return high
        return narrowed_s(self._is_reachable, low, high, tolerance, may_go_on)[0]

    # --- what a stage costs ------------------------------------------------------------------

    def _all_options(self) -> Iterator[_Option]:
        if self._single:
            unit = np.eye(len(self.counts), dtype=int)
            every = [tuple(int(x) for x in row) for row in unit]
        else:
            every = [counts for counts in product(*map(range, self._shape)) if sum(counts)]
        for counts in every:
            if self._is_useful(counts):
                yield from self._options_on(counts)

    def _is_useful(self, counts: Counts) -> bool:
        """Whether one replica less would not carry the same load; on one type only."""
        replicas, microbatches = sum(counts), self.intervals.microbatches
        if replicas == 1 or max(counts) < replicas:
            return True
        return -(-microbatches // replicas) < -(-microbatches // (replicas - 1))

    def _options_on(self, counts: Counts) -> Iterator[_Option]:
        """The stage inside a group, and the stage across groups."""
        replicas = sum(counts)
        inside = self._most_in_a_group(counts)
        narrowest = self.links.joint_s_per_byte[replicas]
        if inside:
            yield self._option(counts, narrowest, crosses=False)
        if self._groups is not None and replicas > 1:
            between = 1e-9 / self._groups.widest_between_gb_per_s
            yield self._option(counts, max(narrowest, between), crosses=True)

    def _most_in_a_group(self, counts: Counts) -> bool:
        """Whether some group has so many devices."""
        if self._groups is None:
            return True
        for group in range(int(self._groups.of.max()) + 1):
            members = self.kinds[self._groups.of == group]
            if all(int((members == k).sum()) >= count for k, count in enumerate(counts)):
                return True
        return False

    def _option(self, counts: Counts, s_per_byte: float, *, crosses: bool) -> _Option:
        table, replicas = self.intervals, sum(counts)
        load = table.load_s(counts)
        reduce = np.zeros_like(load)
        if replicas > 1 and np.isfinite(s_per_byte):
            moved = 2 * (replicas - 1) / replicas * table.gradient_bytes
            start = fewest_steps(replicas) * self.links.least_latency_s
            reduce = np.where(table.gradient_bytes > 0, start + moved * s_per_byte, 0.0)
        elif replicas > 1:
            reduce = np.where(table.gradient_bytes > 0, np.inf, 0.0)
        end = reduce + table.optimizer_s(counts)
        load = np.where(table.fits(counts), load, np.inf)
        return _Option(counts, load, end, table.path_s(counts), crosses)

    # --- what a cut costs --------------------------------------------------------------------

    def _transfers(self) -> list[list[tuple[FloatArray, FloatArray]]]:
        """Seconds forward and back at each cut, by the type they reach: any link, a slow one."""
        rows = []
        for k in range(len(self.counts)):
            fast = self.links.least_s_per_byte_to(np.flatnonzero(self.kinds == k))
            row = [self._transfer(fast)]
            if self._groups is not None:
                row.append(self._transfer(1e-9 / self._groups.widest_between_gb_per_s))
            rows.append(row)
        return rows

    def _transfer(self, s_per_byte: float) -> tuple[FloatArray, FloatArray]:
        latency_s = self.links.least_latency_s
        there, back = (
            moving_s(bytes_, latency_s, s_per_byte) for bytes_ in self.intervals.crossing_bytes
        )
        return there, back

    def _count_groups(self) -> IntArray:
        """Groups that so many devices of each type lie in at least, by state."""
        if self._groups is None:
            return np.ones(len(self._used), dtype=np.int64)
        of, number = self._groups.of, int(self._groups.of.max()) + 1
        needed = np.zeros((len(self.counts), len(self._used)), dtype=np.int64)
        mixed = False
        for k in range(len(self.counts)):
            sizes = np.sort([int(((of == g) & (self.kinds == k)).sum()) for g in range(number)])
            room = np.concatenate([[0], np.cumsum(sizes[::-1])])
            needed[k] = np.searchsorted(room, self._used[:, k])
        for group in range(number):
            mixed |= len(set(self.kinds[of == group].tolist())) > 1
        total = needed.max(axis=0) if mixed else needed.sum(axis=0)
        return np.asarray(np.maximum(total, 1))

    # --- the dynamic program -----------------------------------------------------------------

    def _is_reachable(self, limit_s: float) -> bool:
        """Whether some sequence of stages keeps the limit."""
        table = self.intervals
        limit = limit_s * ROUNDING
        states = len(self._used)
        reached = np.full((table.count + 1, (self._spare_end + 1) * states), np.inf)
        reached[0, 0] = 0.0
        capacity_left = self._price_left * limit
        for cut in range(table.count):
            alive = np.flatnonzero(self._undominated(reached[cut]) <= limit - self._rest_s[cut])
            alive = alive[capacity_left[alive % states] >= self._work_left[cut]]
            if not len(alive):
                continue
            frontier = _Frontier(cut, alive, limit, self._rest_s[cut], self._head_s[cut])
            for option in self._options:
                self._extend(reached, frontier, option)
        return bool((reached[-1] <= limit).any())

    def _undominated(self, row: FloatArray) -> FloatArray:
        """Infinite where fewer devices, or more spare crossings, do as well."""
        times = row.reshape(self._spare_end + 1, *self._shape)
        least = np.flip(np.minimum.accumulate(np.flip(times, 0)), 0)
        for axis in range(1, times.ndim):
            least = np.minimum.accumulate(least, axis=axis)
        kept = times.copy()
        for axis in range(times.ndim):
            better = np.full_like(times, np.inf)
            source, target = [slice(None)] * times.ndim, [slice(None)] * times.ndim
            source[axis], target[axis] = slice(None, -1), slice(1, None)
            if axis == 0:
                source, target = target, source
            better[tuple(target)] = least[tuple(source)]
            kept[better <= times] = np.inf
        return kept.ravel()

    def _extend(self, reached: FloatArray, frontier: _Frontier, option: _Option) -> None:
        """Add a stage from the frontier's cut on to every state that has the devices for it."""
        cut, states = frontier.cut, len(self._used)
        own = frontier.head_s + option.load_s[cut, cut + 1 :] + option.end_s[cut, cut + 1 :]
        ends = int(np.searchsorted(own, frontier.limit_s, side="right"))
        room = np.array(self.counts) - np.array(option.counts)
        alive = frontier.alive[(self._used[frontier.alive % states] <= room).all(axis=1)]
        if not ends or not len(alive):
            return
        columns = slice(cut + 1, cut + 1 + ends)
        load, path = option.load_s[cut, columns], option.path_s[cut, columns]
        home = frontier.head_s + option.end_s[cut, columns]
        target = alive % states + self._offset(option.counts)
        more = self._needed_groups[target] - self._needed_groups[alive % states]
        window = reached[columns].T
        for slow, arrival in self._arrivals(reached[cut, alive], frontier, option):
            spare = self._spare_after(alive // states, slow - more)
            if option.crosses:
                # Its all-reduce crosses the network for every group it lies in: any number.
                spare = np.full_like(spare, self._spare_end)
            good = (spare >= 0) & np.isfinite(arrival)
            spent_s = np.maximum(arrival[good, None], home)
            new = np.where(spent_s + load <= frontier.limit_s, spent_s + path, np.inf)
            # States that differ in spare crossings alone may become one: several at one place.
            np.minimum.at(window, (spare * states + target)[good], new)

    def _arrivals(
        self, spent: FloatArray, frontier: _Frontier, option: _Option
    ) -> Iterator[tuple[int, FloatArray]]:
        """Time spent on arrival at a stage, over a link in the group or across the network."""
        cut = frontier.cut
        if cut == 0:
            yield 0, spent
            return
        held = [k for k, count in enumerate(option.counts) if count]
        for slow in range(len(self._send[0])):
            there = min(self._send[k][slow][0][cut] for k in held)
            back = min(self._send[k][slow][1][cut] for k in held)
            arrival = spent + there + back
            if self._single and self.links.is_exclusive:
                # All microbatches one after the other over a single link, then on and home.
                busy = self.intervals.microbatches * max(there, back) + min(there, back)
                keeps = spent + busy + frontier.rest_s <= frontier.limit_s
                arrival = np.where(keeps, arrival, np.inf)
            yield slow, arrival

    def _spare_after(self, spare: IntArray, change: IntArray) -> IntArray:
        """Negative where a crossing is missing; any number stays any number."""
        after = np.minimum(spare + change, self._spare_end)
        return np.asarray(np.where(spare >= self._spare_end, self._spare_end, after))

    def _offset(self, counts: Counts) -> int:
        strides = [prod(self._shape[k + 1 :]) for k in range(len(self._shape))]
        return sum(count * stride for count, stride in zip(counts, strides, strict=True))
