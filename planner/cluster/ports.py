"""What joins devices of a type to each other and to their host, by the vendors' datasheets.

Sources are those of the presets (:data:`planner.cluster.presets.DEVICE_SOURCES`); the numbers of
NVLinks are in the same documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ports:
    """The interconnects of one type of device.

    Attributes:
        pcie: preset of its link to the host.
        fabric: preset of all its NVLinks together, or of one xGMI link; None if it has neither.
        fabric_links: how many links the preset of the fabric stands for.
        peer_to_peer: whether such devices reach each other's memory over PCIe.
    """

    pcie: str = "PCIe4-x16"
    fabric: str | None = None
    fabric_links: int = 0
    peer_to_peer: bool = True


PORTS: Mapping[str, Ports] = {
    **dict.fromkeys(("V100-16GB", "V100-32GB"), Ports("PCIe3-x16", "NVLink2", 6)),
    "T4": Ports("PCIe3-x16"),
    **dict.fromkeys(("A10", "L4", "L40S"), Ports()),
    "A6000": Ports(fabric="NVLink3-GA102", fabric_links=4),
    # GeForce: NVIDIA's drivers have no peer-to-peer over PCIe since the 30 series.
    "RTX-3090": Ports(fabric="NVLink3-GA102", fabric_links=4, peer_to_peer=False),
    "RTX-4090": Ports(peer_to_peer=False),
    **dict.fromkeys(
        ("A100-40GB", "A100-80GB", "A100-80GB-PCIe"), Ports(fabric="NVLink3", fabric_links=12)
    ),
    **dict.fromkeys(
        ("H100-80GB", "H100-80GB-PCIe", "H100-94GB-NVL", "H200"),
        Ports("PCIe5-x16", "NVLink4", 18),
    ),
    # A GB200's GPU reaches network cards through its CPU, whose ports are PCIe 5.
    **dict.fromkeys(("B200", "GB200"), Ports("PCIe5-x16", "NVLink5", 18)),
    "MI250X": Ports(fabric="xGMI-MI250X", fabric_links=1),
    "MI300X": Ports("PCIe5-x16", "xGMI-MI300X", 1),
}
OTHER_PORTS = Ports(fabric="NVLink3", fabric_links=12)
"""Assumed for device types of one's own."""
