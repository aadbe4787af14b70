"""What a stage on given devices costs, in bands of intervals that keep a time limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.artifacts.link_table import LinkTable
from planner.costs.collectives import fewest_steps
from planner.partition.chain import FloatArray
from planner.partition.intervals import Counts, Intervals


@dataclass(frozen=True)
class Band:
    """Figures of stages by the cut they begin at and their number of cells, from 1 on.

    Attributes:
        load_s: work of the most loaded replica; infinite if the stage breaks the limit.
        path_s: one microbatch forward and back.
        optimizer_s: optimizer step.
        gradient_bytes: reduced among the replicas.
        in_flight: microbatches a replica has memory for.
        least_in_flight: of the stages that keep the limit.
    """

    load_s: FloatArray
    path_s: FloatArray
    optimizer_s: FloatArray
    gradient_bytes: FloatArray
    in_flight: FloatArray
    least_in_flight: float

    def load_within_memory_s(self, in_flight: int) -> FloatArray:
        """Load, infinite where so many microbatches in flight do not fit."""
        if in_flight <= self.least_in_flight:
            return self.load_s
        return np.where(self.in_flight >= in_flight, self.load_s, np.inf)

    def end_s(self, start_s: float, s_per_byte: float) -> FloatArray:
        """What follows the load on the stage itself: reduction and optimizer step."""
        if s_per_byte == 0:
            return self.optimizer_s
        reduce = start_s + self.gradient_bytes * min(s_per_byte, 1e300)
        return np.where(self.gradient_bytes > 0, self.optimizer_s + reduce, self.optimizer_s)


class StageCosts:
    """Bands and transfers for sets of devices, given by their numbers in the cluster.

    Args:
        intervals: of the chain.
        links: of the cluster.
    """

    def __init__(self, intervals: Intervals, links: LinkTable) -> None:
        chain = intervals.chain
        cluster = chain.problem.cluster
        self.intervals = intervals
        self.links = links
        self.kinds = [chain.types.index(cluster.type_of(name)) for name in cluster.device_names]
        self._there = intervals.at_cuts(chain.cut_bytes)
        self._back = intervals.at_cuts(chain.cut_gradient_bytes)
        self._transfers: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        self._bands: dict[Counts, Band] = {}
        self._reductions: dict[tuple[int, ...], tuple[float, float]] = {}
        self._limit_s = np.inf

    def keep_limit(self, limit_s: float) -> None:
        """Bands from now on hold the stages that keep this limit."""
        if limit_s != self._limit_s:
            self._bands.clear()
            self._limit_s = limit_s

    def counts(self, devices: tuple[int, ...]) -> Counts:
        """How many devices of each type."""
        rows = [0] * len(self.intervals.types)
        for device in devices:
            rows[self.kinds[device]] += 1
        return tuple(rows)

    def band(self, devices: tuple[int, ...]) -> Band:
        """The stages these devices can hold."""
        counts = self.counts(devices)
        if counts not in self._bands:
            self._bands[counts] = self._make_band(counts)
        return self._bands[counts]

    def _make_band(self, counts: Counts) -> Band:
        table = self.intervals
        step, load = table.optimizer_s(counts), table.load_s(counts)
        in_flight = table.most_in_flight(counts)
        holds = table.is_interval & (load + step <= self._limit_s) & (in_flight >= 1)
        cells = np.arange(holds.shape[1])[None, :] - np.arange(len(holds))[:, None]
        width = max(1, int((holds * cells).max()))
        load = np.where(holds, load, np.inf)
        return Band(
            load_s=_banded(load, width),
            path_s=_banded(table.path_s(counts), width),
            optimizer_s=_banded(step, width),
            gradient_bytes=_banded(table.gradient_bytes, width),
            in_flight=_banded(in_flight, width),
            least_in_flight=float(in_flight[holds].min(initial=np.inf)),
        )

    def reduction(self, devices: tuple[int, ...]) -> tuple[float, float]:
        """Seconds at once and seconds a byte of an all-reduce, as fastest_all_reduce_s has them."""
        count = len(devices)
        if count < 2:
            return 0.0, 0.0
        if devices not in self._reductions:
            joint = self.links.reduction(devices)[0]
            moved = 2 * (count - 1) / count
            seconds = fewest_steps(count) * joint.latency_s, moved * joint.s_per_byte
            self._reductions[devices] = seconds
        return self._reductions[devices]

    def transfer_s(self, source: int, target: int) -> tuple[FloatArray, FloatArray]:
        """Forward and back at every cut."""
        key = (source, target)
        if key not in self._transfers:
            latency_s, s_per_byte = self.links.latency_s[key], self.links.s_per_byte[key]
            there, back = (
                np.where(bytes_ > 0, latency_s + bytes_ * min(s_per_byte, 1e300), 0.0)
                for bytes_ in (self._there, self._back)
            )
            self._transfers[key] = there, back
        return self._transfers[key]


def _banded(matrix: FloatArray, width: int) -> FloatArray:
    """Entry [a, x] is matrix[a, a + 1 + x], infinite beyond the last column."""
    rows = np.arange(len(matrix))[:, None]
    columns = rows + 1 + np.arange(width)[None, :]
    inside = columns < matrix.shape[1]
    return np.where(inside, matrix[rows, np.minimum(columns, matrix.shape[1] - 1)], np.inf)
