"""What a rank talks to the other ranks of its plan over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from executor.distributed.member_group import ProcessGroupMembers, TensorParallelGroup
from executor.launch.prepare import Prepared
from executor.runtime.lowering import members_by_rank
from executor.runtime.runtime import Recorder
from executor.runtime.transport import Transport, make_channels, open_communicators, open_groups
from executor.sync.divided_layers import DividedLayer, DividedLayers
from executor.sync.shared_parameters import (
    divided_parameters,
    make_process_groups,
    shared_parameters,
)
from executor.training.state_shards import StateShards
from planner.plan.programs import directions


@dataclass(frozen=True)
class Connections:
    """The process groups of a plan and one rank's place in them.

    Attributes:
        process_groups: by their ranks.
        replicas: of each of this rank's stages, the ranks that hold the same part of it.
        members: of this rank's tensor-parallel group; None if it is in none.
        transport: of messages between stages.
        divided: layers of whose weights replicas have parts.
    """

    process_groups: Mapping[tuple[int, ...], Any]
    replicas: Mapping[int, tuple[int, ...]]
    members: ProcessGroupMembers | None
    transport: Transport
    divided: DividedLayers

    @classmethod
    def open(
        cls,
        prepared: Prepared,
        shards: StateShards | None,
        recorder: Recorder,
        timeout: timedelta | None,
        *,
        watches: bool,
    ) -> Connections:
        """Make process groups and open them; all ranks call it together.

        Args:
            prepared: what this rank runs.
            shards: of the optimizer's state; None: each rank has all of its own.
            recorder: told of the collectives of a tensor-parallel group.
            timeout: of collectives.
            watches: whether arrivals of messages are noted.
        """
        plan, rank, device = prepared.plan, prepared.place.rank, prepared.device
        mine = plan.place_of(rank).member
        sets = [row.ranks for row in shared_parameters(plan)]
        replicas = {}
        for stage in plan.stages:
            ranks_of_members = zip(*map(plan.ranks_of, stage.devices), strict=True)
            for member, ranks in enumerate(map(tuple, map(sorted, ranks_of_members))):
                sets += [ranks] if len(ranks) > 1 else []
                if member == mine:
                    replicas[stage.index] = ranks
        groups = members_by_rank(plan)
        made = make_process_groups([*sets, *groups.values()], timeout)
        members = ProcessGroupMembers(made[groups[rank]], recorder) if rank in groups else None
        ends = directions(plan)
        transport = Transport(device, make_channels(ends, device, timeout), watches=watches)
        open_communicators(transport, ends, made, device)
        # Their weights are gathered while gradients are reduced: they have groups of their own.
        own = make_process_groups([row.ranks for row in divided_parameters(plan)], timeout)
        open_groups(own, device)
        layers = () if shards is None else shards.divided_weights
        divided = DividedLayers([row for row in layers if isinstance(row, DividedLayer)], own)
        return cls(made, replicas, members, transport, divided)

    @property
    def group(self) -> TensorParallelGroup | None:
        """The tensor-parallel group of this rank; None if it is in none."""
        return None if self.members is None else TensorParallelGroup(self.members)

    @property
    def is_first_member(self) -> bool:
        """Whether this rank counts what all members of its group have alike."""
        return self.members is None or self.members.index == 0

    def replicas_of(self, stage: int) -> Any:
        """Return the process group of the replicas of a stage; None if it has one replica."""
        return self.process_groups.get(self.replicas[stage])
