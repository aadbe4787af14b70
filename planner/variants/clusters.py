"""Variants of a cluster: without some devices, with copies of some, united with a file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import ClusterFile, Host
from planner.cluster.hardware import LinkType
from planner.errors import PipeplanError

Data = Mapping[str, Any]


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


def with_copies(cluster: Cluster, names: Mapping[str, str]) -> Cluster:
    """Return a cluster with copies of some devices and switches.

    Copies have the type, price and links of the originals; links to others lead to these. They are
    on other hosts: copies of one host's devices slow each other as the originals do.

    Args:
        cluster: as it is.
        names: of the copies, which are free, by their originals.
    """
    devices = (
        device.model_copy(update={"name": names[device.name]})
        for device in cluster.devices
        if device.name in names
    )
    links = (
        link.model_copy(update={"between": tuple(names.get(end, end) for end in link.between)})
        for link in cluster.links
        if not names.keys().isdisjoint(link.between)
    )
    hosts = (
        host.model_copy(update={"devices": tuple(names[name] for name in host.devices)})
        for host in hosts_of(cluster, names)
    )
    fields = {
        "devices": (*cluster.devices, *devices),
        "switches": (*cluster.switches, *(names[s] for s in cluster.switches if s in names)),
        "links": (*cluster.links, *links),
        "hosts": (*cluster.hosts, *hosts),
    }
    return cluster.model_copy(update=fields)


# --- united with a file ---------------------------------------------------------------------------


def with_file(cluster: Cluster, path: Path) -> Cluster:
    """Return a cluster with the devices and links of a file, which may end at its switches.

    Args:
        cluster: as it is; the file may use its device types by name.
        path: a cluster file, TOML or JSON.

    Raises:
        PipeplanError: if the file is wrong, or names something that the cluster has in another
            form.
    """
    source = str(path)
    file = ClusterFile.load(path)
    types = {**cluster.device_types, **file.device_types}
    added = file.model_copy(update={"device_types": types}).expanded(source)
    return united(cluster, added, source)


def united(cluster: Cluster, added: Data, source: str) -> Cluster:
    """Return a cluster united with plain data of another one.

    What both have is taken once, if it is the same. Links that the data has twice stay two.

    Args:
        cluster: as it is.
        added: of the form of a cluster's JSON; links may end at the cluster's devices and switches.
        source: the name to use for it in messages.

    Raises:
        PipeplanError: naming everything that is there in another form already.
    """
    data = cluster.model_dump(mode="json")
    problems = [*_clashes(cluster, data, added)]
    if problems:
        raise PipeplanError(f"{source}: {problem}; {_REMEDY}" for problem in problems)
    known = {_link_key(link) for link in data["links"]}
    mine = set(cluster.device_names)
    merged = {
        **data,
        "currency": data.get("currency") or added.get("currency"),
        "device_types": {**added["device_types"], **data["device_types"]},
        "devices": [*data["devices"], *(d for d in added["devices"] if d["name"] not in mine)],
        "switches": [*dict.fromkeys((*cluster.switches, *added["switches"]))],
        "links": [*data["links"], *(x for x in added["links"] if _link_key(x) not in known)],
        "hosts": _united_hosts(data.get("hosts", ()), added.get("hosts", ())),
    }
    return Cluster.parse(merged, source)


def _united_hosts(mine: Sequence[Data], added: Sequence[Data]) -> list[Data]:
    """Return all hosts; one that is extended by devices stands as it was added."""
    extended = {name for host in added for name in host["devices"]}
    kept = [host for host in mine if not extended.issuperset(host["devices"])]
    return [*kept, *added]


_REMEDY = "leave it out, or give all machines there are now as the new cluster"


def _clashes(cluster: Cluster, data: Data, added: Data) -> Iterator[str]:
    """Yield what the added data contradicts of the cluster."""
    for name, kind in added["device_types"].items():
        old = cluster.device_types.get(name)
        if old is not None and type(old).parse(kind, name) != old:
            yield f"device_types: {name!r} has other figures in the plan's cluster"
    devices = {device["name"]: device for device in data["devices"]}
    for device in added["devices"]:
        old_device = devices.get(device["name"])
        if old_device is not None and old_device != device:
            yield (
                f"devices: {device['name']!r} is in the plan's cluster already, of type "
                f"{old_device['type']!r}, here {device['type']!r}"
            )
        if device["name"] in cluster.switches:
            yield f"devices: {device['name']!r} is a switch of the plan's cluster"
    for switch in added["switches"]:
        if switch in devices:
            yield f"switches: {switch!r} is a device of the plan's cluster"
    yield from _link_clashes(data, added)
    mine, theirs = data.get("currency"), added.get("currency")
    if mine and theirs and mine != theirs:
        yield f"currency: {theirs!r}, the plan's cluster has {mine!r}"


def _link_clashes(data: Data, added: Data) -> Iterator[str]:
    ends = {frozenset(link["between"]) for link in data["links"]}
    known = {_link_key(link) for link in data["links"]}
    for link in added["links"]:
        if frozenset(link["between"]) in ends and _link_key(link) not in known:
            first, second = link["between"]
            yield (
                f"links: the plan's cluster joins {first!r} and {second!r} by a link of other "
                "figures"
            )


def _link_key(link: Data) -> tuple[object, ...]:
    """Return the same for links of equal figures between the same ends, in either order."""
    figures = LinkType.model_validate({k: v for k, v in link.items() if k != "between"})
    return frozenset(link["between"]), *figures.model_dump().values()
