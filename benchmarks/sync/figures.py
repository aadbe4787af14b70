"""What runs of a strategy come to: shares a second, time to a loss, ratios and their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WARM_UP = 5
"""Steps of each pipeline that do not count."""
TARGET_SHARE = 0.5
"""The target is the loss that all-reduce has reached after this share of its work."""


@dataclass(frozen=True)
class Step:
    """A step of a pipeline, or of all of them together.

    Attributes:
        end_s: on one clock for all pipelines.
        seconds: that it took.
    """

    end_s: float
    seconds: float


@dataclass(frozen=True)
class Look:
    """The state of a training at some moment.

    Attributes:
        at_s: since its beginning.
        shares: that are done.
        loss: held-out loss of the mean model.
    """

    at_s: float
    shares: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """A training, real or simulated.

    Attributes:
        shares_per_s: committed in steady state, by all pipelines together.
        looks: in order of time.
        final_loss: of the mean model after equal work, on held-out samples; simulated: on all.
    """

    shares_per_s: float
    looks: Sequence[Look]
    final_loss: float

    def reached(self, loss: float) -> Look | None:
        """The first moment of a loss at most this, between two looks; None: never."""
        before = self.looks[0]
        for look in self.looks:
            if look.loss <= loss:
                fall = before.loss - look.loss
                part = min(max((before.loss - loss) / fall, 0.0), 1.0) if fall > 0 else 1.0
                return Look(
                    before.at_s + part * (look.at_s - before.at_s),
                    before.shares + part * (look.shares - before.shares),
                    loss,
                )
            before = look
        return None

    def time_to_s(self, loss: float) -> float | None:
        """Return when the loss is reached, in seconds; None if it never is."""
        look = self.reached(loss)
        return None if look is None else look.at_s

    def shares_to(self, loss: float) -> float | None:
        """Return how many work units are done until then."""
        look = self.reached(loss)
        return None if look is None else look.shares

    def loss_after(self, part: float) -> float:
        """The loss after a part of the work."""
        wanted = part * self.looks[-1].shares
        return next(look.loss for look in self.looks if look.shares >= wanted)


def steady_rate(pipelines: Sequence[Sequence[float]], warm_up: int = WARM_UP) -> float:
    """Steps a second of all pipelines, while all of them are under way and warm.

    Between the first and the last end of a step of each that lies in the window, so that where the
    window cuts a long step does not matter.

    Args:
        pipelines: ends of the steps of each, ascending.
        warm_up: steps of each before the window may begin.
    """
    begin_s = max(ends[min(warm_up, len(ends) - 1)] for ends in pipelines)
    end_s = min(ends[-1] for ends in pipelines)
    rates = []
    for ends in pipelines:
        inside = [end for end in ends if begin_s <= end <= end_s]
        if len(inside) > 1:
            rates.append((len(inside) - 1) / (inside[-1] - inside[0]))
        else:  # The window is shorter than a step: take the whole run.
            rates.append((len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0)
    return sum(rates)


def measured(
    pipelines: Sequence[Sequence[Step]],
    shares_per_step: int,
    looks: Sequence[Look],
    final_loss: float,
) -> Measured:
    """A real training's figures.

    Args:
        pipelines: the steps of each; one row where all run in step.
        shares_per_step: that a step of a row is: 1, or all pipelines' where they run in step.
        looks: on the clock of the steps, with the steps of all rows in place of shares.
        final_loss: of the mean model.
    """
    begin_s = min(steps[0].end_s - steps[0].seconds for steps in pipelines)
    mine = [Look(look.at_s - begin_s, shares_per_step * look.shares, look.loss) for look in looks]
    rate = shares_per_step * steady_rate([[step.end_s for step in row] for row in pipelines])
    return Measured(rate, mine, final_loss)


@dataclass(frozen=True)
class Spread:
    """A figure over several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.values)

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)

    def __str__(self) -> str:
        """Mean and range."""
        return f"{self.mean:.2f} ({self.least:.2f}..{self.most:.2f})"


def ratio(ours: Sequence[float | None], others: Sequence[float | None]) -> Spread | None:
    """Seed by seed ours over theirs; None if one of them is not known."""
    known = [a / b for a, b in zip(ours, others, strict=True) if a is not None and b]
    return Spread(tuple(known)) if known and len(known) == len(ours) else None


Runs = Mapping[str, Sequence[Measured]]
"""Trainings by strategy, one a seed."""


@dataclass(frozen=True)
class Compared:
    """A strategy against another, seed by seed.

    Attributes:
        throughput: shares a second over the other's.
        time_to_loss: the other's time to the target over this one's; None: one never reached it.
        final_loss: over the other's.
    """

    throughput: Spread
    time_to_loss: Spread | None
    final_loss: Spread


def compare(runs: Runs, strategy: str, rival: str, target: str = "all_reduce") -> Compared:
    """Figures of a strategy against a rival.

    Args:
        runs: of all of them with the same seeds.
        strategy: one of them.
        rival: another.
        target: the strategy whose loss after :data:`TARGET_SHARE` of its work is the target.
    """
    mine, theirs = runs[strategy], runs[rival]
    targets = [run.loss_after(TARGET_SHARE) for run in runs[target]]
    throughput = ratio([r.shares_per_s for r in mine], [r.shares_per_s for r in theirs])
    final = ratio([r.final_loss for r in mine], [r.final_loss for r in theirs])
    assert throughput is not None
    assert final is not None
    return Compared(
        throughput,
        ratio(
            [run.time_to_s(loss) for run, loss in zip(theirs, targets, strict=True)],
            [run.time_to_s(loss) for run, loss in zip(mine, targets, strict=True)],
        ),
        final,
    )


def json_line(strategy: str, setting: str, found: Compared, **more: Any) -> dict[str, Any]:
    """Return the JSON line of a strategy in a setting."""
    to_loss = found.time_to_loss
    return {
        "strategy": strategy,
        "setting": setting,
        "throughput_ratio": round(found.throughput.mean, 4),
        "time_to_loss_ratio": None if to_loss is None else round(to_loss.mean, 4),
        "final_loss_ratio": round(found.final_loss.mean, 5),
        "seeds": len(found.throughput.values),
        "spread": {
            "throughput_ratio": _ends(found.throughput),
            "time_to_loss_ratio": None if to_loss is None else _ends(to_loss),
        },
        **more,
    }


def _ends(spread: Spread) -> list[float]:
    return [round(spread.least, 4), round(spread.most, 4)]
