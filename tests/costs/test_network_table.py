"""The arrays of a cluster agree with its routes and device types."""

from pathlib import Path

import numpy as np
import pytest

from planner.cluster.cluster import Cluster
from planner.costs.network_table import NetworkTable

CLUSTERS = sorted(Path(__file__).parents[2].glob("examples/clusters/*.toml"))
TANGLED = Cluster.from_data(
    {
        "format": "pipeplan-cluster/1",
        "device_types": {
            "t": {
                "memory_gib": 8,
                "memory_bandwidth_gb_per_s": 1.0,
                "peak_tflop_per_s": {"float32": 1.0},
            }
        },
        "devices": [{"name": name, "type": "t"} for name in "abcde"],
        "switches": ["s"],
        "links": [
            {"between": ["a", "b"], "bandwidth_gb_per_s": 2.0, "latency_us": 5},
            {"between": ["a", "s"], "bandwidth_gb_per_s": 3.0, "latency_us": 1, "duplex": "half"},
            {"between": ["b", "s"], "bandwidth_gb_per_s": 9.0, "latency_us": 2, "shared": True},
            {"between": ["c", "s"], "bandwidth_gb_per_s": 1.0, "latency_us": 2, "duplex": "half"},
        ],
        "hosts": [{"devices": ["a", "c"], "slowdown": [1.0, 1.5]}],
    }
)


@pytest.mark.parametrize(
    "cluster",
    [TANGLED, *map(Cluster.load, CLUSTERS)],
    ids=["tangled", *(path.stem for path in CLUSTERS)],
)
def test_routes_are_those_of_the_cluster(cluster: Cluster) -> None:
    table = NetworkTable.of(cluster)
    for i, source in enumerate(table.devices):
        for j, target in enumerate(table.devices):
            route = cluster.route(source, target)
            if route is None:
                assert table.gb_per_s[i, j] == 0
                assert np.isinf(table.latency_s[i, j])
                continue
            row = table.middle[i, j]
            middle = table.middle_links[table.middle_start[row] : table.middle_start[row + 1]]
            found = [table.first_link[i], *middle, table.last_link[j]] if i != j else []
            assert tuple(table.links[link] for link in found if link >= 0) == route.links
            assert table.latency_s[i, j] == route.latency_s
            assert table.gb_per_s[i, j] == route.bandwidth_gb_per_s


def test_hosts_slow_their_devices_alone() -> None:
    table = NetworkTable.of(TANGLED)
    assert table.host_of.tolist() == [0, -1, 0, -1, -1]
    assert table.slowdown.tolist() == [[1.0, 1.5]]
