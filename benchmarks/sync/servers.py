"""PS+ against both parameter servers, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.sync.claims import Outcome, extremes
from benchmarks.sync.figures import TARGET_SHARE, Measured, Runs, Spread, compare, ratio
from benchmarks.sync.settings import ASYNC, EAGER, SERVER
from benchmarks.sync.simulated import (
    LATENCY_S,
    Simulated,
    flat_world,
    simulate_all,
    tuned_rates,
)

FEWER_TIME, FEWER_ITERATIONS = 0.54, 0.37
"""The gains of Jin's thesis: less time an iteration, and fewer iterations."""
RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
"""Every strategy has its best of these in every setting."""
MODULATIONS = (EAGER, f"{EAGER}:modulation=exponential", f"{EAGER}:modulation=constant")


def servers_section(seeds: int, *, short: bool) -> Outcome:
    """Return PS+ with each modulation against both parameter servers, each tuned alike."""
    settings = list(_settings(short=short))
    strategies = (SERVER, ASYNC, *MODULATIONS)
    rates = tuned_rates(settings, strategies, RATES, seeds)
    found = simulate_all(settings, strategies, seeds, rates=rates)
    claims = []
    for rival in (SERVER, ASYNC):
        told = f"share of the time of an iteration that PS+ saves against `{rival}`"
        claims += extremes(
            told, [_less_time(s.regime, found[s.name], rival) for s in settings], FEWER_TIME
        )
        for ours in MODULATIONS:
            told = f"share of the iterations to a held-out loss that `{ours}` saves against "
            fewer = [(s.regime, _fewer(found[s.name], ours, rival), None) for s in settings]
            claims += extremes(f"{told}`{rival}`", fewer, FEWER_ITERATIONS)
    columns = (
        *("setting", "strategy", "learning rate", "shares/s"),
        *("shares to the held-out loss", "seconds to it"),
    )
    rows = []
    for name, runs in found.items():
        targets = _targets(runs[SERVER])
        for strategy, mine in runs.items():
            shares = [r.shares_to(loss) for r, loss in zip(mine, targets, strict=True)]
            times = [r.time_to_s(loss) for r, loss in zip(mine, targets, strict=True)]
            speed = Spread(tuple(r.shares_per_s for r in mine))
            rate = f"{rates[name][strategy]:g}"
            rows.append([name, f"`{strategy}`", rate, str(speed), _told(shares), _told(times)])
    return Outcome(claims, columns, rows, _server_lines(found))


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
                    f"of {len(RATES)} learning rates",
                    flat_world(workers, 2 * busy / workers, latency_s=latency_s),
                    slowness,
                )


def _server_lines(found: dict[str, Runs]) -> list[dict[str, object]]:
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
                    "runs": "simulated",
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
