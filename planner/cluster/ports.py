"""What joins devices of a type to each other and to their host, by the vendors' datasheets."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cluster.presets import DEVICE_ROWS, LINK_ROWS


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
    name: row["links"] for name, row in LINK_ROWS.items() if "links" in row
}
"""How many links a preset of a fabric stands for."""
PORTS: Mapping[str, Ports] = {
    name: Ports(row["pcie"], row.get("fabric"), row.get("peer_to_peer", True))
    for name, row in DEVICE_ROWS.items()
    if "pcie" in row
}
OTHER_PORTS = Ports()
"""Assumed for device types of one's own."""
