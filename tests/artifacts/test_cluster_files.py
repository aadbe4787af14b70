"""Cluster files: what the short forms stand for, and the sample files."""

from pathlib import Path

import pytest
from builders import ROOT

from planner.cluster.cluster import Cluster
from planner.cluster.presets import DEVICES, LINKS

SAMPLES = ROOT / "examples" / "clusters"
HEAD = 'format = "pipeplan-cluster/1"\n'
NODE = """
[[nodes]]
name = "n0"
devices = 2
type = "A100-80GB"
link = "NVLink3"
"""


def load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(HEAD + text)
    return Cluster.load(path)


def test_a_node_is_devices_around_a_switch(tmp_path: Path) -> None:
    found = load(tmp_path, NODE)
    assert found.device_names == ("n0/gpu0", "n0/gpu1")
    assert found.switches == ("n0",)
    assert found.device_type("n0/gpu1") == DEVICES["A100-80GB"]
    assert [link.between for link in found.links] == [("n0/gpu0", "n0"), ("n0/gpu1", "n0")]
    assert {link.bandwidth_gb_per_s for link in found.links} == {300}
    route = found.route("n0/gpu0", "n0/gpu1")
    assert (route.bandwidth_gb_per_s, route.latency_s) == (300, pytest.approx(4e-6))


def test_nodes_are_joined_by_their_switches(tmp_path: Path) -> None:
    """A transfer between machines passes five links here and is as fast as the slowest."""
    second = NODE.replace("n0", "n1").replace("NVLink3", "PCIe4-x16")
    cables = "".join(
        f'[[links]]\nbetween = ["{node}", "tor"]\npreset = "InfiniBand-HDR"\n'
        for node in ("n0", "n1")
    )
    found = load(tmp_path, f'switches = ["tor"]\n{NODE}{second}{cables}')
    route = found.route("n0/gpu1", "n1/gpu0")
    assert [found.link_name(resource) for resource in route.links] == [
        "n0/gpu1>n0",
        "n0>tor",
        "tor>n1",
        "n1>n1/gpu0",
    ]
    assert route.bandwidth_gb_per_s == 25
    assert route.latency_s == pytest.approx((2 + 5 + 5 + 5) * 1e-6)


def test_own_figures_replace_those_of_a_preset(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        NODE + '[[links]]\nbetween = ["n0/gpu0", "n0/gpu1"]\npreset = "NVLink4"\nlatency_us = 7\n'
        'duplex = "half"\nsource = "measured"\n',
    )
    link = found.links[-1]
    assert (link.bandwidth_gb_per_s, link.latency_us) == (LINKS["NVLink4"].bandwidth_gb_per_s, 7)
    assert (link.duplex, link.source, link.shared) == ("half", "measured", False)


def test_a_file_may_define_its_own_types(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        """
        [device_types.board]
        memory_gib = 8
        memory_bandwidth_gb_per_s = 100
        peak_tflop_per_s = { float32 = 1.5 }
        [device_types."A10"]
        memory_gib = 12
        memory_bandwidth_gb_per_s = 600
        peak_tflop_per_s = { float32 = 31.2 }
        [link_types.wire]
        bandwidth_gb_per_s = 0.5
        shared = true
        [[devices]]
        name = "x"
        type = "board"
        [[devices]]
        name = "y"
        type = "A10"
        [[links]]
        between = ["x", "y"]
        preset = "wire"
        """,
    )
    assert found.device_type("x").peak_tflop_per_s == {"float32": 1.5}
    assert found.device_type("x").capacity_bytes == 7 * 2**30
    assert found.device_type("y").memory_gib == 12
    assert found.links[0].shared
    assert found.route("x", "y").links == ()


def test_a_link_of_a_node_may_have_its_own_figures(tmp_path: Path) -> None:
    text = NODE.replace('"NVLink3"', "{ bandwidth_gb_per_s = 12, latency_us = 3 }")
    assert {link.bandwidth_gb_per_s for link in load(tmp_path, text).links} == {12}


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("single_node", 4),
        ("this_machine", 4),
        ("two_nodes", 16),
        ("irregular", 9),
        ("dapple_testbed", 16),
    ],
)
def test_a_sample_cluster_is_whole(name: str, devices: int) -> None:
    found = Cluster.load(SAMPLES / f"{name}.toml")
    assert found.name == name
    assert len(found.devices) == devices
    for source in found.device_names:
        for target in found.device_names:
            assert found.route(source, target) is not None


def test_every_sample_cluster_is_tested() -> None:
    tested = {"single_node", "this_machine", "two_nodes", "irregular", "dapple_testbed"}
    assert {path.stem for path in SAMPLES.iterdir()} == tested


def test_the_testbed_of_dapple_has_the_links_of_its_planner() -> None:
    """25 GB/s between GPUs of a server, 1 GB/s between servers: the constants of its planner."""
    found = Cluster.load(SAMPLES / "dapple_testbed.toml")
    assert {device.type for device in found.devices} == {"V100-16GB"}
    assert found.route("n0/gpu0", "n0/gpu7").bandwidth_gb_per_s == 25
    assert found.route("n0/gpu0", "n1/gpu0").bandwidth_gb_per_s == 1


def test_two_nodes_share_their_network_cards() -> None:
    found = Cluster.load(SAMPLES / "two_nodes.toml")
    inside = found.route("n0/gpu0", "n0/gpu7")
    first, second = found.route("n0/gpu0", "n1/gpu0"), found.route("n0/gpu5", "n1/gpu3")
    assert inside.bandwidth_gb_per_s == 300
    assert first.bandwidth_gb_per_s == second.bandwidth_gb_per_s == 25
    assert {found.link_name(r) for r in {*first.links} & {*second.links}} == {
        "n0>network",
        "network>n1",
    }
    back = found.route("n1/gpu0", "n0/gpu0")
    assert not {*first.links} & {*back.links}


def test_the_irregular_sample_is_irregular() -> None:
    found = Cluster.load(SAMPLES / "irregular.toml")
    assert len({device.type for device in found.devices}) == 3
    bridge = found.route("big/gpu0", "big/gpu1")
    assert (bridge.bandwidth_gb_per_s, len(bridge.links)) == (300, 1)
    assert found.route("big/gpu0", "big/gpu2").bandwidth_gb_per_s == 31.5
    assert found.route("big/gpu0", "ws0").bandwidth_gb_per_s == 11.4
    half = found.route("ws1", "ws0")
    assert half.bandwidth_gb_per_s == 3.125
    assert {*half.links} & {*found.route("ws0", "ws1").links}


@pytest.mark.parametrize("name", DEVICES)
def test_a_preset_device_leaves_memory_and_knows_float32(name: str) -> None:
    device = DEVICES[name]
    assert 0 < device.capacity_bytes < device.memory_gib * 2**30
    assert device.peak_tflop_per_s["float32"] > 0


MEASURED = """
format = "pipeplan-cluster/1"
switches = ["bus"]
devices = [
    { name = "a", type = "A100-40GB" }, { name = "b", type = "A100-40GB" },
    { name = "c", type = "A100-40GB" },
]
links = [
    { between = ["a", "bus"], preset = "PCIe4-x16" },
    { between = ["b", "bus"], preset = "PCIe4-x16" },
    { between = ["c", "bus"], preset = "PCIe4-x16"PORT },
    { between = ["a", "b"], bandwidth_gb_per_s = WIDTH, source = "measured" },
]
"""


@pytest.mark.parametrize(
    ("width", "port", "told"),
    [
        (300, "", []),
        (300, ', bandwidth_gb_per_s = 11, source = "measured"', []),
        (300, ", bandwidth_gb_per_s = 2", []),
        (
            3,
            "",
            [
                "links[3]: 3 GB/s were measured between 'a' and 'b', and messages between the two "
                "go over a>bus, bus>b instead, with 31.5 GB/s by the file: measure it again "
            ],
        ),
        (
            300,
            ', bandwidth_gb_per_s = 2, source = "measured"',
            [
                "links[2]: 2 GB/s were measured between 'c' and 'bus', and PCIe4-x16 has 31.5: ",
                "links[2]: 2 GB/s were measured between 'c' and 'bus', and the 2 other links from "
                "'bus' to devices of type A100-40GB have 31.5 (median): measure it again ",
            ],
        ),
    ],
)
def test_measured_links_that_contradict_the_topology_are_told(
    width: float, port: str, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(MEASURED.replace("WIDTH", str(width)).replace("PORT", port))
    Cluster.load(path)
    assert len(caplog.messages) == len(told)
    for said, expected in zip(caplog.messages, told, strict=True):
        assert said.startswith(f"{path}: {expected}")
