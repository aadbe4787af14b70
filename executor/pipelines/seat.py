"""Which pipeline this process belongs to, and where it meets the others."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from executor.coordinator.store import Meeting
from executor.place import Place
from executor.process_group import Part
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.sync.lanes import Lane

_trainings = count()
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux's netdevice(7)."""


@dataclass(frozen=True)
class Seat:
    """This process among the pipelines.

    Attributes:
        pipeline: its number.
        place: in the pipeline.
        meeting: with the coordinator.
        hosts_coordinator: whether it starts the coordinator.
        part: of torchrun's processes that is its pipeline; None: all of them.
    """

    pipeline: int
    place: Place
    meeting: Meeting
    hosts_coordinator: bool
    part: Part | None

    @property
    def tells(self) -> bool:
        """Whether it prints for all of torchrun's processes."""
        return self.place.rank == 0 and (self.hosts_coordinator or self.part is None)


def seat_of(
    plan: Plan, lanes: Sequence[Lane], pipeline: int | None, coordinator: str | None
) -> Seat:
    """Find it out.

    Args:
        plan: with all pipelines.
        lanes: of the plan.
        pipeline: that torchrun's processes are; None: they are all pipelines.
        coordinator: ``HOST:PORT`` of one that runs already; needed with ``pipeline``.

    Raises:
        PipeplanError: if the processes are too many or too few, or only one of both is given.
    """
    place = Place.of_this_process()
    if (pipeline is None) != (coordinator is None):
        raise PipeplanError(
            "--pipeline and --coordinator belong together: start python -m executor.coordinator "
            "PLAN --listen HOST:PORT, then each pipeline with both"
        )
    if dist.is_initialized():
        raise PipeplanError(
            "a process group exists already, and pipelines make groups of their own; train before "
            "init_process_group, or use one of all_reduce, fused, decoupled, cross_iteration"
        )
    if pipeline is not None and coordinator is not None:
        return _of_one_pipeline(lanes, pipeline, coordinator, place)
    if place.world_size != len(plan.ranks):
        raise PipeplanError(
            f"the plan has {len(plan.ranks)} ranks, {place.world_size} processes were started; "
            f"run it with torchrun --nproc-per-node {len(plan.ranks)} -m executor PLAN"
        )
    device = plan.ranks[place.rank]
    number, lane = next((n, lane) for n, lane in enumerate(lanes) if device in lane.devices)
    inside = Place(lane.devices.index(device), len(lane.devices))
    part = Part(f"pipeline {number}", inside.rank, inside.world_size)
    return Seat(number, inside, _own_meeting(), place.rank == 0, part)


def _of_one_pipeline(lanes: Sequence[Lane], pipeline: int, coordinator: str, place: Place) -> Seat:
    if not 0 <= pipeline < len(lanes):
        raise PipeplanError(f"--pipeline: {pipeline}; the plan has pipelines 0 to {len(lanes) - 1}")
    size = len(lanes[pipeline].devices)
    if place.world_size != size:
        raise PipeplanError(
            f"a pipeline of the plan has {size} ranks, {place.world_size} processes were started; "
            f"run it with torchrun --nproc-per-node {size} -m executor PLAN --pipeline {pipeline}"
        )
    return Seat(pipeline, place, Meeting.parse(coordinator), False, None)


def _own_meeting() -> Meeting:
    """In the store that torchrun's processes share."""
    if "MASTER_ADDR" not in os.environ:
        raise PipeplanError("several pipelines are started by torchrun; start the plan with it")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"pipeplan/{run}/{attempt}/{next(_trainings)}"
    return Meeting(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix)


def new_nonce() -> str:
    """A name for this life of the pipeline, the same on all its ranks."""
    drawn = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
    if dist.get_world_size() > 1:
        dist.broadcast(drawn, 0)
    return bytes(drawn.tolist()).hex()


def own_address(meeting: Meeting) -> str:
    """The address of this machine that others reach it by.

    That of the network interface which ``GLOO_SOCKET_IFNAME`` names, as for all of gloo's data;
    else the one that leads to the meeting.

    Raises:
        PipeplanError: if there is no such interface, or it has no IPv4 address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        return _address_of(interface)
    found = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    if not sys.platform.startswith("linux"):
        raise PipeplanError(
            f"GLOO_SOCKET_IFNAME: {interface!r}; interfaces are only chosen on Linux, unset it"
        )
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
        except OSError as error:
            raise PipeplanError(
                f"GLOO_SOCKET_IFNAME: {interface!r} has no IPv4 address here "
                f"({error.strerror}); name an interface that has one, or unset it"
            ) from None
    return socket.inet_ntoa(found[20:24])
