"""`nvidia-smi topo -m`: what each class becomes, and what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from link_files import own_type, topology

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions

A100 = "A100-80GB"
PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0


def read(
    tmp_path: Path, text: str, kind: str | None = A100, **given: str
) -> tuple[Cluster, tuple[str, ...]]:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    found = import_cluster(path, "nvidia-smi", ImportOptions(kind, given=given))[1]
    assert {link.source for link in found.cluster.links} == {"assumed"}
    return found.cluster, found.notes


def links_of(cluster: Cluster) -> dict[str, float]:
    return {"-".join(link.between): link.bandwidth_gb_per_s for link in cluster.links}


def way(cluster: Cluster, a: str, b: str) -> tuple[float, float]:
    """Bandwidth in GB/s and latency in microseconds."""
    route = cluster.route(a, b)
    assert route is not None
    return route.bandwidth_gb_per_s, pytest.approx(route.latency_s * 1e6)


def full(count: int, word: str) -> list[str]:
    return [" ".join("X" if i == j else word for j in range(count)) for i in range(count)]


CARDS = ("NIC0", "NIC1")
NAMED = "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
HGX = topology(
    [
        "X NV18 NV18 NV18 PIX NODE SYS SYS",
        "NV18 X NV18 NV18 NODE PIX SYS SYS",
        "NV18 NV18 X NV18 SYS SYS PIX NODE",
        "NV18 NV18 NV18 X SYS SYS NODE PIX",
        "PIX NODE SYS SYS X NODE SYS SYS",
        "NODE PIX SYS SYS NODE X SYS SYS",
        "SYS SYS PIX NODE SYS SYS X NODE",
        "SYS SYS NODE PIX SYS SYS NODE X",
    ],
    numa=[*"0011"],
    cards=("NIC0", "NIC1", "mlx5_8", "mlx5_bond_0"),
    more=NAMED,
)
GEFORCE = topology(["X PIX PHB PHB", "PIX X PHB PHB", "PHB PHB X PHB", "PHB PHB PHB X"])
TWO_SOCKETS = topology(
    ["X PHB SYS SYS", "PHB X SYS SYS", "SYS SYS X PHB", "SYS SYS PHB X"], numa=[*"0011"]
)
CARD_ON_ONE_SOCKET = topology(
    [
        "X NODE SYS SYS SYS SYS",
        "NODE X SYS SYS SYS SYS",
        "SYS SYS X NODE NODE NODE",
        "SYS SYS NODE X NODE NODE",
        "SYS SYS NODE NODE X PIX",
        "SYS SYS NODE NODE PIX X",
    ],
    numa=[*"0011"],
    cards=CARDS,
    more=NAMED,
)
CASCADE = topology(
    [
        "X PIX PXB PXB PIX PXB",
        "PIX X PXB PXB PIX PXB",
        "PXB PXB X PIX PXB PIX",
        "PXB PXB PIX X PXB PIX",
        "PIX PIX PXB PXB X PXB",
        "PXB PXB PIX PIX PXB X",
    ],
    cards=CARDS,
)
EQUALLY_NEAR = topology(
    ["X PXB PXB PXB", "PXB X PXB PXB", "PXB PXB X PXB", "PXB PXB PXB X"], cards=CARDS
)
BOXES: dict[str, tuple[str, str, dict[str, float], dict[tuple[str, str], tuple[float, float]]]] = {
    "HGX H100, a card beside each GPU": (
        "H100-80GB",
        HGX,
        {
            **{f"gpu{n}-nvswitch": 450.0 for n in range(4)},
            **{f"gpu{n}-pcie{n}": PCIE5 for n in range(4)},
            **{"mlx5_0-pcie0": PCIE5, "mlx5_1-pcie1": PCIE5},
            **{"mlx5_8-pcie2": PCIE5, "mlx5_bond_0-pcie3": PCIE5},
            **{"pcie0-numa0": PCIE5, "pcie1-numa0": PCIE5},
            **{"pcie2-numa1": PCIE5, "pcie3-numa1": PCIE5},
            "numa0-numa1": PCIE5 / 2,
        },
        {("gpu0", "gpu3"): (450, 4)},
    ),
    "RTX 3090, through host memory": (
        "RTX-3090",
        GEFORCE,
        {
            **{"gpu0-pcie0": PCIE4 / 2, "gpu1-pcie0": PCIE4 / 2, "pcie0-numa0": PCIE4},
            **{"gpu2-numa0": PCIE4 / 2, "gpu3-numa0": PCIE4 / 2},
        },
        {("gpu0", "gpu1"): (PCIE4 / 2, 5), ("gpu1", "gpu2"): (PCIE4 / 2, 5.5)},
    ),
    "T4 on two sockets": (
        "T4",
        TWO_SOCKETS,
        {
            **{"gpu0-numa0": PCIE3, "gpu1-numa0": PCIE3, "gpu2-numa1": PCIE3, "gpu3-numa1": PCIE3},
            "numa0-numa1": PCIE3 / 2,
        },
        {("gpu0", "gpu1"): (PCIE3, 5), ("gpu1", "gpu3"): (PCIE3 / 2, 5.5)},
    ),
    "L40S, a card of two ports on one socket": (
        "L40S",
        CARD_ON_ONE_SOCKET,
        {
            **{"mlx5_0-pcie0": PCIE4, "mlx5_1-pcie0": PCIE4, "pcie0-numa1": PCIE4},
            **{"gpu0-numa0": PCIE4, "gpu1-numa0": PCIE4, "gpu2-numa1": PCIE4, "gpu3-numa1": PCIE4},
            "numa0-numa1": PCIE4 / 2,
        },
        {("gpu0", "gpu1"): (PCIE4, 5), ("gpu0", "gpu3"): (PCIE4 / 2, 5.5)},
    ),
    "A10 behind two switches behind a third": (
        "A10",
        CASCADE,
        {
            **{"gpu0-pcie0": PCIE4, "gpu1-pcie0": PCIE4, "nic0-pcie0": PCIE4},
            **{"gpu2-pcie1": PCIE4, "gpu3-pcie1": PCIE4, "nic1-pcie1": PCIE4},
            **{"pcie0-bridges0": PCIE4, "pcie1-bridges0": PCIE4},
        },
        {("gpu0", "gpu1"): (PCIE4, 5), ("gpu1", "gpu2"): (PCIE4, 6)},
    ),
    "two GPUs as near to two cards": (
        A100,
        EQUALLY_NEAR,
        {
            **{"nic0-bridges0-nic0": PCIE4, "gpu0-bridges0-nic0": PCIE4},
            **{"nic1-bridges0-nic1": PCIE4, "gpu1-bridges0-nic1": PCIE4},
            **{"bridges0-nic0-bridges0": PCIE4, "bridges0-nic1-bridges0": PCIE4},
        },
        {("gpu0", "gpu1"): (PCIE4, 5)},
    ),
}


@pytest.mark.parametrize("box", BOXES)
def test_a_real_box_has_the_links_that_were_drawn_by_hand(box: str, tmp_path: Path) -> None:
    kind, text, links, ways = BOXES[box]
    cluster, _ = read(tmp_path, text, kind)
    assert links_of(cluster) == links
    assert {pair: way(cluster, *pair) for pair in ways} == ways
    for path in (tmp_path / "cluster.toml", tmp_path / "cluster.json"):
        cluster.save(path)
        assert Cluster.load(path) == cluster


def test_gpus_on_a_switch_share_its_link_upwards(tmp_path: Path) -> None:
    cluster, _ = read(tmp_path, CASCADE, "A10")

    def each(*edges: tuple[str, str]) -> Any:
        return [width for _, width in cluster.at_once(edges) or ()]

    assert each(("gpu0", "gpu2"), ("gpu1", "gpu3")) == [PCIE4 / 2]
    assert each(("gpu0", "gpu1"), ("gpu2", "gpu3")) == [PCIE4]


def test_a_gpu_and_its_card_among_equals_share_nothing_with_the_others(tmp_path: Path) -> None:
    """The switch that stands for their affinity costs neither time nor bandwidth."""
    cluster, _ = read(tmp_path, EQUALLY_NEAR)
    for link in cluster.links:
        is_free = link.between[0].startswith("bridges0-")
        assert (link.shared, link.latency_us == 0) == (is_free, is_free)


@pytest.mark.parametrize("separator", ["\t", "    "])
def test_nvlinks_of_all_with_all_are_a_switch(tmp_path: Path, separator: str) -> None:
    """Eight A100: 12 NVLinks to each of 7 others are more than the 12 of a device."""
    cluster, notes = read(tmp_path, topology(full(8, "NV12"), separator=separator))
    assert links_of(cluster) == {f"gpu{n}-nvswitch": 300 for n in range(8)}
    assert any("kinds of connections, no figures" in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "word", "gb_per_s"),
    [
        ("V100-32GB", "NV2", 50),
        (A100, "NV4", 100),
        ("A6000", "NV4", 56.25),
        ("RTX-3090", "NV4", 56.25),
        ("H100-94GB-NVL", "NV12", 300),
        ("GB200", "NV18", 900),
    ],
)
def test_an_nvlink_is_as_wide_as_its_generation(
    tmp_path: Path, kind: str, word: str, gb_per_s: float
) -> None:
    """25 GB/s each way from NVLink 2 on, 50 from NVLink 5 on, 14.0625 in GA102."""
    cluster, _ = read(tmp_path, topology(full(2, word)), kind)
    assert links_of(cluster) == {"gpu0-gpu1": gb_per_s}


def test_nvlinks_between_few_are_links_of_their_own(tmp_path: Path) -> None:
    """Four A100 with 4 NVLinks to each other: 12 in all."""
    cluster, _ = read(tmp_path, topology(full(4, "NV4")))
    assert cluster.switches == ()
    assert set(links_of(cluster).values()) == {100}
    assert len(cluster.links) == 6


def test_a_hybrid_of_nvlink_and_pcie_takes_the_wider_way(tmp_path: Path) -> None:
    """Four V100 in two pairs with one and two NVLinks; sockets between the pairs."""
    rows = ["X NV1 SYS SYS", "NV1 X SYS SYS", "SYS SYS X NV2", "SYS SYS NV2 X"]
    cluster, _ = read(tmp_path, topology(rows, numa=["0", "0", "1", "1"]), "V100-16GB")
    assert way(cluster, "gpu0", "gpu1")[0] == 25
    assert way(cluster, "gpu2", "gpu3")[0] == 50
    assert way(cluster, "gpu0", "gpu3")[0] == PCIE3 / 2
    # Both pairs share what joins their sockets.
    assert cluster.at_once((("gpu0", "gpu2"), ("gpu1", "gpu3"))) == ((5.5e-6, PCIE3 / 4),)


def test_four_numa_nodes_meet_in_a_switch(tmp_path: Path) -> None:
    cluster, _ = read(tmp_path, topology(full(4, "SYS"), numa=[*"0123"]))
    assert links_of(cluster) == {f"gpu{n}-sockets": PCIE4 / 2 for n in range(4)}


def test_geforce_without_peer_to_peer_is_told_and_can_be_denied(tmp_path: Path) -> None:
    _, notes = read(tmp_path, GEFORCE, "RTX-4090")
    assert any(
        note.startswith("RTX-4090: no peer-to-peer over PCIe, so messages go through host memory")
        for note in notes
    )
    cluster, notes = read(tmp_path, GEFORCE, "RTX-4090", peer_to_peer="yes", pcie="3")
    assert set(links_of(cluster).values()) == {PCIE3}
    assert not any("peer-to-peer" in note for note in notes)
    with pytest.raises(PipeplanError, match=r"--given pcie='6': expected one of 3, 4, 5"):
        read(tmp_path, GEFORCE, "RTX-4090", pcie="6")


def test_a_device_type_of_ones_own_comes_from_a_cluster_file(tmp_path: Path) -> None:
    own = own_type(tmp_path, "A5000")
    cluster, notes = read(tmp_path, GEFORCE, f"{own}:A5000")
    assert cluster.device_types["A5000"].peak_tflop_per_s == {"float32": 27.8}
    assert any("A5000: its link to the host is assumed to be PCIe4-x16" in note for note in notes)
    cluster, notes = read(tmp_path, topology(full(2, "NV4")), f"{own}:A5000")
    assert links_of(cluster) == {"gpu0-gpu1": 100}
    assert "A5000: a direct link to another GPU is assumed to be one of NVLink3" in notes
    with pytest.raises(PipeplanError, match=r"types\.toml: device_types: no type 'A5'; it has A5"):
        read(tmp_path, GEFORCE, f"{own}:A5")
    own.write_text(own.read_text().replace("= 24", "= 24e9"))
    with pytest.raises(PipeplanError, match=r"memory_gib: 2\.4e\+10 GiB, expected .* bytes would"):
        read(tmp_path, GEFORCE, f"{own}:A5000")
    with pytest.raises(PipeplanError, match=r"none\.toml: no such file"):
        read(tmp_path, GEFORCE, f"{tmp_path / 'none.toml'}:A5")


def test_names_of_gpus_in_the_same_file_tell_their_type(tmp_path: Path) -> None:
    names = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-0{n})\n" for n in range(2))
    cluster, _ = read(tmp_path, names + topology(full(2, "NV18")), None)
    assert set(cluster.device_types) == {"H100-80GB"}
    _, notes = read(tmp_path, names + topology(full(2, "NV18")), "H200")
    words = "calls a GPU 'NVIDIA H100 80GB HBM3'; it is taken as H200 (--device-type)"
    assert any(words in note for note in notes)


def test_a_box_of_one_gpu_and_its_card(tmp_path: Path) -> None:
    cluster, notes = read(tmp_path, topology(["X PHB", "PHB X"], cards=["mlx5_0"]))
    assert links_of(cluster) == {"gpu0-numa0": PCIE4, "mlx5_0-numa0": PCIE4}
    assert "`pipeplan import` joins this box to others by its network cards (mlx5_0)" in (notes)


def test_styles_of_a_terminal_and_older_names_are_read(tmp_path: Path) -> None:
    text = topology(full(2, "SOC")).replace("GPU1", "\x1b[4mGPU1\x1b[0m", 1)
    cluster, _ = read(tmp_path, text)
    assert links_of(cluster) == {"gpu0-gpu1": PCIE4 / 2}
    assert way(cluster, "gpu0", "gpu1") == (PCIE4 / 2, 5.5)


def test_ways_of_two_classes_are_told(tmp_path: Path) -> None:
    _, notes = read(tmp_path, topology(["X PIX", "SYS X"]))
    assert "GPU0 and GPU1: PIX one way and SYS the other; taken as PIX" in notes
