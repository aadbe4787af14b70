"""How a link is held to its bandwidth: packets, buckets, queues and windows.

A token bucket filter (tc-tbf) counts payload alone: its size table takes the headers off every
packet, so that acknowledgements cost nothing and the rate is the file's figure. A packet is worth
about :data:`PACKET_S` of its link's time, so that slow links interleave finely and fast ones cost
little CPU. The bucket makes up for timers that fire late; what it lends shortens the apparent
latency of a transfer, never its rate. TCP's window holds :data:`WINDOW_S` of a route's bandwidth:
no queue grows longer than that a connection, and no queue is ever full.
"""

from __future__ import annotations

HEADER_BYTES = 14 + 20 + 20 + 12
"""Ethernet, IPv4, TCP and its timestamps: what a packet carries beside payload."""
PACKET_S = 100e-6
BUCKET_S = 300e-6
WINDOW_S = 4e-3
LEAST_MTU_BYTES = 1500
MOST_MTU_BYTES = 60_000
INTERFACE_MTU_BYTES = 65_000
QUEUE_BYTES = 256_000_000
"""A limit that nothing reaches: a dropped packet would cost TCP milliseconds."""


def mtu_bytes(bandwidth_gb_per_s: float) -> int:
    """The largest IP packet on a route of this bandwidth."""
    worth = int(bandwidth_gb_per_s * 1e9 * PACKET_S)
    return min(max(worth, LEAST_MTU_BYTES), MOST_MTU_BYTES)


def bucket_bytes(bandwidth_gb_per_s: float) -> int:
    """Return the bytes that may pass at once after a pause."""
    worth = int(bandwidth_gb_per_s * 1e9 * BUCKET_S)
    return max(worth, 2 * mtu_bytes(bandwidth_gb_per_s))


def window_bytes(bandwidth_gb_per_s: float) -> int:
    """The most a connection may have on its way, 16 packets or more."""
    worth = int(bandwidth_gb_per_s * 1e9 * WINDOW_S)
    return max(worth, 16 * mtu_bytes(bandwidth_gb_per_s))


def tc_line(interface: str, bandwidth_gb_per_s: float) -> str:
    """The line of a ``tc -batch`` file that shapes what leaves by an interface."""
    rate = round(bandwidth_gb_per_s * 8e9)
    return (
        f"qdisc add dev {interface} root stab overhead -{HEADER_BYTES} "
        f"tbf rate {rate}bit burst {bucket_bytes(bandwidth_gb_per_s)}b limit {QUEUE_BYTES}"
    )


def route_metrics(bandwidth_gb_per_s: float) -> str:
    """Return the route's options for ``ip route``: packet size, window, and no slow start."""
    mtu, window = mtu_bytes(bandwidth_gb_per_s), window_bytes(bandwidth_gb_per_s)
    packets = window // (mtu - HEADER_BYTES + 14) + 1
    return f"mtu lock {mtu} window {window} initcwnd {packets} initrwnd {packets}"
