"""A pipeline in whole ticks, rounded down, so that what CP-SAT proves of it holds for the real one.

Every duration is at most its real one, hence every schedule of the real pipeline is also one of
this, and a lower bound in ticks times the tick is a lower bound in seconds.
"""

import math
from dataclasses import dataclass, field

from planner.costs.placement import PlacedPipeline, Transfer

STEPS = 20_000
"""Ticks in the longest operation: the bound loses at most 1/20,000 of each operation."""


@dataclass(frozen=True)
class TickPipeline(PlacedPipeline):
    """The same stages; all times are whole numbers of ``tick_s`` seconds."""

    tick_s: float = field(default=1.0, kw_only=True)

    def seconds(self, stage: int, kind: str, device: str) -> int:
        """Duration in ticks."""
        return math.floor(super().seconds(stage, kind, device) / self.tick_s)

    def _transfer(self, bytes_: int, source: str, target: str) -> Transfer:
        transfer = super()._transfer(bytes_, source, target)
        return Transfer(math.floor(transfer.seconds / self.tick_s), transfer.links)

    def tail_s(self, stage: int, device: str) -> int:
        """Tail in ticks; reductions take the least time any order of the devices allows."""
        seconds = self.least_reduction_s(stage) + self.optimizer_s[device]
        return math.floor(seconds / self.tick_s)


def in_ticks(pipeline: PlacedPipeline) -> TickPipeline:
    """Round a pipeline down to ticks of 1/STEPS of its longest operation."""
    longest = max(
        stage.times[device].seconds(kind)
        for stage in pipeline.stages
        for device in stage.spec.devices
        for kind in "FB"
    )
    return TickPipeline(
        problem=pipeline.problem,
        stages=pipeline.stages,
        synchronisations=pipeline.synchronisations,
        optimizer_s=pipeline.optimizer_s,
        microbatches=pipeline.microbatches,
        tick_s=max(longest, 1e-12) / STEPS,
    )
