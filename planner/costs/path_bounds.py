"""Lower bounds on the time of a microbatch's path through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage
from planner.costs.roofline import OperationTimes


@dataclass(frozen=True)
class PathBounds:
    """Least seconds by stage, over its replicas.

    Args:
        pipeline: the stages.
        split: whether backwards may be split into input and weight gradients (I/W); then a gradient
            is sent to the stage before without waiting for the weight gradient.
    """

    pipeline: PlacedPipeline
    split: bool

    @cached_property
    def forward(self) -> list[float]:
        """Time of a forward, by stage."""
        return self._least("F")

    @cached_property
    def gradient(self) -> list[float]:
        """Time from receiving a stage's gradient to sending the one of its input."""
        return self._over_replicas(self.gradient_s)

    @cached_property
    def send(self) -> list[float]:
        """Time of sending activations from a stage to the next; 0 after the last."""
        return [self._transfer(index, forward=True) for index in range(len(self.forward))]

    @cached_property
    def send_back(self) -> list[float]:
        """Time of sending gradients from the next stage; 0 after the last."""
        return [self._transfer(index, forward=False) for index in range(len(self.forward))]

    @cached_property
    def head(self) -> list[float]:
        """Time from the start of the iteration to a stage's first forward."""
        times_s = [0.0]
        for forward, send in zip(self.forward, self.send, strict=True):
            times_s.append(times_s[-1] + forward + send)
        return times_s[:-1]

    @cached_property
    def back(self) -> list[float]:
        """Time from the end of a stage's gradient to the end of the first stage's."""
        times_s = [0.0]
        for gradient, send_back in zip(self.gradient, self.send_back, strict=True):
            times_s.append(times_s[-1] + gradient + send_back)
        return times_s[:-1]

    @cached_property
    def round_trip(self) -> list[float]:
        """Time from the start of a stage's forward to the end of its gradient, by stage."""
        trips: list[float] = []
        time_s = 0.0
        for index in reversed(range(len(self.forward))):
            time_s += self.forward[index] + self.gradient[index]
            time_s += self.send[index]
            time_s += self.send_back[index]
            trips.append(time_s)
        return trips[::-1]

    @cached_property
    def tail(self) -> list[float]:
        """Time of reduction and optimizer step after a stage's last backward, in any order.

        Of a reduction that overlaps with it, what cannot be over before its end.
        """
        return [
            min(self.pipeline.tail_s(index, device) for device in self._unlike(stage))
            for index, stage in enumerate(self.pipeline.stages)
        ]

    def _unlike(self, stage: PlacedStage) -> Iterable[str]:
        """Return a stage's devices, one of those of a type that update as much."""
        cluster, update_s = self.pipeline.problem.cluster, self.pipeline.optimizer_s
        return {(cluster.type_of(d), update_s[d]): d for d in stage.spec.devices}.values()

    @cached_property
    def gradients_drain(self) -> list[float]:
        """Time from the end of a stage's last gradient to the end of the iteration.

        This is its own tail, or the path to an earlier stage and the tail there: weight gradients
        may already be done, since only some backwards are split.
        """
        longest_ways: list[float] = []
        for index, longest in enumerate(self.tail):
            time_s = 0.0
            for before in reversed(range(index)):
                time_s += self.send_back[before] + self.gradient[before]
                longest = max(longest, time_s + self.tail[before])
            longest_ways.append(longest)
        return longest_ways

    def gradient_s(self, times: OperationTimes) -> float:
        """Return a replica's least time from its gradient to the one it sends back."""
        return min(times.input_gradient_s, times.backward_s) if self.split else times.backward_s

    def _over_replicas(self, seconds: Callable[[OperationTimes], float]) -> list[float]:
        return [min(map(seconds, stage.times.values())) for stage in self.pipeline.stages]

    def _least(self, kind: str) -> list[float]:
        return [stage.least_s(kind) for stage in self.pipeline.stages]

    def _transfer(self, index: int, *, forward: bool) -> float:
        """Return the time between a stage and the next, over the best pair of their devices."""
        if index + 1 == len(self.pipeline.stages):
            return 0.0
        return float(self.pipeline.transfers_s(index, forward=forward).min())
