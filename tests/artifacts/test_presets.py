"""Presets against their chips' units and clocks, and the documentation against the presets."""

import pytest
from typer.testing import CliRunner

from planner.cli.commands import app
from planner.cluster.ports import FABRIC_LINKS, OTHER_PORTS, PORTS
from planner.cluster.presets import DEVICE_SOURCES, DEVICES, LINK_SOURCES, LINKS

# Cores (SMs or CUs), dense 16-bit FLOPs of one in a cycle with float32 accumulation, boost GHz,
# bits of the memory's bus and Gbit/s of each pin, where published: whitepapers of Volta,
# Ampere, Ada, Hopper and CDNA 2 and 3, and the boards' datasheets.
CHIPS = {
    "V100-16GB": (80, 1024, 1.53, 4096, 1.752),
    "V100-32GB": (80, 1024, 1.53, 4096, 1.752),
    "V100-16GB-PCIe": (80, 1024, 1.38, 4096, 1.752),
    "V100-32GB-PCIe": (80, 1024, 1.38, 4096, 1.752),
    "T4": (40, 1024, 1.59, 256, 10),
    "A10": (72, 1024, 1.695, 384, 12.5),
    "A10G": (80, 512, 1.71, 384, 12.5),
    "A30": (56, 2048, 1.44, 3072, 2.43),
    "A40": (84, 1024, 1.74, 384, 14.5),
    "L4": (58, 1024, 2.04, 192, 12.5),
    "L40": (142, 512, 2.49, 384, 18),
    "L40S": (142, 1024, 2.49, 384, 18),
    "A6000": (84, 1024, 1.8, 384, 16),
    "RTX-3090": (82, 512, 1.695, 384, 19.5),
    "RTX-4090": (128, 512, 2.52, 384, 21),
    "RTX-5090": (170, 512, 2.407, 512, 28),
    "RTX-6000-Ada": (142, 1024, 2.505, 384, 20),
    "RTX-PRO-6000": (188, 1024, 2.617, 512, 28),
    "A100-40GB": (108, 2048, 1.41, 5120, 2.43),
    "A100-80GB": (108, 2048, 1.41, 5120, 3.186),
    "A100-80GB-PCIe": (108, 2048, 1.41, 5120, 3.024),
    "H100-80GB": (132, 4096, 1.83, 5120, 5.23),
    "H100-80GB-PCIe": (114, 4096, 1.62, 5120, 3.12),
    "H100-94GB-NVL": (132, 4096, 1.545, None, None),
    "H200": (132, 4096, 1.83, 6144, 6.25),
    "H200-NVL": (132, 4096, 1.545, 6144, 6.25),
    "GH200-96GB": (132, 4096, 1.83, None, None),
    "B200": (148, 8192, 1.85, 7680, 7.992),
    "B300": (148, 8192, 1.85, 7680, 7.992),
    "MI210": (104, 1024, 1.7, 4096, 3.2),
    "MI250": (104, 1024, 1.7, 4096, 3.2),
    "MI250X": (110, 1024, 1.7, 4096, 3.2),
    "MI300A": (228, 2048, 2.1, 8192, 5.2),
    "MI300X": (304, 2048, 2.1, 8192, 5.2),
    "MI325X": (304, 2048, 2.1, 8192, 5.86),
    "MI355X": (256, 4096, 2.4, 8192, 7.8),
}
WITHOUT_CHIP = {"CPU-core"}
OF_RACKS = {"GB200", "GB300"}
"""Known from figures of a whole rack: its clock is in no public document."""


@pytest.mark.parametrize("name", sorted(set(DEVICES) - WITHOUT_CHIP - OF_RACKS))
def test_peaks_are_dense_with_float32_accumulation(name: str) -> None:
    cores, flops, ghz, *_ = CHIPS[name]
    assert DEVICES[name].peak_tflop_per_s["float16"] == pytest.approx(
        cores * flops * ghz * 1e-3, rel=0.015
    )


@pytest.mark.parametrize(
    ("name", "float32", "gigabytes"), [("GB200", 5760, 13.4e3), ("GB300", 6000, 20e3)]
)
def test_a_gpu_of_a_rack_has_its_part(name: str, float32: float, gigabytes: float) -> None:
    """NVL72: 360 PFLOP/s in 16 bits and 180 in TF32 with sparsity, 576 TB/s."""
    gpu = DEVICES[name]
    peaks = {"float32": float32 / 72, "tf32": 180e3 / 2 / 72, "bfloat16": 360e3 / 2 / 72}
    found = {name: gpu.peak_tflop_per_s[name] for name in peaks}
    assert found == pytest.approx(peaks, rel=1e-3)
    assert gpu.memory_bandwidth_gb_per_s == 576e3 / 72
    # A vendor's GB of such memory are GiB, less what firmware keeps.
    assert gpu.memory_gib == pytest.approx(gigabytes / 72, rel=0.01)


@pytest.mark.parametrize("name", sorted(name for name in CHIPS if CHIPS[name][-1]))
def test_memory_bandwidth_is_that_of_the_bus(name: str) -> None:
    *_, bits, gbit = CHIPS[name]
    assert DEVICES[name].memory_bandwidth_gb_per_s == pytest.approx(bits * gbit / 8, rel=0.01)


@pytest.mark.parametrize("name", sorted(set(DEVICES) - WITHOUT_CHIP))
def test_bfloat16_is_as_fast_as_float16_where_there_is_any(name: str) -> None:
    peak = DEVICES[name].peak_tflop_per_s
    if name.startswith(("V100", "T4")):
        assert set(peak) == {"float32", "float16"}
    else:
        assert peak["bfloat16"] == peak["float16"] > peak["float32"]
    if "tf32" in peak:
        assert peak["float16"] == pytest.approx(2 * peak["tf32"], rel=0.03)


def test_every_gpu_has_its_ports() -> None:
    assert set(PORTS) == set(DEVICES) - WITHOUT_CHIP
    for ports in (*PORTS.values(), OTHER_PORTS):
        assert {ports.pcie, ports.fabric} <= {*LINKS, None}


def test_nvlinks_and_xgmi_links() -> None:
    """Links of a device, and GB/s of one each way."""
    for name, links, each in (
        ("NVLink2", 6, 25),
        ("NVLink3", 12, 25),
        ("NVLink3-GA102", 4, 14.0625),
        ("NVLink4", 18, 25),
        ("NVLink5", 18, 50),
    ):
        assert LINKS[name].bandwidth_gb_per_s == links * each
        assert FABRIC_LINKS[name] == links
        assert any(ports.fabric == name for ports in PORTS.values())
    for name, gt_per_s in (("xGMI-MI250X", 25), ("xGMI-MI300X", 32), ("xGMI-MI355X", 38.4)):
        assert LINKS[name].bandwidth_gb_per_s == 16 * gt_per_s / 8
        assert FABRIC_LINKS[name] == 1
    assert set(FABRIC_LINKS) == {ports.fabric for ports in PORTS.values()} - {None}


def test_every_preset_has_a_source() -> None:
    assert list(DEVICE_SOURCES) == list(DEVICES)
    assert list(LINK_SOURCES) == list(LINKS)
    for source in (*DEVICE_SOURCES.values(), *LINK_SOURCES.values()):
        assert source.name
        assert source.url.startswith("https://") or source.url == ""


def test_pcie_lanes_and_line_rates() -> None:
    for name, gt_per_s in (("PCIe3-x16", 8), ("PCIe4-x16", 16), ("PCIe5-x16", 32)):
        expected = 16 * gt_per_s / 8 * 128 / 130
        assert LINKS[name].bandwidth_gb_per_s == pytest.approx(expected, rel=0.001)
    for name, gbit in (("Ethernet-10G", 10), ("Ethernet-25G", 25), ("InfiniBand-NDR", 400)):
        assert LINKS[name].bandwidth_gb_per_s == gbit / 8


def test_the_command_lists_every_preset() -> None:
    shown = CliRunner().invoke(app, ["detect", "--presets"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in (*DEVICES, *LINKS))
