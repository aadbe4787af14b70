"""Presets by the names that drivers give to GPUs."""

from __future__ import annotations

import pytest

from planner.cluster.device_types import cpu_type, gpu_type
from planner.cluster.presets import DEVICES
from planner.errors import PipeplanError

# Names as `nvidia-smi -L` and torch.cuda.get_device_name print them; memory as torch tells it.
KNOWN = {
    ("NVIDIA A100-SXM4-80GB", 79.15): "A100-80GB",
    ("NVIDIA A100 80GB PCIe", 79.25): "A100-80GB-PCIe",
    ("NVIDIA H100 PCIe", 79.2): "H100-80GB-PCIe",
    ("NVIDIA H100 NVL", 93.0): "H100-94GB-NVL",
    ("NVIDIA A100-SXM4-40GB", 39.39): "A100-40GB",
    ("NVIDIA H100 80GB HBM3", 79.11): "H100-80GB",
    ("NVIDIA H200", 139.8): "H200",
    ("Tesla V100-SXM2-16GB", 15.77): "V100-16GB",
    ("Tesla V100-SXM2-32GB", 31.73): "V100-32GB",
    ("NVIDIA A10", 22.2): "A10",
    ("Tesla T4", 14.56): "T4",
    ("NVIDIA RTX A6000", 47.4): "A6000",
    ("NVIDIA GeForce RTX 3090", 23.6): "RTX-3090",
    ("NVIDIA GB200", 184.3): "GB200",
    ("NVIDIA L4", 22.0): "L4",
    ("NVIDIA L40S", 44.4): "L40S",
    ("NVIDIA GeForce RTX 4090", 23.6): "RTX-4090",
    ("AMD Instinct MI300X", 191.7): "MI300X",
    ("AMD Instinct MI250X / MI250", 63.98): "MI250X",
    ("Tesla V100-PCIE-32GB", 31.73): "V100-32GB-PCIe",
    ("Tesla V100-FHHL-16GB", 15.77): "V100-16GB-PCIe",
    ("NVIDIA A100-PCIE-40GB", 39.39): "A100-40GB",
    ("NVIDIA A10G", 22.2): "A10G",
    ("NVIDIA L40", 44.5): "L40",
    ("NVIDIA GH200 480GB", 94.5): "GH200-96GB",
    ("NVIDIA H200 NVL", 139.8): "H200-NVL",
    ("NVIDIA RTX 6000 Ada Generation", 47.4): "RTX-6000-Ada",
    ("NVIDIA GeForce RTX 5090", 31.4): "RTX-5090",
    ("NVIDIA B300 SXM6 AC", 267.6): "B300",
}
UNKNOWN = {
    "NVIDIA GeForce RTX 4090 D": 23.6,
    "NVIDIA GeForce RTX 4090 Laptop GPU": 15.6,
    "NVIDIA GH200 144G HBM3e": 143.0,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 95.0,
    "NVIDIA H20": 95.6,
    "NVIDIA A800-SXM4-80GB": 79.1,
    "NVIDIA GeForce RTX 3090 Ti": 23.7,
    "Quadro RTX 6000": 23.6,
    "Tesla P4": 7.4,
}


@pytest.mark.parametrize(("called", "memory_gib"), KNOWN)
def test_a_gpu_with_a_preset_is_recognised(called: str, memory_gib: float) -> None:
    found = gpu_type(called, memory_gib)
    assert found.name == KNOWN[called, memory_gib]
    assert found.figures == DEVICES[found.name]
    assert found.note is None


@pytest.mark.parametrize("called", UNKNOWN)
def test_another_gpu_has_a_type_of_its_own_with_assumed_figures(called: str) -> None:
    found = gpu_type(called, UNKNOWN[called])
    assert found.name not in DEVICES
    assert found.figures.memory_gib == UNKNOWN[called]
    assert found.figures.source == "assumed"
    assert found.note is not None
    assert called in found.note


def test_a_slice_of_a_gpu_has_its_share() -> None:
    """3 of 7 slices of compute, half of the memory and of its bandwidth."""
    found = gpu_type("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40.0)
    assert found.name == "A100-80GB-MIG-3g.40gb"
    assert found.figures.peak_tflop_per_s["bfloat16"] == pytest.approx(312 * 3 / 7)
    assert found.figures.memory_bandwidth_gb_per_s == pytest.approx(2039 / 2)
    assert found.figures.memory_gib == 40
    assert found.figures.source == "assumed"
    assert found.note is not None
    with pytest.raises(PipeplanError, match="'NVIDIA A200' is no preset"):
        gpu_type("NVIDIA A200 MIG 3g.40gb", 40.0)


def test_a_tiny_gpu_keeps_some_memory() -> None:
    assert gpu_type("Quadro K620", 0.8).figures.capacity_bytes > 0


def test_a_rank_without_a_gpu_is_a_cpu_core() -> None:
    assert cpu_type().name == "CPU-core"
    assert cpu_type().figures.source == "assumed"
