"""The machines of a cluster, for planners that know two levels of network."""

from __future__ import annotations

from planner.artifacts.cluster import Cluster


def machines(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Devices that hang on the same switch, in file order; a device on none is its own machine.

    A device on several switches belongs to the one with the widest link.
    """
    switches = set(cluster.switches)
    home: dict[str, tuple[float, str]] = {}
    for link in cluster.links:
        for device, switch in (link.between, reversed(link.between)):
            if switch in switches and device not in switches:
                found = (link.bandwidth_gb_per_s, switch)
                home[device] = max(home.get(device, found), found)
    groups: dict[tuple[bool, str], list[str]] = {}
    for device in cluster.device_names:
        key = (True, home[device][1]) if device in home else (False, device)
        groups.setdefault(key, []).append(device)
    return tuple(tuple(group) for group in groups.values())


def equal_machines(cluster: Cluster) -> tuple[tuple[str, ...], ...] | None:
    """The machines if there are several, all of one size above 1 and of one device type."""
    found = machines(cluster)
    sizes = {len(machine) for machine in found}
    types = {cluster.type_of(device) for device in cluster.device_names}
    if len(found) < 2 or len(sizes) > 1 or sizes == {1} or len(types) > 1:
        return None
    return found
