"""Iteration times under noise: how robust a schedule is to varying durations.

The replay without noise fixes the orders: every device keeps its order of operations, every pair
of devices its order of transfers, every group of devices its order of all-reduces, and what shared
its links keeps the shares that it had. The start of each event is then the longest path to it
(:mod:`planner.program.paths`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.simulation.timeline import (
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)

BATCH = 1000
"""Samples replayed at once: enough to hide Python's own time, few enough to stay in cache."""
FEWEST_SAMPLES = 20
"""With fewer samples none would be above the 95th percentile."""
MOST_SAMPLES = 100_000
MOST_SLOWDOWN = 1000.0


@dataclass(frozen=True)
class Noise:
    """Random variation of durations from one iteration to the next.

    Every duration is multiplied by its own draw from a lognormal distribution of mean 1, so that no
    device does more work on average than without noise.

    Attributes:
        jitter: standard deviation of an operation's duration, as a fraction of it.
        transfer_jitter: the same for transfers and all-reduces; None: as ``jitter``.
        slow_probability: probability that a device is slow for a whole iteration; devices are
            independent.
        slow_factor: factor on all operations of a slow device.
        samples: number of iterations to draw.
        seed: seed of the draws; the same seed gives the same figures.

    Raises:
        PipeplanError: naming every field that is out of range.
    """

    jitter: float = 0.05
    transfer_jitter: float | None = None
    slow_probability: float = 0.0
    slow_factor: float = 1.5
    samples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PipeplanError(problems)

    def _problems(self) -> Iterator[str]:
        for name, share in {"jitter": self.jitter, "transfer_jitter": self.transfer_jitter}.items():
            if share is not None and not 0 <= share <= 1:
                yield f"{name}: {share} is not a fraction from 0 to 1; write 0.05 for 5 %"
        if not 0 <= self.slow_probability <= 1:
            yield f"slow_probability: {self.slow_probability} is not a probability from 0 to 1"
        if not 1 <= self.slow_factor <= MOST_SLOWDOWN:
            yield (
                f"slow_factor: {self.slow_factor} is not a number from 1 to {MOST_SLOWDOWN:g}; "
                "write 1.5 for a device that takes half as long again"
            )
        if not FEWEST_SAMPLES <= self.samples <= MOST_SAMPLES:
            yield (
                f"samples: {self.samples} is not a whole number from {FEWEST_SAMPLES} to "
                f"{MOST_SAMPLES}; 1000 give the 95th percentile to about a tenth of a percent"
            )
        if not 0 <= self.seed < 2**31:
            yield f"seed: {self.seed} is not a whole number from 0 to {2**31 - 1}"

    def __str__(self) -> str:
        """Format the noise as options of ``pipeplan simulate``."""
        text = f"jitter {self.jitter:g}"
        if self.transfer_jitter is not None:
            text += f", transfer jitter {self.transfer_jitter:g}"
        if self.slow_probability > 0:
            text += f", slow probability {self.slow_probability:g}, factor {self.slow_factor:g}"
        return f"{text}, seed {self.seed}"


@dataclass(frozen=True)
class NoisyTimes:
    """Iteration times over the samples of a noise, in seconds.

    ``predicted_s`` is without noise; ``samples`` is the number of iterations.
    """

    predicted_s: float
    expected_s: float
    median_s: float
    percentile_95_s: float
    worst_s: float
    samples: int


class Factors(Protocol):
    """Factors on each duration of a timeline: one number per sample."""

    def operation(self, event: OperationEvent) -> FloatArray:
        """Return the factors of a forward or backward."""

    def transfer(self, event: TransferEvent) -> FloatArray:
        """Return the factors of a transfer."""

    def synchronisation(self, event: SynchronisationEvent) -> FloatArray:
        """Return the factors of an all-reduce."""

    def optimizer_step(self, device: str) -> FloatArray:
        """Return the factors of a device's optimizer step."""


def times_under_noise(timeline: Timeline, noise: Noise) -> NoisyTimes:
    """Return the iteration times of a timeline's orders with random durations.

    Devices, links and all-reduces keep their orders; see :func:`replay_times_s`.

    Args:
        timeline: result of ``planner.simulate``, without noise.
        noise: jitter, slow devices, the number of samples and the seed.
    """
    times_s = sample_times_s(timeline, noise)
    return NoisyTimes(
        predicted_s=timeline.iteration_time_s,
        expected_s=float(times_s.mean()),
        median_s=float(np.median(times_s)),
        percentile_95_s=float(np.percentile(times_s, 95)),
        worst_s=float(times_s.max()),
        samples=noise.samples,
    )


def sample_times_s(timeline: Timeline, noise: Noise) -> FloatArray:
    """Return the iteration time of each sample in seconds; more samples extend those of fewer."""
    # Of their own stream, so that two plans for one cluster see the same slow devices.
    durations, slowness = map(np.random.default_rng, np.random.SeedSequence(noise.seed).spawn(2))
    paths, found = _Longest(timeline), []
    for begin in range(0, noise.samples, BATCH):
        size = min(BATCH, noise.samples - begin)
        draws = _Draws(noise, timeline, size, durations, slowness)
        found.append(paths.times_s(draws))
    return np.concatenate(found)


def replay_times_s(timeline: Timeline, factors: Factors) -> FloatArray:
    """Return the iteration times in seconds if every duration is multiplied by a factor.

    Devices, links and all-reduces keep the orders of the timeline, even where another event is
    ready sooner: orders are part of the plan, and the members of a group must agree on the order of
    all-reduces. What shared links in the timeline is as much slower here, whenever it is on them.
    Copies of stashes to the host and back keep their durations.

    Args:
        timeline: a replay without noise.
        factors: factors of all its events, for the same number of samples.
    """
    return _Longest(timeline).times_s(factors)


class _Longest:
    """The longest paths over what waits for what in a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        # numba takes half a second to import, so only who replays anything waits for that.
        from planner.program.lower.lower import lower_orders
        from planner.program.paths import Paths
        from planner.program.replay import replay

        self._timeline = timeline
        lowered = lower_orders(timeline.pipeline, timeline.orders)
        self._numbers = lowered.task_numbers()
        self._tasks = len(lowered.program.tasks)
        self._first_late = int(lowered.program.numbers["first_late"])
        self._paths = Paths(lowered.program, replay(lowered.program))

    def times_s(self, factors: Factors) -> FloatArray:
        """Return the iteration time of each sample, in seconds."""
        rows = dict(self._rows(factors))
        size = max((len(row) for row in rows.values()), default=1)
        found = np.ones((size, self._tasks))
        for number, row in rows.items():
            found[:, number] = row
        return self._paths.times_s(found)

    def _rows(self, factors: Factors) -> Iterator[tuple[int, FloatArray]]:
        """Yield the factors of each task, in the order in which they are drawn."""
        timeline, numbers = self._timeline, self._numbers
        for event in _in_order(timeline):
            if isinstance(event, OperationEvent):
                yield numbers[event.operation, False], factors.operation(event)
            else:
                yield numbers[event.consumer, True], factors.transfer(event)
        first, devices = self._first_late, timeline.pipeline.devices
        for reduction in timeline.synchronisations:
            yield first + reduction.number, factors.synchronisation(reduction)
        first += len(timeline.synchronisations)
        for place, device in enumerate(devices):
            yield first + place, factors.optimizer_step(device)
        gathers = sorted(enumerate(timeline.gathers), key=lambda row: row[1].start_s)
        for place, gather in gathers:
            yield first + len(devices) + place, factors.synchronisation(gather)


class _Draws:
    """The factors of a noise, for a batch of samples."""

    def __init__(
        self,
        noise: Noise,
        timeline: Timeline,
        size: int,
        durations: np.random.Generator,
        slowness: np.random.Generator,
    ) -> None:
        self._noise = noise
        self._size = size
        self._durations = durations
        names = timeline.pipeline.problem.cluster.device_names
        is_slow = slowness.random((len(names), size)) < noise.slow_probability
        slowdowns: FloatArray = np.where(is_slow, noise.slow_factor, 1.0)
        self._slowdown: dict[str, FloatArray] = dict(zip(names, slowdowns, strict=True))

    def operation(self, event: OperationEvent) -> FloatArray:
        return self._on_device(event.device)

    def transfer(self, event: TransferEvent) -> FloatArray:
        return self._on_network()

    def synchronisation(self, event: SynchronisationEvent) -> FloatArray:
        return self._on_network()

    def optimizer_step(self, device: str) -> FloatArray:
        return self._on_device(device)

    def _on_device(self, device: str) -> FloatArray:
        return self._slowdown[device] * self._varied(self._noise.jitter)

    def _on_network(self) -> FloatArray:
        share = self._noise.transfer_jitter
        return self._varied(self._noise.jitter if share is None else share)

    def _varied(self, share: float) -> FloatArray:
        """Draw from a lognormal distribution of mean 1.

        exp(m + v/2) = 1, and its variance exp(v) - 1 is the square of the jitter.
        """
        variance = math.log1p(share**2)
        deviation = math.sqrt(variance)
        factors: FloatArray = self._durations.lognormal(-variance / 2, deviation, self._size)
        return factors


_Result = tuple[int, bool, int]
"""The result of an operation: its stage, whether it is an activation, its microbatch."""


def _result(operation: Operation) -> _Result:
    return operation.stage, operation.kind == "F", operation.microbatch


def _in_order(timeline: Timeline) -> list[OperationEvent | TransferEvent]:
    """Return every event after all that it waits for.

    Events are sorted by start. For events without duration at one moment, operations keep the order
    in which they were started and each transfer follows its producer.
    """
    rows: list[tuple[float, int, bool, OperationEvent | TransferEvent]] = []
    producer: dict[_Result, int] = {}
    for index, event in enumerate(timeline.operations):
        rows.append((event.start_s, index, False, event))
        if event.operation.kind != "W":
            producer[_result(event.operation)] = index
    for transfer in timeline.transfers:
        index = producer[_result(transfer.operation)]
        rows.append((transfer.start_s, index, True, transfer))
    return [row[-1] for row in sorted(rows, key=lambda row: row[:-1])]
