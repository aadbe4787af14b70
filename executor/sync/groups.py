"""Which ranks hold the same parameters: replicas of a stage, and stages that share a tied one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from planner.artifacts.plan import Plan


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of this rank that exactly ``ranks`` hold, and their process group."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    process_group: Any


def holders(plan: Plan) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Trainable parameters by the ranks that hold them, only those that several ranks hold."""
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    trainable = {p.name for p in plan.model.graph.parameters if p.trainable}
    used = {layer.name: layer.parameters for layer in plan.model.graph.layers}
    ranks: dict[str, set[int]] = {}
    for stage in plan.stages:
        for layer in stage.layers:
            for name in used[layer]:
                if name in trainable:
                    ranks.setdefault(name, set()).update(rank_of[d] for d in stage.devices)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, held in ranks.items():
        if len(held) > 1:
            groups.setdefault(tuple(sorted(held)), []).append(name)
    return {key: tuple(names) for key, names in sorted(groups.items())}


def make_groups(
    plan: Plan, rank: int, parameters: Mapping[str, nn.Parameter]
) -> Sequence[ParameterGroup]:
    """Create the process groups; every rank must call this, in the same order by construction."""
    mine = []
    for ranks, names in holders(plan).items():
        group = dist.new_group(list(ranks))
        if rank in ranks:
            held = tuple(parameters[name] for name in names)
            mine.append(ParameterGroup(ranks, names, held, group))
    return mine
