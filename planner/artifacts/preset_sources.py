"""The documents that the presets' figures come from."""

from collections.abc import Mapping
from dataclasses import dataclass

NVIDIA = "https://www.nvidia.com/en-us"


@dataclass(frozen=True)
class Datasheet:
    """Where a preset's figures come from.

    Attributes:
        name: of the document and its date or version.
        url: a public page of the vendor; empty if there is none.
        note: which variant it is, and what is not taken from it as it stands.
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
    "MI250X": Datasheet(
        "AMD Instinct MI250X data sheet, 2021",
        "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html",
        "one of its two dies (GCD), which is what torch sees as a device: half of the figures; "
        "matrix peaks",
    ),
    "MI300X": Datasheet(
        "AMD Instinct MI300X data sheet, 2023",
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
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
    "NVLink4": Datasheet("NVIDIA H100 datasheet, 2023", NVLINK, f"18 links; {GUESS}"),
    "NVLink5": Datasheet("NVIDIA Blackwell technical brief, 2024", NVLINK, f"18 links; {GUESS}"),
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
