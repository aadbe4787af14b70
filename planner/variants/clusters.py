"""Variants of a cluster: without some devices, and with copies of some."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import Host


def without(cluster: Cluster, names: Collection[str]) -> Cluster:
    """Return a cluster less some devices and switches, and less their links."""
    gone = set(names)
    if not gone:
        return cluster
    fields = {
        "devices": tuple(device for device in cluster.devices if device.name not in gone),
        "switches": tuple(name for name in cluster.switches if name not in gone),
        "links": tuple(link for link in cluster.links if gone.isdisjoint(link.between)),
    }
    hosts = tuple(hosts_of(cluster, set(cluster.device_names) - gone))
    return cluster.model_copy(update={**fields, "hosts": hosts})


def hosts_of(cluster: Cluster, devices: Collection[str]) -> Iterator[Host]:
    """Yield a cluster's hosts with some of its devices alone; none without any."""
    return (kept for host in cluster.hosts if (kept := host.of(devices)) is not None)


def with_copies(
    cluster: Cluster, names: Mapping[str, str], source: Cluster | None = None
) -> Cluster:
    """Return a cluster with copies of some devices and switches.

    Copies have the type, price and links of the originals; links to others lead to these. They are
    on other hosts, since copies of one host's devices slow each other as the originals do; devices
    that return under their own names are on their old hosts.

    Args:
        cluster: as it is.
        names: of the copies, which are free, by their originals.
        source: the cluster of the originals; links to what ``cluster`` lacks are left out. None:
            ``cluster`` itself.
    """
    source = source or cluster
    devices = (
        device.model_copy(update={"name": names[device.name]})
        for device in source.devices
        if device.name in names
    )
    links = (
        link.model_copy(update={"between": tuple(names.get(end, end) for end in link.between)})
        for link in source.links
        if not names.keys().isdisjoint(link.between)
    )
    there = {*cluster.device_names, *cluster.switches, *names.values()}
    fields = {
        "devices": (*cluster.devices, *devices),
        "switches": (*cluster.switches, *(names[s] for s in source.switches if s in names)),
        "links": (*cluster.links, *(link for link in links if there.issuperset(link.between))),
        "hosts": tuple(_hosts_with(cluster, names, source)),
    }
    return cluster.model_copy(update=fields)


def _hosts_with(cluster: Cluster, names: Mapping[str, str], source: Cluster) -> Iterator[Host]:
    if all(name == copy for name, copy in names.items()):
        known = {name for host in source.hosts for name in host.devices}
        yield from (host for host in cluster.hosts if known.isdisjoint(host.devices))
        yield from hosts_of(source, {*cluster.device_names, *names})
        return
    yield from cluster.hosts
    for host in hosts_of(source, names):
        yield host.model_copy(update={"devices": tuple(names[name] for name in host.devices)})
