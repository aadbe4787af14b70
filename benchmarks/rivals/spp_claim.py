"""SPP's own claim: its plans, run by its own scheduler, against the baselines that it names.

Luo et al. (INFOCOM 2022) train up to 157 % faster than earlier designs: data parallelism, GPipe,
PipeDream with synchronous steps, and HetPipe, which is no planner of stages here. Each has its own
partition and its own schedule, with whole backwards and one stage a device. Their testbed and their
profiles are not public, so that the pairs are those of the comparison with Pipeplan.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.reporting.report import heading, table
from benchmarks.rivals.pairs import MICROBATCHES, Pair
from planner import Problem
from planner.baselines import BASELINES
from planner.baselines.even import split
from planner.baselines.layers import Layers, Stages
from planner.costs.placement import is_connected, place
from planner.costs.stage_table import StageTable
from planner.errors import InfeasibleError
from planner.records.document import Record
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import WHOLE
from planner.simulation.simulator import simulate


def one_stage(layers: Layers) -> Stages:
    """Return the whole model on every device."""
    return split(layers, 1, len(layers.problem.cluster.device_names))


CLAIMED = 1.57
"""How much faster SPP trains than its baselines, at most."""
COMMAND = "python -m benchmarks.rivals --spp --data FOLDER"
SPP = "SPP"
ROUNDING = 1e-9
OWN: dict[str, tuple[Callable[[Layers], Stages], str]] = {
    SPP: (BASELINES["spp"].plan, "pe"),
    "data parallelism": (one_stage, "1f1b"),
    "GPipe": (BASELINES["even"].plan, "gpipe"),
    "PipeDream": (BASELINES["pipedream"].plan, "1f1b"),
}
"""Planners with the schedule of their own papers."""
COLUMNS = ("profile", "cluster", *(f"{name}, ms" for name in OWN), "SPP over the best, the worst")


class OwnRow(Record):
    """Iteration times of a pair.

    Attributes:
        profile, cluster: of the pair.
        times_s: by planner; null where its plan does not run or does not fit.
    """

    profile: str
    cluster: str
    times_s: dict[str, float | None]

    @property
    def gains(self) -> dict[str, float]:
        """How much faster SPP trains than each baseline, less 1; none where SPP finds nothing."""
        ours = self.times_s[SPP]
        known = {name: s for name, s in self.times_s.items() if name != SPP and s is not None}
        return {} if ours is None else {name: s / ours - 1 for name, s in known.items()}

    def cells(self) -> list[str]:
        """Return the row of the table."""
        times = [("-" if s is None else f"{1e3 * s:.1f}") for s in self.times_s.values()]
        gains = self.gains.values()
        told = f"{100 * min(gains):+.0f} %, {100 * max(gains):+.0f} %" if gains else "-"
        return [self.profile, self.cluster, *times, told]


def own_row(pair: Pair) -> OwnRow:
    """Plan a pair with SPP and each of its baselines."""
    problem = pair.problem()
    plain = {"backward": "whole", "max_stages_per_device": 1}
    job = problem.job.model_copy(update=plain)
    layers = Layers(StageTable(Problem(problem.graph, problem.cluster, job)))
    profile, cluster = pair.name
    times_s = {name: _time_s(layers, plan, order) for name, (plan, order) in OWN.items()}
    return OwnRow(profile=profile, cluster=cluster, times_s=times_s)


def _time_s(layers: Layers, plan: Callable[[Layers], Stages], order: str) -> float | None:
    try:
        stages = plan(layers)
    except InfeasibleError:
        return None
    pipeline = place(layers.problem, layers.specs(stages))
    if not is_connected(pipeline):
        return None
    timeline = simulate(pipeline, WHOLE[order](pipeline, balanced_assignment(pipeline)))
    peaks = timeline.peak_memory_bytes
    fits = all(peak <= pipeline.capacity_bytes(device) for device, peak in peaks.items())
    return timeline.iteration_time_s if fits else None


def own_rows(chosen: Sequence[Pair]) -> list[OwnRow]:
    """Return the rows of pairs, one pair a core."""
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        return list(executor.map(own_row, chosen))


def report(rows: Sequence[OwnRow]) -> str:
    """Return the page."""
    return "\n".join(
        [
            heading("SPP over its own baselines", COMMAND),
            f"{len(rows)} pairs of a public profile and a cluster, {MICROBATCHES} microbatches: "
            "each planner's own stages in its own schedule, with whole backwards and one stage a "
            "device, in one simulator; `-`: it does not run or does not fit in memory. HetPipe is "
            "not there, nor are SPP's testbed and profiles.\n",
            f"SPP trains faster by, where up to {100 * CLAIMED:.0f} % is published:\n",
            *_gains(rows),
            "",
            table(COLUMNS, [row.cells() for row in rows]),
        ]
    )


def _gains(rows: Sequence[OwnRow]) -> Iterator[str]:
    """Yield a line for each baseline, and for the best of them in each pair."""
    names = [name for name in OWN if name != SPP]
    for name in names:
        yield from _line(name, [(r.gains[name], r) for r in rows if name in r.gains])
    least = [(min(row.gains.values()), row) for row in rows if row.gains]
    yield from _line("the best of them in each pair", least)


def _line(name: str, found: Sequence[tuple[float, OwnRow]]) -> Iterator[str]:
    if not found:
        return
    most, where = max(found, key=lambda pair: pair[0])
    mean = statistics.geometric_mean([1 + gain for gain, _ in found]) - 1
    slower = sum(gain < -ROUNDING for gain, _ in found)
    verdict = "reached" if most >= CLAIMED else "not reached"
    yield (
        f"- over {name}: at most {100 * most:.0f} % ({where.profile} on {where.cluster}; "
        f"{verdict}), {100 * mean:.0f} % in the geometric mean of {len(found)} pairs, slower on "
        f"{slower}"
    )
