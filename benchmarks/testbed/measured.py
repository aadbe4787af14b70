"""The cluster file of a testbed with its measured latencies and bandwidths."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.testbed.check import PairCheck
from benchmarks.testbed.routing import hops
from planner import Cluster

SHARE_STEPS = 2000


def measured_cluster(cluster: Cluster, checks: Sequence[PairCheck]) -> Cluster:
    """Return the same topology with measured bandwidths of the routes that a link limits.

    A link that is the narrowest of no route keeps the file's bandwidth. Latencies of links are
    those that add up best to the measured ones of routes.
    """
    latencies_s = _link_latencies_s(cluster, checks)
    widths: dict[int, list[float]] = {}
    for check in checks:
        links = _links(cluster, check)
        narrowest = min(links, key=lambda link: cluster.links[link].bandwidth_gb_per_s)
        least = cluster.links[narrowest].bandwidth_gb_per_s
        for link in links:
            if cluster.links[link].bandwidth_gb_per_s == least:
                widths.setdefault(link, []).append(check.bandwidth_gb_per_s)
    links_found = [
        link.model_copy(
            update={
                "latency_us": round(latencies_s.get(index, link.latency_us * 1e-6) * 1e6, 1),
                "bandwidth_gb_per_s": round(statistics.median(widths[index]), 6)
                if index in widths
                else link.bandwidth_gb_per_s,
                "source": "measured",
            }
        )
        for index, link in enumerate(cluster.links)
    ]
    return cluster.model_copy(update={"links": tuple(links_found)})


def _links(cluster: Cluster, check: PairCheck) -> list[int]:
    route = hops(cluster, check.source, check.target)
    assert route is not None, f"{check.source} > {check.target} was measured"
    return [hop.link for hop in route]


def _link_latencies_s(cluster: Cluster, checks: Sequence[PairCheck]) -> dict[int, float]:
    """Least squares, none below 0: gradient descent from an even share of each route."""
    rows = [_links(cluster, check) for check in checks]
    used = sorted({link for row in rows for link in row})
    matrix = np.array([[float(link in row) for link in used] for row in rows])
    wanted = np.array([check.latency_s for check in checks])
    found = np.full(len(used), wanted.mean() / matrix.sum(axis=1).mean())
    step = 1 / np.linalg.norm(matrix, 2) ** 2
    for _ in range(SHARE_STEPS):
        found = np.maximum(0.0, found - step * matrix.T @ (matrix @ found - wanted))
    return dict(zip(used, (float(value) for value in found), strict=True))
