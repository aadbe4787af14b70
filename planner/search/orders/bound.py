"""A lower bound on every schedule of given stages, without a search.

The busiest device runs all of its operations behind the way of a microbatch to it, and before the
way back. A stage on devices of its own has at most K microbatches in flight at a time, so that
ceil(M / K) round trips follow each other. And what microbatches hold on a device while they are on
their way, in bytes times seconds, is no more than its room times the time that it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from planner.costs.placed_pipeline import PlacedPipeline


@dataclass(frozen=True)
class StagesBound:
    """Bounds of one pipeline's stages.

    Args:
        placed: the stages.
        splits: whether backwards may be split.
    """

    placed: PlacedPipeline
    splits: bool

    @property
    def seconds(self) -> float:
        """No schedule of the stages takes less."""
        stages = range(len(self.placed.stages))
        alone = [s for s in stages if len(self.placed.stages[s].spec.devices) == 1]
        rows = [self._way_s, *map(self._share_s, stages), *map(self._round_trips_s, alone)]
        for device, held in self.placed.stages_on.items():
            if set(held) <= set(alone):
                rows += [self._load_s(device, held), self._room_s(device, held)]
        return max(rows)

    # --- ways -----------------------------------------------------------------------------------

    def _forward_s(self, stage: int) -> float:
        return self.placed.stages[stage].least_s("F")

    def _gradient_s(self, stage: int) -> float:
        """Seconds until a stage's gradient can be sent."""
        times = self.placed.stages[stage]
        whole_s = times.least_s("B")
        return min(whole_s, times.least_s("I")) if self.splits else whole_s

    def _work_s(self, stage: int, device: str) -> float:
        """Seconds of a microbatch on a device."""
        times = self.placed.stages[stage].times[device]
        apart_s = times.seconds("I") + times.seconds("W")
        whole_s = times.seconds("B")
        return times.seconds("F") + (min(whole_s, apart_s) if self.splits else whole_s)

    @cached_property
    def _head_s(self) -> list[float]:
        """Least seconds before the first forward of each stage."""
        found = [0.0]
        for stage in range(len(self.placed.stages) - 1):
            message_s = float(self.placed.transfers_s(stage, forward=True).min())
            found.append(found[-1] + self._forward_s(stage) + message_s)
        return found

    @cached_property
    def _back_s(self) -> list[float]:
        """Least seconds behind a gradient of each stage, without optimizer steps."""
        found = [0.0]
        for stage in range(len(self.placed.stages) - 1):
            message_s = float(self.placed.transfers_s(stage, forward=False).min())
            found.append(found[-1] + message_s + self._gradient_s(stage))
        return found

    def _round_trip_s(self, stage: int) -> float:
        """Least seconds from the start of a forward to the end of its gradient."""
        last = len(self.placed.stages) - 1
        there_s = self._head_s[last] - self._head_s[stage] + self._forward_s(last)
        return there_s + self._gradient_s(last) + self._back_s[last] - self._back_s[stage]

    # --- bounds ---------------------------------------------------------------------------------

    @cached_property
    def _way_s(self) -> float:
        return self._round_trip_s(0)

    def _tail_s(self, stage: int, device: str) -> float:
        return self.placed.tail_s(stage, device)

    def _share_s(self, stage: int) -> float:
        """All microbatches on the replicas of a stage, shared out as they are fastest."""
        each_s = [self._work_s(stage, name) for name in self.placed.stages[stage].spec.devices]
        if not min(each_s):
            return 0.0
        speed = sum(1 / seconds for seconds in each_s)
        return self._head_s[stage] + self.placed.microbatches / speed

    def _load_s(self, device: str, held: tuple[int, ...]) -> float:
        count = self.placed.microbatches
        work_s = sum(self._work_s(stage, device) for stage in held)
        sent_s = sum(self._forward_s(stage) + self._gradient_s(stage) for stage in held)
        head_s = min(self._head_s[stage] for stage in held)
        back_s = min(self._back_s[stage] for stage in held)
        tail_s = min(self._tail_s(stage, device) for stage in held)
        return head_s + max(count * work_s + tail_s, count * sent_s + back_s)

    def _round_trips_s(self, stage: int) -> float:
        """Round trips of every K-th microbatch, K the most in flight."""
        placed, (device,) = self.placed, self.placed.stages[stage].spec.devices
        row = placed.stages[stage]
        held = row.stash_bytes - row.offload_bytes
        room = placed.capacity_bytes(device) - placed.static_bytes(device)
        if held <= 0 or room < held:
            return 0.0
        most = room // held
        trips, rest = math.ceil(placed.microbatches / most), (placed.microbatches - 1) % most
        # The first of these trips begins behind the forwards of the rest.
        head_s = self._head_s[stage] + rest * self._forward_s(stage)
        return head_s + trips * self._round_trip_s(stage) + self._back_s[stage]

    def _room_s(self, device: str, held: tuple[int, ...]) -> float:
        """Bytes times seconds of all microbatches over the room of a device."""
        placed, total = self.placed, 0.0
        for stage in held:
            row = placed.stages[stage]
            each = max(0, row.stash_bytes - row.offload_bytes)
            total += placed.microbatches * each * self._round_trip_s(stage)
        room = placed.capacity_bytes(device) - placed.static_bytes(device)
        head_s = min(self._head_s[stage] for stage in held)
        back_s = min(self._back_s[stage] for stage in held)
        return head_s + total / room + back_s if room > 0 else 0.0
