"""Stages cut again among given groups of devices: less time for more bytes to move.

The groups keep their order. For a limit on every group's load, the cuts that move the fewest bytes
are found by a dynamic program over cuts; several limits give several compromises. Loads are of
computation alone: a schedule decides what the result is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.replanning.state import BoolArray, State
from planner.search.partition.chain import Chain, FloatArray, IntArray, Partition, StageChoice

Groups = tuple[tuple[str, ...], ...]
LOAD_FACTORS = (1.0, 1.02, 1.05, 1.1, 1.2)
"""Limits on the load of a group, as multiples of the least that cuts can reach."""
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Recut:
    """The cuts of one problem that may be chosen.

    Attributes:
        chain: the layers.
        state: what devices hold.
        cuts: positions in the chain, ascending, from 0 to its length.
    """

    chain: Chain
    state: State
    cuts: IntArray

    def partitions(self, groups: Groups) -> Iterator[Partition]:
        """Yield the partition that moves fewest bytes, then those within lower and lower limits."""
        if len(groups) >= len(self.cuts):
            return
        loads = [self._known(self._known_loads, self._loads, group) for group in groups]
        moved = [self._known(self._known_moved, self._moved, group) for group in groups]
        least_s = _least_limit(loads)
        if not np.isfinite(least_s):
            return
        known: set[Partition] = set()
        limits_s = (least_s * factor * ROUNDING for factor in reversed(LOAD_FACTORS))
        for limit_s in (np.finfo(float).max, *limits_s):
            ends = _fewest_bytes(loads, moved, limit_s)
            partition = self._partition(groups, ends)
            if partition not in known:
                known.add(partition)
                yield partition

    def _known(
        self,
        table: dict[tuple[str, ...], FloatArray],
        work_out: Callable[[tuple[str, ...]], FloatArray],
        group: tuple[str, ...],
    ) -> FloatArray:
        if group not in table:
            table[group] = work_out(group)
        return table[group]

    @cached_property
    def _known_loads(self) -> dict[tuple[str, ...], FloatArray]:
        return {}

    @cached_property
    def _known_moved(self) -> dict[tuple[str, ...], FloatArray]:
        return {}

    @cached_property
    def _needs(self) -> list[BoolArray]:
        """The parameters of each layer."""
        return [self.state.of_layers([name]) for name in self.chain.names]

    def _partition(self, groups: Groups, ends: Sequence[int]) -> Partition:
        begins = (0, *ends[:-1])
        return tuple(
            StageChoice(int(self.cuts[begin]), int(self.cuts[end]), group)
            for group, begin, end in zip(groups, begins, ends, strict=True)
        )

    def _loads(self, group: tuple[str, ...]) -> FloatArray:
        """Return seconds an iteration of the busiest replica for [i, j); infinite if impossible."""
        chain, cluster = self.chain, self.chain.problem.cluster
        kinds = [cluster.type_of(device) for device in group]
        counts = {kind: kinds.count(kind) for kind in kinds}
        spans = {kind: self._span(chain.work_s[chain.types.index(kind)]) for kind in counts}
        load = _shared(spans, counts, chain.problem.job.microbatches)
        room = min(cluster.device_type(device).capacity_bytes for device in group)
        least = chain.least_bytes[self.cuts]
        load[(least[None, :] - least[:, None]) > room] = np.inf
        for kind in counts:
            load[self._span(chain.foreign_layers(kind)) > 0] = np.inf
        load[np.tril_indices(len(load))] = np.inf
        return load

    def _span(self, values: FloatArray) -> FloatArray:
        """Return sums over the layers of [i, j), 0 where there are none."""
        sums = np.concatenate([[0.0], np.cumsum(values)])[self.cuts]
        return np.asarray(np.maximum(sums[None, :] - sums[:, None], 0.0))

    def _moved(self, group: tuple[str, ...]) -> FloatArray:
        """Return bytes that a group lacks for [i, j); what layers share counts for each."""
        lacking = self.state.missing_bytes(self._needs, group).sum(axis=1)
        return self._span(lacking.astype(float))


def _shared(spans: dict[str, FloatArray], counts: dict[str, int], microbatches: int) -> FloatArray:
    """Return seconds of the busiest replica: whole microbatches on equal ones.

    Replicas of several types divide the microbatches by their speed.
    """
    if len(counts) == 1:
        ((kind, count),) = counts.items()
        return spans[kind] * -(-microbatches // count)
    per_second = sum(count / np.maximum(spans[kind], 1e-15) for kind, count in counts.items())
    return np.asarray(microbatches / per_second)


def _least_limit(loads: Sequence[FloatArray]) -> float:
    """Return the least largest load."""
    best = np.full(len(loads[0]), np.inf)
    best[0] = 0.0
    for load in loads:
        best = np.maximum(best[:, None], load).min(axis=0)
    return float(best[-1])


def _fewest_bytes(
    loads: Sequence[FloatArray], moved: Sequence[FloatArray], limit_s: float
) -> list[int]:
    """Return the cut after each group, by its number, that moves the fewest bytes."""
    best = np.full(len(loads[0]), np.inf)
    best[0] = 0.0
    chosen: list[IntArray] = []
    for load, bytes_ in zip(loads, moved, strict=True):
        total = np.where(load <= limit_s, best[:, None] + bytes_, np.inf)
        chosen.append(total.argmin(axis=0))
        best = total.min(axis=0)
    ends = [len(best) - 1]
    for begins in reversed(chosen[1:]):
        ends.append(int(begins[ends[-1]]))
    return ends[::-1]
