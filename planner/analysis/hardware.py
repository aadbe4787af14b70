"""The devices of a plan: what hardware ran them, and which it leaves unused out of reach."""

from __future__ import annotations

import re
from collections import Counter

from planner.cluster.cluster import Cluster
from planner.cluster.device_types import CPU
from planner.cluster.presets import DEVICES
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan
from planner.units import plural

_ON_A_CPU = re.compile(r", \d+ threads$")
"""What the executor adds to the name of a processor."""


def other_hardware(plan: Plan, measured: MeasuredTimeline) -> tuple[str, ...]:
    """Say which devices of a plan another kind of hardware ran.

    A device type that was measured names its hardware, and presets of GPUs are no processors. Of a
    type with a user's own figures nothing is known, and nothing is said; nor where compute was
    emulated, which any machine does.

    Args:
        plan: what ran.
        measured: its measurement.

    Returns:
        A line for each device type and the hardware in its place.
    """
    if measured.emulated:
        return ()
    kinds = {device: plan.cluster.type_of(plan.members(device)[0]) for device in plan.ranks}
    found = Counter((kinds[device.name], device.hardware) for device in measured.devices)
    return tuple(
        f"{plural(count, 'device')} of type {kind} ran on {ran_on!r}: these are not the times of "
        f"{_named(plan.cluster, kind)}; run the plan there, or plan for the machine that is here "
        "(`pipeplan detect` writes its cluster file)"
        for (kind, ran_on), count in found.items()
        if _is_other(plan.cluster, kind, ran_on)
    )


def _is_other(cluster: Cluster, kind: str, ran_on: str) -> bool:
    expected = cluster.device_types[kind].hardware
    if expected is not None:
        return not ran_on.startswith(expected)
    return kind in DEVICES and kind != CPU and _ON_A_CPU.search(ran_on) is not None


def _named(cluster: Cluster, kind: str) -> str:
    expected = cluster.device_types[kind].hardware
    return kind if expected is None else repr(expected)


def unjoined_devices(plan: Plan) -> tuple[str, ...]:
    """Return unused devices that no path of links and switches joins to a device in use."""
    cluster, used = plan.cluster, plan.rank_devices
    left = [name for name in cluster.device_names if name not in used]
    return tuple(name for name in left if all(cluster.route(name, other) is None for other in used))
