"""What a stage on given devices costs, for all intervals at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cluster.link_table import LinkTable, moving_s
from planner.costs.collectives import fewest_steps
from planner.search.partition.chain import FloatArray
from planner.search.partition.intervals import Counts, Intervals, exposed_s

MOST_KEPT = 128
"""Figures kept at a time, one for each number of devices by type."""
Block = tuple[slice, slice]
"""Some of the cuts at which a stage begins, and some at which it ends."""


@dataclass(frozen=True)
class StageFigures:
    """Figures of stages on so many devices of each type, by the cuts they begin and end at.

    Attributes:
        load_s: span of the most loaded replica; infinite if no microbatch fits.
        path_s: one microbatch forward and back.
        forward_s: one microbatch forward.
        optimizer_s: optimizer step.
        gradient_bytes: reduced among the replicas.
        earlier_s: of a last backward before the last layer; None if reductions do not overlap.
        recomputed_s: load if every layer is recomputed in its backward.
        in_flight: microbatches a replica has memory for.
        lean_in_flight: the same if everything is recomputed.
        always_in_flight: so many fit any stage that keeps the limit.
        last_end: the last cut at which such a stage may end, by the cut it begins at.
    """

    load_s: FloatArray
    path_s: FloatArray
    forward_s: FloatArray
    optimizer_s: FloatArray
    gradient_bytes: FloatArray
    earlier_s: FloatArray | None
    recomputed_s: FloatArray
    in_flight: FloatArray
    lean_in_flight: FloatArray
    always_in_flight: float
    last_end: FloatArray

    def load_within_memory_s(self, block: Block, in_flight: int) -> FloatArray:
        """Return the load, recomputed and stalled where so many microbatches do not fit.

        With fewer in flight than 1F1B has, a stage waits for gradients about as many times longer.
        """
        if in_flight <= self.always_in_flight:
            return self.load_s[block]
        lean = np.maximum(self.lean_in_flight[block], 1)
        stalled = self.recomputed_s[block] * np.maximum(1.0, in_flight / lean)
        return np.where(self.in_flight[block] >= in_flight, self.load_s[block], stalled)

    def end_s(self, block: Block, start_s: float, s_per_byte: float) -> FloatArray:
        """Return what follows the load on the stage itself: reduction and optimizer step."""
        step = self.optimizer_s[block]
        if s_per_byte == 0:
            return step
        reduction = moving_s(self.gradient_bytes[block], start_s, s_per_byte)
        earlier_s = None if self.earlier_s is None else self.earlier_s[block]
        return step + exposed_s(reduction, earlier_s)


class OrderStageCosts:
    """Figures and transfers for sets of devices, given by their numbers in the cluster.

    Args:
        intervals: of the chain.
        links: of the cluster.
    """

    def __init__(self, intervals: Intervals, links: LinkTable) -> None:
        self.intervals = intervals
        self.links = links
        self.kinds = intervals.chain.kinds
        self._transfers: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        self._figures: dict[Counts, StageFigures] = {}
        self._reductions: dict[tuple[int, ...], tuple[float, float]] = {}
        self._limit_s = np.inf

    def keep_limit(self, limit_s: float) -> None:
        """Take only stages that keep this limit into account from now on."""
        if limit_s != self._limit_s:
            self._figures.clear()
            self._limit_s = limit_s

    def counts(self, devices: tuple[int, ...]) -> Counts:
        """Return how many devices of each type."""
        rows = [0] * len(self.intervals.types)
        for device in devices:
            rows[self.kinds[device]] += 1
        return tuple(rows)

    def figures(self, counts: Counts) -> StageFigures:
        """Return the stages so many devices of each type can hold."""
        if counts not in self._figures:
            if len(self._figures) >= MOST_KEPT:
                self._figures.clear()
            self._figures[counts] = self._work_out(counts)
        return self._figures[counts]

    def _work_out(self, counts: Counts) -> StageFigures:
        table = self.intervals
        step, in_flight = table.optimizer_s(counts), table.most_in_flight(counts)
        fits, path = table.fits(counts), table.path_s(counts)
        load = np.where(fits, table.span_s(counts), np.inf)
        again = 1 + table.least_forward_s(counts) / np.maximum(path, 1e-300)
        holds = table.is_interval & (load + step <= self._limit_s)
        last = np.where(holds, np.arange(table.count + 1)[None, :], 0).max(axis=1)
        return StageFigures(
            load_s=load,
            path_s=path,
            forward_s=table.least_forward_s(counts),
            optimizer_s=step,
            gradient_bytes=table.gradient_bytes,
            earlier_s=table.earlier_s(counts),
            recomputed_s=load * again if table.chain.problem.job.recompute else load,
            in_flight=in_flight,
            lean_in_flight=table.most_in_flight(counts, recompute=True),
            always_in_flight=float(in_flight[holds].min(initial=np.inf)),
            last_end=np.maximum.accumulate(last),
        )

    def reduction(self, devices: tuple[int, ...]) -> tuple[float, float]:
        """Return latency and seconds a byte of an all-reduce, as fastest_all_reduce_s has them."""
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
        """Return forward and back at every cut."""
        key = (source, target)
        if key not in self._transfers:
            latency_s, s_per_byte = self.links.latency_s[key], self.links.s_per_byte[key]
            there, back = (
                moving_s(bytes_, latency_s, s_per_byte) for bytes_ in self.intervals.crossing_bytes
            )
            self._transfers[key] = there, back
        return self._transfers[key]
