"""The most that one device can earn within a limit if every layer pays a price: a knapsack.

A device holds some runs of layers, each for a number of microbatches. The program goes through the
layers from the last to the first; its states are the crossings that may still be made and the load
that is left, in steps of a grid. A run that begins behind the first layer makes a crossing, and so
does one that ends before the last. Loads are rounded down to the grid, so that nothing a device can
hold is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.cluster.link_table import FloatArray, IntArray
from planner.search.partition.dynamic_programs.core import ROUNDING
from planner.search.partition.relaxations.column_figures import (
    DOWN,
    UP,
    ColumnFigures,
    DeviceColumn,
    Heads,
)

NOTHING = -1e18
"""Value of a state that no choice leads to."""


class ColumnKnapsack:
    """The columns that keep one limit.

    Args:
        figures: of layers and cuts by kind of device.
        limit_s: on the iteration time.
        steps: of the grid, for the whole limit.
        most_runs: a device may hold.
    """

    def __init__(self, figures: ColumnFigures, limit_s: float, steps: int, most_runs: int) -> None:
        self._figures = figures
        self._limit_s = limit_s * ROUNDING
        self._most_runs = most_runs
        self._step_s = self._limit_s / steps
        self._heads = Heads(figures, self._limit_s)
        self._numbers = figures.shares
        self._through, self._head = self._rooms()
        self._crossings = self._most_crossings()
        self._programs = list(self._all_programs())

    @property
    def cells(self) -> int:
        """States that a look for the best columns goes through."""
        return sum(program.cells for program in self._programs)

    # --- the grid ----------------------------------------------------------------------------

    def _rooms(self) -> tuple[FloatArray, FloatArray]:
        """Return the seconds left for the layers on a device, by kind and first layer.

        For all forwards and gradients on their way, after which the last gradient goes home; and
        for all work and the optimizer step.
        """
        head = self._limit_s - self._heads.arrival_s[:, :-1]
        return head - self._heads.home_s[:, :-1], head

    @cached_property
    def _is_through(self) -> IntArray:
        """Which of the two rooms is the tighter one for its kind of load, by kind and layer."""
        figures = self._figures
        way = (figures.forward_s + figures.gradient_s).sum(axis=1)[:, None]
        work = (figures.forward_s + figures.backward_s).sum(axis=1)[:, None]
        step = figures.step_s.sum(axis=1)[:, None] / figures.microbatches
        return np.asarray(self._through * (work + step) < self._head * way)

    @cached_property
    def _room(self) -> IntArray:
        """Steps of the grid left, by kind and first layer; negative where there are none."""
        room = np.where(self._is_through, self._through, self._head) / self._step_s * UP
        steps = np.floor(np.nan_to_num(room, neginf=-1.0) + 1e-9)
        return np.asarray(np.maximum(steps, -1).astype(int))

    def _loads(self, kind: int, *, through: bool) -> IntArray:
        """Return the steps that each layer takes: by number of microbatches and layer."""
        figures = self._figures
        backward = figures.gradient_s if through else figures.backward_s
        each = figures.forward_s[kind] + backward[kind]
        seconds = self._numbers[:, None] * each[None, :]
        if not through:
            seconds = seconds + figures.step_s[kind]
        steps = np.floor(seconds / self._step_s * DOWN).astype(int)
        none = int(self._limit_s / self._step_s) + 2
        return np.where(figures.may_hold[kind], np.minimum(steps, none), none)

    def _most_crossings(self) -> IntArray:
        """Return how many ends of runs inside the chain a device may have, by kind and layer.

        All messages of a device pass between the first microbatch's arrival at its first layer and
        the last gradient's way home from there.
        """
        figures = self._figures
        first = np.arange(figures.length)[None, :]
        most = np.broadcast_to(2 * self._most_runs - (first == 0), self._room.shape)
        if figures.replication:
            return most
        least_s = figures.port_s[:, 1:-1].min(axis=1, initial=np.inf) * figures.microbatches
        window_s = self._limit_s - self._heads.passed_s[:-1] - self._heads.left_s[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            carried = np.floor(window_s[None, :] / least_s[:, None] * UP + 1e-9)
        carried = np.where(least_s[:, None] > 0, carried, np.inf)
        return np.asarray(np.minimum(most, np.maximum(carried, 0)).astype(int))

    # --- the program -------------------------------------------------------------------------

    def best(self, prices: FloatArray) -> list[DeviceColumn]:
        """Return for each kind and first layer a column of most value.

        Args:
            prices: of a microbatch in each layer.
        """
        return [column for program in self._programs for column in program.columns(prices)]

    def _all_programs(self) -> Iterator[_Program]:
        for kind, (room, is_through) in enumerate(zip(self._room, self._is_through, strict=True)):
            for through in (True, False):
                firsts = np.flatnonzero((is_through == through) & (room >= 0))
                if len(firsts):
                    loads = self._loads(kind, through=through)
                    yield _Program(kind, self._numbers, loads, room, self._crossings[kind], firsts)

    def holds(self, column: DeviceColumn) -> bool:
        """Return whether a column found for another limit keeps this one too."""
        kind, layers = column.kind, np.flatnonzero(column.taken)
        loads = self._loads(kind, through=bool(self._is_through[kind, column.first]))
        rows = np.searchsorted(self._numbers, column.taken[layers])
        return int(loads[rows, layers].sum()) <= int(self._room[kind, column.first])


@dataclass(frozen=True)
class _Program:
    """The program for one kind of device and one kind of load.

    Attributes:
        kind: of the device.
        numbers: of microbatches that a run may have.
        loads: of each number and layer, in steps.
        room: steps left, by first layer.
        crossings: that may be made, by first layer.
        firsts: the first layers to which all that applies.
    """

    kind: int
    numbers: IntArray
    loads: IntArray
    room: IntArray
    crossings: IntArray
    firsts: IntArray

    @property
    def cells(self) -> int:
        """States that are gone through."""
        return self.loads.size * (int(self.crossings.max()) + 1) * (self._most_room + 1)

    @property
    def _most_room(self) -> int:
        return int(self.room[self.firsts].max())

    def columns(self, prices: FloatArray) -> Iterator[DeviceColumn]:
        """Yield the best column from each first layer on."""
        outside, starts = self._tables(prices)
        for first in map(int, self.firsts):
            left, room = int(self.crossings[first]) - (first > 0), int(self.room[first])
            if left < 0:
                continue
            value = float(starts[first, left, room])
            if value > 0:
                taken = self._taken(prices, outside, first, left, room)
                yield DeviceColumn(self.kind, first, taken, value)

    def _tables(self, prices: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the most value from each layer on, by crossings and steps left.

        Where no run goes on, and where one begins.
        """
        count = self.loads.shape[1]
        shape = (int(self.crossings.max()) + 1, self._most_room + 1)
        outside = np.zeros((count + 1, *shape))
        starts = np.full((count, *shape), NOTHING)
        inside = np.zeros((len(self.numbers), *shape))
        for layer in range(count - 1, -1, -1):
            is_last = layer == count - 1
            for row, number in enumerate(self.numbers):
                inside[row] = self._extended(
                    inside[row], outside[layer + 1], int(self.loads[row, layer]), is_last
                )
                inside[row] += number * prices[layer]
            np.max(inside, axis=0, out=starts[layer])
            outside[layer] = outside[layer + 1]
            np.maximum(outside[layer, 1:], starts[layer, :-1], out=outside[layer, 1:])
        return outside, starts

    def _extended(
        self, inside: FloatArray, outside: FloatArray, load: int, is_last: bool
    ) -> FloatArray:
        """Return the most value after a layer that a run takes."""
        after = np.zeros_like(inside) if is_last else inside
        if not is_last:
            after[1:] = np.maximum(after[1:], outside[:-1])
        extended = np.full_like(inside, NOTHING)
        width = inside.shape[1]
        if load < width:
            extended[:, load:] = after[:, : width - load]
        return extended

    def _taken(
        self, prices: FloatArray, outside: FloatArray, first: int, left: int, room: int
    ) -> FloatArray:
        """Follow a best choice through the tables."""
        taken = np.zeros(len(prices))
        begin: int | None = first
        while begin is not None:
            end, row, left, room = self._run(prices, outside, begin, left, room)
            taken[begin:end] = self.numbers[row]
            begin = self._next_begin(outside, end, left, room)
            left -= 1
        return taken

    def _run(
        self, prices: FloatArray, outside: FloatArray, begin: int, left: int, room: int
    ) -> tuple[int, int, int, int]:
        """Return end and number of the best run from a layer on, and what is left after it."""
        best, found = NOTHING, (begin + 1, 0, left, room)
        for row, number in enumerate(self.numbers):
            rest = room - np.cumsum(self.loads[row, begin:])
            value = number * np.cumsum(prices[begin:])
            for end, (steps, gained) in enumerate(zip(rest, value, strict=True), begin + 1):
                if steps < 0:
                    break
                crosses = int(end < len(prices))
                if left < crosses:
                    continue
                total = gained + outside[end, left - crosses, steps]
                if total > best:
                    best, found = total, (end, row, left - crosses, int(steps))
        return found

    @staticmethod
    def _next_begin(outside: FloatArray, layer: int, left: int, room: int) -> int | None:
        """Return where the next run begins; None if nothing more is gained."""
        value = outside[layer:, left, room]
        if value[0] <= 0:
            return None
        return layer + int(np.flatnonzero(value == value[0])[-1])
