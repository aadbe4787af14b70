"""Who averages with whom: schedulers of groups as pure state machines.

:func:`scheduler_of` makes the one that a strategy's options ask for.
"""

from __future__ import annotations

from random import Random

from planner.errors import PipeplanError
from planner.sync.groups.draws import Drawer, Draws
from planner.sync.groups.events import Scheduler
from planner.sync.groups.generator import Division, InterIntra, RandomGroups
from planner.sync.groups.machine import Machine, Rules, WaitingRoom
from planner.sync.groups.matching import random_pairs
from planner.sync.groups.nodes import nodes_of
from planner.sync.groups.readiness import Readiness
from planner.sync.groups.static import StaticSchedule
from planner.sync.strategies import (
    AdPsgdOptions,
    Options,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
    group_size_of,
)

__all__ = ["scheduler_of"]


def scheduler_of(
    options: Options, workers: int, keys: int, pipelines_per_node: int | None = None
) -> Scheduler:
    """The scheduler of a strategy's groups.

    Args:
        options: of ``partial_all_reduce``, ``semi_decentralized`` or ``ad_psgd:pairs=matching``.
        workers: how many pipelines there are. A ``group_size`` or ``most_members`` above that
            means all of them.
        keys: how many places a pipeline has.
        pipelines_per_node: what the cluster says, where the options say nothing; None: unknown, see
            :func:`planner.sync.groups.nodes.nodes_of`.

    Raises:
        PipeplanError: if the strategy has no groups to schedule, or there is nobody to schedule.
    """
    problems = [
        f"{name}: {value}; expected a whole number of 1 or more"
        for name, value in {"workers": workers, "keys": keys}.items()
        if value < 1
    ]
    if pipelines_per_node is not None and pipelines_per_node < 1:
        problems.append(
            f"pipelines_per_node: {pipelines_per_node}; expected 1 or more, or None if not known"
        )
    if problems:
        raise PipeplanError(problems)
    room = WaitingRoom(workers, keys)
    return Machine(room, _rules(options, room, pipelines_per_node))


def _rules(options: Options, room: WaitingRoom, pipelines_per_node: int | None) -> Rules:
    match options:
        case PartialAllReduceOptions():
            return _partial(options, room, options.pipelines_per_node or pipelines_per_node)
        case SemiDecentralizedOptions():
            return Readiness(room, options)
        case AdPsgdOptions(pairs="matching"):
            return Draws(room, random_pairs(Random(0)))
    raise PipeplanError(
        f"sync: {type(options).__name__} schedules no groups; use partial_all_reduce, "
        "semi_decentralized or ad_psgd:pairs=matching"
    )


def _partial(
    options: PartialAllReduceOptions, room: WaitingRoom, pipelines_per_node: int | None
) -> Rules:
    nodes = nodes_of(room.workers, pipelines_per_node)
    if options.schedule == "static":
        return StaticSchedule(room, nodes)
    random, behind = Random(options.seed), options.slowdown_filter
    size = group_size_of(options, room.workers)
    drawer: Drawer
    if options.inter_intra:
        drawer = InterIntra(nodes, behind, random)
    elif options.group_division:
        drawer = Division(size, behind, random)
    else:
        drawer = RandomGroups(size, behind, options.group_buffer, random)
    return Draws(room, drawer)
