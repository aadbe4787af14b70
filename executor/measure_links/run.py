"""A measurement from the meeting of the ranks to the cluster file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from executor.gloo_threads import let_others_finish
from executor.measure_links.about import about_this_rank, members_of
from executor.measure_links.interrupt import Interrupt, nothing_measured
from executor.measure_links.options import Options
from executor.measure_links.probe import Probe
from executor.measure_links.record import Record
from executor.measure_links.report import conclude
from executor.measure_links.turn_taking import TurnTaking
from executor.measure_links.turns import Turn, all_turns
from executor.place import Place
from executor.process_group import (
    backend_of,
    device_of_this_process,
    process_group,
    require_backend,
)
from planner.errors import PipeplanError
from planner.tracing.torch_private import default_store

_TELL_EVERY_S = 1.0
_TELL_ALL = 40
"""Of so few turns each is told."""


def measure(options: Options, interrupt: Interrupt | None) -> None:
    """Measure, and on the first rank write and tell.

    Args:
        options: what the user typed.
        interrupt: the first rank's.

    Raises:
        PipeplanError: if it cannot be measured, or a rank is lost.
    """
    place = Place.of_this_process()
    if place.world_size < 2:
        raise PipeplanError(
            "there is one process, and links join two or more; start one a device, such as "
            "torchrun --nproc-per-node 4 -m executor.measure_links"
        )
    device = device_of_this_process(options.device)
    require_backend(options.backend, device)
    backend = options.backend or backend_of(device)
    with process_group(device, options.timeout_s, options.backend):
        store = PrefixStore("measured links", default_store())
        taking = TurnTaking(store, place.rank, place.world_size, options.timeout_s)
        abouts = taking.gather(about_this_rank(device, options.host))
        members, types = members_of(abouts)
        turns = all_turns(
            [member.host for member in members],
            at_once=options.at_once,
            together=options.together,
            reductions=options.reductions,
        )
        record = Record(members, types, options.of_equal)
        if interrupt is not None:
            interrupt.finish_with(lambda: _keep(options, backend, record, turns))
        groups = _groups(turns, device, options.timeout_s)
        probe = Probe(device, backend, options)
        _take_turns(turns, taking, probe, groups, record)
    if place.rank == 0:
        if interrupt is not None:
            interrupt.finish_with(lambda: print("interrupted", file=sys.stderr, flush=True))
        conclude(options, backend, record.measurements, record.notes)


def _keep(options: Options, backend: str, record: Record, turns: Sequence[Turn]) -> None:
    """Write what is known of what was to be measured."""
    notes = [*record.notes, _left_out(turns[record.turns_done :])]
    found = record.measurements
    if not found.pairs:
        nothing_measured()
        return
    try:
        conclude(options, backend, found, notes, is_partial=True)
    except PipeplanError as error:
        print(*(f"error: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)


def _left_out(turns: Sequence[Turn]) -> str:
    counts = {
        "pairs of devices": sum(len(turn.flows) for turn in turns if turn.kind == "pair"),
        "trials of flows at the same time": sum(turn.kind == "together" for turn in turns),
        "groups of all-reduces": sum(turn.kind == "all-reduce" for turn in turns),
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    return f"interrupted: not measured are {', '.join(parts) or 'no turns'}"


def _groups(
    turns: Sequence[Turn], device: torch.device, timeout_s: float
) -> Mapping[tuple[int, ...], Any]:
    """Made by all ranks in one order, before anything is measured."""
    # The connections of all with all, which NCCL makes when they are first used.
    dist.all_reduce(torch.zeros(1, device=device))
    wanted = [turn.group for turn in turns if turn.kind == "all-reduce"]
    world = tuple(range(dist.get_world_size()))
    made = {
        ranks: None
        if ranks == world
        else dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        for ranks in wanted
    }
    if device.type == "cpu":
        rank = dist.get_rank()
        let_others_finish(1 + sum(rank in ranks for ranks in made if ranks != world))
    return made


def _take_turns(
    turns: Sequence[Turn],
    taking: TurnTaking,
    probe: Probe,
    groups: Mapping[tuple[int, ...], Any],
    record: Record,
) -> None:
    told_s = 0.0
    for number, turn in enumerate(turns):
        if probe.rank in turn.ranks:
            taking.await_turn(number)
            taking.done(number, len(turn.ranks), _part(turn, probe, groups))
        if probe.rank == 0:
            found = {rank: taking.found(number, rank) for rank in turn.ranks}
            line = record.add(turn, found)
            if len(turns) <= _TELL_ALL or time.monotonic() > told_s + _TELL_EVERY_S:
                told_s = time.monotonic()
                print(f"[{number + 1}/{len(turns)}] {line}", file=sys.stderr, flush=True)
    # Nobody leaves while others talk.
    taking.await_turn(len(turns))


def _part(turn: Turn, probe: Probe, groups: Mapping[tuple[int, ...], Any]) -> Any:
    """What this rank found in a turn, as plain JSON values."""
    if turn.kind == "together":
        return probe.flow(turn.flows)
    if turn.kind == "all-reduce":
        return probe.reduce(groups[turn.group], turn.group[0], len(turn.group))
    first, second = next(flow for flow in turn.flows if probe.rank in flow)
    if probe.rank == second:
        probe.answer(first)
        return {first: probe.ask(first)}
    found = probe.ask(second)
    probe.answer(second)
    return {second: found}
