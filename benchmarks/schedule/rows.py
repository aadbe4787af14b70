"""Rows of the schedule benchmark: instances, bars and results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.schedule.instances import Instance, chunks, uneven, zero_bubble, zero_bubble_rows
from planner.costs.placed_pipeline import PlacedPipeline
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import published_orders
from planner.schedules.split import split_backwards
from planner.search.clock import Clock
from planner.search.orders.search import ScheduleSearch
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


@dataclass(frozen=True)
class Settings:
    """Of each search: its random numbers, threads, and whether it counts work instead of time."""

    seed: int = 0
    workers: int = 1
    deterministic: bool = False


LIMIT_S = 57.0
"""For a row that is to end within a minute."""
UNEVEN_MEDIAN, UNEVEN_WORST, MANY_GAP, CLASSIC_MEAN = 0.005, 0.04, 0.01, 1.08
"""Bars: of gaps, and of the geometric mean of published over our times."""
PROVED = 1e-6
SENDS_MS = (0.3, 1.0, 2.0)
"""Times of a transfer, against published schedules."""


def chunks_gap(microbatches: int) -> float:
    """The bar of gaps with two stages a device."""
    return 0.05 if microbatches == 16 else 0.07


@dataclass(frozen=True)
class Row:
    """One instance, solved; times in microseconds."""

    instance: str
    stages: int
    microbatches: int
    cap: str
    value: float
    lower_bound: float
    best_classic: float
    reference: float | None
    seconds: float

    @property
    def gap(self) -> float:
        """Value / bound - 1."""
        return max(0.0, self.value / self.lower_bound - 1)


@dataclass(frozen=True)
class Case:
    """An instance to solve.

    Attributes:
        instance: stages and microbatches.
        split: whether input and weight gradients run apart.
        cap: on stashes, in words.
        limit_s: of the search.
    """

    instance: Instance
    split: bool
    cap: str = ""
    limit_s: float = LIMIT_S


def solve(
    instance: Instance,
    *,
    split: bool,
    limit_s: float,
    settings: Settings,
    cap: str = "",
    reference: float | None = None,
) -> Row:
    """Schedule an instance and the published schedules beside it."""
    pipeline = instance.pipeline()
    begin, clock = time.perf_counter(), Clock(limit_s, deterministic=settings.deterministic)
    search = ScheduleSearch(
        pipeline, clock, splits=split, seed=settings.seed, workers=settings.workers
    )
    search.run()
    seconds = round(time.perf_counter() - begin, 1)
    return Row(
        instance.name,
        len(pipeline.stages),
        pipeline.microbatches,
        cap,
        _microseconds(search.best_s),
        _microseconds(min(search.bound_s, search.best_s)),
        _microseconds(best_classic_s(pipeline, split=split)),
        reference,
        seconds,
    )


def best_classic_s(pipeline: PlacedPipeline, *, split: bool) -> float:
    """The best published schedule within memory; infinity if none fits."""
    found = _published(pipeline, split=split)
    return min((row.iteration_time_s for row in found if not row.overflow_bytes), default=math.inf)


def _published(pipeline: PlacedPipeline, *, split: bool) -> Iterator[Timeline]:
    """Whole backwards count as input and weight gradients in a row where these are apart."""
    for _, orders in published_orders(pipeline, balanced_assignment(pipeline), split=split):
        apart = {d: split_backwards(o) for d, o in orders.items()} if split else orders
        yield simulate(pipeline, apart)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# --- sections -------------------------------------------------------------------------------------


def zero_bubble_file(
    path: Path, settings: Settings, limit_s: float = LIMIT_S, every: int = 1
) -> Iterator[Row]:
    """Instances and caps of a file of the form of zero_bubble_instances.json.

    Args:
        path: the file.
        settings: of each search.
        limit_s: of each search.
        every: each second, third, … instance only, from the first.
    """
    for row in zero_bubble_rows(path)[::every]:
        for cap in (1, 2):
            told: dict[str, Any] = row.get(f"zero_bubble_heuristic_cap_{cap}p", {})
            yield solve(
                zero_bubble(row, cap),
                split=True,
                limit_s=limit_s,
                settings=settings,
                cap=f"{cap}p",
                reference=told.get("makespan"),
            )


def solve_cases(cases: Iterable[Case], settings: Settings) -> Iterator[Row]:
    """A row a case, as each is solved."""
    for case in cases:
        yield solve(
            case.instance, split=case.split, limit_s=case.limit_s, settings=settings, cap=case.cap
        )


def one_stage_a_device() -> list[Case]:
    """16 x 64, uneven stages with communication, twelve instances."""
    return [
        Case(uneven(16, 64, caps, seed, whole=whole), not whole, caps)
        for seed, caps, whole in product((1, 2), ("1f1b", "uniform", "double"), (True, False))
    ]


def loose_caps() -> list[Case]:
    """16 x 64 where memory holds all microbatches."""
    return [
        Case(uneven(16, 64, "loose", seed, whole=whole), not whole, "loose")
        for seed, whole in product((1, 2), (True, False))
    ]


def two_stages_a_device() -> list[Case]:
    """Interleaved and V on 8 devices, 16 and 32 microbatches."""
    kinds = [
        ("interleaved", True, None),
        ("interleaved", False, None),
        ("v", True, None),
        ("v", True, True),
        ("v", False, None),
    ]
    return [
        Case(chunks(8, microbatches, placement, 1, whole=whole, tapered=tapered), not whole)
        for microbatches, (placement, whole, tapered) in product((16, 32), kinds)
    ]


def many_microbatches() -> list[Case]:
    """8 to 32 stages, 256 and 1,024 microbatches."""
    sizes = product((8, 16, 32), (256, 1024), ("1f1b", "double"), (True, False))
    return [
        Case(uneven(stages, count, caps, 1, whole=whole), not whole, caps, limit_s=30.0)
        for stages, count, caps, whole in sizes
    ]


def against_classics(send_ms: float) -> list[Case]:
    """8 x 32, uneven stages, transfers of so many milliseconds; twelve instances."""
    kinds = product((1, 2), ("1f1b", "uniform", "double"), (True, False))
    return [
        Case(uneven(8, 32, caps, seed, whole=whole, send_ms=send_ms), not whole, caps, limit_s=15.0)
        for seed, caps, whole in kinds
    ]


def geometric_mean_over_classic(rows: list[Row]) -> float:
    """Return the geometric mean of the best published schedule's time over ours, where one fits."""
    ratios = [row.best_classic / row.value for row in rows if math.isfinite(row.best_classic)]
    return statistics.geometric_mean(ratios)
