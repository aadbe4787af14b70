"""What the runs of a strategy come to: iterations a second, time to a loss, and their ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.harness import Row

WARM_UP = 5
"""Steps of each pipeline that do not count."""
TARGET_SHARE = 0.5
"""The target is the loss that overlapped all-reduce has reached after this share of its work."""
PLAIN, OVERLAPPED = "all_reduce:overlap=false", "all_reduce"


@dataclass(frozen=True)
class Look:
    """The state of a training at some moment.

    Attributes:
        at_s: since its beginning.
        iterations: done by all pipelines together.
        loss: held-out loss of the pipelines' mean model.
    """

    at_s: float
    iterations: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """A training, real or simulated.

    Attributes:
        iterations_per_s: in steady state, of all pipelines together.
        looks: in order of time.
        final_loss: of the mean model after equal work.
    """

    iterations_per_s: float
    looks: Sequence[Look]
    final_loss: float

    def time_to_s(self, loss: float) -> float | None:
        """Return when a loss is reached, between two looks; None if it never is."""
        before = self.looks[0]
        for look in self.looks:
            if look.loss <= loss:
                fall = before.loss - look.loss
                part = min(max((before.loss - loss) / fall, 0.0), 1.0) if fall > 0 else 1.0
                return before.at_s + part * (look.at_s - before.at_s)
            before = look
        return None

    def loss_after(self, part: float) -> float:
        """Return the loss after a part of the work."""
        wanted = part * self.looks[-1].iterations
        return next(look.loss for look in self.looks if look.iterations >= wanted)


Runs = Mapping[str, Sequence[Measured]]
"""Trainings by strategy, one a seed."""


def steady_rate(pipelines: Sequence[Sequence[float]]) -> float:
    """Return steps a second of all pipelines, while all of them are under way and warm.

    Each is counted between its first and its last end of a step that lies in the window, so that
    where the window cuts a long step does not matter.

    Args:
        pipelines: ends of the steps of each in seconds, ascending.
    """
    begin_s = max(ends[min(WARM_UP, len(ends) - 1)] for ends in pipelines)
    end_s = min(ends[-1] for ends in pipelines)
    rate = 0.0
    for ends in pipelines:
        inside = [end for end in ends if begin_s <= end <= end_s]
        # A window that is shorter than a step: the whole run counts.
        counted = inside if len(inside) > 1 else ends
        if len(counted) > 1:
            rate += (len(counted) - 1) / (counted[-1] - counted[0])
    return rate


def rows_of(setting: str, runs: Runs) -> list[Row]:
    """Return a row a strategy: ratios are taken seed by seed, and are above 1 where it is faster.

    Args:
        setting: its name.
        runs: of every strategy with the same seeds, both forms of all-reduce among them.
    """
    plain, over = runs[PLAIN], runs[OVERLAPPED]
    targets = [run.loss_after(TARGET_SHARE) for run in over]
    times_s = [run.time_to_s(loss) for run, loss in zip(over, targets, strict=True)]
    rows = []
    for strategy, mine in runs.items():
        own_s = [run.time_to_s(loss) for run, loss in zip(mine, targets, strict=True)]
        ratios = {
            "against all-reduce": [
                a.iterations_per_s / b.iterations_per_s for a, b in zip(mine, plain, strict=True)
            ],
            "against overlapped": [
                a.iterations_per_s / b.iterations_per_s for a, b in zip(mine, over, strict=True)
            ],
            "to the loss, against overlapped": [
                a / b if a and b else None for a, b in zip(times_s, own_s, strict=True)
            ],
            "held-out loss, over overlapped's": [
                a.final_loss / b.final_loss for a, b in zip(mine, over, strict=True)
            ],
        }
        rate = fmean(run.iterations_per_s for run in mine)
        means = {name: _mean(values) for name, values in ratios.items()}
        rows.append({"setting": setting, "strategy": strategy, "iterations/s": rate, **means})
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean over the seeds; None if one of them did not get there."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
