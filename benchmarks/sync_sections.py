"""Sections of the report that the simulator makes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.sync_claims import OVERLAPPED, RUN_COLUMNS, Claim, Outcome, run_lines, run_rows
from benchmarks.sync_figures import TARGET_SHARE, Measured, Runs, Spread, compare, ratio
from benchmarks.sync_loopback import (
    ASYNC,
    DRAWN,
    EAGER,
    MATCHING,
    PAIRS,
    SEMI,
    SERVER,
    STATIC,
    strategies_of,
)
from benchmarks.sync_simulated import Simulated, flat_world, pipeline_world, simulate_all
from planner.sync.simulation.run import simulate_sync
from planner.sync.strategies import parse_sync

FEWER_TIME, FEWER_ITERATIONS, FASTER = 0.54, 0.37, 1.292
"""Of Jin's thesis: less time an iteration, fewer iterations, and faster all-reduce training."""


def links_section(seeds: int, *, short: bool) -> Outcome:
    """Equal workers whose all-reduce takes longer than, or a small part of, their computation."""
    heavy = Simulated(
        "communication_dominates",
        "4 nodes of 4 workers that share a card; all-reduce takes 3x the computation",
        flat_world(16, 3.0, per_node=4),
    )
    light = Simulated(
        "communication_small",
        "8 workers; all-reduce takes 2% of the computation",
        flat_world(8, 0.02),
    )
    found = simulate_all((heavy, light), strategies_of(short=False), seeds)
    runs = found[heavy.name]
    rivals = ((OVERLAPPED, 1.1), (SERVER, 5.1), (MATCHING, 4.3), (PAIRS, 4.3))
    told = "time to the loss, static partial all-reduce over "
    claims = [
        Claim(f"{told}`{rival}`", heavy.regime, False, bar, _to_loss(runs, STATIC, rival))
        for rival, bar in rivals
    ]
    told = "time to the loss, semi_decentralized over overlapped all-reduce"
    other = _to_loss(found[light.name], SEMI, OVERLAPPED)
    claims.append(Claim(told, light.regime, False, 0.97, other))
    return _outcome(claims, found)


def slow_section(seeds: int, *, short: bool) -> Outcome:
    """One of sixteen workers is slow."""
    settings = [
        Simulated(
            f"sixteen_one_{factor}x_slow",
            f"16 workers in 4 nodes, one {factor}x slow, all-reduce takes 2% of the computation",
            flat_world(16, 0.02, per_node=4),
            f"slow:0x{factor}",
            60 if short else 100,
        )
        for factor in ((2, 5) if short else (2, 3, 4, 5))
    ]
    names = [name for name in strategies_of(short=False) if not name.startswith("fused")]
    found = simulate_all(settings, names, seeds)
    claims = []
    for setting in settings:
        runs = found[setting.name]
        told = "time to the loss, drawn partial all-reduce over "
        if setting.slowness[-1] != "2":
            over = _to_loss(runs, DRAWN, OVERLAPPED)
            claims.append(Claim(f"{told}all-reduce (Ripples)", setting.regime, False, 2.0, over))
            over = _to_loss(runs, DRAWN, SERVER)
            told += "the parameter server (Ripples)"
            claims.append(Claim(told, setting.regime, False, 3.0, over))
        if setting.slowness[-1] == "5":
            over = compare(runs, DRAWN, OVERLAPPED).throughput
            told = "throughput, drawn partial all-reduce over all-reduce (Prague)"
            claims.append(Claim(told, setting.regime, False, 4.4, over))
    return _outcome(claims, found)


def sleeps_section(seeds: int, *, short: bool) -> Outcome:
    """SDPipe's random sleeps on pipelines of four places."""
    settings = [
        Simulated(
            f"sleeps_{workers}x4_{1000 * sleep_s:g}ms",
            f"{workers} pipelines of 4 places, 8 microbatches, 100 ms; each forward and backward "
            f"sleeps {1000 * sleep_s:g} ms with probability 0.1",
            pipeline_world(workers, 4, 8, 0.02),
            f"sleep:0.1:{sleep_s:g}",
            60 if short else 120,
        )
        for workers in ((4, 16) if short else (4, 8, 16))
        for sleep_s in (0.01, 0.03, 0.1)
    ]
    names = strategies_of(short=False)
    found = simulate_all(settings, names, seeds)
    claims = []
    for setting in settings:
        runs = found[setting.name]
        over = compare(runs, SEMI, OVERLAPPED)
        others = {name: _to_loss(runs, SEMI, name) for name in names if name != SEMI}
        known = {name: spread for name, spread in others.items() if spread is not None}
        fastest = min(known, key=lambda name: known[name].mean)
        told = "time to the loss of the fastest other strategy over semi_decentralized's"
        note = f"({fastest}; against all-reduce {over.time_to_loss})"
        claims.append(Claim(told, setting.regime, False, 1.0, known[fastest], note=note))
        off = Spread(tuple(abs(value - 1) for value in over.final_loss.values))
        told = "distance of semi_decentralized's final loss from all-reduce's"
        claims.append(Claim(told, setting.regime, False, 0.01, off, at_most=True))
    return _outcome(claims, found)


def servers_section(seeds: int, *, short: bool) -> Outcome:
    """PS+ against both parameter servers, over communication and slowness."""
    constant = f"{EAGER}:modulation=constant"
    settings = [
        Simulated(
            f"servers_{workers}_{communication * workers / 2:g}_{name.replace(' ', '_')}",
            f"{workers} workers, one server, whose card takes {communication * workers / 2:g} of "
            f"the computation each way, {name}",
            flat_world(workers, communication),
            slowness,
            40,
        )
        for workers in (8, 64)
        for communication in (1 / workers, 2 / workers, 4 / workers)
        for name, slowness in (("steady", "steady"), ("random sleeps", "sleep:0.1:0.3"))
    ]
    found = simulate_all(settings, (SERVER, ASYNC, EAGER, constant), seeds)
    claims = []
    for rival in (SERVER, ASYNC):
        less = [
            (_saved([r.shares_per_s for r in runs[rival]], [r.shares_per_s for r in runs[EAGER]]))
            for runs in (found[setting.name] for setting in settings)
        ]
        told = f"share of the time of an iteration that PS+ saves against `{rival}`"
        claims += _extremes(told, settings, less, FEWER_TIME)
        for ours in (EAGER, constant):
            told = f"share of the iterations to the loss that `{ours}` saves against `{rival}`"
            fewer = [_fewer(found[setting.name], ours, rival) for setting in settings]
            claims += _extremes(told, settings, fewer, FEWER_ITERATIONS)
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


def overlap_section(seeds: int, *, short: bool) -> Outcome:
    """What hides behind the next iteration, against buckets behind the backward."""
    ratios = (0.1, 1.0, 1.5) if short else (0.02, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 4.0)
    settings = [
        Simulated(
            f"overlap_{communication:g}",
            f"8 workers, 100 MB, all-reduce takes {communication:g} of the computation",
            flat_world(8, communication),
        )
        for communication in ratios
    ]
    hidden = ("decoupled", "cross_iteration")
    found = simulate_all(settings, ("all_reduce:overlap=false", OVERLAPPED, *hidden), seeds)
    claims = []
    for strategy in hidden:
        gains = [
            compare(found[setting.name], strategy, OVERLAPPED).throughput for setting in settings
        ]
        told = f"throughput of {strategy} over overlapped all-reduce"
        claims += _extremes(told, settings, gains, FASTER, least=0.98)
        off = [
            abs(value - 1)
            for runs in found.values()
            for value in compare(runs, strategy, OVERLAPPED).final_loss.values
        ]
        told = f"distance of {strategy}'s final loss from all-reduce's"
        claims.append(Claim(told, "all of them", False, 0.01, Spread(tuple(off)), at_most=True))
    return _outcome(claims, found)


def scale_section(workers: int = 1024, iterations: int = 1000, *, short: bool) -> Outcome:
    """Seconds that the simulator itself takes."""
    names = (SEMI, DRAWN) if short else strategies_of(short=False)
    iterations = iterations // 4 if short else iterations
    setting = Simulated(
        f"scale_{workers}x{iterations}",
        f"{workers} workers in nodes of 8, {iterations} iterations, random sleeps",
        flat_world(workers, 0.02, per_node=8),
        "sleep:0.1:0.03",
        iterations,
    )
    claims, lines = [], []
    for name in names:
        begin_s = time.perf_counter()
        simulate_sync(setting.scenario(0), parse_sync(name))
        took = Spread((time.perf_counter() - begin_s,))
        bar = 15.0 if short else 60.0
        told = f"seconds to simulate `{name}`"
        claims.append(Claim(told, setting.regime, False, bar, took, at_most=True))
        seconds = round(took.mean, 2)
        lines.append({"strategy": name, "setting": setting.name, "seconds": seconds})
    return Outcome(claims, lines=lines)


def _outcome(claims: Sequence[Claim], found: dict[str, Runs]) -> Outcome:
    rows = [row for name, runs in found.items() for row in run_rows(name, runs)]
    lines = [line for name, runs in found.items() for line in run_lines(name, runs, is_real=False)]
    return Outcome(claims, RUN_COLUMNS, rows, lines)


def _to_loss(runs: Runs, strategy: str, rival: str) -> Spread | None:
    return compare(runs, strategy, rival, OVERLAPPED).time_to_loss


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


def _extremes(
    text: str,
    settings: Sequence[Simulated],
    found: Sequence[Spread | None],
    bar: float,
    least: float = 0.0,
) -> list[Claim]:
    """The best regime against the bar, and the worst against ``least``."""
    known = [(f, s) for f, s in zip(found, settings, strict=True) if f is not None]
    if not known:
        return [Claim(text, "all of them", False, bar, None)]
    high = max(known, key=lambda pair: pair[0].mean)
    low = min(known, key=lambda pair: pair[0].mean)
    missing = len(found) - len(known)
    note = f"({missing} regimes where no run got there)" if missing else ""
    return [
        Claim(f"{text}: best", high[1].regime, False, bar, high[0]),
        Claim(f"{text}: worst", low[1].regime, False, least, low[0], note=note),
    ]


def _told(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return str(Spread(tuple(known))) if len(known) == len(values) else "not there"
