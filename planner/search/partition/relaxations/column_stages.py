"""What one device may take of a single stage within a limit, with replicas, for all intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cluster.link_table import FloatArray, IntArray
from planner.search.partition.intervals import interval_sums
from planner.search.partition.relaxations.column_figures import UP, ColumnFigures, Heads


@dataclass(frozen=True)
class ColumnStage:
    """Figures of stages on one kind of device, an entry for each of many stages.

    Attributes:
        begin, end: cuts.
        forward_s, gradient_s, backward_s, step_s: sums over the layers.
        head_s, home_s: least times before and after.
        shared_s: least reduction after the last backward, with replicas.
        alone_s: the same if one device takes all microbatches; infinite if none can.
        most: microbatches that a device may take, whatever else it holds.
    """

    begin: IntArray
    end: IntArray
    forward_s: FloatArray
    gradient_s: FloatArray
    backward_s: FloatArray
    step_s: FloatArray
    head_s: FloatArray
    home_s: FloatArray
    shared_s: FloatArray
    alone_s: FloatArray
    most: IntArray

    def __getitem__(self, chosen: IntArray) -> ColumnStage:
        """Return the figures of some of the stages."""
        return ColumnStage(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    @property
    def work_s(self) -> FloatArray:
        """All of a microbatch's work."""
        return self.forward_s + self.backward_s

    @property
    def way_s(self) -> FloatArray:
        """A microbatch's forward and the gradient on its way."""
        return self.forward_s + self.gradient_s


def quotient(room_s: FloatArray, each_s: FloatArray) -> FloatArray:
    """Return how often something fits; any number if it takes nothing, negative without room."""
    with np.errstate(divide="ignore", invalid="ignore"):
        often = np.floor(room_s * UP / each_s + 1e-9)
    return np.asarray(np.where(room_s < 0, -1.0, np.where(each_s > 0, often, np.inf)))


class ColumnStages:
    """All stages, by the kind of a device that holds them.

    Where the devices of the cluster need to be several to take all microbatches of a stage, it has
    so many replicas at least.

    Args:
        figures: of layers and cuts by kind of device.
        heads: of the devices.
        limit_s: on the iteration time.

    Attributes:
        begin, end: cuts of each stage.
        number: of a stage, by its cuts.
        of_kind: the figures of all stages, by kind.
    """

    def __init__(self, figures: ColumnFigures, heads: Heads, limit_s: float) -> None:
        self._figures, self._heads, self._limit_s = figures, heads, limit_s
        cuts = np.arange(figures.length + 1)
        self.begin, self.end = np.nonzero(cuts[:, None] < cuts)
        self.number = np.zeros((len(cuts), len(cuts)), dtype=int)
        self.number[self.begin, self.end] = np.arange(len(self.begin))
        free = [self._on(kind) for kind in range(figures.kinds)]
        least = self._least_replicas([rows.most for rows in free])
        self.of_kind = [self._with_replicas(kind, rows, least) for kind, rows in enumerate(free)]

    def _on(self, kind: int) -> ColumnStage:
        """Return the stages on a kind of device, as if one device might take each of them whole."""
        figures, heads, begin, end = self._figures, self._heads, self.begin, self.end
        fits = figures.fits[kind, begin, end]
        forward_s, gradient_s, backward_s, step_s = (
            interval_sums(per_layer[kind])[begin, end]
            for per_layer in (
                figures.forward_s,
                figures.gradient_s,
                figures.backward_s,
                figures.step_s,
            )
        )
        rows = ColumnStage(
            begin=begin,
            end=end,
            forward_s=forward_s,
            gradient_s=gradient_s,
            backward_s=backward_s,
            step_s=step_s,
            head_s=heads.arrival_s[kind, begin],
            home_s=heads.home_s[kind, begin],
            shared_s=np.zeros(len(begin)),
            alone_s=np.zeros(len(begin)),
            most=np.where(fits, figures.microbatches, 0),
        )
        return self._with_replicas(kind, rows, np.ones(len(begin), dtype=int))

    def _with_replicas(self, kind: int, rows: ColumnStage, least: IntArray) -> ColumnStage:
        """Return the figures if each stage has so many replicas at least."""
        reduction_s = self._figures.reduction_s
        rows = replace(
            rows,
            shared_s=reduction_s(kind, rows.begin, rows.end, np.maximum(least, 2)),
            alone_s=np.where(least > 1, np.inf, reduction_s(kind, rows.begin, rows.end, least)),
        )
        # The stages before and after may lie on the same device, so that no hop is needed.
        near = replace(
            rows,
            head_s=self._heads.passed_s[rows.begin],
            home_s=self._heads.left_s[rows.begin],
        )
        return replace(rows, most=self.most(near))

    def most(self, rows: ColumnStage) -> IntArray:
        """Return how many microbatches a device has time for in the work of a stage alone."""
        count = self._figures.microbatches
        free_s = self._limit_s - rows.head_s
        ends_s = free_s - rows.step_s
        shared = np.minimum(quotient(ends_s - rows.shared_s, rows.work_s), count - 1)
        takes_all = count * rows.work_s <= ends_s - rows.alone_s
        most = np.where(takes_all, count, shared)
        most = np.minimum(most, quotient(free_s - rows.home_s, rows.way_s))
        return np.asarray(np.clip(most, 0, rows.most).astype(int))

    def _least_replicas(self, most: Sequence[IntArray]) -> IntArray:
        """Return how many devices all microbatches of each stage need."""
        table, counts = np.array(most), self._figures.counts
        left = np.full(table.shape[1], self._figures.microbatches)
        replicas = np.zeros(table.shape[1], dtype=int)
        for kinds in np.argsort(-table, axis=0, kind="stable"):
            each = np.maximum(np.take_along_axis(table, kinds[None], axis=0)[0], 0)
            needed = np.where(each > 0, -(-left // np.maximum(each, 1)), 0)
            used = np.minimum(needed, counts[kinds])
            left, replicas = np.maximum(left - used * each, 0), replicas + used
        return np.where(left > 0, self._figures.count + 1, np.maximum(replicas, 1))
