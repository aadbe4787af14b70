"""Four real pipelines of four places whose ranks pause at random, as in SDPipe's experiment."""

from __future__ import annotations

from benchmarks.sync.claims import RUN_COLUMNS, Outcome, against_all, run_lines, run_rows
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.real import LEARNING_RATE, RATES
from benchmarks.sync.settings import (
    ASYNC,
    DRAWN,
    MATCHING,
    OVERLAPPED,
    PAIRS,
    PLAIN,
    SEMI,
    SEMI_BEHIND,
    Grid,
    Setting,
)

PIPELINES, PLACES, MICROBATCHES, ITERATION_S = 4, 4, 4, 0.2
PROBABILITY, SLEEPS_S = 0.1, (0.02, 0.06, 0.2)
STEPS, SHORT_STEPS = 60, 30
STRATEGIES = (
    *(PLAIN, OVERLAPPED, "cross_iteration", ASYNC, PAIRS),
    *(MATCHING, DRAWN, SEMI, SEMI_BEHIND),
)
SHORT_STRATEGIES = (PLAIN, OVERLAPPED, PAIRS, SEMI, SEMI_BEHIND)


def pipelines_section(seeds: int, steps: int | None, *, short: bool) -> Outcome:
    """Strategies in every size of pause.

    Args:
        seeds: how many.
        steps: of each training; None: 60, half of them in the short form.
        short: one size of pause and fewer strategies.
    """
    sleeps_s = SLEEPS_S[1:2] if short else SLEEPS_S
    grid = Grid(
        pipelines_plan(PIPELINES, ITERATION_S, stages=PLACES, microbatches=MICROBATCHES),
        {f"{1000 * sleep_s:g}ms": _setting(sleep_s) for sleep_s in sleeps_s},
        SHORT_STRATEGIES if short else STRATEGIES,
        seeds,
        steps or (SHORT_STEPS if short else STEPS),
        rates=(LEARNING_RATE,) if short else RATES,
    )
    claims, rows, lines = [], [], []
    for setting, runs in grid.train().runs.items():
        for ours in (SEMI_BEHIND, SEMI):
            claims += against_all(runs, ours, grid.settings[setting].regime, is_real=True)
        name = f"real_{PIPELINES}x{PLACES}_{setting}"
        rows += run_rows(name, runs)
        lines += run_lines(name, runs, is_real=True)
    return Outcome(claims, RUN_COLUMNS, rows, lines)


def _setting(sleep_s: float) -> Setting:
    regime = (
        f"{PIPELINES} pipelines of {PLACES} places, {MICROBATCHES} microbatches, "
        f"{1000 * ITERATION_S:g} ms of emulated compute, loopback; each place pauses "
        f"{1000 * sleep_s:g} ms in {100 * PROBABILITY:g}% of its iterations"
    )
    return Setting(regime, sleep_probability=PROBABILITY, sleep_s=sleep_s)
