"""Shortest ways of a microbatch through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from planner.costs.placement import PlacedPipeline
from planner.costs.roofline import OperationTimes


@dataclass(frozen=True)
class Ways:
    """Least seconds by stage, over its replicas.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients may run apart, microbatch by microbatch; then a
            gradient goes on to the stage before without waiting for the weights.
    """

    pipeline: PlacedPipeline
    split: bool

    @cached_property
    def forward(self) -> list[float]:
        """Of a forward, by stage."""
        return self._least("F")

    @cached_property
    def gradient(self) -> list[float]:
        """From a stage's gradient to the one it sends back."""
        return self._over_replicas(self.gradient_s)

    @cached_property
    def weight(self) -> list[float]:
        """What a backward takes besides, whether it is split or not; 0 if all are whole."""
        return self._over_replicas(self.besides_s)

    @cached_property
    def send(self) -> list[float]:
        """Of activations from a stage to the next; 0 behind the last."""
        return [self._transfer(index, forward=True) for index in range(len(self.forward))]

    @cached_property
    def send_back(self) -> list[float]:
        """Of gradients from the next stage; 0 behind the last."""
        return [self._transfer(index, forward=False) for index in range(len(self.forward))]

    @cached_property
    def head(self) -> list[float]:
        """From the start of the iteration to a stage's first forward."""
        ways = [0.0]
        for forward, send in zip(self.forward, self.send, strict=True):
            ways.append(ways[-1] + forward + send)
        return ways[:-1]

    @cached_property
    def back(self) -> list[float]:
        """From the end of a stage's gradient to the end of the first stage's."""
        ways = [0.0]
        for gradient, send_back in zip(self.gradient, self.send_back, strict=True):
            ways.append(ways[-1] + gradient + send_back)
        return ways[:-1]

    @cached_property
    def round_trip(self) -> list[float]:
        """From the start of a stage's forward through all later stages to its gradient's end."""
        trips: list[float] = []
        way = 0.0
        for index in reversed(range(len(self.forward))):
            way += self.forward[index] + self.gradient[index]
            way += self.send[index]
            way += self.send_back[index]
            trips.append(way)
        return trips[::-1]

    @cached_property
    def tail(self) -> list[float]:
        """Reduction and optimizer step after a stage's last backward, over any device order."""
        return [
            self.pipeline.least_reduction_s(index)
            + min(self.pipeline.optimizer_s[device] for device in stage.spec.devices)
            for index, stage in enumerate(self.pipeline.stages)
        ]

    @cached_property
    def home(self) -> list[float]:
        """From the end of a stage's last gradient to the end of the iteration.

        Its own weight gradient and tail, or the way to an earlier stage and what is left there.
        """
        return self._home(self.weight)

    @cached_property
    def gradients_home(self) -> list[float]:
        """The same where weight gradients may be done by then, as if only some are apart."""
        return self._home([0.0] * len(self.weight))

    def _home(self, weight: list[float]) -> list[float]:
        longest_ways: list[float] = []
        for index in range(len(self.tail)):
            longest, way = weight[index] + self.tail[index], 0.0
            for before in reversed(range(index)):
                way += self.send_back[before] + self.gradient[before]
                longest = max(longest, way + weight[before] + self.tail[before])
            longest_ways.append(longest)
        return longest_ways

    @cached_property
    def most_in_flight(self) -> list[int]:
        """Microbatches between the start of a forward and the end of its gradient, by stage.

        On all its replicas together. What is held for no time, as the output of a forward of no
        length, is not counted in a replay; then nothing is known.
        """
        pipeline = self.pipeline
        limits = [
            sum(
                pipeline.stash_limit(index, device, whole_backwards=not self.split)
                for device in stage.spec.devices
            )
            for index, stage in enumerate(pipeline.stages)
        ]
        return [
            min(limit, pipeline.microbatches) if forward else pipeline.microbatches
            for limit, forward in zip(limits, self.forward, strict=True)
        ]

    def gradient_s(self, times: OperationTimes) -> float:
        """Of a replica, from its gradient to the one it sends back, at least."""
        return min(times.input_gradient_s, times.backward_s) if self.split else times.backward_s

    def besides_s(self, times: OperationTimes) -> float:
        """Of a replica, what its backward takes besides, at least."""
        left_s = times.backward_s - self.gradient_s(times)
        return min(left_s, times.weight_gradient_s) if self.split else 0.0

    def _over_replicas(self, seconds: Callable[[OperationTimes], float]) -> list[float]:
        return [min(map(seconds, stage.times.values())) for stage in self.pipeline.stages]

    def _least(self, kind: str) -> list[float]:
        return [stage.least_s(kind) for stage in self.pipeline.stages]

    def _transfer(self, index: int, *, forward: bool) -> float:
        """Between a stage and the next, over the best pair of their devices."""
        if index + 1 == len(self.pipeline.stages):
            return 0.0
        return float(self.pipeline.transfers_s(index, forward=forward).min())
