"""`rocm-smi --showtopo`: xGMI and PCIe as links, and what cannot be read."""

from __future__ import annotations

from pathlib import Path

from link_files import own_type, rocm_topology

from planner.cluster.cluster import Cluster
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions

ALL_JOINED = rocm_topology(
    ["0 XGMI XGMI XGMI", "XGMI 0 XGMI XGMI", "XGMI XGMI 0 XGMI", "XGMI XGMI XGMI 0"],
    ["0 15 15 15", "15 0 15 15", "15 15 0 15", "15 15 15 0"],
    [*"0011"],
)
# Two packages of two dies: 4 links in a package, one between the first dies, none between others.
DIES = rocm_topology(
    ["0 XGMI XGMI XGMI", "XGMI 0 XGMI XGMI", "XGMI XGMI 0 XGMI", "XGMI XGMI XGMI 0"],
    ["0 15 15 30", "15 0 30 30", "15 30 0 15", "30 30 15 0"],
    [*"0000"],
)
DIES_BANDWIDTH = f"""
{" Bandwidth ":=^80}
       GPU0         GPU1         GPU2         GPU3
GPU0   N/A          50000-200000 50000-50000  0-0
GPU1   50000-200000 N/A          0-0          0-0
GPU2   50000-50000  0-0          N/A          50000-200000
GPU3   0-0          0-0          50000-200000 N/A
Format: min-max; Units: mps
"""


def read(tmp_path: Path, text: str, kind: str | None) -> tuple[Cluster, str]:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    name, found = import_cluster(path, options=ImportOptions(kind))
    assert name == "rocm-smi"
    assert {link.source for link in found.cluster.links} == {"assumed"}
    return found.cluster, "\n".join(found.notes)


def links_of(cluster: Cluster) -> dict[str, float]:
    return {"-".join(link.between): link.bandwidth_gb_per_s for link in cluster.links}


def test_each_pair_of_a_platform_has_its_own_xgmi_link(tmp_path: Path) -> None:
    cluster, notes = read(tmp_path, ALL_JOINED, "MI300X")
    pairs = ("gpu0-gpu1", "gpu0-gpu2", "gpu0-gpu3", "gpu1-gpu2", "gpu1-gpu3", "gpu2-gpu3")
    assert links_of(cluster) == {
        **dict.fromkeys(pairs, 64.0),
        **{"gpu0-numa0": 63.0, "gpu1-numa0": 63.0, "gpu2-numa1": 63.0, "gpu3-numa1": 63.0},
        "numa0-numa1": 31.5,
    }
    assert "xGMI between two GPUs is taken as one link" in notes
    assert "through other GPUs" not in notes


def test_told_bandwidths_count_and_indirect_pairs_are_told(tmp_path: Path) -> None:
    cluster, notes = read(tmp_path, DIES + DIES_BANDWIDTH, "MI250X")
    found = links_of(cluster)
    assert (found["gpu0-gpu1"], found["gpu0-gpu2"], found["gpu2-gpu3"]) == (200, 50, 200)
    assert (found["gpu1-gpu3"], found["gpu0-numa0"]) == (50, 31.5)
    assert "3 pairs, such as gpu0 and gpu3, are joined by xGMI through other GPUs" in notes
    assert "taken as one link" not in notes


def test_pairs_over_pcie_meet_at_their_host_bridges(tmp_path: Path) -> None:
    text = rocm_topology(["0 PCIE", "PCIE 0"], ["0 72", "72 0"], [*"01"])
    cluster, _ = read(tmp_path, text, "T4")
    assert links_of(cluster) == {"gpu0-gpu1": 15.75 / 2}


def test_a_type_of_ones_own_has_xgmi_links(tmp_path: Path) -> None:
    own = own_type(tmp_path, "MI100")
    cluster, notes = read(tmp_path, ALL_JOINED, f"{own}:MI100")
    # 25 GT/s on 16 lanes.
    assert links_of(cluster)["gpu0-gpu1"] == 50
    assert "MI100: a direct link to another GPU is assumed to be one of xGMI-MI250X" in notes


def test_the_product_name_tells_the_type(tmp_path: Path) -> None:
    names = "".join(f"GPU[{n}]\t\t: Card Series: \t\tAMD Instinct MI300X\n" for n in range(4))
    cluster, _ = read(tmp_path, ALL_JOINED + names, None)
    assert set(cluster.device_types) == {"MI300X"}
