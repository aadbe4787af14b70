"""The ranks that hold the same parameters: replicas of a stage, stages that share a tied one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from executor.distributed.failure import talking_to
from executor.distributed.host_tuning import let_others_finish
from planner.model.group_graph import split_of
from planner.model.split_record import SplitRecord
from planner.plan.operations import owners
from planner.plan.plan import Plan
from planner.plan.programs import Reduce
from planner.plan.tensor_parallel import splits_of


@dataclass(frozen=True)
class ParameterOwners:
    """The ranks that hold each parameter and buffer, by the model's own names (FQNs).

    Attributes:
        ranks: that hold it or, of a tensor-parallel group, a share of it.
        members: of the group of each rank; 1 without.
        shared: the parameters of which members have shares, by their number.
    """

    ranks: Mapping[str, tuple[int, ...]]
    members: Sequence[int]
    shared: Mapping[int, frozenset[str]]

    @classmethod
    def of_plan(cls, plan: Plan) -> ParameterOwners:
        """Find ranks by the stages' layers; a tied parameter has the holders of all its stages."""
        held = [{r for device in s.devices for r in plan.ranks_of(device)} for s in plan.stages]
        ranks = {
            name: tuple(sorted(set[int]().union(*(held[stage] for stage in stages))))
            for name, stages in _users(plan).items()
        }
        parallel = plan.tensor_parallel
        splits = {} if parallel is None else splits_of(plan.model.graph, parallel)
        shared = {degree: frozenset(split.parameters) for degree, split in splits.items()}
        return cls(ranks, [plan.place_of(r).members for r in range(plan.world_size)], shared)

    def first_held(self, rank: int) -> frozenset[str]:
        """Return the tensors that this rank is the first to hold whole: it counts and writes them.

        Members of a group are all the first to hold their shares of a parameter.
        """
        return frozenset(
            name
            for name, ranks in self.ranks.items()
            if rank in ranks[: self.members[ranks[0]] if self.is_split(name) else 1]
        )

    def is_split(self, name: str) -> bool:
        """Return whether members of a group each hold a share of a parameter."""
        members = self.members[self.ranks[name][0]]  # All that hold it have as many.
        return name in self.shared.get(members, ())


def planned_split(plan: Plan, members: int) -> SplitRecord | None:
    """Return how tensor-parallel groups of a plan share its model; None of single devices.

    Args:
        plan: with such groups.
        members: of a group.
    """
    parallel = plan.tensor_parallel
    if parallel is None or members == 1:
        return None
    return split_of(plan.model.graph, members, sequence=parallel.sequence)


@dataclass(frozen=True)
class SharedParameters:
    """Trainable parameters that these stages have in common and exactly these ranks hold.

    Attributes:
        stages: that use them.
        ranks: that hold these stages.
        names: of the parameters. Those that every rank holds whole are in the order in which a
            backward completes their gradients: those that a forward uses last come first.
        layer: of whose weights each of the ranks keeps a part; None: every rank holds all.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    layer: str | None = None

    @property
    def reduce(self) -> Reduce:
        """The action that sums their gradients."""
        return Reduce(self.stages, self.ranks)


def shared_parameters(plan: Plan) -> list[SharedParameters]:
    """All parameters that several ranks hold whole, by the stages that use them, in stage order.

    Members of tensor-parallel groups share them with those of other groups that have their place.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    divided = plan.problem.divided_parameters
    for name, stages in users_of_parameters(plan).items():
        if name not in divided:
            groups.setdefault(stages, []).append(name)
    rows = []
    for stages, names in sorted(groups.items()):
        devices = {d for index in stages for d in plan.stages[index].devices}
        for ranks in zip(*map(plan.ranks_of, devices), strict=True) if len(devices) > 1 else ():
            rows.append(SharedParameters(stages, tuple(sorted(ranks)), tuple(reversed(names))))
    return rows


def divided_parameters(plan: Plan) -> list[SharedParameters]:
    """Return the parameters that replicas divide, by layer, in the order of stages and layers."""
    if not plan.job.shards_parameters:
        return []
    own, rows = plan.problem.graph.own_parameters, []
    for stage in plan.stages:
        ranks = tuple(sorted(rank for device in stage.devices for rank in plan.ranks_of(device)))
        for layer in stage.layers if len(ranks) > 1 else ():
            names = tuple(parameter.name for parameter in own[layer])
            rows += [SharedParameters((stage.index,), ranks, names, layer)] if names else []
    return rows


def users_of_parameters(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The stages that use each trainable parameter, in the order of the layers that run first."""
    trainable = {p.name for p in plan.model.graph.parameters if p.trainable}
    return {name: stages for name, stages in _users(plan).items() if name in trainable}


def _users(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the stages that use each parameter or buffer, as :func:`users_of_parameters`."""
    used = {layer.name: layer.parameters for layer in plan.model.graph.layers}
    stages: dict[str, dict[int, None]] = {}
    for stage in plan.stages:
        for layer in stage.layers:
            for name in used[layer]:
                stages.setdefault(name, {})[stage.index] = None
    return {name: tuple(indices) for name, indices in stages.items()}


def own_shares(plan: Plan, rank: int) -> dict[str, float]:
    """Return the share, 0 to 1, of each parameter's gradient that a rank's microbatches make.

    All uses of a tied parameter count alike; of those in stages that the rank does not hold it
    knows nothing, and its share is of the others.
    """
    device, owner = plan.place_of(rank).replica, owners(plan.parsed_orders())
    run = Counter(stage for (stage, _), where in owner.items() if where == device)
    mine = {stage.index for stage in plan.stages if device in stage.devices}
    shares = {}
    for name, stages in users_of_parameters(plan).items():
        held = mine.intersection(stages)
        if held:
            shares[name] = sum(run[s] for s in held) / (plan.microbatches * len(held))
    return shares


def make_process_groups(
    sets: Iterable[tuple[int, ...]], timeout: timedelta | None = None
) -> dict[tuple[int, ...], Any]:
    """A process group for each set of ranks; every rank must call this with the same sets."""
    with talking_to("the other ranks, to make process groups"):
        made = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sorted(set(sets))}
    # One of the default group, and one of each that this rank is in.
    let_others_finish(1 + sum(dist.get_rank() in ranks for ranks in made))
    return made
