"""Schedulers that decide which workers average their weights together, as pure state machines.

:func:`scheduler_of` makes the scheduler for a strategy's options.
"""

from __future__ import annotations

from random import Random

from planner.errors import PipeplanError
from planner.sync.groups.generator import (
    Division,
    Drawer,
    RandomGroups,
    equal_groups,
    inter_intra,
)
from planner.sync.groups.levels import nodes_of
from planner.sync.groups.readiness import ReadyGroups
from planner.sync.groups.ripples import Draws, StaticSchedule
from planner.sync.groups.scheduler import GroupRules, Scheduler, WaitingRoom
from planner.sync.groups.waves import Waves
from planner.sync.strategies import (
    AdPsgdOptions,
    Options,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
    WaveSynchronousOptions,
    group_size_of,
)

__all__ = ["scheduler_of"]


def scheduler_of(
    options: Options, workers: int, keys: int, pipelines_per_node: int | None = None
) -> Scheduler:
    """Make the scheduler of a strategy's groups.

    Args:
        options: options of ``partial_all_reduce``, ``semi_decentralized``, ``wave_synchronous`` or
            ``ad_psgd:pairs=matching``.
        workers: number of pipelines. A ``group_size`` or ``most_members`` above it means all.
        keys: number of pipeline ranks.
        pipelines_per_node: the cluster's number, used if the options have none; None: unknown, see
            :func:`planner.sync.groups.levels.nodes_of`.

    Raises:
        PipeplanError: if the strategy has no groups to schedule, or there are no workers.
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
    return Scheduler(room, _rules(options, room, pipelines_per_node))


def _rules(options: Options, room: WaitingRoom, pipelines_per_node: int | None) -> GroupRules:
    match options:
        case PartialAllReduceOptions():
            return _partial(options, room, options.pipelines_per_node or pipelines_per_node)
        case SemiDecentralizedOptions():
            return ReadyGroups(room, options)
        case AdPsgdOptions(pairs="matching"):
            # Two workers that have no group; a worker that finds nobody continues alone. Every two
            # can meet, so any two are connected before long, though there is no bound.
            return Draws(room, RandomGroups(2, None, takes_promised=False, random=Random(0)))
        case WaveSynchronousOptions():
            return Waves(room, options.distance)
    raise PipeplanError(
        f"sync: {type(options).__name__} schedules no groups; use partial_all_reduce, "
        "semi_decentralized, wave_synchronous or ad_psgd:pairs=matching"
    )


def _partial(
    options: PartialAllReduceOptions, room: WaitingRoom, pipelines_per_node: int | None
) -> GroupRules:
    nodes = nodes_of(room.workers, pipelines_per_node)
    if options.schedule == "static":
        return StaticSchedule(room, nodes)
    random, behind = Random(options.seed), options.slowdown_filter
    size = group_size_of(options, room.workers)
    if options.group_division:
        split = inter_intra(nodes) if options.inter_intra else equal_groups(size)
        one_band = options.filter_between == "initiator"
        drawer: Drawer = Division(split, behind, one_band, random)
    else:
        drawer = RandomGroups(size, behind, options.group_buffer, random)
    return Draws(room, drawer)
