"""Devices that slow each other down on their host, or by what they send and receive."""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.lower.wires import (
    COMPUTE_SLOWDOWN,
    HOST_OF,
    MESSAGE_SLOWDOWN,
    SLOWDOWN,
    WIRES,
)
from planner.program.program import DEVICES, HOSTS, PROGRAM, SLOWDOWNS
from planner.program.stage_rows import DEVICE, ROWS


@compiled
def fill_hosts(rows: Any, wires: Any, program: Any) -> None:
    """Fill in what slows each device."""
    numbers, h = header(program, PROGRAM), header(wires, WIRES)
    numbers.is_slowed, numbers.hosts = 0, 0
    host_of, slowdowns = items(wires, HOST_OF), items(wires, SLOWDOWN)
    for n in range(header(rows, ROWS).devices):
        device, number = row(program, DEVICES, n), row(rows, DEVICE, n).number
        device.compute_slowdown = items(wires, COMPUTE_SLOWDOWN)[number]
        device.message_slowdown = items(wires, MESSAGE_SLOWDOWN)[number]
        device.host = host_of[number]
        is_slowed = device.host >= 0
        is_slowed |= device.compute_slowdown > 1 or device.message_slowdown > 1
        device.is_slowed = is_slowed
        numbers.is_slowed |= is_slowed
    if not h.is_slowed:
        return
    numbers.hosts = h.hosts
    for host in range(h.hosts):
        row(program, HOSTS, host).slowdown = host * h.most_of_host
    for place in range(h.hosts * h.most_of_host):
        items(program, SLOWDOWNS)[place] = slowdowns[place]
