"""Datasheet values of common devices and links, by the name people use for them.

Sources: the vendors' public datasheets. Throughput is dense, without sparsity, per device;
link bandwidth is per direction. ``efficiency`` is the share of peak that large matrix products
reach in practice and is an assumption until it is measured. Figures of CPUs and of the loopback are
assumptions altogether.
"""

from planner.artifacts.hardware import DeviceType, LinkType


def _gpu(memory_gib: float, bandwidth: float, **peak: float) -> DeviceType:
    return DeviceType(
        memory_gib=memory_gib,
        memory_bandwidth_gb_per_s=bandwidth,
        peak_tflop_per_s=peak,
        efficiency=0.5,
        reserved_gib=1.0,
    )


DEVICES: dict[str, DeviceType] = {
    "V100-16GB": _gpu(16, 900, float32=15.7, float16=125),
    "V100-32GB": _gpu(32, 900, float32=15.7, float16=125),
    "A10": _gpu(24, 600, float32=31.2, float16=125, bfloat16=125),
    "L4": _gpu(24, 300, float32=30.3, float16=121, bfloat16=121),
    "L40S": _gpu(48, 864, float32=91.6, float16=362, bfloat16=362),
    "RTX-4090": _gpu(24, 1008, float32=82.6, float16=165, bfloat16=165),
    "A100-40GB": _gpu(40, 1555, float32=19.5, float16=312, bfloat16=312),
    "A100-80GB": _gpu(80, 2039, float32=19.5, float16=312, bfloat16=312),
    "H100-80GB": _gpu(80, 3350, float32=67, float16=989, bfloat16=989),
    "H200": _gpu(141, 4800, float32=67, float16=989, bfloat16=989),
    "B200": _gpu(180, 8000, float32=80, float16=2250, bfloat16=2250),
    "MI300X": _gpu(192, 5300, float32=163.4, float16=1307, bfloat16=1307),
    # One process on a share of a desktop CPU: for trying plans without a GPU.
    "CPU-core": DeviceType(
        memory_gib=4,
        memory_bandwidth_gb_per_s=10,
        peak_tflop_per_s={"float32": 0.06, "bfloat16": 0.06, "float64": 0.03},
        efficiency=0.5,
        reserved_gib=0.5,
        source="assumed",
    ),
}

LINKS: dict[str, LinkType] = {
    "NVLink2": LinkType(bandwidth_gb_per_s=150, latency_us=2),
    "NVLink3": LinkType(bandwidth_gb_per_s=300, latency_us=2),
    "NVLink4": LinkType(bandwidth_gb_per_s=450, latency_us=2),
    "NVLink5": LinkType(bandwidth_gb_per_s=900, latency_us=2),
    "PCIe3-x16": LinkType(bandwidth_gb_per_s=15.75, latency_us=5),
    "PCIe4-x16": LinkType(bandwidth_gb_per_s=31.5, latency_us=5),
    "PCIe5-x16": LinkType(bandwidth_gb_per_s=63, latency_us=5),
    "InfiniBand-HDR": LinkType(bandwidth_gb_per_s=25, latency_us=5),
    "InfiniBand-NDR": LinkType(bandwidth_gb_per_s=50, latency_us=5),
    "Ethernet-10G": LinkType(bandwidth_gb_per_s=1.25, latency_us=30),
    "Ethernet-25G": LinkType(bandwidth_gb_per_s=3.125, latency_us=30),
    "Ethernet-100G": LinkType(bandwidth_gb_per_s=12.5, latency_us=20),
    "loopback": LinkType(bandwidth_gb_per_s=1.0, latency_us=200, source="assumed"),
}
