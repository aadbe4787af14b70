"""Real pipelines of four places: SDPipe's experiment, whose own pipelines do not flush.

Four pipelines on nodes of their own, whose ranks pause at random, and two of which one has a slow
node. Links are shaped.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from benchmarks.sync.claims import (
    RUN_COLUMNS,
    Claim,
    Outcome,
    against_all,
    rates_note,
    run_lines,
    run_rows,
)
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.real import BUCKETS, LEARNING_RATE, RATES
from benchmarks.sync.settings import (
    ASYNC,
    DRAWN,
    MATCHING,
    OVERLAPPED,
    PAIRS,
    PLAIN,
    SEMI,
    SEMI_BEHIND,
    SERVER,
    WAVES,
    Grid,
    Setting,
)
from benchmarks.testbed.network import Testbed, why_not

PLACES, MICROBATCHES, ITERATION_S = 4, 4, 0.2
WITHIN_GB_PER_S, BETWEEN_GB_PER_S = 0.05, 0.006
PROBABILITY, SLEEPS_S = 0.1, (0.02, 0.06, 0.2)
SLOW_FACTOR = 2.0
STEPS, SHORT_STEPS = 60, 30
STRATEGIES = (
    *(PLAIN, OVERLAPPED, "cross_iteration", SERVER, ASYNC, WAVES, PAIRS),
    *(MATCHING, DRAWN, SEMI, SEMI_BEHIND),
)
SHORT_STRATEGIES = (PLAIN, OVERLAPPED, PAIRS, SEMI, SEMI_BEHIND)


def pipelines_section(seeds: int, steps: int | None, *, short: bool) -> Outcome:
    """Strategies in every size of pause, and beside a slow node; nothing without shaped links.

    Args:
        seeds: how many.
        steps: of each training; None: 60, half of them in the short form.
        short: one size of pause and fewer strategies.
    """
    reason = why_not()
    if reason is not None:
        print(f"pipelines: left out: {reason}", file=sys.stderr)
        return Outcome()
    sleeps_s = SLEEPS_S[1:2] if short else SLEEPS_S
    slow = {str(rank): SLOW_FACTOR for rank in range(PLACES)}
    grids = {
        4: {f"{1000 * sleep_s:g}ms": _sleeping(sleep_s) for sleep_s in sleeps_s},
        2: {"slow_node": Setting(f"{_regime(2)}; one node {SLOW_FACTOR:g}x slow", slow)},
    }
    claims: list[Claim] = []
    rows, lines, rates = [], [], {}
    for pipelines, settings in grids.items():
        grid = _grid(pipelines, settings, seeds, steps, short=short)
        with Testbed(grid.plan.cluster) as testbed:
            found = grid.train(testbed)
        rates[f"{pipelines} x {PLACES}"] = found.rates
        for setting, runs in found.runs.items():
            for ours in (SEMI_BEHIND, SEMI):
                claims += against_all(runs, ours, settings[setting].regime, is_real=True)
            name = f"real_{pipelines}x{PLACES}_{setting}"
            rows += run_rows(name, runs)
            lines += run_lines(name, runs, is_real=True)
    note = rates_note(rates, (LEARNING_RATE,) if short else RATES)
    return Outcome(claims, RUN_COLUMNS, rows, lines, note)


def _grid(
    pipelines: int, settings: Mapping[str, Setting], seeds: int, steps: int | None, *, short: bool
) -> Grid:
    plan = pipelines_plan(
        pipelines,
        ITERATION_S,
        stages=PLACES,
        microbatches=MICROBATCHES,
        within_gb_per_s=WITHIN_GB_PER_S,
        between_gb_per_s=BETWEEN_GB_PER_S,
    )
    return Grid(
        plan,
        settings,
        SHORT_STRATEGIES if short else STRATEGIES,
        seeds,
        steps or (SHORT_STEPS if short else STEPS),
        syncs=BUCKETS,
        rates=(LEARNING_RATE,) if short else RATES,
    )


def _regime(pipelines: int) -> str:
    return (
        f"{pipelines} pipelines of {PLACES} places that flush (SDPipe's do not), {MICROBATCHES} "
        f"microbatches, {1000 * ITERATION_S:g} ms of emulated compute, a node each, "
        f"{1000 * BETWEEN_GB_PER_S:g} MB/s between nodes"
    )


def _sleeping(sleep_s: float) -> Setting:
    regime = (
        f"{_regime(4)}; each place pauses {1000 * sleep_s:g} ms in {100 * PROBABILITY:g}% of its "
        "iterations"
    )
    return Setting(regime, sleep_probability=PROBABILITY, sleep_s=sleep_s)
