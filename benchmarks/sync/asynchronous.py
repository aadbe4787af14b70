"""A real pipeline that flushes, beside one that does not (``--pipelining async``)."""

from __future__ import annotations

from typing import Literal

from benchmarks.sync.claims import Outcome
from benchmarks.sync.figures import WARM_UP, Measured, Spread
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.real import RATES, Training, train_all
from benchmarks.sync.settings import OVERLAPPED, best_of
from executor.training.asynchronous import lag_of
from planner.plan.plan import Plan

PLACES, ITERATION_S, STEPS = 4, 0.2, 40
MICROBATCHES = (4, 8)
MODES: tuple[Literal["flush"], Literal["async"]] = ("flush", "async")
COLUMNS = (
    *("microbatches", "pipeline", "learning rate", "steps/s", "over flush", "at most"),
    "held-out loss, over flush's",
)


def asynchronous_section(seeds: int, steps: int | None) -> Outcome:
    """Steps a second, and the held-out loss after the same samples.

    Args:
        seeds: how many.
        steps: of each training; None: 40.
    """
    rows, lines = [], []
    for count in MICROBATCHES:
        plan = pipelines_plan(1, ITERATION_S, stages=PLACES, microbatches=count)
        found, rates = _trained(plan, seeds, steps or STEPS)
        # A flush idles for the forwards and backwards of all places but one.
        most = (count + PLACES - 1) / count
        for mode in MODES:
            pairs = list(zip(found[mode], found["flush"], strict=True))
            mine = Spread(tuple(steps_per_s(run, count) for run in found[mode]))
            over = Spread(tuple(steps_per_s(a, count) / steps_per_s(b, count) for a, b in pairs))
            loss = Spread(tuple(a.final_loss / b.final_loss for a, b in pairs))
            told = "" if mode == "flush" else f"{most:.2f}"
            rate = f"{rates[mode]:g}"
            rows.append([str(count), mode, rate, f"{mine.mean:.2f}", str(over), told, str(loss)])
            lines.append(
                {
                    "setting": f"asynchronous_{count}",
                    "strategy": mode,
                    "runs": "real",
                    "steps_per_s": round(mine.mean, 4),
                    "over_flush": round(over.mean, 4),
                    "final_loss_ratio": round(loss.mean, 4),
                }
            )
    return Outcome((), COLUMNS, rows, lines)


def steps_per_s(run: Measured, microbatches: int) -> float:
    """Return the rate in steady state: the last steps are told together, once all ranks are done.

    Args:
        run: of one pipeline.
        microbatches: of a step.
    """
    looks = run.looks[WARM_UP : -1 - lag_of(PLACES, microbatches)]
    return (looks[-1].shares - looks[0].shares) / (looks[-1].at_s - looks[0].at_s)


def _trained(
    plan: Plan, seeds: int, steps: int
) -> tuple[dict[str, list[Measured]], dict[str, float]]:
    """Return each form's trainings at its best learning rate, and that rate.

    An asynchronous pipeline steps on each microbatch, at the rate over their number.
    """

    def training(mode: Literal["flush", "async"], rate: float, seed: int) -> Training:
        count = plan.microbatches if mode == "async" else 1
        return Training(
            name=f"{mode}.{rate:g}.{seed}",
            plan="plan",
            sync=OVERLAPPED,
            steps=steps,
            seed=seed,
            learning_rate=rate / count,
            pipelining=mode,
        )

    tried = [(mode, rate) for mode in MODES for rate in RATES]
    jobs = [training(mode, rate, seeds) for mode, rate in tried]
    runs = train_all({"plan": plan}, jobs).runs
    losses = {pair: runs[job.name].final_loss for pair, job in zip(tried, jobs, strict=True)}
    rates = best_of(losses)
    chosen = [training(mode, rates[mode], seed) for mode in MODES for seed in range(seeds)]
    runs = train_all({"plan": plan}, chosen).runs
    found = {
        mode: [runs[training(mode, rates[mode], seed).name] for seed in range(seeds)]
        for mode in MODES
    }
    return found, rates
