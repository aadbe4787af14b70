"""PS+ against both parameter servers, simulated and really."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.sync.claims import Claim, Outcome, extremes
from benchmarks.sync.figures import TARGET_SHARE, Measured, Runs, Spread, compare, ratio
from benchmarks.sync.loopback import ITERATION_S, PIPELINES, REGIME, SETTINGS
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.real import RATES
from benchmarks.sync.settings import ASYNC, EAGER, SERVER, Grid
from benchmarks.sync.simulated import (
    LATENCY_S,
    Simulated,
    flat_world,
    simulate_all,
    tuned_rates,
)
from executor.training.optimizer import MOMENTUM

FEWER_TIME, FEWER_ITERATIONS = 0.54, 0.37
"""The gains of Jin's thesis: less time an iteration, and fewer iterations."""
MODULATIONS = (EAGER, f"{EAGER}:modulation=exponential", f"{EAGER}:modulation=constant")
STRATEGIES = (SERVER, ASYNC, *MODULATIONS)
REAL = ("one_5x_slow", "random_sleeps")
"""Settings in which gradients are of different ages."""
REAL_STEPS = 60
TRIED_RATES = (0.00625, 0.0125, *RATES)
"""Staleness acts as more momentum, so that asynchronous servers may do best at small rates."""
REAL_RATES = (0.0125, 0.025, 0.05, 0.1, 0.2)
"""Learning rates that real servers try with momentum; ten times as much is tried without."""
COLUMNS = (
    *("setting", "strategy", "learning rate, momentum", "shares/s"),
    *("shares to the held-out loss", "seconds to it"),
)


def servers_section(seeds: int, *, short: bool) -> Outcome:
    """Return PS+ with each modulation against both parameter servers, each tuned alike."""
    settings = list(_settings(short=short))
    rates = tuned_rates(settings, STRATEGIES, TRIED_RATES, seeds)
    found = simulate_all(settings, STRATEGIES, seeds, rates=rates)
    claims = _claims({s.name: s.regime for s in settings}, found, is_real=False)
    tuned = {
        name: {strategy: f"{rate:g}, {MOMENTUM:g}" for strategy, rate in row.items()}
        for name, row in rates.items()
    }
    return Outcome(claims, COLUMNS, _rows(found, tuned), _server_lines(found, "simulated"))


def real_servers_section(seeds: int, steps: int | None) -> Outcome:
    """Return the same of real processes where gradients are of different ages.

    Args:
        seeds: how many.
        steps: of each training; None: 60.
    """
    plan = pipelines_plan(PIPELINES, ITERATION_S)
    found: dict[str, Runs] = {}
    tuned: dict[str, Mapping[str, str]] = {}
    for name in REAL:
        setting = {name: SETTINGS[name]}
        # A setting at a time: each strategy has its best rate there.
        grid = Grid(
            *(plan, setting, STRATEGIES, seeds, steps or REAL_STEPS),
            rates=REAL_RATES,
            momenta=(0.0, MOMENTUM),
        )
        trained = grid.train()
        found |= trained.runs
        tuned[name] = {
            strategy: f"{best.rate:g}, {best.momentum:g}" for strategy, best in trained.best.items()
        }
    claims = _claims({name: REGIME + SETTINGS[name].regime for name in REAL}, found, is_real=True)
    return Outcome(claims, COLUMNS, _rows(found, tuned), _server_lines(found, "real"))


def _claims(regimes: Mapping[str, str], found: Mapping[str, Runs], *, is_real: bool) -> list[Claim]:
    claims = []
    for rival in (SERVER, ASYNC):
        told = f"share of the time of an iteration that PS+ saves against `{rival}`"
        less = [_less_time(regime, found[name], rival) for name, regime in regimes.items()]
        claims += extremes(told, less, FEWER_TIME, is_real=is_real)
        for ours in MODULATIONS:
            told = f"share of the iterations to a held-out loss that `{ours}` saves against "
            fewer = [
                (regime, _fewer(found[name], ours, rival), None) for name, regime in regimes.items()
            ]
            claims += extremes(f"{told}`{rival}`", fewer, FEWER_ITERATIONS, is_real=is_real)
    return claims


def _rows(found: Mapping[str, Runs], tuned: Mapping[str, Mapping[str, str]]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name, runs in found.items():
        targets = _targets(runs[SERVER])
        for strategy, mine in runs.items():
            shares = [r.shares_to(loss) for r, loss in zip(mine, targets, strict=True)]
            times = [r.time_to_s(loss) for r, loss in zip(mine, targets, strict=True)]
            speed = Spread(tuple(r.shares_per_s for r in mine))
            how = tuned[name][strategy]
            rows.append([name, f"`{strategy}`", how, str(speed), _told(shares), _told(times)])
    return rows


def _settings(*, short: bool) -> Iterator[Simulated]:
    slownesses = {
        "steady": "steady",
        "random sleeps": "sleep:0.1:0.3",
        "one 4x slow": "slow:0x4",
    }
    links = ((0.5, LATENCY_S), (1, LATENCY_S), (2, LATENCY_S), (0.2, 0.08))
    for workers in (8,) if short else (8, 64):
        for busy, latency_s in links[:1] if short else links:
            for name, slowness in slownesses.items():
                yield Simulated(
                    f"servers_{workers}_{busy:g}_{1000 * latency_s:g}ms_{name.replace(' ', '_')}",
                    f"{workers} workers, one server, whose card takes {busy:g} of the computation "
                    f"each way, latency {1000 * latency_s:g} ms, {name}; each strategy at its best "
                    f"of {len(TRIED_RATES)} learning rates",
                    flat_world(workers, 2 * busy / workers, latency_s=latency_s),
                    slowness,
                )


def _server_lines(found: Mapping[str, Runs], kind: str) -> list[dict[str, object]]:
    lines = []
    for name, runs in found.items():
        for strategy in runs:
            over = compare(runs, strategy, SERVER, SERVER)
            to_loss = over.time_to_loss
            lines.append(
                {
                    **{"strategy": strategy, "setting": name, "against": SERVER},
                    "throughput_ratio": round(over.throughput.mean, 4),
                    "time_to_loss_ratio": None if to_loss is None else round(to_loss.mean, 4),
                    "seeds": len(over.throughput.values),
                    "spread": [round(over.throughput.least, 4), round(over.throughput.most, 4)],
                    "runs": kind,
                }
            )
    return lines


def _less_time(regime: str, runs: Runs, rival: str) -> tuple[str, Spread, Spread]:
    row = compare(runs, EAGER, rival, SERVER)
    less = Spread(tuple(1 - 1 / value for value in row.throughput.values))
    return regime, less, row.final_loss


def _targets(runs: Sequence[Measured]) -> list[float]:
    return [run.loss_after(TARGET_SHARE) for run in runs]


def _fewer(runs: Runs, ours: str, rival: str) -> Spread | None:
    targets = _targets(runs[SERVER])
    mine = [run.shares_to(loss) for run, loss in zip(runs[ours], targets, strict=True)]
    theirs = [run.shares_to(loss) for run, loss in zip(runs[rival], targets, strict=True)]
    return _saved(mine, theirs)


def _saved(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Spread | None:
    part = ratio(ours, theirs)
    return None if part is None else Spread(tuple(1 - value for value in part.values))


def _told(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return str(Spread(tuple(known))) if len(known) == len(values) else "not there"
