"""Eight real pipelines on loopback, and the simulator against them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.catalogue import SYNC_LOOPBACK_BARS
from benchmarks.sync.claims import (
    RUN_COLUMNS,
    Claim,
    Outcome,
    best,
    ceiling,
    rates_note,
    run_lines,
    run_rows,
)
from benchmarks.sync.figures import Runs, Spread, compare, steady_rate
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.real import LEARNING_RATE, RATES
from benchmarks.sync.settings import (
    DRAWN,
    DRAWN_BEHIND,
    OVERLAPPED,
    PARTIAL,
    PLAIN,
    SERVER,
    STATIC,
    Grid,
    Setting,
    Trained,
    strategies_of,
)
from executor.emulation.pace import Pace
from planner.measured.sync_trace import SyncTrace
from planner.plan.plan import Plan
from planner.sync.simulation.calibration import calibrated
from planner.sync.simulation.planned import from_plan
from planner.sync.simulation.run import Scenario, trace_sync
from planner.sync.simulation.slowness import BLOCK, Block, Trace
from planner.sync.simulation.world import World
from planner.sync.strategies import parse_sync

PIPELINES, ITERATION_S = 8, 0.1
TRACED = STATIC
"""The strategy whose trace the simulator is calibrated from: its groups have several sizes."""
TRACE = Path(__file__).parent / "loopback.trace.json"
"""Of :data:`TRACED` among equal pipelines, of the day of the published rows."""

SIMULATED = 3
"""Simulated runs for each measured one: where groups depend on who comes when, single runs of so
few steps differ by up to a third."""


@dataclass(frozen=True)
class SamePauses:
    """The slowness of real trainings, with the very pauses that they draw.

    Attributes:
        pace: of them.
        seeds: how many there were; further ones have the same pauses again.
    """

    pace: Pace
    seeds: int

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Iterations of real trainings count from 1 too."""
        pace = replace(self.pace, seed=seed % self.seeds)
        workers = range(world.workers)
        factors = np.array([[pace.slow.get(worker, 1.0)] * BLOCK for worker in workers])
        for first in count(1, BLOCK):
            steps = range(first, first + BLOCK)
            yield factors, np.array([[pace.pause_s(w, step) for step in steps] for w in workers])


def sleeper_share(setting: Setting, seeds: int, steps: int) -> Spread:
    """Return the fraction of iterations in which a worker pauses, by seed."""
    shares = []
    for seed in range(seeds):
        pace = replace(setting.pace, seed=seed)
        paused = [any(pace.pause_s(w, s) for w in range(PIPELINES)) for s in range(1, steps + 1)]
        shares.append(sum(paused) / steps)
    return Spread(tuple(shares))


def steady_rates(world: World, sync: str, trace: Trace, seeds: int, steps: int) -> list[float]:
    """Return the shares a second of simulated runs, counted as those of real ones are.

    Args:
        world: of the pipelines.
        sync: strategy and options.
        trace: how iterations vary.
        seeds: of real runs; each has :data:`SIMULATED` simulated ones, that number apart.
        steps: of all workers on average.
    """
    rates = []
    for seed in range(SIMULATED * seeds):
        scenario = Scenario(world, steps, trace).with_seed(seed)
        done = trace_sync(scenario, parse_sync(sync))[1]
        rates.append(steady_rate([[row.end_s for row in rows] for rows in done.workers]))
    return rates


SETTINGS = {
    "homogeneous": Setting("equal"),
    "one_2x_slow": Setting("one 2x slow", {"0": 2.0}),
    "one_4x_slow": Setting("one 4x slow", {"0": 4.0}),
    "one_5x_slow": Setting("one 5x slow", {"0": 5.0}),
    "random_sleeps": Setting("10% of iterations +0.3 s", {}, 0.1, 0.3),
}
RIVALS = (PLAIN, OVERLAPPED, SERVER, STATIC, DRAWN)
"""Strategies that claims need, the one that is traced among them."""
SHORT_SETTINGS = tuple(SYNC_LOOPBACK_BARS)
REGIME = "8 pipelines of one place, 85k parameters, 100 ms of emulated compute, loopback; "


class Loopback:
    """Runs every strategy in every setting once, for all sections that ask.

    Args:
        seeds: how many.
        steps: of each pipeline on average.
        short: fewer strategies and settings.
        only: names of settings; None: all, or those of the short form.
        strategies: beside those that claims compare with; None: all, or those of the short form.
    """

    def __init__(
        self,
        seeds: int,
        steps: int,
        *,
        short: bool,
        only: Sequence[str] | None = None,
        strategies: Sequence[str] | None = None,
    ) -> None:
        self.seeds, self.steps = seeds, steps
        wanted = None if strategies is None else {*RIVALS, *strategies}
        known = strategies_of(short=short)
        self._strategies = tuple(s for s in known if wanted is None or s in wanted)
        self.tried_rates = (LEARNING_RATE,) if short else RATES
        names = only or (SHORT_SETTINGS if short else tuple(SETTINGS))
        self._settings = {name: SETTINGS[name] for name in names}

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of one pipeline of one place for each process."""
        return pipelines_plan(PIPELINES, ITERATION_S)

    @property
    def runs(self) -> Mapping[str, Runs]:
        """Return the runs of each setting."""
        return self._trained.runs

    @property
    def rates(self) -> Mapping[str, float]:
        """Return the learning rates by strategy."""
        return self._trained.rates

    @property
    def trace(self) -> SyncTrace:
        """Return a trace of :data:`TRACED` among equal pipelines."""
        return self._trained.traces["homogeneous"]

    @cached_property
    def _trained(self) -> Trained:
        grid = Grid(
            self.plan,
            self._settings,
            self._strategies,
            self.seeds,
            self.steps,
            traced=TRACED,
            rates=self.tried_rates,
        )
        print(f"{len(grid.trainings)} real trainings of 8 pipelines", file=sys.stderr)
        return grid.train()


def loopback_section(loopback: Loopback, trace: Path | None = None) -> Outcome:
    """Every strategy in every setting, against both forms of all-reduce.

    Args:
        loopback: runs them.
        trace: file for a trace that calibrates the simulator; None: none is written.
    """
    rows, lines = [], []
    if trace is not None:
        loopback.trace.save(trace)
    for setting, runs in loopback.runs.items():
        rows += run_rows(setting, runs)
        lines += run_lines(setting, runs, is_real=True)
    note = rates_note({"equal pipelines": loopback.rates}, loopback.tried_rates)
    return Outcome(_claims(loopback), RUN_COLUMNS, rows, lines, note)


def _claims(loopback: Loopback) -> Sequence[Claim]:
    claims = []
    for setting, runs in loopback.runs.items():
        regime = REGIME + SETTINGS[setting].regime
        if SETTINGS[setting].sleep_probability:
            drawn = sleeper_share(SETTINGS[setting], loopback.seeds, loopback.steps)
            expected = 1 - (1 - SETTINGS[setting].sleep_probability) ** PIPELINES
            regime += f"; somebody paused in {drawn} of the iterations, expected {expected:.2f}"
        for rival, told in ((PLAIN, "all-reduce"), (OVERLAPPED, "overlapped all-reduce")):
            if setting in SYNC_LOOPBACK_BARS:
                name, compared = best(runs, PARTIAL, rival)
                text = f"throughput of the best partial strategy over {told}'s"
                claims.append(
                    Claim(
                        text,
                        regime,
                        True,
                        SYNC_LOOPBACK_BARS[setting],
                        compared.throughput,
                        note=f"({name})",
                        loss=compare(runs, name, OVERLAPPED).final_loss,
                    )
                )
        if not SETTINGS[setting].slow:
            continue
        name, compared = best(runs, (*PARTIAL, STATIC), SERVER)
        text = "throughput over the synchronous parameter server's (Ripples)"
        if setting != "one_2x_slow":
            loss = compared.final_loss
            rate = compared.throughput
            claims.append(Claim(text, regime, True, 3.0, rate, note=f"({name})", loss=loss))
            told = "time to the loss, drawn partial all-reduce over overlapped all-reduce (Ripples)"
            ours = compare(runs, DRAWN, OVERLAPPED)
            claims.append(Claim(told, regime, True, 2.0, ours.time_to_loss))
        if setting == "one_5x_slow":
            claims += [
                _prague(runs, name, regime) for name in (DRAWN, DRAWN_BEHIND) if name in runs
            ]
    return claims


def _prague(runs: Runs, name: str, regime: str) -> Claim:
    ours, most = compare(runs, name, OVERLAPPED), ceiling(PIPELINES, 5)
    told = f"throughput of `{name}` over all-reduce's (Prague's 4.4x)"
    part = ours.throughput.mean / most
    note = f"({100 * part:.0f} % of the {most:.2f} that it would be by compute alone)"
    claim = (told, regime, True, 4.4, ours.throughput)
    return Claim(*claim, note=note, loss=ours.final_loss)


def accuracy_section(loopback: Loopback) -> Outcome:
    """The simulator, calibrated from one trace, against every real run."""
    world = calibrated(from_plan(loopback.plan), loopback.trace)
    rows, lines, errors = [], [], []
    for setting, runs in loopback.runs.items():
        trace = SamePauses(SETTINGS[setting].pace, loopback.seeds)
        for strategy, mine in runs.items():
            found = steady_rates(world, strategy, trace, loopback.seeds, loopback.steps)
            rates = [fmean(found[seed :: loopback.seeds]) for seed in range(loopback.seeds)]
            pairs = zip(rates, mine, strict=True)
            error = Spread(tuple(simulated / real.shares_per_s - 1 for simulated, real in pairs))
            mean = sum(rates) / len(rates)
            real = Spread(tuple(run.shares_per_s for run in mine))
            errors.append((abs(error.mean), f"{strategy}, {setting}"))
            told = f"{100 * error.mean:+.1f}%" + ("" if abs(error.mean) <= 0.15 else " **beyond**")
            rows.append([setting, f"`{strategy}`", str(real), f"{mean:.2f}", told])
            lines.append(
                {
                    **{"strategy": strategy, "setting": f"simulator_error.{setting}"},
                    **{"error": round(error.mean, 4), "seeds": len(mine)},
                    "spread": [round(error.least, 4), round(error.most, 4)],
                }
            )
    worst, where = max(errors)
    claim = Claim(
        "largest error of the simulator's throughput over all strategies and settings",
        f"{REGIME}calibrated from one trace of `{TRACED}`",
        True,
        0.15,
        Spread((worst,)),
        at_most=True,
        note=f"({where})",
    )
    columns = ("setting", "strategy", "real shares/s (min..max)", "simulated", "error")
    return Outcome([claim], columns, rows, lines)
