"""Training at the speed of other machines: operations compute and then wait for their time.

A device that is slow costs no processor so, and many fit on one. What is announced within an
operation, such as a gradient that is complete, is announced when its layer would have come to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from executor.device_time import DeviceTime
from executor.layer_moments import LayerMoments, Moments
from executor.sync.protocol import Synchronisation
from executor.worker import Worker
from planner.costs.roofline import OperationTimes
from planner.errors import PipeplanError

MOST_LATE_S = 2e-3
"""A sleep that wakes later has waited for a processor."""
_MOST = 1e6
Run = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Pace:
    """How the time of operations differs from what the plan's costs say.

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
        """The same for some of the ranks, which are numbered from 0 then."""
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
        """How long a rank pauses before its n-th iteration; the same in every run of one seed."""
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
    """Stands between a rank's stages and its strategy, and holds back what is not due yet.

    Args:
        clock: of the device.
        synchronisation: the strategy.
    """

    def __init__(self, clock: DeviceTime, synchronisation: Synchronisation) -> None:
        self.clock = clock
        self._synchronisation = synchronisation
        self._needed: Moments = {}
        self._held: list[str] | None = None

    def ready(self, name: str) -> None:
        """A gradient is complete, or would be so later in the operation that runs."""
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

    def forward(self, run: Run, seconds: float, needed: Moments) -> tuple[Tensor, ...]:
        """Compute, and wait until the forward's time is over."""
        self.clock.begin_operation()
        self._needed = needed
        results = run()
        self._needed = {}
        self.clock.reach(seconds)
        return results

    def backward(self, run: Run, seconds: float, complete: Moments) -> tuple[Tensor, ...]:
        """Compute, then let time pass and tell of each gradient when it would be complete."""
        self.clock.begin_operation()
        self._held = []
        results = run()
        held, self._held = self._held, None
        for name in sorted(held, key=lambda name: complete.get(name, seconds)):
            self.clock.reach(complete.get(name, seconds))
            self._synchronisation.ready(name)
        self.clock.reach(seconds)
        return results


class PacedWorker:
    """A stage that computes, and takes the time that the plan says.

    Args:
        worker: the stage.
        split: the microbatches whose backward runs in two halves.
        times: of its operations.
        moments: of its layers.
        pacer: of the rank.
    """

    def __init__(
        self,
        worker: Worker,
        split: Iterable[int],
        times: OperationTimes,
        moments: LayerMoments,
        pacer: Pacer,
    ) -> None:
        self._worker = worker
        self._split = frozenset(split)
        self._times = times
        self._moments = moments
        self._pacer = pacer
        self.is_last = worker.is_last
        self.incoming = worker.incoming
        self.returning = worker.returning

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors for the next stage, or the loss."""

        def run() -> tuple[Tensor, ...]:
            return self._worker.forward(microbatch, received)

        return self._pacer.forward(run, self._times.forward_s, self._moments.needed)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients for the stage before."""

        def run() -> tuple[Tensor, ...]:
            return self._worker.backward(microbatch, gradients)

        return self._backward("I" if microbatch in self._split else "B", run)

    def weight_gradients(self, microbatch: int) -> None:
        """The second half of a split backward."""

        def run() -> tuple[Tensor, ...]:
            self._worker.weight_gradients(microbatch)
            return ()

        self._backward("W", run)

    def _backward(self, kind: str, run: Run) -> tuple[Tensor, ...]:
        complete = self._moments.complete.get(kind, {})
        return self._pacer.backward(run, self._times.seconds(kind), complete)

    def require_empty(self) -> None:
        """Every microbatch of the iteration is through."""
        self._worker.require_empty()
