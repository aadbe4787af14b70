"""Iteration times under noise: how robust a schedule is to varying durations.

The replay without noise fixes the orders: every device keeps its order of operations, every pair
of devices (or link, by older rules) its order of transfers, every group of devices its order of
all-reduces, and what shared its links keeps the shares that it had. Where messages block, an
event also follows every message of its devices that had ended when it began without noise. The
start of each event is then the longest path to it, evaluated for all samples at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.costs.placed_pipeline import Resource
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.simulation.timeline import (
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)
from planner.simulation.together import partners_of

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
    require_no_copies(timeline)
    events = _in_order(timeline)
    found = []
    for begin in range(0, noise.samples, BATCH):
        size = min(BATCH, noise.samples - begin)
        draws = _Draws(noise, timeline, size, durations, slowness)
        found.append(_Replay(timeline, draws).run(events))
    return np.concatenate(found)


def replay_times_s(timeline: Timeline, factors: Factors) -> FloatArray:
    """Return the iteration times in seconds if every duration is multiplied by a factor.

    Devices, links and all-reduces keep the orders of the timeline, even where another event is
    ready sooner: orders are part of the plan, and the members of a group must agree on the order of
    all-reduces. What shared links in the timeline is as much slower here, whenever it is on them.

    Args:
        timeline: a replay without noise.
        factors: factors of all its events, for the same number of samples.
    """
    require_no_copies(timeline)
    return _Replay(timeline, factors).run(_in_order(timeline))


def require_no_copies(timeline: Timeline) -> None:
    """Refuse a timeline whose stashes travel to the host.

    Raises:
        PipeplanError: if there are any.
    """
    if timeline.copies:
        raise PipeplanError(
            "stages.offload: iteration times under noise are not simulated with stashes on their "
            "way to the host; plan with offload = false"
        )


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


def _input(operation: Operation) -> _Result:
    """Return what an operation waits for from a neighbouring stage, if there is one."""
    is_forward = operation.kind == "F"
    return operation.stage + (-1 if is_forward else 1), is_forward, operation.microbatch


class _Backward(NamedTuple):
    """A stage's last backward on a device: when it began and ended, and its factors, by sample."""

    event: OperationEvent
    begin_s: FloatArray
    end_s: FloatArray
    factors: FloatArray

    def ready_s(self, made_s: float) -> FloatArray:
        """Return when gradients are there that were made at a time without noise."""
        return np.maximum(self.begin_s, self.end_s - (self.event.end_s - made_s) * self.factors)


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


class _Replay:
    """Ends of the latest events, by sample: all that later events can still wait for."""

    def __init__(self, timeline: Timeline, factors: Factors) -> None:
        self.timeline = timeline
        self.factors = factors
        self.last = len(timeline.pipeline.stages) - 1
        self.free_s: defaultdict[str, FloatArray] = defaultdict(_begin)
        self.free_again_s: defaultdict[Resource, FloatArray] = defaultdict(_begin)
        behaviour = timeline.pipeline.behaviour
        self.sends_block = behaviour.send == "blocking"
        self.receives_block = behaviour.receive == "blocking"
        self.under_way: defaultdict[str, list[tuple[float, FloatArray]]] = defaultdict(list)
        """By device: messages that it waits for, with their ends without noise."""
        self.result_s: dict[_Result, FloatArray] = {}
        self.last_backwards: dict[tuple[int, str], _Backward] = {}
        self.partners = partners_of(timeline)
        self.able_s: dict[Operation, FloatArray] = {}
        """When what waits for others that start with it could start by itself."""

    def run(self, events: list[OperationEvent | TransferEvent]) -> FloatArray:
        for event in events:
            if isinstance(event, OperationEvent):
                self._operate(event)
            else:
                self._transfer(event)
        for device in self.timeline.pipeline.devices:
            self._wait(device, math.inf)
        self._synchronise()
        optimizer_s = self.timeline.optimizer_s
        for device in self.timeline.pipeline.devices:
            step_s = optimizer_s[device] * self.factors.optimizer_step(device)
            self.free_s[device] = self.free_s[device] + step_s
        self._gather()
        latest: FloatArray = np.maximum.reduce(
            [self.free_s[device] for device in self.timeline.pipeline.devices]
        )
        return latest

    def _gather(self) -> None:
        """Gather parameters, in the order in which that began without noise."""
        for event in sorted(self.timeline.gathers, key=lambda event: event.start_s):
            devices = event.synchronisation.devices
            begin_s = reduce(np.maximum, [self.free_s[device] for device in devices], _begin())
            seconds = (event.end_s - event.start_s) * self.factors.synchronisation(event)
            self.free_s.update(dict.fromkeys(devices, begin_s + seconds))

    def _operate(self, event: OperationEvent) -> None:
        self.able_s[event.operation] = self._able_s(event)
        together = self.partners.get(event.operation, (event,))
        able = [self.able_s.get(partner.operation) for partner in together]
        begin_s = [moment for moment in able if moment is not None]
        if len(begin_s) < len(together):
            return  # Those that start with it come after it, and they take time.
        for partner in together:
            del self.able_s[partner.operation]
            self._run(partner, reduce(np.maximum, begin_s))

    def _able_s(self, event: OperationEvent) -> FloatArray:
        """Return when nothing of its own is in an operation's way."""
        self._wait(event.device, event.start_s)
        # Whatever the operation needs from its own device came before it in the device's order.
        begin_s = self.free_s[event.device]
        if event.operation.kind != "W":
            begin_s = np.maximum(begin_s, self.result_s.pop(_input(event.operation), begin_s))
        return begin_s

    def _run(self, event: OperationEvent, begin_s: FloatArray) -> None:
        stage, kind, _ = event.operation
        factors = self.factors.operation(event)
        end_s = begin_s + (event.end_s - event.start_s) * factors
        self.free_s[event.device] = end_s
        is_sent = stage < self.last if kind == "F" else kind != "W" and stage > 0
        if is_sent:
            self.result_s[_result(event.operation)] = end_s
        if kind in "BW":
            self.last_backwards[stage, event.device] = _Backward(event, begin_s, end_s, factors)

    def _transfer(self, event: TransferEvent) -> None:
        begin_s = self.result_s[_result(event.operation)]
        for device, blocks in self._ends(event):
            if blocks:
                self._wait(device, event.start_s)
                begin_s = np.maximum(begin_s, self.free_s[device])
        for resource in event.occupied:
            begin_s = np.maximum(begin_s, self.free_again_s[resource])
        end_s = begin_s + (event.end_s - event.start_s) * self.factors.transfer(event)
        for resource in event.occupied:
            self.free_again_s[resource] = end_s
        for device, blocks in self._ends(event):
            if blocks:
                self.under_way[device].append((event.end_s, end_s))
        self.result_s[_result(event.operation)] = end_s

    def _ends(self, event: TransferEvent) -> tuple[tuple[str, bool], tuple[str, bool]]:
        """Return the devices of a message, and whether each waits for it."""
        moves = event.end_s > event.start_s
        return (
            (event.source, moves and self.sends_block),
            (event.target, moves and self.receives_block),
        )

    def _wait(self, device: str, until_s: float) -> None:
        """Let a device go on after the messages that had ended at a time without noise."""
        ended = [end_s for planned_s, end_s in self.under_way[device] if planned_s <= until_s]
        if ended:
            self.free_s[device] = reduce(np.maximum, ended, self.free_s[device])
            left = [row for row in self.under_way[device] if row[0] > until_s]
            self.under_way[device] = left

    def _synchronise(self) -> None:
        network_free_s: defaultdict[str, FloatArray] = defaultdict(_begin)
        done_s = {device: self.free_s[device] for device in self.timeline.pipeline.devices}
        for event in self.timeline.synchronisations:
            devices = event.synchronisation.devices
            before = [network_free_s[device] for device in devices]
            begin_s = reduce(np.maximum, [*before, *self._ready_s(event, done_s)], _begin())
            end_s = begin_s + (event.end_s - event.start_s) * self.factors.synchronisation(event)
            for device in devices:
                network_free_s[device] = end_s
                self.free_s[device] = np.maximum(self.free_s[device], end_s)

    def _ready_s(
        self, event: SynchronisationEvent, done_s: Mapping[str, FloatArray]
    ) -> Iterator[FloatArray]:
        """Yield the times that the gradients of a reduction wait for."""
        stages, devices = event.synchronisation.stages, event.synchronisation.devices
        match self.timeline.pipeline.behaviour.reduction:
            case "flush":
                yield from done_s.values()
            case "device":
                yield from (done_s[device] for device in devices)
            case _:
                for member in product(stages, devices):
                    if member in self.last_backwards:
                        made_s = self.timeline.made_s[event.number, *member]
                        yield self.last_backwards[member].ready_s(made_s)


def _begin() -> FloatArray:
    """Return the start of the iteration, in every sample."""
    return np.zeros(1)
