"""The cluster files of the examples say what their comments say."""

from pathlib import Path

import pytest
from builders import ROOT

from planner import Cluster

CLUSTERS = ROOT / "examples" / "clusters"


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_loads_and_joins_all_its_devices(path: Path) -> None:
    cluster = Cluster.load(path)
    assert cluster.name == path.stem
    first, *others = cluster.device_names
    assert all(cluster.route(first, other) is not None for other in others)


def test_the_testbed_of_dapple_is_two_servers_of_eight() -> None:
    cluster = Cluster.load(CLUSTERS / "dapple_testbed.toml")
    assert len(cluster.device_names) == 16
    assert {device.type for device in cluster.devices} == {"V100-16GB"}
    inside, between = (cluster.route("n0/gpu0", other) for other in ("n0/gpu7", "n1/gpu0"))
    assert inside is not None
    assert between is not None
    assert (inside.bandwidth_gb_per_s, between.bandwidth_gb_per_s) == (25, 1)
