"""Sections of the report that the simulator makes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.sync.claims import (
    RUN_COLUMNS,
    Claim,
    Outcome,
    against_all,
    best,
    ceiling,
    extremes,
    run_lines,
    run_rows,
)
from benchmarks.sync.figures import Runs, Spread, compare
from benchmarks.sync.settings import (
    DRAWN,
    MATCHING,
    OVERLAPPED,
    PAIRS,
    PARTIAL,
    SEMI,
    SEMI_BEHIND,
    SERVER,
    STATIC,
    strategies_of,
)
from benchmarks.sync.simulated import (
    Simulated,
    flat_world,
    pipeline_world,
    simulate_all,
)
from planner.sync.simulation.run import simulate_sync
from planner.sync.strategies import parse_sync

FASTER = 1.292
"""The gain of Jin's thesis: 29.2% faster than all-reduce."""
SMALL_BUCKETS = "decoupled:bucket_mib=5"
EQUAL_BUCKETS = "all_reduce:bucket_mib=5"
SEVERAL_SERVERS = tuple(f"{SERVER}:servers={number}" for number in (4, 16))
SERVERS = (SERVER, *SEVERAL_SERVERS)
ASYNCHRONOUS_PAIRS = "(half of our pairs answer beside their computation and wait for nobody)"
SLEEP_COMMUNICATION = (0.02, 0.2)
"""Seconds of a place's all-reduce over those of an iteration."""


def links_section(seeds: int, *, short: bool) -> Outcome:
    """Equal workers whose all-reduce takes longer than, or a small part of, their computation."""
    heavy = [
        Simulated(
            f"communication_{part}x",
            f"4 nodes of 4 workers that share a card; all-reduce takes {part}x the computation",
            flat_world(16, part, per_node=4),
        )
        for part in (3, 10)
    ]
    light = Simulated(
        "communication_small",
        "8 workers; all-reduce takes 2% of the computation",
        flat_world(8, 0.02),
    )
    found = simulate_all((*heavy, light), strategies_of(short=False), seeds)
    for name, runs in simulate_all(heavy, SEVERAL_SERVERS, seeds).items():
        found[name] = {**found[name], **runs}
    rivals = ((OVERLAPPED, 1.1), (MATCHING, 4.3), (PAIRS, 4.3))
    told = "time to the loss, static partial all-reduce over "
    claims = [
        Claim(
            *(f"{told}`{rival}`", setting.regime, False, bar),
            _to_loss(found[setting.name], STATIC, rival),
            note=ASYNCHRONOUS_PAIRS if rival == PAIRS else "",
        )
        for setting in heavy
        for rival, bar in rivals
    ]
    for setting in heavy:
        over = {rival: _to_loss(found[setting.name], STATIC, rival) for rival in SERVERS}
        known = {rival: spread for rival, spread in over.items() if spread is not None}
        rival = min(known, key=lambda name: known[name].mean)
        text = f"{told}the fastest parameter server, of 1, 4 or 16"
        note = f"({rival})"
        claims.append(Claim(text, setting.regime, False, 5.1, known[rival], note=note))
    for ours in (SEMI, SEMI_BEHIND):
        told = f"time to the loss, `{ours}` over overlapped all-reduce"
        other = _to_loss(found[light.name], ours, OVERLAPPED)
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
        )
        for factor in ((2, 5) if short else (2, 3, 4, 5))
    ]
    found = simulate_all(settings, strategies_of(short=False), seeds)
    claims = []
    for setting in settings:
        runs = found[setting.name]
        told = "time to the loss, drawn partial all-reduce over "
        most = ceiling(setting.world.workers, int(setting.slowness[-1]))
        note = f"(by compute alone it would be {most:.2f})"
        if setting.slowness[-1] != "2":
            over = _to_loss(runs, DRAWN, OVERLAPPED)
            claim = (f"{told}all-reduce (Ripples)", setting.regime, False, 2.0)
            claims.append(Claim(*claim, over, note=note))
            over = _to_loss(runs, DRAWN, SERVER)
            told += "the parameter server (Ripples)"
            claims.append(Claim(told, setting.regime, False, 3.0, over, note=note))
        if setting.slowness[-1] == "5":
            for told, names in (
                ("drawn partial all-reduce over all-reduce (Prague)", (DRAWN,)),
                ("the best of drawn and ready groups over all-reduce (ours)", PARTIAL),
            ):
                name, over = best(runs, names, OVERLAPPED)
                told = f"throughput, {told}"
                note = f"({name}; by compute alone it would be {most:.2f})"
                claim = (told, setting.regime, False, 4.4, over.throughput)
                claims.append(Claim(*claim, note=note, loss=over.final_loss))
    return _outcome(claims, found)


def sleeps_section(seeds: int, *, short: bool) -> Outcome:
    """SDPipe's random sleeps on pipelines of four places."""
    settings = [
        Simulated(
            f"sleeps_{workers}x4_{1000 * sleep_s:g}ms_{communication:g}",
            f"{workers} pipelines of 4 places, 8 microbatches, 100 ms; each forward and backward "
            f"sleeps {1000 * sleep_s:g} ms with probability 0.1; a place's all-reduce takes "
            f"{100 * communication:g} ms",
            pipeline_world(workers, 4, 8, communication),
            f"sleep:0.1:{sleep_s:g}",
        )
        for workers in ((4, 16) if short else (4, 8, 16))
        for sleep_s in (0.01, 0.03, 0.1)
        for communication in SLEEP_COMMUNICATION
    ]
    names = strategies_of(short=False)
    found = simulate_all(settings, names, seeds)
    claims = []
    for setting in settings:
        runs = found[setting.name]
        for ours in (SEMI_BEHIND, SEMI):
            claims += against_all(runs, ours, setting.regime, is_real=False)
    return _outcome(claims, found)


def overlap_section(seeds: int, *, short: bool) -> Outcome:
    """Return the section on overlap with the next iteration, against buckets in the backward."""
    ratios = (0.1, 1.0, 1.33) if short else (0.02, 0.1, 0.3, 0.6, 1.0, 1.25, 1.33, 1.5, 2.0, 4.0)
    settings = [
        Simulated(
            f"overlap_{communication:g}",
            f"8 workers, 100 MB, all-reduce takes {communication:g} of the computation",
            flat_world(8, communication),
        )
        for communication in ratios
    ]
    rivals = {
        "decoupled": OVERLAPPED,
        SMALL_BUCKETS: EQUAL_BUCKETS,
        "cross_iteration": OVERLAPPED,
    }
    strategies = ("all_reduce:overlap=false", OVERLAPPED, EQUAL_BUCKETS, *rivals)
    found = simulate_all(settings, strategies, seeds)
    claims = []
    for strategy, rival in rivals.items():
        rows = [compare(found[setting.name], strategy, rival) for setting in settings]
        told = f"throughput of `{strategy}` over `{rival}`"
        gains = [
            (setting.regime, row.throughput, row.final_loss)
            for setting, row in zip(settings, rows, strict=True)
        ]
        claims += extremes(told, gains, FASTER, least=0.98)
        off = [
            abs(value - 1)
            for runs in found.values()
            for value in compare(runs, strategy, OVERLAPPED).final_loss.values
        ]
        told = f"distance of `{strategy}`'s final loss from all-reduce's"
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
