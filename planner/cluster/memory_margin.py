"""Memory that plans leave free on every device, for fragmentation and what the model cannot see."""

from __future__ import annotations

import re

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError

_MARGIN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|gib)?", re.IGNORECASE)


def with_memory_margin(cluster: Cluster, margin: str) -> Cluster:
    """Return a cluster whose devices keep some more memory free: it counts as reserved.

    Args:
        cluster: of the devices.
        margin: a share of each device's memory, as ``6%`` or ``0.06``, or ``2GiB``.

    Raises:
        PipeplanError: if it is neither, or leaves no memory on some type of device.
    """
    match = _MARGIN.fullmatch(margin.strip())
    number = None if match is None else float(match["number"])
    unit = "" if match is None else (match["unit"] or "").lower()
    share = None if number is None or unit == "gib" else number / (100 if unit else 1)
    if number is None or (share is not None and share >= 1):
        raise PipeplanError(
            f"memory margin {margin!r}: expected a share such as 6% or 0.06, or a size such as 2GiB"
        )
    types = {}
    for name, kind in cluster.device_types.items():
        more_gib = number if share is None else share * kind.memory_gib
        reserved_gib = kind.reserved_gib + more_gib
        if reserved_gib >= kind.memory_gib:
            raise PipeplanError(
                f"memory margin {margin!r}: device type {name!r} has {kind.memory_gib:g} GiB, of "
                f"which {kind.reserved_gib:g} are reserved: nothing is left; give a smaller margin"
            )
        types[name] = kind.model_copy(update={"reserved_gib": reserved_gib})
    return cluster.model_copy(update={"device_types": types})
