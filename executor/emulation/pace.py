"""Operations at the speed of other machines: each waits until its predicted time is over.

A slow device thus costs no processor, and many fit on one. What is announced within an operation,
such as a complete gradient, is announced when the emulated device would have reached its layer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from executor.sync.protocol import Synchronisation
from planner.costs.layer_moments import LayerMoments, Moments
from planner.costs.placement import place_plan
from planner.costs.roofline import OperationTimes
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.plan import Plan

_AT_ONCE_S = 1e-4
"""A wait shorter than this found its message there."""


@dataclass
class DeviceTime:
    """The time at which the emulated device is free, in :func:`time.perf_counter` seconds.

    Attributes:
        factor: every operation takes so many times as long.
        most_late_s: lateness up to this is made up for by the operations that follow, as that of a
            sleep that woke late; the device is busy for what is more.
    """

    factor: float = 1.0
    most_late_s: float = math.inf
    _free_at_s = 0.0
    _ready_s = 0.0
    _start_s = 0.0

    def waited(self, start_s: float, end_s: float) -> None:
        """The next operation's input was waited for from ``start_s`` to ``end_s``."""
        self._ready_s = end_s if end_s - start_s > _AT_ONCE_S else 0.0

    def begin(self, pause_s: float = 0.0) -> None:
        """An iteration starts now, or after a pause."""
        if pause_s:
            time.sleep(pause_s)
        self._free_at_s = time.perf_counter()
        self._ready_s = 0.0

    def begin_operation(self) -> None:
        """An operation starts when the device is free and its input was there."""
        self._start_s = max(self._free_at_s, self._ready_s)
        self._ready_s = 0.0

    def reach(self, seconds: float) -> None:
        """Be busy until so many seconds of the operation have passed."""
        self._free_at_s = self._start_s + seconds * self.factor
        left = self._free_at_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        elif -left > self.most_late_s:
            self._free_at_s = time.perf_counter()

    def idle_until_now(self) -> None:
        """Let the next operation start now: the device has waited for something else."""
        self._free_at_s = max(self._free_at_s, time.perf_counter())


MOST_LATE_S = 2e-3
"""A sleep that wakes later has waited for a processor."""
_MOST = 1e6


@dataclass(frozen=True)
class Pace:
    """The difference of the operations' times from the plan's costs.

    Attributes:
        slow: by rank, how many times as long its operations take; 1 for the others.
        sleep_probability: that a rank pauses at the beginning of an iteration.
        sleep_s: for how long.
        seed: of the pauses.
        ranks: of the plan that the ranks here are; None: the same.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    sleep_probability: float = 0.0
    sleep_s: float = 0.0
    seed: int = 0
    ranks: tuple[int, ...] | None = None

    def of(self, ranks: Sequence[int]) -> Pace:
        """Return the pace of some of the ranks, which are numbered from 0 then."""
        return replace(self, ranks=tuple(ranks))

    @classmethod
    def parse(cls, slow: str | None, sleep: str | None, seed: int = 0) -> Pace:
        """Read ``RANK=FACTOR[,RANK=FACTOR]`` and ``PROBABILITY:SECONDS``.

        Raises:
            PipeplanError: naming what cannot be read.
        """
        factors = {}
        for part in slow.split(",") if slow else ():
            rank, _, factor = part.partition("=")
            if not rank.strip().isdecimal():
                raise PipeplanError(f"slow: {part!r} is not RANK=FACTOR; write it as 1=2.0,3=4.0")
            factors[int(rank)] = _number(factor, f"slow: {part!r}", 1e-3, _MOST)
        if not sleep:
            return cls(factors, seed=seed)
        probability, _, seconds = sleep.partition(":")
        return cls(
            factors,
            _number(probability, f"sleep: {sleep!r}", 0, 1),
            _number(seconds, f"sleep: {sleep!r}", 0, _MOST),
            seed,
        )

    def require_ranks(self, count: int) -> None:
        """Refuse to slow down ranks that there are not.

        Raises:
            PipeplanError: naming them.
        """
        strange = sorted(rank for rank in self.slow if rank >= count)
        if strange:
            told = ", ".join(map(str, strange))
            raise PipeplanError(
                f"slow: there is no rank {told}; the plan has ranks 0 to {count - 1}"
            )

    def time_of(self, rank: int, most_late_s: float = MOST_LATE_S) -> DeviceTime:
        """The time of a rank's device."""
        return DeviceTime(self.slow.get(self._in_plan(rank), 1.0), most_late_s)

    def pause_s(self, rank: int, iteration: int) -> float:
        """Return the pause before a rank's n-th iteration; the same in every run of one seed."""
        drawn = random.Random(f"{self.seed} {self._in_plan(rank)} {iteration}").random()
        return self.sleep_s if drawn < self.sleep_probability else 0.0

    def _in_plan(self, rank: int) -> int:
        return rank if self.ranks is None else self.ranks[rank]


def _number(text: str, what: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise PipeplanError(f"{what}: {text!r} is not a number") from None
    if not least <= value <= most:
        raise PipeplanError(f"{what}: {value:g} is not from {least:g} to {most:g}")
    return value


class Pacer:
    """Makes each operation of a rank last as long as the plan says.

    It observes operations: before one it holds back what the stage announces, after it waits until
    each announcement is due and the operation's time is over.

    Args:
        synchronisation: the strategy, which is told of parameters when it would be on the emulated
            device.
        clock: the emulated device's time.
        times: of the operations, by stage.
        moments: of the layers, by stage.
        pauses: seconds to pause before each iteration.
        optimizer_s: seconds that the optimizer step takes after the update; 0: its own time.
    """

    def __init__(
        self,
        synchronisation: Synchronisation,
        clock: DeviceTime,
        times: Mapping[int, OperationTimes],
        moments: Mapping[int, LayerMoments],
        pauses: Iterator[float],
        optimizer_s: float = 0.0,
    ) -> None:
        self.clock = clock
        self.moments = moments
        self._synchronisation = synchronisation
        self._times = times
        self._pauses = pauses
        self._optimizer_s = optimizer_s
        self._needed: Moments = {}
        self._held: list[str] | None = None

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        rank: int,
        pace: Pace,
        names: Collection[str],
        synchronisation: Synchronisation,
        *,
        emulates: bool = False,
    ) -> Pacer:
        """Pace a rank by its plan's costs.

        Args:
            plan: verified.
            rank: this process's.
            pace: how operations differ from the plan's costs.
            names: the parameters whose moments matter.
            synchronisation: the strategy.
            emulates: whether nothing is computed; then the optimizer step is timed as well, and
                ranks that share a processor make up for all they lost to each other.
        """
        pipeline, device = place_plan(plan), plan.ranks[rank]
        stages = pipeline.stages_on[device]
        return cls(
            synchronisation,
            pace.time_of(rank, math.inf if emulates else MOST_LATE_S),
            {index: pipeline.stages[index].times[device] for index in stages},
            {index: LayerMoments.of(pipeline, index, device, names) for index in stages},
            (pace.pause_s(rank, iteration) for iteration in count(1)),
            pipeline.optimizer_s[device] if emulates else 0.0,
        )

    def begin_iteration(self) -> None:
        """Pause if this iteration has a pause, and start the emulated device's time."""
        self.clock.begin(next(self._pauses))

    def ready(self, name: str) -> None:
        """Announce a complete gradient, at once or when it is due in the operation that runs."""
        if self._held is None:
            self._synchronisation.ready(name)
        else:
            self._held.append(name)

    def before_use(self, names: Sequence[str]) -> None:
        """Wait for the moment in a forward at which a layer needs parameters."""
        due = [self._needed[name] for name in names if name in self._needed]
        if due:
            self.clock.reach(max(due))
        self._synchronisation.before_use(names)

    def before(self, operation: Operation) -> None:
        """Start an operation on the emulated device."""
        self.clock.begin_operation()
        if operation.kind == "F":
            self._needed = self.moments[operation.stage].needed
        else:
            self._held = []

    def after(self, operation: Operation) -> None:
        """Announce what the operation has completed at its moments, and wait until it is over."""
        seconds = self._times[operation.stage].seconds(operation.kind)
        complete = self.moments[operation.stage].complete.get(operation.kind, {})
        held, self._held, self._needed = self._held or [], None, {}
        for name in sorted(held, key=lambda name: complete.get(name, seconds)):
            self.clock.reach(complete.get(name, seconds))
            self._synchronisation.ready(name)
        self.clock.reach(seconds)

    def after_update(self) -> None:
        """Let the time of an emulated optimizer step pass."""
        if self._optimizer_s:
            self.clock.idle_until_now()
            self.clock.begin_operation()
            self.clock.reach(self._optimizer_s)
