"""Real pipelines on hosts of their own, whose links are shaped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.sync.claims import RUN_COLUMNS, Claim, Outcome, rates_note, run_lines, run_rows
from benchmarks.sync.figures import Runs, Spread, compare
from benchmarks.sync.loopback import ITERATION_S, PIPELINES
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.real import BUCKETS, LEARNING_RATE, RATES
from benchmarks.sync.settings import (
    ASYNC,
    DRAWN,
    EAGER,
    MATCHING,
    OVERLAPPED,
    PAIRS,
    PLAIN,
    SEMI,
    SEMI_BEHIND,
    SERVER,
    STATIC,
    Grid,
    Setting,
    Trained,
)
from benchmarks.testbed.network import Testbed, why_not
from planner.plan.plan import Plan

WITHIN_GB_PER_S, PER_NODE = 0.05, 4
BETWEEN_GB_PER_S = (0.002, 0.006)
"""An all-reduce of 340 kB takes 3 times and as long as 100 ms of computation."""
STEPS = 80
HIDDEN = ("decoupled", "cross_iteration")
STRATEGIES = (
    *(PLAIN, OVERLAPPED, *HIDDEN, SERVER, ASYNC, EAGER),
    *(PAIRS, MATCHING, STATIC, DRAWN, SEMI, SEMI_BEHIND),
)
SHORT_STRATEGIES = (PLAIN, OVERLAPPED, "cross_iteration", SERVER, PAIRS, STATIC)
LEG_STEPS = 25
LEGS = {
    # Pipelines, pipelines of a node, MB/s between nodes and of the last node's link.
    "slow_leg_8": (8, 2, 10.0, 2.5),
    "slow_leg_6": (6, 2, 8.0, 2.0),
    "slow_leg_4": (4, 1, 6.0, 1.5),
}
"""Nodes of which the last one has a link that is four times as slow as the others'."""
LEGS_TRACE = Path(__file__).parent / "legs.trace.json"
"""Of :data:`STATIC` among two nodes with the smaller bandwidth."""
THROUGHPUT_COLUMNS = ("setting", "strategy", "shares/s, median", "min..max")


def setting_of(gb_per_s: float) -> str:
    """Return the setting's name by the bandwidth between its nodes."""
    return f"shaped_{1000 * gb_per_s:g}MB_per_s"


def shaped_plan(gb_per_s: float) -> Plan:
    """Return the plan of a setting: two nodes of four pipelines."""
    return pipelines_plan(
        PIPELINES,
        ITERATION_S,
        per_node=PER_NODE,
        within_gb_per_s=WITHIN_GB_PER_S,
        between_gb_per_s=gb_per_s,
    )


def leg_plan(name: str) -> Plan:
    """Return the plan of a setting of :data:`LEGS`."""
    pipelines, per_node, between, slow_leg = LEGS[name]
    return pipelines_plan(
        pipelines,
        ITERATION_S,
        per_node=per_node,
        within_gb_per_s=WITHIN_GB_PER_S,
        between_gb_per_s=between / 1000,
        slow_leg_gb_per_s=slow_leg / 1000,
    )


def legs_section(seeds: int, steps: int | None) -> Outcome:
    """Throughputs where one node's link is slow, really, and a trace that calibrates; or nothing.

    Args:
        seeds: how many.
        steps: of each training; None: 25.
    """
    reason = why_not()
    if reason is not None:
        print(f"legs: left out: {reason}", file=sys.stderr)
        return Outcome()
    equal, steps = {"equal": Setting("equal")}, steps or LEG_STEPS
    plan = shaped_plan(BETWEEN_GB_PER_S[0])
    with Testbed(plan.cluster) as testbed:
        traced = Grid(plan, equal, (STATIC,), 1, steps, traced=STATIC).train(testbed)
    traced.traces["equal"].save(LEGS_TRACE)
    rows, lines = [], []
    for name in LEGS:
        plan = leg_plan(name)
        with Testbed(plan.cluster) as testbed:
            found = Grid(plan, equal, STRATEGIES, seeds, steps, syncs=BUCKETS).train(testbed)
        for strategy, runs in found.runs["equal"].items():
            rates = Spread(tuple(run.shares_per_s for run in runs))
            middle, told = median(rates.values), f"{rates.least:.1f}..{rates.most:.1f}"
            rows.append([name, f"`{strategy}`", f"{middle:.1f}", told])
            line = {"strategy": strategy, "setting": name, "shares_per_s": round(middle, 2)}
            lines.append({**line, "spread": [round(rates.least, 2), round(rates.most, 2)]})
    return Outcome((), THROUGHPUT_COLUMNS, rows, lines)


def shaped_section(seeds: int, steps: int | None, *, short: bool) -> Outcome:
    """Strategies where links are slow, really; nothing where there can be no such links.

    Args:
        seeds: how many.
        steps: of each training; None: 80, a quarter of them in the short form.
        short: one bandwidth and fewer strategies.
    """
    reason = why_not()
    if reason is not None:
        print(f"shaped: left out: {reason}", file=sys.stderr)
        return Outcome()
    claims, rows, lines, rates = [], [], [], {}
    tried = (LEARNING_RATE,) if short else RATES
    for gb_per_s in BETWEEN_GB_PER_S[:1] if short else BETWEEN_GB_PER_S:
        length = steps or (STEPS // 4 if short else STEPS)
        strategies = SHORT_STRATEGIES if short else STRATEGIES
        trained = _train(gb_per_s, strategies, seeds, length, tried)
        name, runs = setting_of(gb_per_s), trained.runs["shaped"]
        rates[name] = trained.rates
        claims += _claims(runs, gb_per_s)
        rows += run_rows(name, runs)
        lines += run_lines(name, runs, is_real=True)
    return Outcome(claims, RUN_COLUMNS, rows, lines, rates_note(rates, tried))


def _train(
    gb_per_s: float, strategies: Sequence[str], seeds: int, steps: int, rates: Sequence[float]
) -> Trained:
    plan = shaped_plan(gb_per_s)
    equal = {"shaped": Setting("equal")}
    grid = Grid(plan, equal, strategies, seeds, steps, syncs=BUCKETS, rates=rates)
    with Testbed(plan.cluster) as testbed:
        return grid.train(testbed)


def _claims(runs: Runs, gb_per_s: float) -> list[Claim]:
    regime = (
        "8 pipelines of one place on hosts of their own, 85k parameters, 100 ms of emulated "
        f"compute; 2 nodes of 4, {1000 * gb_per_s:g} MB/s between them"
    )
    claims = []
    if gb_per_s == BETWEEN_GB_PER_S[0]:
        for rival, bar in ((OVERLAPPED, 1.1), (SERVER, 5.1), (MATCHING, 4.3), (PAIRS, 4.3)):
            if rival in runs:
                told = f"time to the loss, static partial all-reduce over `{rival}`"
                found = compare(runs, STATIC, rival)
                claims.append(Claim(told, regime, True, bar, found.time_to_loss))
    for strategy in HIDDEN:
        if strategy in runs:
            found = compare(runs, strategy, OVERLAPPED)
            told = f"throughput of {strategy} over overlapped all-reduce"
            loss = found.final_loss
            claims.append(Claim(told, regime, True, 1.292, found.throughput, loss=loss))
            off = Spread(tuple(abs(value - 1) for value in found.final_loss.values))
            told = f"distance of {strategy}'s held-out loss from all-reduce's"
            claims.append(Claim(told, regime, True, 0.01, off, at_most=True))
    return claims
