"""Public topology files and logs: what is right was worked out by hand from each.

``public/`` has what their authors posted, without names of hosts and people. Some tables are the
GPUs' part of a larger one. Bandwidths are those of a route between two ends, in GB/s each way: the
NVLinks of the table times 25 (NVLink 2 to 4) or 50 (NVLink 5), 16 lanes of PCIe 3, 4 or 5 (15.75,
31.5, 63), half of that between sockets and through the host's memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions

FOLDER = Path(__file__).with_name("public")
ISSUE = "https://github.com/{}/issues/{}"


@dataclass(frozen=True)
class Right:
    """A file that is read.

    Attributes:
        source: where it is from.
        type_name: ``--device-type``; None if the file tells it.
        devices: their number.
        ways: GB/s between two GPUs, or between a GPU and a card on the same switch.
        no_direct: pairs that are joined only through a switch.
        notes: words of notes that are due.
    """

    source: str
    type_name: str | None
    devices: int
    ways: dict[str, float]
    no_direct: str = ""
    notes: str = ""


@dataclass(frozen=True)
class Refused:
    """A file that cannot be right, and words of the cause and the remedy."""

    source: str
    words: str
    type_name: str | None = None


def pairs(count: int, gb_per_s: float) -> dict[str, float]:
    """Every pair of GPUs."""
    return {f"gpu{a} gpu{b}": gb_per_s for a in range(count) for b in range(count) if a != b}


CASES: dict[str, Right | Refused] = {
    "nccl-1617.txt": Right(
        ISSUE.format("NVIDIA/nccl", 1617), "H100-80GB", 4, pairs(4, 150) | {"gpu2 nic2": 63}
    ),
    "nccl-1453.txt": Right(
        ISSUE.format("NVIDIA/nccl", 1453), "H100-80GB", 8, pairs(8, 450), "gpu0 gpu1"
    ),
    "nccl-1264.txt": Right(
        ISSUE.format("NVIDIA/nccl", 1264), "H100-80GB", 8, pairs(8, 450), "gpu0 gpu1"
    ),
    "nccl-933.txt": Right(
        ISSUE.format("NVIDIA/nccl", 933), "A100-80GB", 8, pairs(8, 200), "gpu0 gpu7"
    ),
    "nccl-tests-78.txt": Right(
        ISSUE.format("NVIDIA/nccl-tests", 78), "V100-32GB", 16, pairs(16, 150), "gpu0 gpu8"
    ),
    "nccl-tests-273.txt": Right(
        ISSUE.format("NVIDIA/nccl-tests", 273),
        "L40S",
        8,
        {"gpu0 gpu3": 31.5, "gpu4 gpu7": 31.5, "gpu0 gpu4": 15.75},
    ),
    "k8s-test-infra-371.txt": Right(
        ISSUE.format("NVIDIA/k8s-test-infra", 371), "GB200", 4, pairs(4, 900), notes="other trays"
    ),
    "sglang-11208.txt": Right(
        ISSUE.format("sgl-project/sglang", 11208), None, 4, pairs(4, 900), "gpu0 gpu1"
    ),
    "vllm-16336.txt": Right(
        ISSUE.format("vllm-project/vllm", 16336),
        "B200",
        8,
        {"gpu0 gpu1": 900, "gpu3 gpu7": 900, "gpu0 gpu2": 63, "gpu2 gpu7": 31.5},
        "gpu0 gpu1",
        "gpu2: no NVLinks, unlike the other GPUs",
    ),
    "msccl-tools-dgx1.txt": Right(
        "https://github.com/microsoft/msccl-tools, test of DGX-1",
        "V100-16GB",
        8,
        {"gpu0 gpu1": 25, "gpu0 gpu3": 50, "gpu0 gpu4": 50, "gpu2 gpu6": 25, "gpu0 gpu7": 7.875},
    ),
    "huvm.txt": Right(
        "https://github.com/casys-kaist/HUVM, README.md (AWS p3.8xlarge)",
        "V100-16GB",
        4,
        {"gpu0 gpu1": 25, "gpu0 gpu2": 25, "gpu0 gpu3": 50, "gpu1 gpu2": 50, "gpu2 gpu3": 50},
    ),
    "polaris.txt": Right(
        "https://github.com/argonne-lcf/user-guides, Polaris",
        "A100-40GB",
        4,
        pairs(4, 100) | {"gpu3 mlx5_0": 31.5, "gpu1 mlx5_1": 31.5},
    ),
    "club-3090-46.txt": Right(
        ISSUE.format("noonghunna/club-3090", 46), "RTX-4090", 5, pairs(5, 15.75), "gpu1 gpu2"
    ),
    "club-3090-178.txt": Right(
        ISSUE.format("noonghunna/club-3090", 178), "RTX-3090", 2, {"gpu0 gpu1": 15.75}
    ),
    "club-3090-1229.txt": Right(
        ISSUE.format("noonghunna/club-3090", 1229),
        "RTX-5090",
        2,
        {"gpu0 gpu1": 31.5},
        notes="no peer-to-peer over PCIe",
    ),
    "club-3090-1125.txt": Right(
        ISSUE.format("noonghunna/club-3090", 1125), "RTX-3090", 2, {"gpu0 gpu1": 15.75}
    ),
    "club-3090-1130.txt": Refused(
        ISSUE.format("noonghunna/club-3090", 1130),
        "is of `nvidia-smi topo -p2p`.*give the output of `nvidia-smi topo -m`",
        "RTX-5090",
    ),
    "miss-alignment-106.txt": Right(
        ISSUE.format("warpem/miss-alignment", 106),
        "L40S",
        4,
        {"gpu0 gpu1": 31.5, "gpu0 gpu2": 15.75, "gpu2 gpu3": 31.5},
    ),
    "kubernetes-53497.txt": Right(
        ISSUE.format("kubernetes/kubernetes", 53497),
        "V100-16GB-PCIe",
        8,
        {"gpu0 gpu1": 15.75, "gpu0 gpu2": 15.75, "gpu0 gpu4": 7.875},
        "gpu0 gpu1",
    ),
    "deepep-60.txt": Refused(
        ISSUE.format("deepseek-ai/DeepEP", 60), "topo -mp`, which hides NVLinks", "H100-80GB"
    ),
    "rocm-1503.txt": Right(ISSUE.format("ROCm/ROCm", 1503), "MI210", 2, {"gpu0 gpu1": 31.5}),
    "rocm-systems-5763.txt": Refused(
        ISSUE.format("ROCm/rocm-systems", 5763),
        "give the output of `rocm-smi --showtopo`",
        "MI250X",
    ),
    "sglang-one-mi300x.txt": Refused(
        "https://github.com/sgl-project/sglang, a report of its environment",
        "of two GPUs or more",
        "MI300X",
    ),
    "azure-ncv4.xml": Right(
        "https://github.com/Azure/azhpc-images, topology/ncv4-topo.xml",
        None,
        4,
        {"gpu0 gpu1": 300, "gpu2 gpu3": 300, "gpu0 gpu2": 15.75},
        notes="without link_speed and link_width",
    ),
    "azure-ndv4.xml": Refused(
        "https://github.com/Azure/azhpc-images, topology/ndv4-topo.xml",
        "has no <gpu>.*NCCL_TOPO_DUMP_FILE",
    ),
    "rccl-3p-pcie.xml": Right(
        "https://github.com/ROCm/rccl, tools/topo_expl/models/topo_3p_pcie.xml",
        None,
        3,
        {"gpu0 gpu1": 15.75, "gpu1 gpu2": 31.5, "gpu0 mlx5_0": 31.5},
    ),
    "rccl-4p-942.xml": Right(
        "https://github.com/ROCm/rccl, tools/topo_expl/models/topo_4p_942.xml",
        None,
        4,
        pairs(4, 64) | {"gpu0 cxi0": 31.5},
    ),
    "nccl-tests-256-one-socket.xml": Right(
        ISSUE.format("NVIDIA/nccl-tests", 256) + ", its first NUMA node",
        None,
        3,
        pairs(3, 450) | {"gpu0 mlx5_0": 63},
        "gpu0 gpu1",
        "--network 400gbit",
    ),
    "nccl-tests-256-cut-off.xml": Refused(
        ISSUE.format("NVIDIA/nccl-tests", 256), "is no whole XML .* it may be cut off"
    ),
    # Median of the slopes 491.4 and 497.4 over the three sizes, times 2 * 15 / 16.
    "nccl-tests-256.log": Right(
        ISSUE.format("NVIDIA/nccl-tests", 256),
        None,
        16,
        {"node0/gpu0 node1/gpu0": 494.4},
        notes="run the test from 8 bytes on",
    ),
    "nccl-tests-107.log": Refused(
        ISSUE.format("NVIDIA/nccl-tests", 107),
        "rank 0 appears 2 times.*build nccl-tests with MPI=1",
    ),
    "nccl-tests-249.log": Refused(
        ISSUE.format("NVIDIA/nccl-tests", 249), "names 1 ranks.* a link joins two or more"
    ),
    "nccl-tests-232.log": Refused(
        ISSUE.format("NVIDIA/nccl-tests", 232),
        "names 0 ranks.* give the log .* from its first line",
    ),
    "nccl-1161.log": Refused(ISSUE.format("NVIDIA/nccl", 1161), "names 0 ranks"),
    "nccl-tests-82.log": Refused(
        ISSUE.format("NVIDIA/nccl-tests", 82), "is of broadcast_perf; those that can be read are"
    ),
}


def way(cluster: Cluster, a: str, b: str) -> float:
    """Devices have routes; a GPU and its card have links to a switch."""
    if b in cluster.device_names:
        route = cluster.route(a, b)
        assert route is not None
        return route.bandwidth_gb_per_s
    ends: list[dict[str, float]] = [{}, {}]
    for link in cluster.links:
        for name, found in zip((a, b), ends, strict=True):
            if name in link.between:
                (other,) = set(link.between) - {name}
                found[other] = link.bandwidth_gb_per_s
    return max(min(ends[0][switch], ends[1][switch]) for switch in ends[0].keys() & ends[1])


def test_every_file_has_its_case() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(CASES)
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if isinstance(case, Right)])
def test_a_public_file_is_read_right(name: str) -> None:
    case, path = CASES[name], FOLDER / name
    assert isinstance(case, Right)
    found = import_cluster(path, options=ImportOptions(case.type_name))[1]
    cluster = found.cluster
    assert len(cluster.devices) == case.devices
    if case.type_name:
        assert set(cluster.device_types) == {case.type_name}
    for ends, gb_per_s in case.ways.items():
        assert way(cluster, *ends.split()) == pytest.approx(gb_per_s, rel=1e-3), ends
    links = {frozenset(link.between) for link in cluster.links}
    assert not case.no_direct or frozenset(case.no_direct.split()) not in links
    assert case.notes in "\n".join(found.notes)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if isinstance(case, Refused)]
)
def test_a_public_file_that_cannot_be_right_is_refused(name: str) -> None:
    case, path = CASES[name], FOLDER / name
    assert isinstance(case, Refused)
    with pytest.raises(PipeplanError) as refused:
        import_cluster(path, options=ImportOptions(case.type_name))[1]
    assert re.search(case.words, str(refused.value)), str(refused.value)
