"""Presets of common devices and links, with the source of each figure.

Throughput is dense, without sparsity; if a datasheet has only sparse figures, half of them. float32
is IEEE float32 as in torch's matrix products by default (``torch.get_float32_matmul_precision()``
is "highest"). float32 convolutions run in TF32 by torch's defaults
(``torch.backends.cudnn.allow_tf32``), so devices with TF32 have ``tf32`` as a peak. To plan with
TF32 products, define a device type whose float32 is the preset's tf32. float16 and bfloat16
accumulate in float32. Link bandwidth is per direction.

``host_link_gb_per_s`` is the bus of a GPU where its datasheet names one: the same for all of a
kind, and more than copies reach. ``memory_gib`` is what the driver reports if ECC or firmware takes
a noticeable part. Efficiencies of GPUs are assumptions: :data:`EFFICIENCIES` names their evidence,
benchmarks/ROOFLINE.md their errors. Figures of CPUs and of the loopback are assumptions fitted on
one machine. :data:`DEVICE_SOURCES` and :data:`LINK_SOURCES` name the datasheets.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cluster.hardware import ClassEfficiency, DeviceType, LinkType


@dataclass(frozen=True)
class Efficiencies:
    """The efficiencies of a family of GPUs.

    Attributes:
        product, convolution, attention: fraction of peak throughput of each class.
        memory: fraction of memory bandwidth of operations without products, run one by one.
        evidence: source of the figures.
    """

    product: float
    convolution: float
    attention: float
    memory: float
    evidence: str


EFFICIENCIES: Mapping[str, Efficiencies] = {
    "Volta": Efficiencies(
        0.7, 0.8, 0.3, 0.5, "ResNet-50 of NVIDIA DeepLearningExamples 21.03, one V100"
    ),
    "Ampere": Efficiencies(
        0.7, 0.37, 0.3, 0.54, "GPTs of llm-foundry and ResNet-50 of DeepLearningExamples, A100 SXM"
    ),
    "Hopper": Efficiencies(
        0.5, 0.3, 0.22, 0.6, "GPTs of llm-foundry, H100 SXM; convolutions a guess"
    ),
    "none": Efficiencies(0.5, 0.3, 0.25, 0.5, "a guess: nothing published was compared"),
}
OVERHEAD_US = 5.0
"""Overhead per operation: torch launches them one by one (a guess; kernels alone take 2 to 4)."""
RAMP_UP_US = 2.0
"""Derived from public timings of 512 x 512 products on an RTX 4090: 6 µs instead of 2."""


BUSES: Mapping[str, float] = {"PCIe3": 15.75, "PCIe4": 31.5, "PCIe5": 63.0}
"""GB/s of 16 lanes in one direction, by which batches are copied; as the datasheets of
:data:`DEVICE_SOURCES` name the bus."""


def _gpu(
    family: str, memory_gib: float, bandwidth: float, bus: str | None = None, **peak: float
) -> DeviceType:
    reached = EFFICIENCIES[family]
    return DeviceType(
        memory_gib=memory_gib,
        memory_bandwidth_gb_per_s=bandwidth,
        peak_tflop_per_s=peak,
        efficiency=0.5,
        bandwidth_efficiency=0.8,
        operation_overhead_us=OVERHEAD_US,
        ramp_up_us=RAMP_UP_US,
        by_class={
            "product": ClassEfficiency(efficiency=reached.product),
            "convolution": ClassEfficiency(efficiency=reached.convolution),
            "attention": ClassEfficiency(efficiency=reached.attention),
            "memory": ClassEfficiency(bandwidth_efficiency=reached.memory),
        },
        reserved_gib=1.0,
        host_link_gb_per_s=None if bus is None else BUSES[bus],
    )


DEVICES: dict[str, DeviceType] = {
    "V100-16GB": _gpu("Volta", 16, 900, "PCIe3", float32=15.7, float16=125),
    "V100-32GB": _gpu("Volta", 32, 900, "PCIe3", float32=15.7, float16=125),
    "T4": _gpu("none", 15, 320, "PCIe3", float32=8.1, float16=65),
    "A10": _gpu("Ampere", 22.5, 600, "PCIe4", float32=31.2, tf32=62.5, float16=125, bfloat16=125),
    "L4": _gpu("none", 22.5, 300, "PCIe4", float32=30.3, tf32=60, float16=121, bfloat16=121),
    "L40S": _gpu("none", 45, 864, "PCIe4", float32=91.6, tf32=183, float16=362, bfloat16=362),
    "A6000": _gpu(
        "Ampere", 48, 768, "PCIe4", float32=38.7, tf32=77.4, float16=154.8, bfloat16=154.8
    ),
    "RTX-3090": _gpu("Ampere", 24, 936, "PCIe4", float32=35.6, tf32=35.6, float16=71, bfloat16=71),
    "RTX-4090": _gpu(
        "none", 24, 1008, "PCIe4", float32=82.6, tf32=82.6, float16=165.2, bfloat16=165.2
    ),
    "A100-40GB": _gpu(
        "Ampere", 40, 1555, "PCIe4", float32=19.5, tf32=156, float16=312, bfloat16=312
    ),
    "A100-80GB": _gpu(
        "Ampere", 80, 2039, "PCIe4", float32=19.5, tf32=156, float16=312, bfloat16=312
    ),
    "A100-80GB-PCIe": _gpu(
        "Ampere", 80, 1935, "PCIe4", float32=19.5, tf32=156, float16=312, bfloat16=312
    ),
    "H100-80GB": _gpu(
        "Hopper", 79.6, 3350, "PCIe5", float32=67, tf32=494.5, float16=989.5, bfloat16=989.5
    ),
    "H100-80GB-PCIe": _gpu(
        "Hopper", 79.6, 2000, "PCIe5", float32=51, tf32=378, float16=756, bfloat16=756
    ),
    "H100-94GB-NVL": _gpu(
        "Hopper", 93.5, 3900, "PCIe5", float32=60, tf32=417.5, float16=835.5, bfloat16=835.5
    ),
    "H200": _gpu(
        "Hopper", 140, 4800, "PCIe5", float32=67, tf32=494.5, float16=989.5, bfloat16=989.5
    ),
    "B200": _gpu("none", 178, 7700, float32=80, tf32=1100, float16=2250, bfloat16=2250),
    "GB200": _gpu("none", 185, 8000, float32=80, tf32=1250, float16=2500, bfloat16=2500),
    "MI250X": _gpu("none", 64, 1638, float32=47.9, float16=191.5, bfloat16=191.5),
    "MI300X": _gpu("none", 192, 5300, "PCIe5", float32=163.4, float16=1307.4, bfloat16=1307.4),
    # One thread of one core, for running plans without a GPU. Fitted to float32 times, see
    # benchmarks/ROOFLINE.md; peaks are those of two 512-bit units at 4 GHz. Memory is what to let
    # the process have.
    "CPU-core": DeviceType(
        memory_gib=4,
        memory_bandwidth_gb_per_s=50,
        peak_tflop_per_s={"float32": 0.25, "bfloat16": 0.25, "float64": 0.125},
        efficiency=0.36,
        bandwidth_efficiency=0.89,
        operation_overhead_us=3,
        ramp_up_us=1,
        by_class={
            "convolution": ClassEfficiency(
                efficiency=0.66, bandwidth_efficiency=0.057, ramp_up_us=450
            ),
            "attention": ClassEfficiency(efficiency=0.51),
            "memory": ClassEfficiency(bandwidth_efficiency=0.27),
        },
        reserved_gib=0.5,
        source="assumed",
    ),
}

LINKS: dict[str, LinkType] = {
    "NVLink2": LinkType(bandwidth_gb_per_s=150, latency_us=2),
    "NVLink3": LinkType(bandwidth_gb_per_s=300, latency_us=2),
    "NVLink3-GA102": LinkType(bandwidth_gb_per_s=56.25, latency_us=2),
    "NVLink4": LinkType(bandwidth_gb_per_s=450, latency_us=2),
    "NVLink5": LinkType(bandwidth_gb_per_s=900, latency_us=2),
    "xGMI-MI250X": LinkType(bandwidth_gb_per_s=50, latency_us=2),
    "xGMI-MI300X": LinkType(bandwidth_gb_per_s=64, latency_us=2),
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


NVIDIA = "https://www.nvidia.com/en-us"
AMD = "https://www.amd.com/en/products/accelerators/instinct"


@dataclass(frozen=True)
class Datasheet:
    """The source of a preset's figures.

    Attributes:
        name: name of the document and its date or version.
        url: a public page of the vendor; empty if there is none.
        note: the variant, and figures that differ from the document.
    """

    name: str
    url: str = ""
    note: str = ""


SPARSE = "its tensor figures are with sparsity: half of them"
DEVICE_SOURCES: Mapping[str, Datasheet] = {
    "V100-16GB": Datasheet(
        "NVIDIA V100 datasheet, January 2020",
        f"{NVIDIA}/data-center/v100/",
        "SXM2 (the PCIe card has 14 and 112 TFLOP/s); no bfloat16, no TF32",
    ),
    "V100-32GB": Datasheet(
        "NVIDIA V100 datasheet, January 2020",
        f"{NVIDIA}/data-center/v100/",
        "SXM2 (the PCIe card has 14 and 112 TFLOP/s); no bfloat16, no TF32",
    ),
    "T4": Datasheet(
        "NVIDIA T4 datasheet, March 2019, and product brief PB-09256",
        f"{NVIDIA}/data-center/tesla-t4/",
        "15,360 MiB with ECC; the brief has 320 GB/s, the datasheet 300; no bfloat16, no TF32",
    ),
    "A10": Datasheet(
        "NVIDIA A10 datasheet, March 2021",
        f"{NVIDIA}/data-center/products/a10-gpu/",
        "dense figures; 23,028 MiB with ECC; not the A10G, which has 70 TFLOP/s in 16 bits",
    ),
    "L4": Datasheet(
        "NVIDIA L4 datasheet, March 2023",
        f"{NVIDIA}/data-center/l4/",
        f"{SPARSE}; 23,034 MiB with ECC",
    ),
    "L40S": Datasheet(
        "NVIDIA L40S datasheet, 2023",
        f"{NVIDIA}/data-center/l40s/",
        "dense figures; 46,068 MiB with ECC",
    ),
    "A6000": Datasheet(
        "NVIDIA Ampere GA102 GPU architecture, whitepaper v2.0, 2021, and RTX A6000 datasheet",
        f"{NVIDIA}/design-visualization/rtx-a6000/",
        "dense figures (the datasheet's 309.7 TFLOP/s are with sparsity); ECC off, as delivered",
    ),
    "RTX-3090": Datasheet(
        "NVIDIA Ampere GA102 GPU architecture, whitepaper v2.0, 2021, appendix A",
        f"{NVIDIA}/geforce/graphics-cards/30-series/rtx-3090-3090ti/",
        "16 bits with float32 accumulation, as torch asks for: half of that with float16",
    ),
    "RTX-4090": Datasheet(
        "NVIDIA Ada GPU architecture, whitepaper v2, 2022, appendix A",
        f"{NVIDIA}/geforce/graphics-cards/40-series/rtx-4090/",
        "16 bits with float32 accumulation, as torch asks for: half of that with float16",
    ),
    "A100-40GB": Datasheet(
        "NVIDIA A100 datasheet, June 2021",
        f"{NVIDIA}/data-center/a100/",
        "SXM and PCIe have the same peaks and bandwidth",
    ),
    "A100-80GB": Datasheet(
        "NVIDIA A100 datasheet, June 2021", f"{NVIDIA}/data-center/a100/", "SXM"
    ),
    "A100-80GB-PCIe": Datasheet(
        "NVIDIA A100 datasheet, June 2021", f"{NVIDIA}/data-center/a100/", "PCIe"
    ),
    "H100-80GB": Datasheet(
        "NVIDIA H100 datasheet, 2023",
        f"{NVIDIA}/data-center/h100/",
        f"SXM; {SPARSE}; 81,559 MiB",
    ),
    "H100-80GB-PCIe": Datasheet(
        "NVIDIA H100 datasheet, 2022",
        f"{NVIDIA}/data-center/h100/",
        f"PCIe; {SPARSE}; 81,559 MiB",
    ),
    "H100-94GB-NVL": Datasheet(
        "NVIDIA H100 datasheet, 2024",
        f"{NVIDIA}/data-center/h100/",
        f"one of the pair; {SPARSE}",
    ),
    "H200": Datasheet(
        "NVIDIA H200 datasheet, 2024", f"{NVIDIA}/data-center/h200/", f"SXM; {SPARSE}"
    ),
    "B200": Datasheet(
        "NVIDIA Blackwell architecture technical brief, 2024",
        f"{NVIDIA}/data-center/hgx/",
        "HGX at 1,000 W; the brief has 192 GB and up to 8 TB/s, the GPU's driver reports 178 GiB "
        "and a memory bus of 7.7 TB/s",
    ),
    "GB200": Datasheet(
        "NVIDIA GB200 NVL72 datasheet, 2024",
        f"{NVIDIA}/data-center/gb200-nvl72/",
        f"one GPU of 72; {SPARSE}; 189,471 MiB",
    ),
    "MI250X": Datasheet(
        "AMD Instinct MI250X data sheet, 2021",
        f"{AMD}/mi200/mi250x.html",
        "one of its two dies (GCD), which is what torch sees as a device: half of the figures; "
        "matrix peaks",
    ),
    "MI300X": Datasheet(
        "AMD Instinct MI300X data sheet, 2023",
        f"{AMD}/mi300/mi300x.html",
        "matrix peaks; no TF32, which torch does not use by default there",
    ),
    "CPU-core": Datasheet(
        "benchmarks/ROOFLINE.md",
        "",
        "measured: one core of a server CPU with AVX-512, one thread",
    ),
}
NVLINK = f"{NVIDIA}/data-center/nvlink/"
PCIE = "https://pcisig.com/specifications"
INFINIBAND = "https://www.infinibandta.org/infiniband-roadmap/"
ETHERNET = "https://www.ieee802.org/3/"
GUESS = "latency assumed"
LINK_SOURCES: Mapping[str, Datasheet] = {
    "NVLink2": Datasheet("NVIDIA V100 datasheet, January 2020", NVLINK, f"6 links; {GUESS}"),
    "NVLink3": Datasheet("NVIDIA A100 datasheet, June 2021", NVLINK, f"12 links; {GUESS}"),
    "NVLink3-GA102": Datasheet(
        "NVIDIA Ampere GA102 GPU architecture, whitepaper v2.0, 2021",
        NVLINK,
        f"4 links of 14.0625 GB/s (RTX 3090, A6000); {GUESS}",
    ),
    "NVLink4": Datasheet("NVIDIA H100 datasheet, 2023", NVLINK, f"18 links; {GUESS}"),
    "NVLink5": Datasheet("NVIDIA Blackwell technical brief, 2024", NVLINK, f"18 links; {GUESS}"),
    "xGMI-MI250X": Datasheet(
        "AMD Instinct MI250X data sheet, 2021",
        f"{AMD}/mi200/mi250x.html",
        f"one link of 25 GT/s, 16 lanes; {GUESS}",
    ),
    "xGMI-MI300X": Datasheet(
        "AMD Instinct MI300X platform data sheet, 2023",
        f"{AMD}/mi300/mi300x.html",
        f"one link of 32 GT/s, 16 lanes; {GUESS}",
    ),
    "PCIe3-x16": Datasheet("PCI Express 3.0", PCIE, f"8 GT/s, 128b/130b; {GUESS}"),
    "PCIe4-x16": Datasheet("PCI Express 4.0", PCIE, f"16 GT/s, 128b/130b; {GUESS}"),
    "PCIe5-x16": Datasheet("PCI Express 5.0", PCIE, f"32 GT/s, 128b/130b; {GUESS}"),
    "InfiniBand-HDR": Datasheet("InfiniBand roadmap, HDR x4", INFINIBAND, f"200 Gb/s; {GUESS}"),
    "InfiniBand-NDR": Datasheet("InfiniBand roadmap, NDR x4", INFINIBAND, f"400 Gb/s; {GUESS}"),
    "Ethernet-10G": Datasheet("IEEE 802.3ae", ETHERNET, f"line rate; {GUESS}"),
    "Ethernet-25G": Datasheet("IEEE 802.3by", ETHERNET, f"line rate; {GUESS}"),
    "Ethernet-100G": Datasheet("IEEE 802.3ba", ETHERNET, f"line rate; {GUESS}"),
    "loopback": Datasheet("a guess", "", "messages between processes of one machine by TCP"),
}
