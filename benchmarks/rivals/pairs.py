"""The pairs of a public profile and a cluster, and what every planner makes of them."""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.harness import Claim, Result, Row, counted
from benchmarks.plans.drawn import random_cluster
from benchmarks.rivals.kept import rows_of
from benchmarks.rivals.profiles import PRECISION, read_profile
from planner import Cluster, Job, PipeplanError, Problem
from planner.analysis.comparison import OURS, compare
from planner.baselines import BASELINES

MICROBATCHES = 32
FREEDOMS = {"backward": "any", "max_stages_per_device": 2}
"""What every planner may use: all published schedules."""
LOCAL = "this_machine"
"""The example that describes the machine one sits at."""
RANDOM_CLUSTERS = 20
STRIDE = 11
"""One in so many pairs makes the table; prime to the number of clusters, so that all kinds of
clusters and most profiles come by."""
LIMIT_S, SHORT_LIMIT_S = 10.0, 5.0
ROUNDING = 1e-9
"""Share of a time below which a difference is rounding."""
BUT_SPP = tuple(name for name in BASELINES if name != "spp")
SOURCE = "even splits, even grids, PipeDream, DAPPLE, AutoPipe, SPP, in their fastest schedules"
MEANS = (
    ("the best rival", tuple(BASELINES), 1.10),
    ("the best rival but SPP", BUT_SPP, 1.15),
    ("SPP", ("spp",), 1.05),
)
"""Geometric means of rivals' times over ours, with their bars."""


@dataclass(frozen=True)
class Pair:
    """A public profile on a cluster.

    Attributes:
        profile: its file.
        cluster: file of a sample cluster, or seed of a random one.
    """

    profile: Path
    cluster: Path | int

    def problem(self) -> Problem:
        """Return the problem, with every freedom that a published schedule needs."""
        cluster = self.cluster
        machines = (
            Cluster.from_data(random_cluster(cluster))
            if isinstance(cluster, int)
            else Cluster.load(cluster)
        )
        graph = read_profile(self.profile)
        job = Job(
            name=graph.name,
            samples_per_microbatch=graph.record.samples_per_microbatch,
            precision=PRECISION,
            microbatches=MICROBATCHES,
            **FREEDOMS,
        )
        return Problem(graph, machines, job)

    @property
    def name(self) -> dict[str, str]:
        """Profile and cluster."""
        where = self.cluster
        cluster = f"random {where}" if isinstance(where, int) else where.stem
        return {"profile": self.profile.stem, "cluster": cluster}


def pairs(data: Path) -> list[Pair]:
    """Return every profile with every sample cluster and every random one.

    Raises:
        PipeplanError: if the folder has no profiles.
    """
    folders = ("dapple", "pipedream")
    profiles = [path for name in folders for path in sorted((data / name).glob("*.txt"))]
    if not profiles:
        raise PipeplanError(f"--data {data}: no *.txt in dapple, pipedream; give their parent")
    samples = [path for path in sorted(SAMPLE_CLUSTERS.glob("*.toml")) if path.stem != LOCAL]
    clusters: list[Path | int] = [*samples, *range(RANDOM_CLUSTERS)]
    return [Pair(profile, cluster) for profile in profiles for cluster in clusters]


def section(options: argparse.Namespace) -> Result:
    """Public profiles: Pipeplan against the best of all published planners and schedules."""
    texts = [f"time of {who} over ours, geometric mean, public profiles" for who, _, _ in MEANS]
    if options.data is None:
        bars = zip(texts, (bar for _, _, bar in MEANS), strict=True)
        return Result([], [Claim(text, None, SOURCE, at_least=bar) for text, bar in bars])
    limit_s = options.time_limit or (SHORT_LIMIT_S if options.short else LIMIT_S)
    kept = options.keep and options.keep / "profiles.jsonl"
    chosen = pairs(options.data)[:: options.every]
    if options.short:
        chosen = chosen[::4]
    rows = rows_of(chosen, lambda pair: pair.name, partial(_measured, limit_s), kept, limit_s)
    claims = [
        Claim(text, _mean(rows, names), SOURCE, at_least=bar)
        for text, (_, names, bar) in zip(texts, MEANS, strict=True)
    ]
    fine = (row["rival / ours"] >= 1 - ROUNDING for row in rows)
    return Result(rows, [*claims, counted("plans that no rival is faster than", fine, SOURCE)])


def _mean(rows: Sequence[Row], names: Sequence[str]) -> float:
    """Return the geometric mean of the best of some rivals over ours, where one finds a plan."""
    ratios = []
    for row in rows:
        times = [row[f"{name}, ms"] for name in names if row[f"{name}, ms"] is not None]
        ratios += [min(times) / row["ours, ms"]] if times else []
    return statistics.geometric_mean(ratios)


def _measured(limit_s: float, chosen: Sequence[Pair]) -> Iterator[Row]:
    """Yield a row a pair as it is known, one pair a core."""
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        for future in as_completed([executor.submit(_row, pair, limit_s) for pair in chosen]):
            yield future.result()


def _row(pair: Pair, limit_s: float) -> Row:
    """Plan a pair with every planner.

    Raises:
        PipeplanError: if our search or every rival finds nothing.
    """
    problem = pair.problem()
    found = {
        row.planner: (row.figures.iteration_time_s, row.schedule)
        for row in compare(
            problem, tuple(BASELINES), time_limit_s=limit_s, workers=1, deterministic=True
        )
        if row.figures is not None
    }
    rivals = {name: found[name] for name in BASELINES if name in found}
    if OURS not in found or not rivals:
        raise PipeplanError(f"{pair.name}: no plan was found")
    ours_s, schedule = found[OURS]
    best = min(rivals, key=lambda name: rivals[name][0])
    return {
        **pair.name,
        "devices": len(problem.cluster.devices),
        "ours, ms": 1e3 * ours_s,
        "our schedule": schedule,
        "best rival": best,
        "its schedule": rivals[best][1],
        "rival, ms": 1e3 * rivals[best][0],
        "rival / ours": rivals[best][0] / ours_s,
        **{
            f"{name}, ms": 1e3 * rivals.get(name, (math.nan, None))[0] if name in rivals else None
            for name in BASELINES
        },
    }
