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
        fabric: preset of all its NVLinks together, or of one xGMI link; None if it has neither or
            its fabric is not known.
        peer_to_peer: whether such devices reach each other's memory over PCIe.
    """

    pcie: str = "PCIe4-x16"
    fabric: str | None = None
    peer_to_peer: bool = True


FABRIC_LINKS: Mapping[str, int] = {
    "NVLink2": 6,
    "NVLink3": 12,
    "NVLink3-GA102": 4,
    "NVLink4": 18,
    "NVLink5": 18,
    "xGMI-MI250X": 1,
    "xGMI-MI300X": 1,
}
"""How many links a preset of a fabric stands for."""
PORTS: Mapping[str, Ports] = {
    **dict.fromkeys(("V100-16GB", "V100-32GB"), Ports("PCIe3-x16", "NVLink2")),
    "T4": Ports("PCIe3-x16"),
    **dict.fromkeys(("A10", "L4", "L40S"), Ports()),
    "A6000": Ports(fabric="NVLink3-GA102"),
    # GeForce: NVIDIA's drivers have no peer-to-peer over PCIe since the 30 series.
    "RTX-3090": Ports(fabric="NVLink3-GA102", peer_to_peer=False),
    "RTX-4090": Ports(peer_to_peer=False),
    **dict.fromkeys(("A100-40GB", "A100-80GB", "A100-80GB-PCIe"), Ports(fabric="NVLink3")),
    **dict.fromkeys(
        ("H100-80GB", "H100-80GB-PCIe", "H100-94GB-NVL", "H200"),
        Ports("PCIe5-x16", "NVLink4"),
    ),
    # A GB200's GPU reaches network cards through its CPU, whose ports are PCIe 5.
    **dict.fromkeys(("B200", "GB200"), Ports("PCIe5-x16", "NVLink5")),
    "MI250X": Ports(fabric="xGMI-MI250X"),
    "MI300X": Ports("PCIe5-x16", "xGMI-MI300X"),
}
OTHER_PORTS = Ports()
"""Assumed for device types of one's own."""
