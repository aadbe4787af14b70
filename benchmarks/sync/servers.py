"""PS+ against both parameter servers, simulated."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.sync.claims import Outcome, extremes
from benchmarks.sync.figures import TARGET_SHARE, Measured, Runs, Spread, compare, ratio
from benchmarks.sync.settings import ASYNC, EAGER, SERVER
from benchmarks.sync.simulated import ITERATIONS, LATENCY_S, Simulated, flat_world, simulate_all

FEWER_TIME, FEWER_ITERATIONS = 0.54, 0.37
"""The gains of Jin's thesis: less time an iteration, and fewer iterations."""
EARLY = 40
"""Iterations of a training whose target comes while the momentum of a synchronous server grows
still; who steps on every gradient has that behind it sooner."""


def servers_section(seeds: int, *, short: bool) -> Outcome:
    """PS+ against both parameter servers, over communication and slowness."""
    constant = f"{EAGER}:modulation=constant"
    settings = [
        Simulated(
            f"servers_{workers}_{busy:g}_{1000 * latency_s:g}ms_{name.replace(' ', '_')}_"
            f"{iterations}",
            f"{workers} workers, one server, whose card takes {busy:g} of the computation each "
            f"way, latency {1000 * latency_s:g} ms, {name}, {iterations} iterations",
            flat_world(workers, 2 * busy / workers, latency_s=latency_s),
            slowness,
            iterations,
        )
        for iterations in (EARLY, ITERATIONS)
        for workers in (8, 64)
        for busy, latency_s in ((0.5, LATENCY_S), (1, LATENCY_S), (2, LATENCY_S), (0.2, 0.08))
        for name, slowness in (("steady", "steady"), ("random sleeps", "sleep:0.1:0.3"))
    ]
    found = simulate_all(settings, (SERVER, ASYNC, EAGER, constant), seeds)
    regimes, claims = [setting.regime for setting in settings], []
    for rival in (SERVER, ASYNC):
        less = [
            (_saved([r.shares_per_s for r in runs[rival]], [r.shares_per_s for r in runs[EAGER]]))
            for runs in (found[setting.name] for setting in settings)
        ]
        told = f"share of the time of an iteration that PS+ saves against `{rival}`"
        claims += extremes(told, regimes, less, FEWER_TIME)
        for ours in (EAGER, constant):
            told = f"share of the iterations to the loss that `{ours}` saves against `{rival}`"
            fewer = [_fewer(found[setting.name], ours, rival) for setting in settings]
            claims += extremes(told, regimes, fewer, FEWER_ITERATIONS)
    columns = ("setting", "strategy", "shares/s", "shares to the loss", "seconds to the loss")
    rows = []
    for name, runs in found.items():
        targets = _targets(runs[SERVER])
        for strategy, mine in runs.items():
            shares = [r.shares_to(loss) for r, loss in zip(mine, targets, strict=True)]
            times = [r.time_to_s(loss) for r, loss in zip(mine, targets, strict=True)]
            rates = Spread(tuple(r.shares_per_s for r in mine))
            rows.append([name, f"`{strategy}`", str(rates), _told(shares), _told(times)])
    return Outcome(claims, columns, rows, _server_lines(found))


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
