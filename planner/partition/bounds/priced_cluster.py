"""A bound on every plan for large clusters: devices are bought from one budget.

As ``relaxed_cluster``, but instead of a number of devices for each type there is one budget: a
device of each type has a price, a whole number, and all of the cluster together cost the budget
(a surrogate constraint, Glover 1968). Any prices give a bound. Those of the work bound are a good
start; wherever they allow a limit, the price of each type is multiplied, up if more devices are
bought than there are, down if fewer. The program then has one state for each amount spent,
however many devices there are, and each stage buys the cheapest replicas that keep the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.artifacts.link_table import NO_LINK, LinkTable, moving_s
from planner.costs.collectives import fewest_steps
from planner.partition.bisection import narrowed_s
from planner.partition.bounds.work import work_bound_s
from planner.partition.chain import Chain, FloatArray, IntArray
from planner.partition.intervals import Intervals, coarse_cuts

ROUNDING = 1 + 1e-9
BUDGET = 10_000
"""About how many units of price the whole cluster costs."""
ROUNDS = 16
"""Of changing the prices towards using up every type."""
FIRST_STEP = 0.5
"""At first a price is multiplied, or divided, by at most e to this power."""
STEP_DECAY = 0.85
"""The power of each change over that of the one before."""


class Bought(NamedTuple):
    """A stage between two cuts, by their indices.

    Attributes:
        quickest: type of its quickest replica.
        type, replicas: of all its replicas, if they are of the type that is worth its price most.
    """

    begin: int
    end: int
    quickest: int
    type: int
    replicas: float


@dataclass(frozen=True)
class _Type:
    """Figures of stages whose quickest replica is of this type; by cut and end.

    Attributes:
        work_s: one microbatch forward and back on this type; infinite where it does not fit.
        path_s: on the quickest of the types that may stand beside it.
        partners: types that are no quicker, by cut and end.
    """

    work_s: FloatArray
    path_s: FloatArray
    partners: FloatArray


class PricedCluster:
    """The relaxation of one problem.

    Args:
        chain: the layers.
        links: of the cluster.

    Attributes:
        prices: of a device by type, all devices together costing 1; they change with the bound.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self.chain = chain
        self.links = links
        self.prices = chain.load_prices
        self._may_go_on: Callable[[], bool] = lambda: True
        self.intervals = Intervals(chain, coarse_cuts(chain), relaxed=True)
        self.kinds = np.array(chain.kinds)
        self.counts = np.array(chain.counts)
        self._replication = chain.problem.job.replication
        self._types = self._stage_figures()
        self._send = self._transfers()
        self._step_s = self._least_step_s()
        self._reduce_s = self._reductions()
        self._head_s = self.intervals.before(chain.least_forward_s)
        self._rest_s = self.intervals.behind(chain.least_work_s)

    def bound_s(
        self,
        known_s: float,
        tolerance: float = 1e-3,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """No plan is faster; not more than the time of a known plan.

        Args:
            known_s: iteration time of any plan, or any valid time limit.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step.
        """
        self._may_go_on = may_go_on
        bound = self._bisect(self.prices, work_bound_s(self.chain), known_s, tolerance)
        step = FIRST_STEP
        for _ in range(ROUNDS if len(self.counts) > 1 else 0):
            target_s = bound * (1 + 2 * tolerance)
            if target_s >= known_s or not may_go_on():
                break
            stages = self.stages(target_s)
            if stages is None:
                bound = self._bisect(self.prices, target_s, known_s, tolerance)
            else:
                self._change_prices(stages, step)
                step *= STEP_DECAY
        return bound

    def _change_prices(self, stages: Sequence[Bought], step: float) -> None:
        """Multiply them: dearer what more is used of than there is, cheaper what is left over."""
        used = np.zeros(len(self.counts))
        for stage in stages:
            used[stage.type] += stage.replicas
        self.prices = self.prices * np.exp(step * (used / self.counts - 1).clip(-1, 1))
        self.prices /= float(self.prices @ self.counts)

    def stages(self, limit_s: float) -> tuple[Bought, ...] | None:
        """Stages that keep a limit on the relaxed cluster, or None if there are none."""
        price = self._whole_prices(self.prices)
        reached = self._reach(price, limit_s * ROUNDING)
        end, spent = self.intervals.count, int(reached[-1].argmin())
        if reached[-1, spent] > limit_s * ROUNDING:
            return None
        stages = []
        while end > 0:
            stage, spent = self._last_stage(reached, end, spent, price, limit_s * ROUNDING)
            stages.append(stage)
            end = stage.begin
        return tuple(reversed(stages))

    def _last_stage(
        self, reached: FloatArray, end: int, spent: int, price: IntArray, limit: float
    ) -> tuple[Bought, int]:
        """The stage by which a state was reached, and what was spent before."""
        for cut in reversed(range(end)):
            alive = np.flatnonzero(np.isfinite(reached[cut, :spent]))
            for k in range(len(self.counts) if len(alive) else 0):
                columns = slice(end, end + 1)
                cost, new = self._offers(reached, cut, alive, k, price, limit, columns)
                match = (cost[:, 0] == spent) & (new[:, 0] == reached[end, spent])
                if match.any():
                    which = int(match.argmax())
                    chosen, replicas = self._cheapest(
                        reached, cut, alive[which], k, price, limit, end
                    )
                    return Bought(cut, end, k, chosen, replicas), int(alive[which])
        raise AssertionError("the dynamic program reached a state by no stage")

    def _bisect(self, prices: FloatArray, low_s: float, high_s: float, tolerance: float) -> float:
        """The largest limit found that these prices rule out."""
        if low_s >= high_s or not self._is_reachable(prices, high_s):
            return high_s
        is_reachable = partial(self._is_reachable, prices)
        return narrowed_s(is_reachable, low_s, high_s, tolerance, self._may_go_on)[0]

    # --- figures -----------------------------------------------------------------------------

    def _stage_figures(self) -> list[_Type]:
        table = self.intervals
        work = np.array([f + b for f, b in zip(table.forward_s, table.backward_s, strict=True)])
        unit = np.eye(len(self.counts), dtype=int)
        rows = []
        for k in range(len(self.counts)):
            counts = tuple(int(x) for x in unit[k])
            fits = table.fits(counts)
            partners = work >= work[k] * (1 - 1e-12)
            forward = np.where(partners, np.array(table.forward_s), np.inf).min(axis=0)
            backward = np.where(partners, np.array(table.backward_s), np.inf).min(axis=0)
            rows.append(_Type(np.where(fits, work[k], np.inf), forward + backward, partners))
        return rows

    def _transfers(self) -> list[FloatArray]:
        """By the type of a stage's quickest replica; over the widest link to any of them.

        A slower replica may have a wider link.
        """
        alone = np.array([self._transfer_s(k)[:-1, None] for k in range(len(self.counts))])
        if not self._replication:
            return [np.broadcast_to(row, self._types[0].work_s.shape) for row in alone]
        return [np.where(x.partners, alone, np.inf).min(axis=0) for x in self._types]

    def _transfer_s(self, k: int) -> FloatArray:
        """Forward and back at each cut, over the widest link to a device of the type."""
        latency_s = self.links.least_latency_s
        s_per_byte = self.links.least_s_per_byte_to(np.flatnonzero(self.kinds == k))
        there, back = (
            moving_s(bytes_, latency_s, s_per_byte) for bytes_ in self.intervals.crossing_bytes
        )
        return there + back

    def _least_step_s(self) -> FloatArray:
        widest = max(kind.memory_bandwidth_gb_per_s for kind in self.intervals.types)
        return self.intervals.optimizer_traffic_bytes / (widest * 1e9)

    def _reductions(self) -> tuple[FloatArray, FloatArray]:
        """Seconds at once and seconds a byte of an all-reduce, by the number of replicas."""
        count = self.links.count
        replicas = np.arange(count + 1)
        steps = [fewest_steps(r) if r > 1 else 0 for r in range(count + 1)]
        joint = self.links.joint_s_per_byte
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(replicas > 1, 2 * (replicas - 1) / replicas * joint, 0.0)
        return np.array(steps) * self.links.least_latency_s, np.minimum(each, NO_LINK)

    # --- the dynamic program -----------------------------------------------------------------

    def _is_reachable(self, prices: FloatArray, limit_s: float) -> bool:
        """Whether stages that keep the limit can be bought within the budget."""
        limit = limit_s * ROUNDING
        return bool((self._reach(self._whole_prices(prices), limit)[-1] <= limit).any())

    def _whole_prices(self, prices: FloatArray) -> IntArray:
        whole = prices / float(prices @ self.counts) * BUDGET
        return np.asarray(np.maximum(1, np.round(whole)).astype(int))

    def _reach(self, price: IntArray, limit: float) -> FloatArray:
        """Least head and way back of the next stage by cut and amount spent."""
        budget = int(price @ self.counts)
        reached = np.full((self.intervals.count + 1, budget + 1), np.inf)
        reached[0, 0] = 0.0
        cheapest = (price[:, None] * self.chain.work_s).min(axis=0)
        work = self.intervals.behind(cheapest) * self.intervals.microbatches / ROUNDING
        left = (budget - np.arange(budget + 1)) * limit
        for cut in range(self.intervals.count):
            row = reached[cut]
            least = np.minimum.accumulate(row)
            best = np.append(True, row[1:] < least[:-1]) & (row <= limit - self._rest_s[cut])
            alive = np.flatnonzero(best & (left >= work[cut]))
            if len(alive):
                for k in range(len(self.counts)):
                    self._extend(reached, cut, alive, k, price, limit)
        return reached

    def _extend(
        self, reached: FloatArray, cut: int, alive: IntArray, k: int, price: IntArray, limit: float
    ) -> None:
        """Buy a stage whose quickest replica is of type k, from ``cut`` to every end."""
        work = self._types[k].work_s[cut, cut + 1 :]
        ends = int(np.searchsorted(work, limit, side="right"))
        if not ends:
            return
        columns = slice(cut + 1, cut + 1 + ends)
        spent, new = self._offers(reached, cut, alive, k, price, limit, columns)
        good = (spent < reached.shape[1]) & (new <= limit)
        end = np.broadcast_to(np.arange(columns.start, columns.stop), spent.shape)
        np.minimum.at(reached, (end[good], spent[good]), new[good])

    def _offers(
        self,
        reached: FloatArray,
        cut: int,
        alive: IntArray,
        k: int,
        price: IntArray,
        limit: float,
        columns: slice,
    ) -> tuple[IntArray, FloatArray]:
        """What will have been spent, and the head and way back, by state and end of the stage."""
        home, most = self._room(reached, cut, alive, k, limit, columns)
        cost = np.minimum(self._least_cost(most, price, k), reached.shape[1])
        spent = alive[:, None] + cost.astype(int)
        return spent, home + self._types[k].path_s[cut, columns]

    def _room(
        self, reached: FloatArray, cut: int, alive: IntArray, k: int, limit: float, columns: slice
    ) -> tuple[FloatArray, FloatArray]:
        """Head and way back of a stage, and what a replica of each type can do besides."""
        table = self.intervals
        send = self._send[k][cut, columns] if cut else 0.0
        arrival = reached[cut, alive][:, None] + send
        end = self._head_s[cut] + self._step_s[cut, columns]
        most = self._most_microbatches(cut, columns, k, limit - np.maximum(arrival, end))
        replicas = -(-table.microbatches // np.maximum(most.max(axis=0), 1)).astype(int)
        replicas = np.minimum(replicas, self.links.count)
        start, each = (row[replicas] for row in self._reduce_s)
        bytes_ = table.gradient_bytes[cut, columns]
        reduce = np.where((bytes_ > 0) & (replicas > 1), start + bytes_ * each, 0.0)
        home = np.maximum(arrival, end + reduce)
        return home, self._most_microbatches(cut, columns, k, limit - home)

    def _cheapest(
        self,
        reached: FloatArray,
        cut: int,
        state: int,
        k: int,
        price: IntArray,
        limit: float,
        end: int,
    ) -> tuple[int, float]:
        """The type that carries a stage at the least price, and how many of it."""
        columns = slice(end, end + 1)
        _, most = self._room(reached, cut, np.array([state]), k, limit, columns)
        each = [price[j] / n if n else np.inf for j, n in enumerate(most[:, 0, 0])]
        chosen = int(np.argmin(each))
        return chosen, self.intervals.microbatches / float(most[chosen, 0, 0])

    def _most_microbatches(
        self, cut: int, columns: slice, k: int, seconds: FloatArray
    ) -> FloatArray:
        """What one replica of each type can do in the time, beside one of type k at the quickest.

        Returns:
            By type, state and end; 0 for types that may not take part.
        """
        rows = []
        for other, figures in enumerate(self._types):
            work = figures.work_s[cut, columns][None, :]
            with np.errstate(divide="ignore", invalid="ignore"):
                most = np.floor(seconds / work)
            most = np.where(work == 0, self.intervals.microbatches, most)
            allowed = self._types[k].partners[other][cut, columns][None, :] & (seconds >= 0)
            rows.append(np.where(allowed, np.clip(most, 0, self.intervals.microbatches), 0.0))
        return np.array(rows)

    def _least_cost(self, most: FloatArray, price: IntArray, k: int) -> FloatArray:
        """Of replicas that together run all microbatches, one of type k at least."""
        count = self.intervals.microbatches
        if not self._replication:
            return np.where(most[k] >= count, float(price[k]), np.inf)
        with np.errstate(divide="ignore"):
            each = np.where(most > 0, price[:, None, None] / most, np.inf)
        cost = np.ceil(each.min(axis=0) * count / ROUNDING)
        return np.where(most[k] > 0, np.maximum(cost, price[k]), np.inf)
