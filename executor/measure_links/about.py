"""What each rank is: its host, its device, and the names that the cluster file gives them."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from planner.artifacts.hardware import GIB
from planner.wiring.candidates import NETWORK
from planner.wiring.device_types import KnownType, cpu_type, gpu_type
from planner.wiring.measured import Member

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]+")
_MOST_CHARACTERS = 90
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def about_this_rank(device: torch.device, host: str | None) -> dict[str, Any]:
    """Plain JSON values for the other ranks.

    Args:
        device: of this rank.
        host: as the user calls the machine; None for the machine's own name.
    """
    boot = ""
    if host is None:
        # Two machines may bear one name, such as localhost.
        with suppress(OSError):
            boot = _BOOT.read_text().strip()
    about: dict[str, Any] = {"host": host or socket.gethostname(), "boot": boot, "gpu": None}
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
        about["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / GIB
    return about


def members_of(
    abouts: Sequence[Mapping[str, Any]],
) -> tuple[tuple[Member, ...], dict[str, KnownType]]:
    """Devices by rank, and their types by name."""
    hosts = _host_names([(about["host"], about["boot"]) for about in abouts])
    types: dict[str, KnownType] = {}
    members = []
    places: Counter[tuple[str, str]] = Counter()
    for host, about in zip(hosts, abouts, strict=True):
        gpu = about["gpu"]
        known = cpu_type() if gpu is None else gpu_type(gpu, about["memory_gib"])
        kind = "cpu" if gpu is None else "gpu"
        name = f"{host}/{kind}{places[host, kind]}"
        places[host, kind] += 1
        types.setdefault(known.name, known)
        members.append(Member(name, host, known.name))
    return tuple(members), types


def _host_names(machines: Sequence[tuple[str, str]]) -> list[str]:
    """One name for each machine, of characters that a cluster file takes."""
    named: dict[tuple[str, str], str] = {}
    for machine in machines:
        if machine in named:
            continue
        plain = _NOT_IN_NAMES.sub("-", machine[0])[:_MOST_CHARACTERS].strip("-") or "host"
        taken = {*named.values(), NETWORK}
        name, number = plain, 2
        while name in taken:
            name, number = f"{plain}-{number}", number + 1
        named[machine] = name
    return [named[machine] for machine in machines]
