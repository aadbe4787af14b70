"""A pipeline in whole ticks, rounded down, so that what CP-SAT proves of it holds for the real one.

Every duration is at most its real one, hence every schedule of the real pipeline is also one of
this, and a lower bound in ticks times the tick is a lower bound in seconds. Where all durations are
multiples of a common unit that is not too small, the unit is the tick and nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from planner.costs.placed_pipeline import PlacedPipeline, Transfer

STEPS = 20_000
"""Ticks in the longest operation: the bound loses at most 1/20,000 of each operation."""
MOST_STEPS = 10 * STEPS
"""The most units in the longest operation with which a common unit is the tick."""
DECIMALS = 9
"""Common units down to a nanosecond are found."""
ROUNDING = 1e-7
"""Share of a tick by which a multiple of it may be off in floating point."""
SUMMED = 1e-3
"""Share of a tick by which the sum of all durations in a bound may be off then."""


@dataclass(frozen=True)
class TickPipeline(PlacedPipeline):
    """The same stages; all times are whole numbers of ``tick_s`` seconds.

    Attributes:
        real: the pipeline in seconds.
        is_exact: whether nothing was rounded.
    """

    real: PlacedPipeline = field(kw_only=True)
    tick_s: float = field(default=1.0, kw_only=True)
    is_exact: bool = field(default=False, kw_only=True)

    def seconds(self, stage: int, kind: str, device: str) -> int:
        """Return the duration in ticks."""
        return self._ticks(super().seconds(stage, kind, device))

    def _transfer(self, bytes_: int, gathered_bytes: int, source: str, target: str) -> Transfer:
        transfer = super()._transfer(bytes_, gathered_bytes, source, target)
        latency = self._ticks(transfer.latency_s)
        return replace(transfer, seconds=self._ticks(transfer.seconds), latency_s=latency)

    def tail_s(self, stage: int, device: str) -> int:
        """Return the tail in ticks; reductions take the least time any order of devices allows."""
        return self._ticks(super().least_tail_s(stage, device))

    def least_ticks(self, bound_s: float) -> int:
        """Return a lower bound in ticks."""
        if self.is_exact:
            return math.ceil(bound_s / self.tick_s - SUMMED)
        return math.floor(bound_s / self.tick_s * (1 - 1e-12))

    def _ticks(self, seconds: float) -> int:
        # A multiple of the tick may be a hair too small.
        return math.floor(seconds / self.tick_s + (ROUNDING if self.is_exact else 0))


def in_ticks(pipeline: PlacedPipeline) -> TickPipeline:
    """Round a pipeline down to ticks of 1/STEPS of its longest operation, or to its own unit."""
    longest = max(
        stage.times[device].seconds(kind)
        for stage in pipeline.stages
        for device in stage.spec.devices
        for kind in "FB"
    )
    unit_s = _common_unit_s(pipeline, longest)
    return TickPipeline(
        problem=pipeline.problem,
        stages=pipeline.stages,
        synchronisations=pipeline.synchronisations,
        optimizer_s=pipeline.optimizer_s,
        microbatches=pipeline.microbatches,
        sync=pipeline.sync,
        real=pipeline,
        tick_s=unit_s or max(longest, 1e-12) / STEPS,
        is_exact=unit_s is not None,
    )


def _common_unit_s(pipeline: PlacedPipeline, longest: float) -> float | None:
    """Return the largest time that divides all durations; None if it is too small.

    Looked for among multiples of decimal fractions of a second, as people write durations.
    """
    durations = set(_durations_s(pipeline))
    for digits in range(DECIMALS + 1):
        counts = [seconds * 10**digits for seconds in durations]
        if all(abs(count - round(count)) <= ROUNDING for count in counts):
            unit = math.gcd(*map(round, counts)) / 10**digits
            return unit if unit * MOST_STEPS >= longest > 0 else None
    return None


def _durations_s(pipeline: PlacedPipeline) -> Iterator[float]:
    for index, stage in enumerate(pipeline.stages):
        for device in stage.spec.devices:
            yield from (stage.times[device].seconds(kind) for kind in "FIW")
            yield pipeline.least_tail_s(index, device)
    for index, (here, there) in enumerate(pairwise(pipeline.stages)):
        for u in here.spec.devices:
            for v in there.spec.devices:
                yield pipeline.forward_transfer(index, u, v).seconds
                yield pipeline.backward_transfer(index + 1, v, u).seconds
