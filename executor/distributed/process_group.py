"""The process group of a run: made once everything that one rank can refuse has been."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from executor.distributed.failure import Failures, talking_to, watched
from executor.distributed.machines import BACKENDS, Machine, agreed_backend
from executor.distributed.meeting import meet
from executor.distributed.stop import StopRequest
from executor.launch.rank_options import DEFAULT_TIMEOUT_S
from planner.errors import PipeplanError


def _collective(*names: str) -> Any:
    """Return the first of these functions that this version of torch has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# Their names since torch 2.13 and before.
reduce_scatter_single = _collective("reduce_scatter_single", "reduce_scatter_tensor")
all_gather_single = _collective("all_gather_single", "all_gather_into_tensor")

MEETING_TIMEOUT_S = 600.0
"""Ranks trace the model before they meet, some sooner than others."""
_trainings = itertools.count()


@dataclass(frozen=True)
class Part:
    """Some of the processes that torchrun started, which form a world of their own.

    Attributes:
        name: that no other part has.
        rank, world_size: of this process in it.
    """

    name: str
    rank: int
    world_size: int


def device_of_this_process(kind: str | None = None) -> torch.device:
    """The device of this rank.

    Args:
        kind: ``cpu``, or ``cuda``: ranks of a host take its GPUs in turn; None: a GPU if there is
            one.

    Raises:
        PipeplanError: if there is no GPU though one is wanted, or the kind is neither.
    """
    if kind not in (None, "cpu", "cuda"):
        raise PipeplanError(f"device: {kind!r}; expected 'cpu' or 'cuda', or nothing")
    has_gpu = torch.cuda.is_available()
    if kind == "cuda" and not has_gpu:
        raise PipeplanError("device: 'cuda', but torch sees no GPU here; use 'cpu'")
    if kind == "cpu" or not has_gpu:
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    )
    torch.cuda.set_device(device)
    return device


def carrier_of(device: torch.device, group: Any = None) -> str:
    """Return the backend, ``gloo`` or ``nccl``, that carries a device's tensors in a group."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return str(dict(pairs)[device.type])


def require_backend(backend: str | None, device: torch.device) -> None:
    """Refuse a backend that cannot carry a device's tensors.

    Raises:
        PipeplanError: if it cannot, or this torch is built without it.
    """
    if backend != "nccl":
        return
    if device.type == "cpu":
        raise PipeplanError(
            "backend: 'nccl' carries tensors of GPUs, and these lie on the CPU; use 'gloo' or "
            "leave it out"
        )
    if not dist.is_nccl_available():
        raise PipeplanError("backend: 'nccl', but this torch was built without it; use 'gloo'")


@contextmanager
def process_group(
    device: torch.device,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    backend: str | None = None,
    part: Part | None = None,
    stop: StopRequest | None = None,
) -> Iterator[list[Machine]]:
    """Join the other ranks, unless this process has done so already, and leave them at the end.

    Yields what each rank runs on.

    Args:
        device: of tensors.
        timeout_s: a rank that lets others wait for so long, once they have met, counts as lost.
        backend: ``gloo`` or ``nccl``; default what fits the devices of all ranks.
        part: of the processes that torchrun started; default all of them.
        stop: told of SIGTERM and SIGINT; None: they end the process.

    Raises:
        LostRankError: if the ranks do not meet, or another is lost later on.
        PipeplanError: if the ranks' devices or backends do not go together.
    """
    mine = Machine.of_this_process(device, backend)
    if dist.is_initialized():
        found: list[Any] = [mine] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        with watched(None, stop):
            yield found
        return
    store, rank, world_size = _meeting_place()
    # A script may train several times: each has keys of its own, in an order all ranks share.
    store = PrefixStore(f"training {next(_trainings)}", store)
    if part is not None:
        store, rank, world_size = PrefixStore(part.name, store), part.rank, part.world_size
    with talking_to("the other ranks"):
        store, machines = meet(store, rank, world_size, mine, MEETING_TIMEOUT_S)
    failures = Failures(PrefixStore("failures", store), rank, machines)
    agreed = agreed_backend(machines)
    with talking_to("the other ranks"):
        dist.init_process_group(
            BACKENDS[agreed],
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    try:
        with watched(failures, stop):
            yield machines
    except BaseException:
        # Leaving it could wait for those who are lost; the end of the process closes it.
        if world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _meeting_place() -> tuple[Store, int, int]:
    if "RANK" in os.environ:
        timeout = timedelta(seconds=MEETING_TIMEOUT_S)
        with talking_to("the first host"):
            store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
            return store, rank, world_size
    # Not started by torchrun: a plan of one rank needs no port to meet others at.
    return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
