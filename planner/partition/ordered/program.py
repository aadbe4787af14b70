"""The best partition along an order of devices for the bound on the iteration time.

Stages take the devices in order, replicas side by side. Whether a limit can be kept is decided by
a dynamic program: for every cut and number of devices, the least sum of the head of the next stage
and its way back to the end of the iteration. A stage keeps the limit if that sum and its load do;
the least limit is found by bisection. Transfers are estimated by one of the pairs of
devices, so the result is scored again by planner.partition.bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.partition.chain import FloatArray, Partition, StageChoice
from planner.partition.ordered.stages import StageCosts

Order = tuple[int, ...]
"""Device numbers."""


class OrderProgram:
    """The dynamic program.

    Args:
        costs: of stages on devices.
        replicas: numbers of replicas a stage may have.
    """

    def __init__(self, costs: StageCosts, replicas: Sequence[int]) -> None:
        self.costs = costs
        self.replicas = sorted(replicas)
        table = costs.intervals
        chain = table.chain
        self._microbatches = table.microbatches
        self._cells = table.count
        layer = [chain.forward_s(t) + chain.backward_s(t) for t in chain.types]
        least = np.min(layer, axis=0)
        before = table.before(least)
        self._rest_s = before[-1] - before[:-1]
        forward = np.min([chain.forward_s(t) for t in chain.types], axis=0)
        self._head_s = table.before(forward)[:-1]

    def reach(
        self, order: Order, limit_s: float, kept: Sequence[FloatArray] = ()
    ) -> list[FloatArray]:
        """Least head and way back at every cut, by the number of devices used.

        Args:
            order: devices.
            limit_s: stages that break it are left out.
            kept: the first rows, known from an order that begins alike, under the same limit.
        """
        self.costs.keep_limit(limit_s)
        rows = list(kept)
        if not rows:
            start = np.full(self._cells + 1, np.inf)
            start[0] = 0.0
            rows = [start]
        for used in range(len(rows), len(order) + 1):
            row = np.full(self._cells + 1, np.inf)
            for replicas in self.replicas:
                if replicas > used:
                    break
                self._extend(row, rows[used - replicas], order, used, replicas, limit_s)
            rows.append(row)
        return rows

    def _extend(
        self,
        row: FloatArray,
        before: FloatArray,
        order: Order,
        used: int,
        replicas: int,
        limit_s: float,
    ) -> None:
        """Let the last stage so far lie on the last ``replicas`` of the devices used."""
        arrival = self._arrival(before, order, used - replicas, replicas, limit_s)
        if not np.isfinite(arrival).any():
            return
        new = self._stage(arrival, order, used, replicas, limit_s)
        for cells in range(new.shape[1]):
            window = row[cells + 1 :]
            np.minimum(window, new[: len(window), cells], out=window)

    def _stage(
        self, arrival: FloatArray, order: Order, used: int, replicas: int, limit_s: float
    ) -> FloatArray:
        devices = order[used - replicas : used]
        # 1F1B keeps as many microbatches in flight as there are devices from here on.
        in_flight = -(-(len(order) - used + replicas) // replicas)
        band = self.costs.band(devices)
        load = band.load_within_memory_s(min(in_flight, self._microbatches))
        home = self._head_s[:, None] + band.end_s(*self.costs.reduction(tuple(sorted(devices))))
        spent = np.maximum(arrival[:, None], home)
        return np.where(spent + load <= limit_s, spent + band.path_s, np.inf)

    def _arrival(
        self, before: FloatArray, order: Order, first: int, replicas: int, limit_s: float
    ) -> FloatArray:
        """Time spent when a stage's first microbatch arrives, over its best link."""
        spent = before[:-1]
        if first == 0:
            return spent
        source = order[first - 1]
        target = min(
            order[first : first + replicas], key=lambda v: self.costs.links.s_per_byte[source, v]
        )
        there, back = (seconds[:-1] for seconds in self.costs.transfer_s(source, target))
        arrival = spent + there + back
        if replicas > 1 or not self.costs.links.is_exclusive:
            return np.asarray(arrival)
        longer, shorter = np.maximum(there, back), np.minimum(there, back)
        busy = spent + self._microbatches * longer + shorter + self._rest_s
        return np.where(busy <= limit_s, arrival, np.inf)

    def time_s(self, rows: Sequence[FloatArray]) -> float:
        """One microbatch's way, or infinity if the limit cannot be kept."""
        return float(min(row[-1] for row in rows[1:]))

    def keeps(self, order: Order, limit_s: float) -> bool:
        """Whether the order has a partition within the limit."""
        return self.time_s(self.reach(order, limit_s)) <= limit_s

    def least_limit_s(
        self, order: Order, low_s: float, high_s: float, tolerance: float = 1e-4
    ) -> float | None:
        """The least limit the order can keep; None if not even ``high_s``."""
        if not self.keeps(order, high_s):
            return None
        while high_s - low_s > tolerance * low_s:
            middle = (low_s + high_s) / 2
            if self.keeps(order, middle):
                high_s = middle
            else:
                low_s = middle
        return high_s

    def partition(self, order: Order, limit_s: float) -> Partition | None:
        """A partition within the limit, if there is one."""
        rows = self.reach(order, limit_s)
        if self.time_s(rows) > limit_s:
            return None
        used = min(range(1, len(rows)), key=lambda n: rows[n][-1])
        end, stages = self._cells, []
        while end > 0:
            begin, replicas = self._last_stage(rows, order, used, end, limit_s)
            stages.append(self._choice(begin, end, order[used - replicas : used]))
            used, end = used - replicas, begin
        return tuple(reversed(stages))

    def _last_stage(
        self, rows: Sequence[FloatArray], order: Order, used: int, end: int, limit_s: float
    ) -> tuple[int, int]:
        """The cut and number of replicas of the last stage of the best way to a state."""
        for replicas in self.replicas:
            if replicas > used:
                break
            first = used - replicas
            arrival = self._arrival(rows[first], order, first, replicas, limit_s)
            new = self._stage(arrival, order, used, replicas, limit_s)
            for begin in range(max(0, end - new.shape[1]), end):
                if new[begin, end - begin - 1] == rows[used][end]:
                    return begin, replicas
        raise AssertionError("the dynamic program reached a state by no stage")

    def _choice(self, begin: int, end: int, devices: Order) -> StageChoice:
        table = self.costs.intervals
        names = table.chain.problem.cluster.device_names
        held = tuple(names[device] for device in sorted(devices))
        return StageChoice(int(table.cuts[begin]), int(table.cuts[end]), held)
