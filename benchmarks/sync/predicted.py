"""The simulator against throughputs that earlier runs measured, on loopback and shaped links.

Nothing runs but the simulator. Measured rows are read from the report. What the machine adds to a
plan's costs depends on its load, so that it is taken from traces of the same days: one of the rows
with one slow leg, and one of all others. Bandwidths are those of the cluster files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import ROOT
from benchmarks.sync.claims import RUN_COLUMNS, Claim, Outcome
from benchmarks.sync.figures import Spread
from benchmarks.sync.loopback import (
    ITERATION_S,
    PIPELINES,
    SETTINGS,
    TRACE,
    SamePauses,
    steady_rates,
)
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.real import BUCKETS
from benchmarks.sync.shaped import (
    BETWEEN_GB_PER_S,
    LEGS,
    LEGS_TRACE,
    THROUGHPUT_COLUMNS,
    leg_plan,
    setting_of,
    shaped_plan,
)
from planner.measured.sync_trace import SyncTrace
from planner.plan.plan import Plan
from planner.sync.simulation.calibration import calibrated
from planner.sync.simulation.meetings import durations, meetings_of
from planner.sync.simulation.planned import from_plan
from planner.sync.simulation.slowness import Steady
from planner.sync.simulation.world import LinkCost, World

REPORT = ROOT / "benchmarks" / "SYNC.md"
MEDIAN, WORST = 0.07, 0.15
STEPS = 25

Rows = Mapping[tuple[str, str], float]
"""Measured shares a second by setting and strategy."""


@dataclass(frozen=True)
class Host:
    """What the machine adds to a plan's costs.

    Attributes:
        iteration_s: an iteration of a pipeline that waits for nobody.
        message_s: of every message and step of a ring, before its bytes.
        jitter_s: standard deviation of an iteration.
        lateness_s: scale of how late members notice their average.
        round_trip_s: of a request to the coordinator.
    """

    iteration_s: float
    message_s: float
    jitter_s: float
    lateness_s: float
    round_trip_s: float

    @classmethod
    def of(cls, trace: SyncTrace, plan: Plan) -> Host:
        """Take the figures from a trace of groups.

        A group's seconds beyond those of its bytes are a request and a message for each step of its
        ring: a line through the medians of its shapes, by least squares.

        Args:
            trace: of ``partial_all_reduce`` in groups of several sizes.
            plan: that ran, whose cluster has the bandwidths of the links.
        """
        planned = from_plan(plan)
        world = calibrated(planned, trace)
        rows = []
        for (bytes_, count, crosses), seconds in durations(world, meetings_of(trace)).items():
            if count > 1:
                steps = 2 * (count - 1)
                link = planned.between if crosses else planned.within
                moving_s = link.moving_s(steps * bytes_ / count)
                rows.append((steps, median(seconds) - moving_s))
        steps_, left_s = np.array(rows).T
        message_s, round_trip_s = np.polyfit(steps_, left_s, 1)
        return cls(
            world.iteration_s,
            max(0.0, message_s),
            world.jitter_s,
            world.lateness_s,
            max(0.0, round_trip_s),
        )

    def world(self, plan: Plan) -> World:
        """Return the world of a plan on this machine: bandwidths are those of its cluster."""
        world = from_plan(plan)
        speed = self.iteration_s / world.iteration_s
        return replace(
            world,
            ranks=tuple(rank.at_speed(speed) for rank in world.ranks),
            within=LinkCost(self.message_s, world.within.bandwidth_gb_per_s),
            between=LinkCost(self.message_s, world.between.bandwidth_gb_per_s),
            scheduler_round_trip_s=self.round_trip_s,
            jitter_s=self.jitter_s,
            lateness_s=self.lateness_s,
        )


def measured_rows(report: Path = REPORT) -> Rows:
    """Return the measured rows of a report."""
    return {row: float(cells[2]) for row, cells in measured_cells(report).items()}


def kept_hosts() -> tuple[Host, Host]:
    """Return the machine by the kept traces: of rows where no leg is slow, and where one is."""
    equal, legs = SyncTrace.load(TRACE), SyncTrace.load(LEGS_TRACE)
    return (
        Host.of(equal, pipelines_plan(PIPELINES, ITERATION_S)),
        Host.of(legs, shaped_plan(BETWEEN_GB_PER_S[0])),
    )


def measured_cells(report: Path = REPORT) -> dict[tuple[str, str], list[str]]:
    """Return the cells of a report's measured rows, by setting and strategy."""
    settings = {*SETTINGS, *map(setting_of, BETWEEN_GB_PER_S), *LEGS}
    lengths = {len(RUN_COLUMNS), len(THROUGHPUT_COLUMNS)}
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in report.read_text().splitlines()
    ]
    return {
        (cells[0], cells[1]): cells
        for cells in rows
        if len(cells) in lengths and cells[0] in settings
    }


def predicted_section(seeds: int, report: Path = REPORT) -> Outcome:
    """Return predicted and measured throughputs of every measured setting and strategy."""
    measured = measured_rows(report)
    host, legs_host = kept_hosts()
    hosts = {"loopback": host, "shaped links": host, "one slow leg": legs_host}
    loopback = host.world(pipelines_plan(PIPELINES, ITERATION_S))
    shaped = {setting_of(rate): host.world(shaped_plan(rate)) for rate in BETWEEN_GB_PER_S}
    legs = {name: legs_host.world(leg_plan(name)) for name in LEGS}
    rows, lines = [], []
    errors: dict[str, list[tuple[float, str]]] = {}
    for (setting, strategy), real in measured.items():
        on_loopback = setting in SETTINGS
        where = "loopback" if on_loopback else "one slow leg" if setting in legs else "shaped links"
        sync = strategy if on_loopback else BUCKETS.get(strategy, strategy)
        trace = SamePauses(SETTINGS[setting].pace, seeds) if on_loopback else Steady()
        world = {**shaped, **legs}.get(setting, loopback)
        rate = median(steady_rates(world, sync, trace, seeds, STEPS))
        error = rate / real - 1
        errors.setdefault(where, []).append((abs(error), f"{strategy}, {setting}"))
        told = f"{100 * error:+.1f}%" + ("" if abs(error) <= WORST else " **beyond**")
        rows.append([setting, f"`{strategy}`", f"{real:.1f}", f"{rate:.1f}", told])
        lines.append(
            {
                **{"strategy": strategy, "setting": f"predicted.{setting}"},
                **{"measured": real, "predicted": round(rate, 2), "error": round(error, 4)},
            }
        )
    columns = ("setting", "strategy", "measured shares/s", "predicted", "error")
    claims = [claim for where, row in errors.items() for claim in _claims(row, where, hosts[where])]
    return Outcome(claims, columns, rows, lines)


def _claims(errors: Sequence[tuple[float, str]], where: str, host: Host) -> list[Claim]:
    regime = (
        f"{len(errors)} rows on {where}; an iteration takes "
        f"{1000 * host.iteration_s:.1f} ms, a message {1000 * host.message_s:.2f} ms before its "
        f"bytes, jitter {1000 * host.jitter_s:.1f} ms, a request {1000 * host.round_trip_s:.1f} "
        f"ms, two in three members go on within {1000 * host.lateness_s:.1f} ms of the average"
    )
    usual = Spread((median(error for error, _ in errors),))
    worst, row = max(errors)
    beyond = sum(error > WORST for error, _ in errors)
    note = f"({row}; {beyond} beyond)" if beyond else f"({row})"
    return [
        Claim("median error of predicted throughput", regime, True, MEDIAN, usual, at_most=True),
        Claim(
            "largest error of predicted throughput",
            regime,
            True,
            WORST,
            Spread((worst,)),
            at_most=True,
            note=note,
        ),
    ]
