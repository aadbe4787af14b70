"""Four real pipelines of four places whose ranks pause at random, as in SDPipe's experiment."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.sync_claims import (
    OVERLAPPED,
    PLAIN,
    RUN_COLUMNS,
    Claim,
    Outcome,
    run_lines,
    run_rows,
)
from benchmarks.sync_figures import Runs, Spread, compare
from benchmarks.sync_loopback import (
    ASYNC,
    DRAWN,
    MATCHING,
    PAIRS,
    SEMI,
    SEMI_BEHIND,
    SERVER,
)
from benchmarks.sync_plans import pipelines_plan
from benchmarks.sync_real import Training, learning_rate_of, train_all

PIPELINES, PLACES, MICROBATCHES, ITERATION_S = 4, 4, 4, 0.2
PROBABILITY, SLEEPS_S = 0.1, (0.02, 0.06, 0.2)
STEPS, SHORT_STEPS = 60, 30
STRATEGIES = (
    *(PLAIN, OVERLAPPED, "cross_iteration", ASYNC, PAIRS),
    *(MATCHING, DRAWN, SEMI, SEMI_BEHIND),
)
SHORT_STRATEGIES = (PLAIN, OVERLAPPED, PAIRS, SEMI, SEMI_BEHIND)
WAITING = (OVERLAPPED, SERVER, MATCHING, DRAWN)
"""One strategy of each kind whose workers wait for each other. Which form of AD-PSGD SDPipe's
authors ran we do not know; the bar itself is against every strategy."""


def pipelines_section(seeds: int, *, short: bool) -> Outcome:
    """Strategies in every size of pause; one size for the short form."""
    plan = pipelines_plan(PIPELINES, ITERATION_S, stages=PLACES, microbatches=MICROBATCHES)
    sleeps_s = SLEEPS_S[1:2] if short else SLEEPS_S
    strategies = SHORT_STRATEGIES if short else STRATEGIES
    trainings = {
        (sleep_s, strategy, seed): Training(
            name=f"{place}.{number}.{seed}",
            plan="pipelines",
            sync=strategy,
            steps=SHORT_STEPS if short else STEPS,
            seed=seed,
            sleep_probability=PROBABILITY,
            sleep_s=sleep_s,
            learning_rate=learning_rate_of(strategy, PIPELINES),
        )
        for seed in range(seeds)
        for place, sleep_s in enumerate(sleeps_s)
        for number, strategy in enumerate(strategies)
    }
    found = train_all({"pipelines": plan}, list(trainings.values())).runs
    claims, rows, lines = [], [], []
    for sleep_s in sleeps_s:
        runs = {
            strategy: [found[trainings[sleep_s, strategy, seed].name] for seed in range(seeds)]
            for strategy in strategies
        }
        regime = (
            f"{PIPELINES} pipelines of {PLACES} places, {MICROBATCHES} microbatches, "
            f"{1000 * ITERATION_S:g} ms of emulated compute, loopback; each place pauses "
            f"{1000 * sleep_s:g} ms in {100 * PROBABILITY:g}% of its iterations"
        )
        for ours in (SEMI_BEHIND, SEMI):
            claims += against_all(runs, ours, regime, is_real=True)
        name = f"real_{PIPELINES}x{PLACES}_{1000 * sleep_s:g}ms"
        rows += run_rows(name, runs)
        lines += run_lines(name, runs, is_real=True)
    return Outcome(claims, RUN_COLUMNS, rows, lines)


def against_all(runs: Runs, ours: str, regime: str, *, is_real: bool) -> Iterator[Claim]:
    """A form of semi_decentralized against every other strategy, and its final loss."""
    others = [name for name in runs if not name.startswith(SEMI)]
    waiting = [name for name in WAITING if name in runs]
    for told, rivals in (
        ("any other strategy", others),
        ("those whose workers wait for each other", waiting),
    ):
        found = {name: compare(runs, ours, name, OVERLAPPED).time_to_loss for name in rivals}
        known = {name: spread for name, spread in found.items() if spread is not None}
        fastest = min(known, key=lambda name: known[name].mean, default="")
        told = f"time to the loss, `{ours}` over the fastest of {told}"
        note = f"({fastest})" if fastest else ""
        yield Claim(told, regime, is_real, 1.0, known.get(fastest), note=note)
    values = compare(runs, ours, OVERLAPPED).final_loss.values
    off = Spread(tuple(abs(value - 1) for value in values))
    told = f"distance of `{ours}`'s final loss from all-reduce's"
    yield Claim(told, regime, is_real, 0.01, off, at_most=True)
