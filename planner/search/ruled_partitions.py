"""Stages that keep the user's rules, from CP-SAT's plan model: a step of the search."""

from __future__ import annotations

import random
from typing import Any

from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.search.budget import TimeSlice
from planner.search.cp_sat.plan_model import Effort, PlanModels, Stages
from planner.search.partition.chain import Partition, StageChoice
from planner.search.state import Search

COUNTS = (2, 3, 4, 5, 6, 1, 8)
"""Numbers of stages of which the model looks for stages, in turn."""
STARTS = 0.5
"""Share of the time for these; the rest is for stages near the best of them."""
BEST_OF_MODEL = 3
"""Solutions of each number of stages that are scheduled: the last ones found are the best."""
NEIGHBOURS, NEAR_S = 3, 0.3
"""Neighbouring stages that change at a time, and seconds for that."""


def try_plan_model(search: Search, time: TimeSlice) -> None:
    """Schedule stages that keep all rules: unlike ones first, then some near the best of these."""
    network = NetworkTable.of(search.problem.cluster)
    constrain: Any = search.task.constrain
    models = PlanModels(StageTable(search.problem), network, (constrain,))
    most = search.max_stages
    counts = [n for n in COUNTS if search.problem.job.min_stages <= n <= most] or [most]
    each_s = STARTS * time.left_s / len(counts)
    best: tuple[float, Stages] | None = None
    for count in counts:
        if not time.has_time():
            break
        found = models.model(count).solve(_effort(search, each_s))
        for stages in found[-BEST_OF_MODEL:]:
            best = _better(search, best, stages)
    draw = random.Random(search.settings.seed)
    while best is not None and time.has_time() and not search.is_done():
        first = draw.randrange(len(best[1]))
        free = range(first, min(len(best[1]), first + NEIGHBOURS))
        for stages in models.near(best[1], free, _effort(search, NEAR_S))[-1:]:
            best = _better(search, best, stages)


def _effort(search: Search, seconds: float) -> Effort:
    settings = search.settings
    search.clock.spend(seconds)
    return Effort(max(seconds, 1e-3), settings.deterministic, settings.seed)


def _better(
    search: Search, best: tuple[float, Stages] | None, stages: Stages
) -> tuple[float, Stages] | None:
    candidate = search.consider(_partition(search, stages))
    if candidate is None:
        return best
    seconds = candidate.schedule.iteration_time_s
    return (seconds, stages) if best is None or seconds < best[0] else best


def _partition(search: Search, stages: Stages) -> Partition:
    names = search.problem.cluster.device_names
    return tuple(
        StageChoice(row.first, row.last, tuple(names[d] for d in row.devices)) for row in stages
    )
