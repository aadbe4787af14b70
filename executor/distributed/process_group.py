"""The process group of a run: made once everything that one rank can refuse has been.

Keys of their own for each time that a job's ranks are started, in one store.

Torchrun starts all ranks of a job again when one fails, and lets them meet at the same store. What
the ranks before left there would be taken for the others': addresses of processes that are no
more, and the note of the failure. Torchrun's count of restarts is no name for an attempt, as it
differs between hosts. So the ranks agree on one: each leaves a word drawn at random, the first
gathers them, and all say that they have read their own among those gathered.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from executor.distributed.failure import Failures, absent, talking_to, watched
from executor.distributed.machines import (
    BACKENDS,
    Machine,
    agreed_backend,
    gather_machines,
)
from executor.distributed.stop import StopRequest
from executor.launch.rank_options import DEFAULT_TIMEOUT_S
from planner.errors import PipeplanError


def _collective(*names: str) -> Any:
    """Return the first of these functions that this version of torch has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# Their names since torch 2.13 and before.
reduce_scatter_single = _collective("reduce_scatter_single", "reduce_scatter_tensor")
all_gather_single = _collective("all_gather_single", "all_gather_into_tensor")

_LOOK_S = 0.05


def store_of_attempt(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of a store that the ranks which were started together share.

    Args:
        store: of all attempts.
        rank: this one.
        world_size: number of ranks.
        timeout_s: to wait for the others.

    Raises:
        LostRankError: naming those who did not come.
    """
    mine = secrets.token_hex(8)
    store.set(_word(rank), mine)
    end_s = time.monotonic() + timeout_s
    while True:
        if rank == 0:
            _gather(store, world_size)
        words = json.loads(store.get(_GATHERED)) if store.check([_GATHERED]) else []
        if len(words) == world_size and words[rank] == mine:
            name = "-".join(words)
            store.set(_read(name, rank), "")
            if store.check([_read(name, other) for other in range(world_size)]):
                return PrefixStore(f"attempt {name}", store)
        if time.monotonic() > end_s:
            raise absent(_missing(store, words, world_size), timeout_s)
        time.sleep(_LOOK_S)


_GATHERED = "words"


def _gather(store: Store, world_size: int) -> None:
    keys = [_word(rank) for rank in range(world_size)]
    if store.check(keys):
        store.set(_GATHERED, json.dumps([store.get(key).decode() for key in keys]))


def _missing(store: Store, words: list[str], world_size: int) -> list[int]:
    """Ranks that have left no word; else those that have not read all words."""
    name = "-".join(words)
    wordless = [r for r in range(world_size) if not store.check([_word(r)])]
    return wordless or [r for r in range(world_size) if not store.check([_read(name, r)])]


def _word(rank: int) -> str:
    return f"word of {rank}"


def _read(name: str, rank: int) -> str:
    return f"read {name}/{rank}"


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
        store = store_of_attempt(store, rank, world_size, MEETING_TIMEOUT_S)
    failures = Failures(PrefixStore("failures", store), rank, world_size)
    failures.meet(MEETING_TIMEOUT_S)
    with talking_to("the other ranks"):
        machines = gather_machines(
            PrefixStore("machines", store), rank, world_size, mine, MEETING_TIMEOUT_S
        )
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
