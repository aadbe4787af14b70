"""How well a testbed keeps its cluster file: every pair over gloo, alone, by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.reporting.report import heading, table
from benchmarks.testbed.network import Testbed
from benchmarks.testbed.scenario import Move, Scenario, Times, measure
from planner import Cluster

WORTHS_S = (2e-3, 5e-3, 10e-3, 20e-3, 40e-3)
"""Sizes are what a route carries in these times."""
CHECK_COLUMNS = (
    *("route", "file MB/s", "measured MB/s", "error"),
    *("file latency us", "measured us", "one byte us", "worst error of a message"),
)


@dataclass(frozen=True)
class PairCheck:
    """Two devices, one way.

    Attributes:
        bytes_, seconds: medians by size; the first is one byte.
        latency_s, bandwidth_gb_per_s: of the line that fits the larger sizes.
        worst_error: of seconds against the file's latency and bandwidth, over the larger sizes;
            above 0 where the testbed is slower.
    """

    source: str
    target: str
    bytes_: tuple[int, ...]
    seconds: tuple[float, ...]
    latency_s: float
    bandwidth_gb_per_s: float
    worst_error: float


def check(testbed: Testbed, repeats: int = 5) -> list[PairCheck]:
    """Time single messages between all pairs that are joined, one pair at a time."""
    layout = testbed.layout
    names = layout.cluster.device_names
    pairs = list(layout.routes)
    sizes = [_sizes(layout.bandwidth_gb_per_s(*pair)) for pair in pairs]
    scenarios = [
        Scenario((Move(names.index(source), names.index(target), bytes_),), repeats=repeats)
        for (source, target), row in zip(pairs, sizes, strict=True)
        for bytes_ in row
    ]
    times = measure(testbed, names, scenarios)
    width = len(WORTHS_S) + 1
    return [
        _pair_check(layout.cluster, pair, row, times[start * width : (start + 1) * width])
        for start, (pair, row) in enumerate(zip(pairs, sizes, strict=True))
    ]


def fitted_line(bytes_: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency in seconds, not below 0, and seconds a byte, of least relative error."""
    sizes, times = np.array(bytes_, dtype=float), np.array(seconds)
    rate, latency_s = np.polyfit(sizes, times, 1, w=1 / times)
    if latency_s < 0:
        latency_s, rate = 0.0, np.sum(sizes / times) / np.sum((sizes / times) ** 2)
    return float(latency_s), float(rate)


def report(cluster: Cluster, checks: Sequence[PairCheck], command: str) -> str:
    """A Markdown table, a row a pair."""
    note = (
        "Single messages over gloo, one way, worth "
        f"{', '.join(f'{worth * 1e3:g}' for worth in WORTHS_S)} ms of their route; latency and "
        "bandwidth are those of the line through the medians. Messages of a few bytes take longer "
        "than the line says, the time of one byte. The worst error is of a median against the "
        "file's latency + bytes / bandwidth.\n"
    )
    title = heading(f"The testbed {cluster.name}", command)
    return "\n".join([title, note, table(CHECK_COLUMNS, check_cells(cluster, checks))])


def check_cells(cluster: Cluster, checks: Sequence[PairCheck]) -> list[list[str]]:
    """A row a pair, in :data:`CHECK_COLUMNS`."""
    rows = []
    for check_ in checks:
        route = cluster.route(check_.source, check_.target)
        assert route is not None, f"{check_.source} and {check_.target} were measured"
        width = check_.bandwidth_gb_per_s / route.bandwidth_gb_per_s - 1
        rows.append(
            [
                f"{check_.source} > {check_.target}",
                f"{route.bandwidth_gb_per_s * 1e3:g}",
                f"{check_.bandwidth_gb_per_s * 1e3:.2f}",
                f"{width:+.1%}",
                f"{route.latency_s * 1e6:.0f}",
                f"{check_.latency_s * 1e6:.0f}",
                f"{check_.seconds[0] * 1e6:.0f}",
                f"{check_.worst_error:+.1%}",
            ]
        )
    return rows


def _sizes(bandwidth_gb_per_s: float) -> list[int]:
    return [1, *(int(worth * bandwidth_gb_per_s * 1e9) for worth in WORTHS_S)]


def _pair_check(
    cluster: Cluster, pair: tuple[str, str], bytes_: Sequence[int], times: Sequence[Times]
) -> PairCheck:
    route = cluster.route(*pair)
    assert route is not None, f"{pair} has a path on the testbed"
    seconds = tuple(row.median_s() for row in times)
    latency_s, s_per_byte = fitted_line(bytes_[1:], seconds[1:])
    errors = [
        taken / route.seconds(size) - 1 for size, taken in zip(bytes_[1:], seconds[1:], strict=True)
    ]
    worst = max(errors, key=abs)
    return PairCheck(*pair, tuple(bytes_), seconds, latency_s, 1e-9 / s_per_byte, worst)
