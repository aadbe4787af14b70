"""The pipeline that this process belongs to, and where it meets the others."""

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

from executor.coordinator.wire import Endpoint
from executor.distributed.process_group import Part
from executor.launch.run import PlanRank
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.sync.pipeline_replicas import PipelineReplica

_trainings = count()
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux's netdevice(7)."""


@dataclass(frozen=True)
class RankAssignment:
    """This process among the pipelines.

    Attributes:
        pipeline: its number.
        place: in the pipeline.
        coordinator: that runs already; None: the first of torchrun's processes starts one.
        hosts_coordinator: whether it starts the coordinator.
        part: of torchrun's processes that is its pipeline; None: all of them.
    """

    pipeline: int
    place: PlanRank
    coordinator: Endpoint | None
    hosts_coordinator: bool
    part: Part | None

    @property
    def prints(self) -> bool:
        """Whether it prints for all of torchrun's processes."""
        return self.place.rank == 0 and (self.hosts_coordinator or self.part is None)


def rank_assignment_of(
    plan: Plan, replicas: Sequence[PipelineReplica], pipeline: int | None, coordinator: str | None
) -> RankAssignment:
    """Find it out.

    Args:
        plan: with all pipelines.
        replicas: of the plan.
        pipeline: that torchrun's processes are; None: they are all pipelines.
        coordinator: ``HOST:PORT`` of one that runs already; needed with ``pipeline``.

    Raises:
        PipeplanError: if the processes are too many or too few, or only one of both is given.
    """
    place = PlanRank.of_this_process()
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
        return _of_one_pipeline(replicas, pipeline, coordinator, place)
    if place.world_size != len(plan.ranks):
        raise PipeplanError(
            f"the plan has {len(plan.ranks)} ranks, {place.world_size} processes were started; "
            f"run it with torchrun --nproc-per-node {len(plan.ranks)} -m executor PLAN"
        )
    device = plan.ranks[place.rank]
    number, replica = next(
        (n, replica) for n, replica in enumerate(replicas) if device in replica.devices
    )
    inside = PlanRank(replica.devices.index(device), len(replica.devices))
    part = Part(f"pipeline {number}", inside.rank, inside.world_size)
    if "MASTER_ADDR" not in os.environ:
        raise PipeplanError("several pipelines are started by torchrun; start the plan with it")
    return RankAssignment(number, inside, None, place.rank == 0, part)


def _of_one_pipeline(
    replicas: Sequence[PipelineReplica], pipeline: int, coordinator: str, place: PlanRank
) -> RankAssignment:
    if not 0 <= pipeline < len(replicas):
        raise PipeplanError(
            f"--pipeline: {pipeline}; the plan has pipelines 0 to {len(replicas) - 1}"
        )
    size = len(replicas[pipeline].devices)
    if place.world_size != size:
        raise PipeplanError(
            f"a pipeline of the plan has {size} ranks, {place.world_size} processes were started; "
            f"run it with torchrun --nproc-per-node {size} -m executor PLAN --pipeline {pipeline}"
        )
    return RankAssignment(pipeline, place, Endpoint.parse(coordinator), False, None)


def torchrun_address() -> tuple[str, int]:
    """Return host and port of the store that torchrun's processes share."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def training_name() -> str:
    """Return a name of this training among those that torchrun's processes run, on all the same."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{run}/{attempt}/{next(_trainings)}"


def new_incarnation() -> str:
    """A name for this incarnation of the pipeline, the same on all its ranks."""
    drawn = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
    if dist.get_world_size() > 1:
        dist.broadcast(drawn, 0)
    return bytes(drawn.tolist()).hex()


def own_address(towards: Endpoint) -> str:
    """Return the address of this machine that others reach it by.

    That of the network interface which ``GLOO_SOCKET_IFNAME`` names, as for all of gloo's data;
    else of the one that leads to ``towards``.

    Raises:
        PipeplanError: if there is no such interface, or it has no IPv4 address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        return _address_of(interface)
    found = socket.getaddrinfo(towards.host, towards.port, type=socket.SOCK_DGRAM)
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
