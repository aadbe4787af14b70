"""Bounds from what a device can do while one of its microbatches is on its way there and back.

From the start of a stage's forward to the end of its gradient at least a round trip passes. What
the device can do meanwhile is limited by how many microbatches fit into its memory; the rest of the
round trip it idles. Round trips that begin K microbatches apart, K the most that fit, do not
overlap. The first of them finds nothing to do backwards, the last nothing forwards.

For one stage a device without replicas, microbatches in order (which loses nothing: they are
equal). Our own; blocks of K microbatches alone are the well-known part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage


@dataclass(frozen=True)
class Windows:
    """The round trips of one stage, in seconds.

    Args:
        ways: of the pipeline.
        index: of the stage; it has a device to itself.
    """

    ways: PathBounds
    index: int

    @property
    def _pipeline(self) -> PlacedPipeline:
        return self.ways.pipeline

    @property
    def _stage(self) -> PlacedStage:
        return self._pipeline.stages[self.index]

    @property
    def _split(self) -> bool:
        return self.ways.split

    @cached_property
    def _room_bytes(self) -> int:
        """Bytes for stashes while a forward makes its output."""
        (device,) = self._stage.spec.devices
        free = self._pipeline.capacity_bytes(device) - self._pipeline.static_bytes(device)
        return free - self._stage.making_bytes()

    @cached_property
    def most_in_flight(self) -> int:
        """K: the most microbatches between the start of a forward and the end of its gradient."""
        return self.ways.most_in_flight[self.index]

    @cached_property
    def load_s(self) -> float:
        """Work of all microbatches."""
        each = self.ways.forward[self.index] + self.ways.gradient[self.index]
        return self._pipeline.microbatches * (each + self.ways.weight[self.index])

    def idle_s(self, after_last_s: float) -> float:
        """Bound the idle time from the first forward's start to some time after the last gradient.

        Args:
            after_last_s: between that end and that time.

        Returns:
            Seconds in which the device does not compute; infinity if no microbatch fits.
        """
        most, count = self.most_in_flight, self._pipeline.microbatches
        if most == 0:
            return math.inf
        trip = self.ways.round_trip[self.index]
        last = max(0.0, trip + after_last_s - self._last_work_s)
        before = (count - 1) // most
        if before == 0:
            return max(last, trip + after_last_s - self.load_s)
        first = max(0.0, trip - self._first_work_s)
        return first + (before - 1) * max(0.0, trip - self._middle_work_s) + last

    @property
    def _first_work_s(self) -> float:
        """Seconds of all forwards that fit, and one gradient."""
        forwards = self.most_in_flight * self.ways.forward[self.index]
        return forwards + self.ways.gradient[self.index]

    @property
    def _middle_work_s(self) -> float:
        return self.most_in_flight * self.ways.forward[self.index] + self._most_backwards_s

    @property
    def _last_work_s(self) -> float:
        """Seconds of one forward, and of the backwards of all that were in memory then."""
        return self.ways.forward[self.index] + self._most_backwards_s

    @cached_property
    def _most_backwards_s(self) -> float:
        """Backward seconds of the most in memory at the start of a forward, that one included."""
        gradient, weight = self.ways.gradient[self.index], self.ways.weight[self.index]
        return max(
            begun * gradient + (begun + self._owed(begun)) * weight
            for begun in range(1, self.most_in_flight + 1)
        )

    def _owed(self, begun: int) -> int:
        """Return the most weight gradients still to do with so many microbatches in flight."""
        stage, count = self._stage, self._pipeline.microbatches
        if not self._split:
            return 0
        if stage.weight_stash_bytes == 0 or not self.ways.forward[self.index]:
            return count - begun
        left = self._room_bytes - begun * stage.stash_bytes
        return min(count - begun, left // stage.weight_stash_bytes)


def iteration_bound_s(pipeline: PlacedPipeline, *, split: bool) -> float:
    """Return a lower bound on the time of every schedule of these stages, in seconds.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients run apart in all of them.

    Returns:
        Seconds; 0 where no stage has a device to itself, infinity if some stage has no room for a
        microbatch.
    """
    ways = PathBounds(pipeline, split)
    bound = 0.0
    for index in _alone(pipeline):
        windows = Windows(ways, index)
        idle_s = max(ways.tail[index], windows.idle_s(ways.drain[index]))
        through_s = windows.load_s - pipeline.microbatches * ways.weight[index] + ways.drain[index]
        bound = max(bound, ways.head[index] + max(windows.load_s + idle_s, through_s))
    return bound


def longest_span_bound_s(pipeline: PlacedPipeline, *, split: bool) -> float:
    """Return a lower bound on the longest span of a stage, first operation to last.

    The zero-bubble paper's objective (Qi et al. 2023): iterations may overlap. Besides a stage's
    own load: it waits from its first forward to its last gradient for every later stage's.
    """
    ways = PathBounds(pipeline, split)
    bound = 0.0
    alone = _alone(pipeline)
    for index in alone:
        windows = Windows(ways, index)
        bound = max(bound, windows.load_s + windows.idle_s(ways.weight[index]))
        for later in alone:
            if later > index:
                there = ways.head[later] - ways.head[index]
                again = ways.back[later] - ways.back[index] + ways.weight[index]
                each = ways.forward[later] + ways.gradient[later]
                bound = max(bound, there + pipeline.microbatches * each + again)
    return bound


def _alone(pipeline: PlacedPipeline) -> list[int]:
    """Return the stages without replicas, on devices that hold no other."""
    return [
        index
        for index, stage in enumerate(pipeline.stages)
        if len(stage.spec.devices) == 1 and len(pipeline.stages_on[stage.spec.devices[0]]) == 1
    ]
