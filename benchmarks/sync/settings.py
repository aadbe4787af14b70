"""Real trainings of several strategies in several settings, in one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from benchmarks.sync.figures import Measured, Runs
from benchmarks.sync.real import LEARNING_RATE, Training, train_all
from benchmarks.testbed.network import Testbed
from executor.emulation.pace import Pace
from executor.training.optimizer import MOMENTUM
from planner.measured.sync_trace import SyncTrace
from planner.plan.plan import Plan
from planner.sync.simulation.comparison import ALL_STRATEGIES, learner_of
from planner.sync.strategies import parse_sync, sync_name

PLAIN, OVERLAPPED = "all_reduce:overlap=false", "all_reduce"
STATIC, DRAWN = "partial_all_reduce:schedule=static", "partial_all_reduce"
DRAWN_BEHIND = "partial_all_reduce:group_size=2,overlap=true"
SEMI, SEMI_BEHIND = "semi_decentralized", "semi_decentralized:overlap=true"
PAIRS, MATCHING = "ad_psgd", "ad_psgd:pairs=matching"
SERVER, ASYNC, EAGER = (
    "parameter_server",
    "parameter_server:mode=async",
    "eager_parameter_server",
)
WAVES = "wave_synchronous"
PARTIAL = (DRAWN, DRAWN_BEHIND, SEMI, SEMI_BEHIND)
"""Averages over groups; AD-PSGD's pairs are no partial all-reduce."""
WAITING = (OVERLAPPED, SERVER, MATCHING, DRAWN)
"""One strategy of each kind whose workers wait for each other. Which form of AD-PSGD SDPipe's
authors ran we do not know; the bar itself is against every strategy."""
Tried = TypeVar("Tried", float, "Descent")
SHORT_STRATEGIES = (PLAIN, OVERLAPPED, SERVER, PAIRS, STATIC, DRAWN, SEMI, SEMI_BEHIND)


def strategies_of(*, short: bool) -> tuple[str, ...]:
    """Names of the strategies that are run."""
    return SHORT_STRATEGIES if short else tuple(sync_name(sync) for sync in ALL_STRATEGIES)


@dataclass(frozen=True)
class Setting:
    """The differences between the ranks.

    Attributes:
        regime: in words.
        slow: by rank.
        sleep_probability, sleep_s: of an iteration.
    """

    regime: str
    slow: Mapping[str, float] = field(default_factory=dict)
    sleep_probability: float = 0.0
    sleep_s: float = 0.0

    @property
    def pace(self) -> Pace:
        """Return the trainings' delays; each seed has its own pauses."""
        slow = {int(rank): factor for rank, factor in self.slow.items()}
        return Pace(slow, self.sleep_probability, self.sleep_s)


class Descent(NamedTuple):
    """What a strategy is tuned by.

    Attributes:
        rate: the learning rate.
        momentum: of the optimizer.
    """

    rate: float
    momentum: float


@dataclass(frozen=True)
class Trained:
    """The results of trainings.

    Attributes:
        runs: by setting.
        traces: by setting, of the first seed; none if no strategy is traced.
        best: what each strategy was tuned to.
    """

    runs: Mapping[str, Runs]
    traces: Mapping[str, SyncTrace]
    best: Mapping[str, Descent]

    @property
    def rates(self) -> dict[str, float]:
        """Return the learning rates by strategy."""
        return {strategy: descent.rate for strategy, descent in self.best.items()}


@dataclass(frozen=True)
class Grid:
    """Every strategy in every setting, with every seed.

    Attributes:
        plan: that all train by.
        settings: by name.
        strategies: their names.
        seeds: how many.
        steps: of all pipelines on average.
        syncs: by strategy, what it is if that is not its name.
        traced: the strategy that writes traces, if any.
        rates: learning rates, of which each strategy has its best: that of the least held-out loss
            in the first setting, with a seed that does not count. Strategies that compute the same
            weights have the same.
        momenta: tried with each of them. With one other than :data:`MOMENTUM`, the rate is such
            that equal gradients lead as far.
    """

    plan: Plan
    settings: Mapping[str, Setting]
    strategies: Sequence[str]
    seeds: int
    steps: int
    syncs: Mapping[str, str] = field(default_factory=dict)
    traced: str | None = None
    rates: Sequence[float] = (LEARNING_RATE,)
    momenta: Sequence[float] = (MOMENTUM,)

    @property
    def descents(self) -> list[Descent]:
        """Return what each strategy has its best of."""
        return [
            Descent(rate * (1 - momentum) / (1 - MOMENTUM), momentum)
            for momentum in self.momenta
            for rate in self.rates
        ]

    @property
    def trainings(self) -> dict[tuple[str, str, int], Training]:
        """Return the trainings by setting, strategy and seed."""
        return {
            (setting, strategy, seed): self._training(
                f"{setting}.{self.strategies.index(strategy)}.{seed}", setting, strategy, seed
            )
            for seed in range(self.seeds)
            for setting in self.settings
            for strategy in self.strategies
        }

    def _training(self, name: str, setting: str, strategy: str, seed: int) -> Training:
        paced = self.settings[setting]
        return Training(
            name=name,
            plan="plan",
            sync=self.syncs.get(strategy, strategy),
            steps=self.steps,
            seed=seed,
            slow=paced.slow,
            sleep_probability=paced.sleep_probability,
            sleep_s=paced.sleep_s,
            sync_trace=strategy == self.traced,
        )

    def train(self, testbed: Testbed | None = None) -> Trained:
        """Run them all, one after the other.

        Args:
            testbed: whose shaped links data goes over; None: loopback.
        """
        best = self._tuned(testbed)
        trainings = {
            name: _with(training, best[name[1]]) for name, training in self.trainings.items()
        }
        found = train_all({"plan": self.plan}, list(trainings.values()), testbed)
        runs: dict[str, dict[str, list[Measured]]] = {}
        for (setting, strategy, _), training in trainings.items():
            of_setting = runs.setdefault(setting, {})
            of_setting.setdefault(strategy, []).append(found.runs[training.name])
        traces = {
            setting: found.traces[training.name]
            for (setting, _, seed), training in trainings.items()
            if training.sync_trace and seed == 0
        }
        return Trained(runs, traces, best)

    def _tuned(self, testbed: Testbed | None) -> dict[str, Descent]:
        """Return the best of each strategy."""
        if len(self.descents) == 1:
            return dict.fromkeys(self.strategies, self.descents[0])
        learners = learners_of(self.strategies)
        first = next(iter(self.settings))
        tried = {
            (learner, descent): replace(
                _with(
                    self._training(f"tuning.{number}.{place}", first, learner, self.seeds), descent
                ),
                sync_trace=False,
            )
            for number, learner in enumerate(dict.fromkeys(learners.values()))
            for place, descent in enumerate(self.descents)
        }
        runs = train_all({"plan": self.plan}, list(tried.values()), testbed).runs
        losses = {name: runs[training.name].final_loss for name, training in tried.items()}
        best = best_of(losses)
        return {name: best[learner] for name, learner in learners.items()}


def _with(training: Training, descent: Descent) -> Training:
    return replace(training, learning_rate=descent.rate, momentum=descent.momentum)


def learners_of(strategies: Sequence[str]) -> dict[str, str]:
    """Return by strategy the one whose learning rate it takes: that which has the same weights."""
    return {name: sync_name(learner_of(parse_sync(name))) for name in strategies}


def best_of(losses: Mapping[tuple[str, Tried], float]) -> dict[str, Tried]:
    """Return what each strategy has its least loss with; what diverged comes last."""
    rows: dict[str, list[tuple[float, Tried]]] = {}
    for (strategy, tried), loss in losses.items():
        rows.setdefault(strategy, []).append((math.inf if math.isnan(loss) else loss, tried))
    return {strategy: min(row)[1] for strategy, row in rows.items()}
