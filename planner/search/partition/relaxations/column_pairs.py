"""What one device may hold within a limit, of up to two stages with replicas: all pairs of them.

For stages [a, b) and [c, e) on one device, b <= c, n1 and n2 are the microbatches it takes of each.
Operations of one device run one at a time. Forwards of a stage and of later ones start after the
first arrival there; gradients of a stage and of later ones are followed by the way home from there;
after the last backward comes the reduction of one of the stages, then the optimizer step. So

    max( head(a) + n1 F1 + n2 F2, head(c) + n2 F2 )
      + max( n1 B1 + n2 B2 + least reduction + step,
             n1 G1 + n2 G2 + home(a), n2 G2 + home(c) )  <=  limit

with forward F, all of the backward B and its part G before a gradient is sent on. The messages at
all four cuts share the device's port; where the stages adjoin those alone that only one of them
takes. For every n2 there is a largest n1 that keeps all this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import comb

import numpy as np

from planner.cluster.link_table import FloatArray, IntArray
from planner.search.partition.dynamic_programs.core import ROUNDING
from planner.search.partition.relaxations.column_figures import ColumnFigures, DeviceColumn, Heads
from planner.search.partition.relaxations.column_stages import (
    ColumnStage,
    ColumnStages,
    quotient,
)

SLACK_S = 1e-12
"""Seconds by which rounding may seem to overload a port."""


def interval_pairs(length: int) -> IntArray:
    """Return all a < b <= c < e, a row each: two stages, the later one behind the first."""
    cuts = np.arange(length + 1)
    a, b, c, e = np.meshgrid(cuts, cuts, cuts, cuts, indexing="ij", sparse=True)
    return np.argwhere((a < b) & (b <= c) & (c < e))


def pair_count(length: int) -> int:
    """Return how many rows :func:`interval_pairs` has."""
    return comb(length + 1, 4) + comb(length + 1, 3)


class ColumnPairs:
    """The columns of up to two stages that keep one limit.

    Args:
        figures: of layers and cuts by kind of device.
        limit_s: on the iteration time.
        pairs: of stages, see :func:`interval_pairs`.
    """

    def __init__(self, figures: ColumnFigures, limit_s: float, pairs: IntArray) -> None:
        self._figures = figures
        self._limit_s = limit_s * ROUNDING
        self._heads = Heads(figures, self._limit_s)
        # Time in which a device sends and receives all its messages, by its first layer.
        self._window_s = self._limit_s - self._heads.passed_s - self._heads.left_s
        self._pairs = pairs
        self._stages = ColumnStages(figures, self._heads, self._limit_s)
        self._numbers = np.arange(1, figures.microbatches + 1)
        self._single = [self._most_single(kind) for kind in range(figures.kinds)]
        self._first = [self._most_first(kind) for kind in range(figures.kinds)]

    @property
    def cells(self) -> int:
        """States that a look for the best columns goes through."""
        return sum(table.size for table in self._first)

    def _most_single(self, kind: int) -> IntArray:
        """Return how many microbatches a device with one stage alone may take of it."""
        stages, port_s = self._stages.of_kind[kind], self._figures.port_s[kind]
        messages_s = port_s[stages.begin] + port_s[stages.end]
        carried = quotient(self._window_s[stages.begin], messages_s)
        most = np.minimum(self._stages.most(stages), carried)
        return np.asarray(np.maximum(most, 0).astype(int))

    def _most_first(self, kind: int) -> IntArray:
        """Return the most of the first stage for each number of the second, by pair.

        Negative where there are none.
        """
        a, b, c, e = self._pairs.T
        number, stages = self._stages.number, self._stages.of_kind[kind]
        first, second = stages[number[a, b]], stages[number[c, e]]
        # The second stage's microbatches may come from the first on the same device, without a hop.
        second = replace(
            second,
            head_s=np.where(b == c, self._heads.passed_s[c], second.head_s),
            home_s=np.where(b == c, self._heads.left_s[c], second.home_s),
        )
        numbers = self._numbers[None, :].astype(float)
        most = np.broadcast_to(first.most[:, None].astype(float), (len(a), len(self._numbers)))
        for room_s, each_s in self._rules(first, second, numbers):
            most = np.minimum(most, quotient(room_s, each_s[:, None]))
        most = self._reduced(first, second, numbers, most)
        most = self._carried(kind, numbers, most)
        return np.where((most >= 1) & (numbers <= second.most[:, None]), most, -1).astype(int)

    def _rules(
        self, first: ColumnStage, second: ColumnStage, numbers: FloatArray
    ) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Yield the time left for the first stage, and what each of its microbatches takes."""

        def after(seconds: FloatArray, each_s: FloatArray) -> FloatArray:
            return np.asarray(self._limit_s - seconds[:, None] - numbers * each_s[:, None])

        step_s, none_s = first.step_s + second.step_s, np.zeros_like(first.forward_s)
        for head_s, forward_s in ((first.head_s, first.forward_s), (second.head_s, none_s)):
            yield after(head_s + step_s, second.work_s), forward_s + first.backward_s
            yield after(head_s + first.home_s, second.way_s), forward_s + first.gradient_s
            yield after(head_s + second.home_s, second.way_s), forward_s

    def _reduced(
        self, first: ColumnStage, second: ColumnStage, numbers: FloatArray, most: FloatArray
    ) -> FloatArray:
        """Return the most with a reduction after the last backward, of either stage."""
        count = self._figures.microbatches
        head_s = np.minimum(first.head_s, second.head_s)
        spent_s = (head_s + first.step_s + second.step_s)[:, None] + numbers * second.work_s[
            :, None
        ]
        second_s = np.where(numbers == count, second.alone_s[:, None], second.shared_s[:, None])

        def room_s(first_s: FloatArray) -> FloatArray:
            end_s = np.minimum(first_s[:, None], second_s)
            return np.asarray(self._limit_s - spent_s - end_s)

        shared = quotient(room_s(first.shared_s), first.work_s[:, None])
        takes_all = count * first.work_s[:, None] <= room_s(first.alone_s)
        fewer = np.minimum(most, np.minimum(shared, count - 1))
        return np.where((most >= count) & takes_all, most, fewer)

    def _carried(self, kind: int, numbers: FloatArray, most: FloatArray) -> FloatArray:
        """Return the most that the device's port has time for; negative if there are none."""
        a, b, c, e = self._pairs.T
        port_s = self._figures.port_s[kind]
        room_s = self._window_s[a][:, None] - numbers * (port_s[c] + port_s[e])[:, None]
        carried = np.minimum(most, quotient(room_s, (port_s[a] + port_s[b])[:, None]))
        adjoin = np.flatnonzero(b == c)
        carried[adjoin] = self._carried_between(kind, adjoin, numbers, most[adjoin])
        return carried

    def _carried_between(
        self, kind: int, adjoin: IntArray, numbers: FloatArray, most: FloatArray
    ) -> FloatArray:
        """Return the same for stages that adjoin: what one of them takes more passes the port."""
        a, _, c, e = self._pairs[adjoin].T
        window_s = self._window_s[a][:, None]
        before_s, between_s, after_s = (
            self._figures.port_s[kind, cut][:, None] for cut in (a, c, e)
        )
        more = quotient(window_s - numbers * (after_s - between_s), before_s + between_s)
        # With fewer of the first stage than of the second, each one more saves a message between.
        left_s, saved_s = window_s - numbers * (after_s + between_s), between_s - before_s
        fewer = np.where(saved_s > 0, -1.0, quotient(left_s, -saved_s))
        most = np.minimum(most, np.where(more >= numbers, more, fewer))
        return np.where((most >= numbers) | (left_s + most * saved_s >= -SLACK_S), most, -1.0)

    # --- columns -----------------------------------------------------------------------------

    def best(self, prices: FloatArray) -> list[DeviceColumn]:
        """Return for each kind and first layer the best column of one stage, and of two.

        Args:
            prices: of a microbatch in each layer.
        """
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        columns: list[DeviceColumn] = []
        for kind in range(self._figures.kinds):
            columns += self._best_single(kind, paid)
            columns += self._best_pairs(kind, paid)
        return columns

    def _best_single(self, kind: int, paid: FloatArray) -> Iterator[DeviceColumn]:
        begin, end, most = self._stages.begin, self._stages.end, self._single[kind]
        values = most * (paid[end] - paid[begin])
        for row in _best_of_each(begin, values):
            taken = np.zeros(self._figures.length)
            taken[begin[row] : end[row]] = most[row]
            yield DeviceColumn(kind, int(begin[row]), taken, float(values[row]))

    def _best_pairs(self, kind: int, paid: FloatArray) -> Iterator[DeviceColumn]:
        a, b, c, e = self._pairs.T
        most = self._first[kind]
        values = most * (paid[b] - paid[a])[:, None] + self._numbers * (paid[e] - paid[c])[:, None]
        values = np.where(most > 0, values, 0.0)
        chosen = values.argmax(axis=1)
        best = values[np.arange(len(a)), chosen]
        for row in _best_of_each(a, best):
            taken = np.zeros(self._figures.length)
            taken[a[row] : b[row]] = most[row, chosen[row]]
            taken[c[row] : e[row]] = self._numbers[chosen[row]]
            yield DeviceColumn(kind, int(a[row]), taken, float(best[row]))

    def holds(self, column: DeviceColumn) -> bool:
        """Return whether a column found for another limit keeps this one too."""
        steps = np.flatnonzero(np.diff(column.taken, prepend=0, append=0))
        stages = [
            (int(begin), int(end), int(column.taken[begin]))
            for begin, end in pairwise(steps)
            if column.taken[begin]
        ]
        if len(stages) == 1:
            [(begin, end, count)] = stages
            return count <= int(self._single[column.kind][self._stages.number[begin, end]])
        (a, b, first), (c, e, second) = stages
        row = int(np.flatnonzero((self._pairs == (a, b, c, e)).all(axis=1))[0])
        return first <= int(self._first[column.kind][row, second - 1])


def _best_of_each(first: IntArray, values: FloatArray) -> list[int]:
    """Return for each first layer the row of most value, if it has any."""
    order = np.lexsort((-values, first))
    _, starts = np.unique(first[order], return_index=True)
    return [int(row) for row in order[starts] if values[row] > 0]
