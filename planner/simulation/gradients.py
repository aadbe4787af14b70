"""When the gradients of each reduction are ready, and what they wait for until then."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.reductions import GradientReduction

Made = tuple[int, int, str]
"""Gradients of a reduction, by its number, that a stage makes on a device."""


class GradientMoments:
    """What every reduction still waits for, by the rule of the runtime.

    Args:
        pipeline: whose reductions.
        owner: the device of each (stage, microbatch).

    Attributes:
        ready: numbers of reductions that wait for nothing more, until they are taken.
        announced: a heap of moments at which parts of the gradients may be made.
        made_s: when each part of the gradients was made, where reductions wait for backwards.
    """

    def __init__(self, pipeline: PlacedPipeline, owner: Mapping[tuple[int, int], str]) -> None:
        self._pipeline = pipeline
        self._backwards_left = Counter((stage, device) for (stage, _), device in owner.items())
        self._waiting: defaultdict[object, list[int]] = defaultdict(list)
        self._left: list[int] = []
        self._by_backward = pipeline.behaviour.reduction in ("bucket", "stage")
        self._device_left = Counter[str]()
        if pipeline.synchronisations and not self._by_backward:
            self._count_work(owner)
        for number, waits in enumerate(self._waits()):
            self._left.append(len(waits))
            for key in waits:
                self._waiting[key].append(number)
        self.ready = [number for number, left in enumerate(self._left) if not left]
        self.announced: list[tuple[float, Made]] = []
        self._due_s: dict[Made, float] = {}
        self.made_s: dict[Made, float] = {}

    def _count_work(self, owner: Mapping[tuple[int, int], str]) -> None:
        """Count the operations of each device, and the sends that it waits for."""
        waits_for_sends = self._pipeline.behaviour.send == "blocking"
        for (stage, microbatch), device in owner.items():
            others = ((stage + 1, microbatch) in owner) + ((stage - 1, microbatch) in owner)
            self._device_left[device] += 2 + (others if waits_for_sends else 0)

    def _waits(self) -> Iterator[set[object]]:
        """Yield what each reduction waits for: backwards by stage and device, or devices."""
        for sync in self._pipeline.synchronisations:
            if self._by_backward:
                pairs = {(stage, device) for stage in sync.stages for device in sync.devices}
                yield {pair for pair in pairs if pair in self._backwards_left}
            else:
                everywhere = self._pipeline.behaviour.reduction == "flush"
                devices = self._pipeline.devices if everywhere else sync.devices
                yield {device for device in devices if device in self._device_left}

    def made_by(
        self, stage: int, kind: str, device: str, syncs: Sequence[GradientReduction]
    ) -> list[tuple[Made, float]]:
        """Return the gradients that a backward makes if it is a stage's last on a device.

        Args:
            stage: whose backward begins.
            kind: of the backward, B or W; other operations make none.
            device: on which it runs.
            syncs: the reductions, with the times of the backward's microbatch.

        Returns:
            Each with the seconds, alone, that the backward still runs behind them.
        """
        if kind not in "BW":
            return []
        self._backwards_left[stage, device] -= 1
        if self._backwards_left[stage, device] or not self._by_backward:
            return []
        return [
            ((number, stage, device), syncs[number].ahead_s(kind, device))
            for number in self._waiting.get((stage, device), ())
        ]

    def announce(self, made: Made, moment_s: float) -> None:
        """Note when gradients will be made; until then another moment may take its place."""
        if made not in self.made_s and self._due_s.get(made) != moment_s:
            self._due_s[made] = moment_s
            heapq.heappush(self.announced, (moment_s, made))

    def make(self, now: float) -> None:
        """Note the gradients that are made at a moment, unless that has changed since."""
        while self.announced and self.announced[0][0] == now:
            made = heapq.heappop(self.announced)[1]
            if self._due_s[made] == now and made not in self.made_s:
                self.made_s[made] = now
                self._note(made[0])

    def note_done(self, device: str) -> None:
        """Note that a device has run a forward or a backward, or ended a send it waited for."""
        if device not in self._device_left:
            return
        self._device_left[device] -= 1
        if not self._device_left[device]:
            for number in self._waiting[device]:
                self._note(number)

    def _note(self, number: int) -> None:
        self._left[number] -= 1
        if not self._left[number]:
            self.ready.append(number)

    def take_ready(self) -> list[int]:
        """Return the reductions that have become ready, in order."""
        ready, self.ready = sorted(self.ready), []
        return ready
