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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError
from planner.simulation.timeline import Timeline

if TYPE_CHECKING:
    from planner.program.replay import Times

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


def times_under_noise(timeline: Timeline, noise: Noise) -> NoisyTimes:
    """Return the iteration times of a timeline's orders with random durations.

    Devices, links and all-reduces keep their orders; see :class:`OrderedTimes`.

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
    times, found = OrderedTimes(timeline), []
    for begin in range(0, noise.samples, BATCH):
        size = min(BATCH, noise.samples - begin)
        found.append(times.times_s(_factors(noise, times, size, durations, slowness)))
    return np.concatenate(found)


class OrderedTimes:
    """The iteration times of a timeline's orders with other durations.

    Devices, links and all-reduces keep the orders of the timeline, even where another event is
    ready sooner: orders are part of the plan, and the members of a group must agree on the order of
    all-reduces. What shared links in the timeline is as much slower here, whenever it is on them.

    Args:
        timeline: a replay without noise.

    Attributes:
        timeline: the same.
        program: its tasks, T of them.
        is_operation, is_message, is_step: T; which tasks are operations, messages between stages,
            and optimizer steps.
        is_forward: T; which of these operations and messages are forwards and activations.
        drawn: the tasks whose durations vary, in order of start; copies of stashes do not.
    """

    def __init__(self, timeline: Timeline) -> None:
        # numba takes half a second to import, so only who replays anything waits for that.
        from planner.program.lower.lower import lower_orders
        from planner.program.paths import Paths
        from planner.program.program import COMPUTE, KINDS, STEP
        from planner.program.replay import replay

        lowered = lower_orders(timeline.pipeline, timeline.orders)
        self.timeline, self.program = timeline, lowered.program
        times = replay(self.program)
        self._paths = Paths(self.program, times)
        tasks = self.program.tasks
        self.is_operation, self.is_step = tasks["role"] == COMPUTE, tasks["role"] == STEP
        self.is_forward, self._is_weight = (tasks["kind"] == KINDS.index(kind) for kind in "FW")
        self.is_message = ~self.is_operation & (np.arange(len(tasks)) < lowered.copies.start)
        first = int(self.program.numbers["first_late"])
        steps = first + len(timeline.synchronisations)
        gathers = steps + len(timeline.pipeline.devices)
        late = [np.arange(*ends) for ends in ((first, steps), (gathers, len(tasks)))]
        reduced, gathered = (row[np.argsort(times.start_s[row], kind="stable")] for row in late)
        early = self._in_order(times)
        self.drawn = np.concatenate([early, reduced, np.arange(steps, gathers), gathered])

    def _in_order(self, times: Times) -> NDArray[np.int64]:
        """Return operations and messages, each after all that it waits for.

        Tasks are sorted by start. Of those without duration at one moment, operations keep the
        order in which they were started and each message follows its producer.
        """
        tasks, rank = self.program.tasks, np.zeros(len(times.start_s), np.int64)
        ran = times.order[np.argsort(times.start_s[times.order], kind="stable")]
        rank[ran] = np.arange(len(ran))
        made_by = np.where(self.is_message, np.where(self.is_forward, -1, 1), 0) + tasks["stage"]
        results = [
            *zip(made_by.tolist(), self.is_forward, tasks["microbatch"].tolist(), strict=True)
        ]
        makes = np.flatnonzero(self.is_operation & ~self._is_weight)
        rank_of = {results[n]: rank[n] for n in makes}
        for n in np.flatnonzero(self.is_message):
            rank[n] = rank_of[results[n]]
        early = np.flatnonzero(self.is_operation | self.is_message)
        keys = (self.is_message[early], rank[early], times.start_s[early])
        return early[np.lexsort(keys)]

    def times_s(self, factors: FloatArray) -> FloatArray:
        """Return the iteration time of each sample, in seconds.

        Args:
            factors: on the duration of each task: samples x T.
        """
        return self._paths.times_s(factors)


def _factors(
    noise: Noise,
    times: OrderedTimes,
    size: int,
    durations: np.random.Generator,
    slowness: np.random.Generator,
) -> FloatArray:
    """Return lognormal factors of mean 1, on the tasks of slow devices times their slowdown.

    exp(m + v/2) = 1, and the variance exp(v) - 1 is the square of the jitter.
    """
    pipeline, tasks = times.timeline.pipeline, times.program.tasks[times.drawn]
    numbers = pipeline.problem.cluster.numbers
    is_slow = slowness.random((len(numbers), size)) < noise.slow_probability
    on_device = (times.is_operation | times.is_step)[times.drawn]
    device = np.array([numbers[name] for name in pipeline.devices])[
        np.where(on_device, tasks["resource"], 0)
    ]
    slowdown = np.where(is_slow[device] & on_device[:, None], noise.slow_factor, 1.0)
    moved = noise.jitter if noise.transfer_jitter is None else noise.transfer_jitter
    variance = np.array([math.log1p(share**2) for share in (moved, noise.jitter)])
    means, deviations = (row[on_device.astype(int), None] for row in (-variance / 2, variance**0.5))
    drawn = durations.lognormal(means, deviations, (len(tasks), size))
    found = np.ones((size, len(times.program.tasks)))
    found[:, times.drawn] = (slowdown * drawn).T
    return found
