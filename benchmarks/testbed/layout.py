"""What stands for what: a namespace for each device and switch, a veth pair for each link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.testbed.routing import Hop, hops
from planner import Cluster
from planner.errors import PipeplanError

PREFIX = "pipeplan"
"""Of every namespace's name; the owner's process id and the vertex follow."""
DATA_INTERFACE = "pipe0"
"""Of each device: it holds the address that gloo's data goes to and comes from."""
CONTROL_INTERFACE = "control0"
"""Of each device, on the unshaped network that processes meet over."""
MOST_DEVICES = 250


@dataclass(frozen=True)
class End:
    """One end of a wire: an interface in the namespace of a vertex.

    Attributes:
        vertex: device or switch by its name in the cluster.
        mac: its own, so that no vertex ever has to ask for it.
    """

    vertex: str
    interface: str
    mac: str


@dataclass(frozen=True)
class Wire:
    """A link of the cluster as a veth pair, shaped where each end sends.

    Attributes:
        link: place in the cluster's ``links``.
        bandwidth_gb_per_s: payload each way.
    """

    link: int
    bandwidth_gb_per_s: float
    ends: tuple[End, End]

    def end_at(self, vertex: str) -> End:
        """The end in this vertex."""
        first, second = self.ends
        return first if first.vertex == vertex else second

    def end_opposite(self, vertex: str) -> End:
        """The end in the other vertex."""
        first, second = self.ends
        return second if first.vertex == vertex else first


@dataclass(frozen=True)
class Layout:
    """The whole testbed on paper; nothing of it needs to exist.

    Attributes:
        namespaces: name by device or switch.
        data_addresses: IPv4 address by device, on no link: routes lead to it over the links.
        control_addresses: IPv4 address by device on the unshaped network.
        control_namespace: where the bridge of the unshaped network is.
        wires: by link; links that no route uses have none.
        routes: what data passes, by source and target.
    """

    cluster: Cluster
    namespaces: Mapping[str, str]
    data_addresses: Mapping[str, str]
    control_addresses: Mapping[str, str]
    control_namespace: str
    wires: Mapping[int, Wire]
    routes: Mapping[tuple[str, str], tuple[Hop, ...]]

    @property
    def all_namespaces(self) -> tuple[str, ...]:
        """Every namespace the testbed has."""
        return (*self.namespaces.values(), self.control_namespace)

    def bandwidth_gb_per_s(self, source: str, target: str) -> float:
        """The bandwidth of the narrowest link between two joined devices."""
        links = [hop.link for hop in self.routes[source, target]]
        return min(self.wires[link].bandwidth_gb_per_s for link in links)


def lay_out(cluster: Cluster, owner: int) -> Layout:
    """Decide every name and address.

    Args:
        cluster: any that has neither half-duplex nor shared links.
        owner: process id that makes the names unique.

    Raises:
        PipeplanError: naming every link that cannot be made real.
    """
    _require_possible(cluster)
    names = cluster.device_names
    pairs = [(source, target) for source in names for target in names if source != target]
    found = {pair: hops(cluster, *pair) for pair in pairs}
    routes = {pair: route for pair, route in found.items() if route is not None}
    used = sorted({hop.link for route in routes.values() for hop in route})
    return Layout(
        cluster,
        _namespaces(cluster, owner),
        {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)},
        {name: f"10.78.0.{number}" for number, name in enumerate(names, 1)},
        f"{PREFIX}-{owner}-control",
        {link: _wire(cluster, link) for link in used},
        routes,
    )


def _require_possible(cluster: Cluster) -> None:
    problems = []
    if len(cluster.devices) > MOST_DEVICES:
        problems.append(
            f"devices: {len(cluster.devices)} of them; the testbed has addresses for "
            f"{MOST_DEVICES}, use a smaller cluster"
        )
    for index, link in enumerate(cluster.links):
        field = f"links[{index}], between {link.between[0]!r} and {link.between[1]!r}"
        if link.shared:
            problems.append(
                f"{field}: shared = true cannot be shaped, every transfer would have a link of "
                "its own; remove it and state the bandwidth that all transfers have together"
            )
        if link.duplex == "half":
            problems.append(
                f'{field}: duplex = "half" cannot be shaped, each end of a veth pair sends for '
                'itself; use duplex = "full"'
            )
    if problems:
        raise PipeplanError(f"cluster {cluster.name}: {problem}" for problem in problems)


def _namespaces(cluster: Cluster, owner: int) -> dict[str, str]:
    """Numbered: names of devices may hold slashes and be long."""
    devices = {
        name: f"{PREFIX}-{owner}-device{number}" for number, name in enumerate(cluster.device_names)
    }
    switches = {
        name: f"{PREFIX}-{owner}-switch{number}" for number, name in enumerate(cluster.switches)
    }
    return {**devices, **switches}


def _wire(cluster: Cluster, index: int) -> Wire:
    link = cluster.links[index]
    first, second = (
        End(vertex, f"link{index}", f"02:50:50:{index >> 8:02x}:{index & 255:02x}:{side:02x}")
        for side, vertex in enumerate(link.between)
    )
    return Wire(index, link.bandwidth_gb_per_s, (first, second))
