"""What every rank runs on, compared among the ranks and with the plan before they train."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from planner.cluster.cluster import node_name
from planner.cluster.hardware import GIB
from planner.errors import PipeplanError
from planner.plan.plan import Plan

logger = logging.getLogger(__name__)
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Hashable)

BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""Backends of torch.distributed by the names that users give; both gather metrics on the CPU."""


@dataclass(frozen=True)
class Machine:
    """What a rank runs on.

    Attributes:
        host: its name.
        kind: ``cpu`` or ``cuda``.
        asked: the backend that its command line names; None: none.
        has_nccl: whether its torch has it.
        gpu: the GPU's UUID, the same for ranks that share it; None on a CPU.
        gpu_name: such as ``NVIDIA H100 80GB HBM3``.
        gpu_bytes: memory of the whole GPU.
        pid: of its process.
    """

    host: str
    kind: str
    asked: str | None = None
    has_nccl: bool = False
    gpu: str | None = None
    gpu_name: str | None = None
    gpu_bytes: int = 0
    pid: int = 0

    @staticmethod
    def of_this_process(device: torch.device, asked: str | None) -> Machine:
        """Describe this process's device."""
        host, kind = socket.gethostname(), device.type
        machine = Machine(host, kind, asked, dist.is_nccl_available(), pid=os.getpid())
        if kind == "cpu":
            return machine
        gpu = torch.cuda.get_device_properties(device)
        uuid, memory = f"{host} {gpu.uuid}", gpu.total_memory
        return replace(machine, gpu=uuid, gpu_name=gpu.name, gpu_bytes=memory)


def hardware_name(device: torch.device) -> str:
    """Return the name of the processor, as torch or the system gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    rows = Path("/proc/cpuinfo")
    if rows.exists():
        for line in rows.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def agreed_backend(machines: Sequence[Machine]) -> str:
    """Return the backend of torch.distributed that all ranks take.

    NCCL wants a GPU for each rank; where several share one, or a rank has no NCCL, all talk by
    gloo.

    Raises:
        PipeplanError: naming the ranks that differ, or that cannot do what they were asked.
    """
    problems = [*_unlike(machines, "kind"), *_unlike(machines, "asked")]
    asked, shared = machines[0].asked, _shared_gpus(machines)
    if asked == "nccl":
        problems += [
            f"backend: 'nccl', but ranks {_listed(ranks)} share a GPU of host "
            f"{machines[ranks[0]].host}; give each rank a GPU of its own (fewer processes a host, "
            "or more visible GPUs), or use --backend gloo"
            for ranks in shared
        ]
    if problems:
        raise PipeplanError(problems)
    can = machines[0].kind == "cuda" and not shared and all(m.has_nccl for m in machines)
    return asked or ("nccl" if can else "gloo")


_REMEDIES = {
    "kind": (
        "device",
        "ranks of one training need devices of one kind; make GPUs visible to all, or use "
        "--device cpu",
    ),
    "asked": ("backend", "give all ranks the same --backend, or none"),
}


def _unlike(machines: Sequence[Machine], name: str) -> Iterator[str]:
    ranks = _ranks_by(getattr(machine, name) for machine in machines)
    if len(ranks) > 1:
        field, remedy = _REMEDIES[name]
        each = (f"{value!r} of ranks {_listed(held)}" for value, held in ranks.items())
        yield f"{field}: {', '.join(each)}; {remedy}"


def _shared_gpus(machines: Sequence[Machine]) -> list[list[int]]:
    """The ranks of each GPU that several share."""
    return [held for held in _ranks_of_gpus(machines) if len(held) > 1]


def _ranks_of_gpus(machines: Sequence[Machine]) -> list[list[int]]:
    """The ranks of each GPU."""
    ranks = _ranks_by(machine.gpu for machine in machines)
    return [held for gpu, held in ranks.items() if gpu is not None]


def _ranks_by(values: Iterable[Value]) -> dict[Value, list[int]]:
    """Return the ranks of each value, of which each rank has one."""
    found: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def _several(
    pairs: Iterable[tuple[Key | None, Value | None]],
) -> Iterator[tuple[Key, dict[Value, list[int]]]]:
    """Yield the keys that have several values, each with its ranks.

    Args:
        pairs: a key and a value of each rank; ranks with one None do not count.
    """
    found: dict[Key, dict[Value, list[int]]] = {}
    for (key, value), ranks in _ranks_by(pairs).items():
        if key is not None and value is not None:
            found.setdefault(key, {})[value] = ranks
    yield from (row for row in found.items() if len(row[1]) > 1)


def require_machines(plan: Plan, machines: Sequence[Machine]) -> None:
    """Refuse machines that are not those the plan was made for.

    Args:
        plan: with a rank for each machine.
        machines: of the ranks, in their order.

    Raises:
        PipeplanError: naming ranks, hosts and GPUs, and the remedy.
    """
    problems = [*_torn_nodes(plan, machines), *_mixed_types(plan, machines)]
    problems += _full_gpus(plan, machines)
    if problems:
        raise PipeplanError(problems)


def warn_of_machines(plan: Plan, machines: Sequence[Machine]) -> None:
    """Log what makes a run on GPUs other than planned, though it can train."""
    for ranks in _shared_gpus(machines):
        logger.warning(
            "ranks %s share a GPU of host %s: their times say nothing about the plan's",
            _listed(ranks),
            machines[ranks[0]].host,
        )
    on_gpus = (
        (machine.host if machine.kind == "cuda" else None, node_name(device))
        for device, machine in zip(plan.rank_devices, machines, strict=True)
    )
    for host, nodes in _several(on_gpus):
        logger.warning(
            "host %s runs the ranks of nodes %s of the plan: links between them are not those "
            "that the plan counts on",
            host,
            ", ".join(sorted(nodes)),
        )


def _torn_nodes(plan: Plan, machines: Sequence[Machine]) -> Iterator[str]:
    """Nodes of the plan whose ranks are on several hosts."""
    rows = zip(plan.rank_devices, machines, strict=True)
    for node, hosts in _several((node_name(device), machine.host) for device, machine in rows):
        where = (f"ranks {_listed(ranks)} on {host}" for host, ranks in hosts.items())
        count = sum(map(len, hosts.values()))
        yield (
            f"ranks: node {node!r} of the plan has {', '.join(where)}; start torchrun so that "
            f"these {count} ranks are on one host, or plan for the nodes there are"
        )


def _mixed_types(plan: Plan, machines: Sequence[Machine]) -> Iterator[str]:
    """Devices of one type of the plan that are GPUs of several."""
    type_of, rows = plan.cluster.type_of, zip(plan.rank_devices, machines, strict=True)
    for kind, names in _several((type_of(device), machine.gpu_name) for device, machine in rows):
        which = (f"{name} on ranks {_listed(ranks)}" for name, ranks in names.items())
        yield (
            f"devices: type {kind!r} of the plan is {', '.join(which)}; start the ranks in the "
            "plan's order, or plan with a cluster file that gives each its own type"
        )


def _full_gpus(plan: Plan, machines: Sequence[Machine]) -> Iterator[str]:
    """GPUs with less memory than their ranks are predicted to take."""
    for held in _ranks_of_gpus(machines):
        machine = machines[held[0]]
        needed = sum(_predicted_bytes(plan, rank) for rank in held)
        if needed > machine.gpu_bytes:
            yield (
                f"memory: ranks {_listed(held)} take {needed / GIB:.1f} GiB by the plan, their "
                f"{machine.gpu_name} of host {machine.host} has {machine.gpu_bytes / GIB:.1f} GiB; "
                "plan with its memory_gib in the cluster file"
            )


def _predicted_bytes(plan: Plan, rank: int) -> float:
    """Return what a rank is predicted to take, of a group's prediction its share."""
    place = plan.place_of(rank)
    return plan.predicted.devices[place.replica].peak_memory_bytes / place.members


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
