"""The process group of a run: made once everything that one rank can refuse has been."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from executor.attempt import store_of_attempt
from executor.failure import Failures, talking_to
from executor.limits import DEFAULT_TIMEOUT_S
from executor.watch import watched
from planner.errors import PipeplanError

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


def backend_of(device: torch.device) -> str:
    """What carries the messages of a device.

    NCCL wants a GPU for each rank; several ranks on one GPU talk by gloo.
    """
    if device.type == "cpu":
        return "gloo"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_own_gpu = ranks_here <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if has_own_gpu and dist.is_nccl_available() else "gloo"


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
) -> Iterator[None]:
    """Join the other ranks, unless this process has done so already, and leave them at the end.

    Args:
        device: of tensors.
        timeout_s: a rank that lets others wait for so long, once they have met, counts as lost.
        backend: of torch.distributed; default what fits the device.
        part: of the processes that torchrun started; default all of them.

    Raises:
        LostRankError: if the ranks do not meet, or another is lost later on.
    """
    if dist.is_initialized():
        yield
        return
    store, rank, world_size = _meeting_place()
    # A script may train several times: each has keys of its own, in an order all ranks share.
    store = PrefixStore(f"training {next(_trainings)}", store)
    if part is not None:
        store, rank, world_size = PrefixStore(part.name, store), part.rank, part.world_size
    with talking_to("the other ranks"):
        store = store_of_attempt(store, rank, world_size, MEETING_TIMEOUT_S)
    failures = Failures(PrefixStore("failures", store), rank, world_size)
    failures.meet(MEETING_TIMEOUT_S)
    with talking_to("the other ranks"):
        dist.init_process_group(
            backend or backend_of(device),
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    try:
        with watched(failures):
            yield
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
