"""`nvidia-smi topo -m`: what each class becomes, and what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from link_files import topology

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.interop.importing.nvidia_topology import read_topology_cluster

A100 = "A100-80GB"
PCIE4 = 31.5


def read(tmp_path: Path, text: str, kind: str | None = A100) -> tuple[Cluster, tuple[str, ...]]:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    found = read_topology_cluster(path, kind)
    assert {link.source for link in found.cluster.links} == {"assumed"}
    return found.cluster, found.notes


def width(cluster: Cluster, a: int, b: int) -> float:
    route = cluster.route(f"gpu{a}", f"gpu{b}")
    assert route is not None
    return route.bandwidth_gb_per_s


def full(count: int, word: str) -> list[str]:
    return [" ".join("X" if i == j else word for j in range(count)) for i in range(count)]


@pytest.mark.parametrize("separator", ["\t", "    "])
def test_nvlinks_of_all_with_all_are_a_switch(tmp_path: Path, separator: str) -> None:
    """Eight A100: 12 NVLinks to each of 7 others are more than the 12 of a device."""
    cards = {"NIC0": "PXB", "mlx5_1": "SYS"}
    cluster, notes = read(tmp_path, topology(full(8, "NV12"), cards=cards, separator=separator))
    assert cluster.switches == ("nvswitch",)
    assert len(cluster.links) == 8
    assert {link.bandwidth_gb_per_s for link in cluster.links} == {300}
    assert any(note.startswith("NIC0, mlx5_1 connect to other machines") for note in notes)
    assert any("classes of connections, no figures" in note for note in notes)


def test_the_count_of_nvlinks_scales_the_preset(tmp_path: Path) -> None:
    """Eight of twelve, as an A800 has."""
    cluster, _ = read(tmp_path, topology(full(8, "NV8")))
    assert width(cluster, 0, 7) == 200


def test_nvlinks_between_few_are_links_of_their_own(tmp_path: Path) -> None:
    """Four A100 with 4 NVLinks to each other: 12 in all."""
    cluster, _ = read(tmp_path, topology(full(4, "NV4")))
    assert cluster.switches == ()
    assert len(cluster.links) == 6
    assert {link.bandwidth_gb_per_s for link in cluster.links} == {100}


def test_a_hybrid_of_nvlink_and_pcie_takes_the_wider_way(tmp_path: Path) -> None:
    """Four V100 in two pairs with one and two NVLinks; sockets between the pairs."""
    rows = ["X NV1 SYS SYS", "NV1 X SYS SYS", "SYS SYS X NV2", "SYS SYS NV2 X"]
    cluster, _ = read(tmp_path, topology(rows, numa=["0", "0", "1", "1"]), "V100-16GB")
    assert width(cluster, 0, 1) == 25
    assert width(cluster, 2, 3) == 50
    assert width(cluster, 0, 3) == pytest.approx(15.75 / 2)
    # Both pairs share what joins their sockets.
    ways = [cluster.route("gpu0", "gpu2"), cluster.route("gpu1", "gpu3")]
    first, second = (set(way.links) for way in ways if way is not None)
    assert first & second


def test_classes_of_pcie_become_a_tree(tmp_path: Path) -> None:
    rows = [
        "X PIX NODE NODE SYS SYS",
        "PIX X NODE NODE SYS SYS",
        "NODE NODE X PXB SYS SYS",
        "NODE NODE PXB X SYS SYS",
        "SYS SYS SYS SYS X PHB",
        "SYS SYS SYS SYS PHB X",
    ]
    cluster, _ = read(tmp_path, topology(rows, numa=[*"000011"]))
    assert set(cluster.switches) == {"pcie0", "pcie1", "numa0", "numa1"}
    hops = {}
    for a, b in ((0, 1), (2, 3), (0, 2), (4, 5), (1, 4)):
        route = cluster.route(f"gpu{a}", f"gpu{b}")
        assert route is not None
        hops[a, b] = len(route.links), route.bandwidth_gb_per_s
    assert hops == {
        (0, 1): (2, PCIE4),
        (2, 3): (2, PCIE4),
        (0, 2): (4, PCIE4),
        (4, 5): (2, PCIE4),
        (1, 4): (4, PCIE4 / 2),
    }


def test_newer_cards_have_newer_pcie(tmp_path: Path) -> None:
    cluster, _ = read(tmp_path, topology(full(2, "PHB")), "H100-80GB")
    assert width(cluster, 0, 1) == 63


def test_names_of_gpus_in_the_same_file_tell_their_type(tmp_path: Path) -> None:
    names = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-0{n})\n" for n in range(2))
    cluster, _ = read(tmp_path, names + topology(full(2, "NV18")), None)
    assert set(cluster.device_types) == {"H100-80GB"}
    assert width(cluster, 0, 1) == 450


def test_styles_of_a_terminal_and_older_names_are_read(tmp_path: Path) -> None:
    text = topology(full(2, "SOC")).replace("GPU1", "\x1b[4mGPU1\x1b[0m", 1)
    cluster, _ = read(tmp_path, text)
    assert width(cluster, 0, 1) == PCIE4 / 2


def test_a_class_that_nobody_knows_is_told(tmp_path: Path) -> None:
    cluster, notes = read(tmp_path, topology(["X NV4 ???", "NV4 X NV4", "??? NV4 X"]))
    assert any(note.startswith("GPU0 and GPU2: '???' is none of NV#, PIX") for note in notes)
    assert width(cluster, 0, 1) == 100
    assert width(cluster, 0, 2) <= PCIE4


def test_ways_of_two_classes_are_told(tmp_path: Path) -> None:
    _, notes = read(tmp_path, topology(["X PIX", "SYS X"]))
    assert "GPU0 and GPU1: PIX one way and SYS the other; taken as PIX" in notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing of the kind\n", "has no table of `nvidia-smi topo -m`"),
        (topology(full(4, "NV4")).partition("GPU3\tNV4")[0], "no row of GPU3; it may be cut off"),
        (topology(["X NV4", "NV4"]).replace("\t0-15,32-47\t0\t\tN/A", ""), "line 3: GPU1 has 1"),
        (topology(["X"]), "has one GPU"),
    ],
)
def test_what_is_no_whole_table_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PipeplanError, match=r"topo\.txt: ") as refused:
        read(tmp_path, text)
    assert words in str(refused.value)


def test_a_type_has_to_be_known(tmp_path: Path) -> None:
    with pytest.raises(PipeplanError, match="does not say what GPU0 is; give --device-type"):
        read(tmp_path, topology(full(2, "NV4")), None)
    with pytest.raises(PipeplanError, match="device_type: 'A1000' is unknown; use one of"):
        read(tmp_path, topology(full(2, "NV4")), "A1000")
