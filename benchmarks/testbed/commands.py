"""The lines for ``ip -batch`` and ``tc -batch`` that build a layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.testbed.layout import CONTROL_INTERFACE, DATA_INTERFACE, Layout, Wire
from benchmarks.testbed.shaping import INTERFACE_MTU_BYTES, route_metrics, tc_line

GATEWAY = "169.254.77.1"
"""Stands for the other end of any wire; its MAC is entered by hand, so nothing is asked."""
FIRST_TABLE = 100
"""Routing table of the first device's traffic in a switch; one table a source."""
SETTINGS = {
    "/proc/sys/net/ipv4/conf/all/rp_filter": 0,
    "/proc/sys/net/ipv4/conf/default/rp_filter": 0,
    "/proc/sys/net/ipv4/tcp_slow_start_after_idle": 0,
    "/proc/sys/net/ipv4/tcp_no_metrics_save": 1,
    "/proc/sys/net/ipv4/tcp_congestion_control": "reno",
}
"""Nothing is lost here, so that the simplest congestion control never acts."""


@dataclass(frozen=True)
class Batch:
    """Lines for one call of a tool.

    Attributes:
        namespace: where; None for outside of all.
    """

    tool: Literal["ip", "tc", "settings"]
    namespace: str | None
    lines: tuple[str, ...]


def batches(layout: Layout) -> Iterator[Batch]:
    """Everything between an empty machine and a ready testbed, in order."""
    yield Batch("ip", None, tuple(f"netns add {name}" for name in layout.all_namespaces))
    for vertex, namespace in layout.namespaces.items():
        yield Batch("settings", namespace, _settings(is_switch=vertex in layout.cluster.switches))
    yield Batch("ip", None, tuple(_cables(layout)))
    yield Batch("ip", layout.control_namespace, tuple(_control(layout)))
    for vertex, namespace in layout.namespaces.items():
        yield Batch("settings", namespace, tuple(_one_core_a_flow(layout, vertex)))
        yield Batch("ip", namespace, tuple(_inside(layout, vertex)))
        yield Batch("tc", namespace, tuple(_shapes(layout, vertex)))


def _settings(*, is_switch: bool) -> tuple[str, ...]:
    """Only switches forward."""
    settings = {"/proc/sys/net/ipv4/ip_forward": int(is_switch), **SETTINGS}
    return tuple(f"{name}={value}" for name, value in settings.items())


def _one_core_a_flow(layout: Layout, vertex: str) -> Iterator[str]:
    """Packets of a connection that several cores hand on would overtake each other."""
    for wire in layout.wires.values():
        if vertex in (wire.ends[0].vertex, wire.ends[1].vertex):
            interface = wire.end_at(vertex).interface
            yield f"/sys/class/net/{interface}/queues/rx-0/rps_cpus={_all_cores()}"


def _all_cores() -> str:
    """The kernel's notation: hexadecimal, a comma before every 32 bits."""
    digits = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
    head = len(digits) % 8 or 8
    groups = [digits[:head], *(digits[at : at + 8] for at in range(head, len(digits), 8))]
    return ",".join(groups)


def _cables(layout: Layout) -> Iterator[str]:
    """Made between namespaces directly: nothing appears outside."""
    for wire in layout.wires.values():
        yield _cable(layout, wire)
    for number, device in enumerate(layout.cluster.device_names):
        yield (
            f"link add {CONTROL_INTERFACE} netns {layout.namespaces[device]} type veth "
            f"peer name port{number} netns {layout.control_namespace}"
        )


def _cable(layout: Layout, wire: Wire) -> str:
    first, second = (
        f"{end.interface} netns {layout.namespaces[end.vertex]} address {end.mac} "
        f"mtu {INTERFACE_MTU_BYTES} gso_max_segs 1 numtxqueues 1 numrxqueues 1"
        for end in wire.ends
    )
    return f"link add {first} type veth peer name {second}"


def _control(layout: Layout) -> Iterator[str]:
    yield "link add bridge0 type bridge"
    yield "link set bridge0 up"
    for number in range(len(layout.cluster.devices)):
        yield f"link set port{number} master bridge0 up"


def _inside(layout: Layout, vertex: str) -> Iterator[str]:
    yield "link set lo up"
    is_device = vertex in layout.data_addresses
    if is_device:
        # A dummy interface would do; not every kernel has them, and gloo wants one that is up.
        yield f"link add {DATA_INTERFACE} type veth peer name pipe1"
        yield f"link set {DATA_INTERFACE} up"
        yield "link set pipe1 up"
        yield f"address add {layout.data_addresses[vertex]}/32 dev {DATA_INTERFACE}"
        yield f"link set {CONTROL_INTERFACE} up"
        yield f"address add {layout.control_addresses[vertex]}/24 dev {CONTROL_INTERFACE}"
    for wire in layout.wires.values():
        if vertex in (wire.ends[0].vertex, wire.ends[1].vertex):
            interface, other = wire.end_at(vertex).interface, wire.end_opposite(vertex)
            yield f"link set {interface} up"
            yield f"neighbour add {GATEWAY} lladdr {other.mac} dev {interface} nud permanent"
    yield from _device_routes(layout, vertex) if is_device else _switch_routes(layout, vertex)


def _device_routes(layout: Layout, device: str) -> Iterator[str]:
    for (source, target), route in layout.routes.items():
        if source == device:
            interface = layout.wires[route[0].link].end_at(device).interface
            metrics = route_metrics(layout.bandwidth_gb_per_s(source, target))
            yield (
                f"route add {layout.data_addresses[target]}/32 via {GATEWAY} dev {interface} "
                f"onlink src {layout.data_addresses[source]} {metrics}"
            )
    for other, address in layout.data_addresses.items():
        if other != device and (device, other) not in layout.routes:
            # Gloo connects all ranks with each other, whether or not they have anything to send.
            yield (
                f"route add {address}/32 via {layout.control_addresses[other]} "
                f"src {layout.data_addresses[device]}"
            )


def _switch_routes(layout: Layout, switch: str) -> Iterator[str]:
    """A table a source: the widest path to a target depends on where it starts."""
    tables = {name: FIRST_TABLE + n for n, name in enumerate(layout.cluster.device_names)}
    seen: set[str] = set()
    for (source, target), route in layout.routes.items():
        for hop in route:
            if hop.vertex != switch:
                continue
            if source not in seen:
                seen.add(source)
                yield f"rule add from {layout.data_addresses[source]} lookup {tables[source]}"
            interface = layout.wires[hop.link].end_at(switch).interface
            yield (
                f"route add {layout.data_addresses[target]}/32 via {GATEWAY} dev {interface} "
                f"onlink table {tables[source]}"
            )


def _shapes(layout: Layout, vertex: str) -> Iterator[str]:
    for wire in layout.wires.values():
        if vertex in (wire.ends[0].vertex, wire.ends[1].vertex):
            yield tc_line(wire.end_at(vertex).interface, wire.bandwidth_gb_per_s)
