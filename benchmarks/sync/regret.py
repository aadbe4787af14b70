"""What the choice of a strategy costs against the best one, simulated and by measured rows.

A strategy is chosen as `--sync choose` does. Then every strategy is simulated with seeds that the
choice has not seen, and for longer, at its own best learning rate. The regret is by how much more
time the chosen one needs to the held-out losses than the fastest. Asynchronous servers are told
apart: the small problem that is simulated flatters them, as measured rows show.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.sync.claims import RUN_COLUMNS, Claim, Outcome
from benchmarks.sync.figures import Spread
from benchmarks.sync.loopback import ITERATION_S, PIPELINES, SETTINGS
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.predicted import REPORT, kept_hosts, measured_cells
from benchmarks.sync.real import RATES
from benchmarks.sync.settings import ASYNC, EAGER
from benchmarks.sync.shaped import (
    BETWEEN_GB_PER_S,
    LEGS,
    leg_plan,
    setting_of,
    shaped_plan,
)
from benchmarks.sync.simulated import (
    Simulated,
    flat_world,
    pipeline_world,
)
from planner.sync.choice import HORIZON, SEEDS, choose
from planner.sync.simulation.comparison import SyncResult, compare_syncs
from planner.sync.strategies import sync_name

MEAN, WORST = 0.03, 0.1
AFTER_CHOICE = 2 * SEEDS
"""The first seed that no choice has seen, for its times or its learning rates."""
FLATTERED = (ASYNC, EAGER)
"""Asynchronous servers, which have a column of their own."""
COLUMNS = (
    *("setting", "chosen, at its learning rate", "fastest, at its own", "regret"),
    "against asynchronous servers",
    "by measured rows, against their fastest",
)


@dataclass(frozen=True)
class Regret:
    """What a choice costs: seconds to the losses over those of the fastest strategy, less 1.

    Attributes:
        setting: its name.
        chosen: strategy.
        fastest: of all but asynchronous servers.
        simulated: against that one.
        servers: against the faster asynchronous server; below zero where it is slower.
        measured_fastest: of real rows; None: there are none.
        measured: against that one, by these rows.
    """

    setting: str
    chosen: str
    fastest: str
    simulated: float
    servers: float
    measured_fastest: str | None = None
    measured: float | None = None

    def row(self, rates: Mapping[str, float]) -> list[str]:
        """Return the row of the table.

        Args:
            rates: learning rates by strategy.
        """
        told = [f"`{name}` {rates[name]:g}" for name in (self.chosen, self.fastest)]
        real = ""
        if self.measured is not None:
            real = f"{100 * self.measured:.1f}% (`{self.measured_fastest}`)"
        regrets = [f"{100 * regret:.1f}%" for regret in (self.simulated, self.servers)]
        return [self.setting, *told, *regrets, real]

    def line(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        found = {"strategy": self.chosen, "setting": f"choice.{self.setting}"}
        return {**found, "regret": round(self.simulated, 4), "fastest": self.fastest}


def choice_section(seeds: int, only: Sequence[str] | None = None, report: Path = REPORT) -> Outcome:
    """Return what the choice costs in every setting.

    Args:
        seeds: how many every strategy is simulated with; the choice has others.
        only: names of settings; None: all.
        report: whose measured rows count too.
    """
    settings = [row for row in settings_of() if only is None or row.name in only]
    measured = _measured_gains(report)
    rows, cells = [], []
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        found = pool.imap(_judged, [(setting, seeds) for setting in settings])
        for setting, (chosen, results) in zip(settings, found, strict=True):
            gains = {name: row.target_speedup for name, row in results.items()}
            row = regret_of(setting.name, chosen, gains, measured.get(setting.name, {}))
            rows.append(row)
            cells.append(row.row({name: row.learning_rate for name, row in results.items()}))
            print(" | ".join(cells[-1]), file=sys.stderr, flush=True)
    return Outcome(_claims(rows), COLUMNS, cells, [row.line() for row in rows])


def _judged(task: tuple[Simulated, int]) -> tuple[str, dict[str, SyncResult]]:
    """Return the choice in a setting, and every strategy's results with other seeds."""
    setting, seeds = task
    chosen = choose(replace(setting, iterations=HORIZON).scenario(0)).sync
    found = compare_syncs(setting.scenario(AFTER_CHOICE), seeds=seeds, rates=RATES)
    return sync_name(chosen), {sync_name(row.sync): row for row in found.results}


def _measured_gains(report: Path) -> dict[str, dict[str, float]]:
    """Return by setting and strategy how much sooner real runs came to the loss; 0: they did not.

    Rows of throughput alone have no gain.
    """
    column = RUN_COLUMNS.index("to the loss, against overlapped")
    found: dict[str, dict[str, float]] = {}
    for (setting, strategy), cells in measured_cells(report).items():
        if len(cells) == len(RUN_COLUMNS):
            word = cells[column].partition(" ")[0]
            found.setdefault(setting, {})[strategy] = 0.0 if word == "not" else float(word)
    return found


def regret_of(
    setting: str, chosen: str, gains: Mapping[str, float], measured: Mapping[str, float]
) -> Regret:
    """Return what a choice costs.

    Args:
        setting: its name.
        chosen: strategy.
        gains: by strategy, how much sooner than overlapped all-reduce it comes to the losses; 0:
            never.
        measured: the same of real rows, whose time is to one loss, if there are any.
    """

    def against(gains: Mapping[str, float], rivals: Collection[str]) -> tuple[str, float]:
        fastest = max(rivals, key=lambda name: gains[name])
        return fastest, gains[fastest] / gains[chosen] - 1 if gains[chosen] else math.inf

    simulated = against(gains, [name for name in gains if name not in FLATTERED])
    _, servers = against(gains, FLATTERED)
    real = against(measured, measured) if chosen in measured else (None, None)
    return Regret(setting, chosen, *simulated, servers, *real)


def _claims(rows: Sequence[Regret]) -> list[Claim]:
    simulated = [(row.simulated, row.setting) for row in rows]
    real = [(row.measured, row.setting) for row in rows if row.measured is not None]
    kinds = [
        ("against the fastest but asynchronous servers", False, simulated),
        ("by measured rows, against the fastest", True, real),
    ]
    claims = []
    for told, is_real, found in kinds:
        if not found:
            continue
        regime = f"{len(found)} settings"
        mean, (worst, where) = fmean(value for value, _ in found), max(found)
        for text, bar, value, note in (
            (f"mean regret {told}", MEAN, mean, ""),
            (f"largest regret {told}", WORST, worst, f"({where})"),
        ):
            found_value = Spread((value,))
            claims.append(Claim(text, regime, is_real, bar, found_value, at_most=True, note=note))
    return claims


def settings_of() -> list[Simulated]:
    """Return the settings; those with measured rows have their names."""
    host, legs = kept_hosts()
    loopback = host.world(pipelines_plan(PIPELINES, ITERATION_S))
    return [
        *(Simulated(name, row.regime, loopback, _slowness(name)) for name, row in SETTINGS.items()),
        *(
            Simulated(setting_of(rate), "two nodes of 4 pipelines", host.world(shaped_plan(rate)))
            for rate in BETWEEN_GB_PER_S
        ),
        *(Simulated(name, "one node's link is slow", legs.world(leg_plan(name))) for name in LEGS),
        *_simulated_only(),
    ]


def _slowness(name: str) -> str:
    pace = SETTINGS[name]
    slow = ",".join(f"{rank}x{factor:g}" for rank, factor in pace.slow.items())
    if slow:
        return f"slow:{slow}"
    if pace.sleep_probability:
        return f"sleep:{pace.sleep_probability:g}:{pace.sleep_s:g}"
    return "steady"


def _simulated_only() -> list[Simulated]:
    nodes = flat_world(16, 0.02, per_node=4)
    found = [
        Simulated(f"flat_{part:g}", f"8 workers, all-reduce {part:g}x", flat_world(8, part))
        for part in (0.02, 0.3, 1.0, 3.0)
    ]
    found += [
        Simulated(f"sixteen_{name}", "16 workers in 4 nodes", nodes, slowness)
        for name, slowness in {
            "one_2x_slow": "slow:0x2",
            "one_4x_slow": "slow:0x4",
            "a_node_4x_slow": "slow:0x4,1x4,2x4,3x4",
            "sleeps": "sleep:0.1:0.3",
            "drift": "drift:0.3",
        }.items()
    ]
    shared = flat_world(16, 1.0, per_node=4)
    found += [
        Simulated("cards_steady", "16 workers in 4 nodes, all-reduce 1x", shared),
        Simulated("cards_one_2x_slow", "the same", shared, "slow:0x2"),
        Simulated("cards_sleeps", "the same", shared, "sleep:0.1:0.1"),
    ]
    found += [
        Simulated(
            f"sleeps_4x4_{1000 * sleep_s:g}ms",
            "4 pipelines of 4 places",
            pipeline_world(4, 4, 8, 0.02),
            f"sleep:0.1:{sleep_s:g}",
        )
        for sleep_s in (0.01, 0.1)
    ]
    return found
