"""NCCL's topologies in XML: racks, C2C, and what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cluster.cluster import Cluster
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions

TO_SWITCH = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
C2C = '<c2c bw="44712" count="5"/>'


def gpu(number: int, links: str, device: str = "0x31c2") -> str:
    return (
        f'<pci busid="000{number}:06:00.0" class="0x030200" vendor="0x10de" device="{device}" '
        f'link_speed="64.0 GT/s PCIe" link_width="16"><gpu dev="{number}" sm="103" '
        f'rank="{number}" gdr="1">{links}</gpu></pci>'
    )


def tray(host: str, *gpus: str) -> str:
    cpus = (
        f'<cpu host_hash="{host}" numaid="{n}" arch="arm64">{one}</cpu>'
        for n, one in enumerate(gpus)
    )
    return "".join(cpus)


def read(tmp_path: Path, text: str, kind: str | None = "GB300") -> tuple[Cluster, str]:
    path = tmp_path / "topo.xml"
    path.write_text(text)
    found = import_cluster(path, options=ImportOptions(kind))[1]
    return found.cluster, "\n".join(found.notes)


def system(*parts: str) -> str:
    return f'<system version="1">{"".join(parts)}</system>'


def test_trays_of_a_rack_are_on_one_switch_but_for_a_gpu_without_nvlinks(tmp_path: Path) -> None:
    """NVIDIA describes such a rack as one NVLink domain; a dump of a faulty tray lacked one."""
    good = [gpu(n, TO_SWITCH + C2C) for n in range(2)]
    text = system(tray("0x1", *good), tray("0x2", good[0], gpu(1, C2C)))
    cluster, notes = read(tmp_path, text)
    assert cluster.device_names == ("host0/gpu0", "host0/gpu1", "host1/gpu0", "host1/gpu1")
    links = {link.between: link.bandwidth_gb_per_s for link in cluster.links}
    assert {a for a, b in links if b == "nvswitch"} == {"host0/gpu0", "host0/gpu1", "host1/gpu0"}
    assert {links[ends] for ends in links if ends[1] == "nvswitch"} == {900}
    # Five C2C links of 44.712 GB/s are wider than PCIe 6.
    assert links["host1/gpu1", "host1/numa1"] == pytest.approx(223.56)
    assert "host1/gpu1: no NVLinks, unlike the other GPUs" in notes
    assert cluster.route("host0/gpu0", "host1/gpu1") is None


def test_a_gpu_with_nvlinks_to_its_cpu_reaches_it_by_them(tmp_path: Path) -> None:
    """Three NVLinks 2 of 25 GB/s, as in POWER9."""
    links = '<nvlink target="0004:00:00.0" count="3" tclass="0x068001"/>'
    cluster, _ = read(tmp_path, system(tray("0x1", gpu(0, links), gpu(1, links))), "V100-16GB")
    found = {link.between: link.bandwidth_gb_per_s for link in cluster.links}
    assert found["gpu0", "numa0"] == max(75, 64 * 16 / 8 * 242 / 256)
