"""A measurement from the meeting of the ranks to the cluster file."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from executor.checkpoint.ranks import Ranks
from executor.detect.compute import Computation
from executor.detect.interrupt import Interrupt, nothing_measured
from executor.detect.options import MeasurementOptions
from executor.detect.probe import Probe
from executor.detect.record import MeasurementRecord, about_this_rank, members_of
from executor.detect.report import conclude
from executor.detect.turns import Turn, all_turns
from executor.distributed.failure import talking_to
from executor.distributed.host_tuning import let_others_finish
from executor.distributed.process_group import (
    carrier_of,
    device_of_this_process,
    process_group,
    require_backend,
)
from executor.launch.console import print_error, say
from executor.launch.run import PlanRank
from planner.errors import PipeplanError
from planner.units import plural

_TELL_EVERY_S = 1.0
_TELL_ALL = 40
"""Number of turns up to which each is reported."""


def measure(options: MeasurementOptions, interrupt: Interrupt | None) -> None:
    """Measure, and on the first rank write the cluster file and print the figures.

    Args:
        options: of the command line.
        interrupt: the first rank's; None on others.

    Raises:
        PipeplanError: if it cannot be measured, or a rank is lost.
    """
    place = PlanRank.of_this_process()
    options.require_ranks(place.world_size)
    device = device_of_this_process(options.device)
    require_backend(options.backend, device)
    with process_group(device, options.timeout_s, options.backend):
        backend = carrier_of(device)
        control = dist.new_group(timeout=timedelta(seconds=options.timeout_s), backend="gloo")
        about = json.dumps(about_this_rank(device, options.host))
        abouts = Ranks.of_process_group(control).gather(about)
        members, types = members_of([json.loads(text) for text in abouts])
        turns = all_turns(
            [member.host for member in members],
            together=options.together,
            reductions=options.reductions,
            compute=options.compute,
            all_pairs=options.all_pairs,
            share_cores=device.type == "cpu",
        )
        record = MeasurementRecord(members, types, options.of_equal)
        if interrupt is not None:
            interrupt.finish_with(lambda: _keep(options, backend, record, turns))
        groups = _groups(turns, device, options.timeout_s)
        ranks_here = sum(other.host == members[place.rank].host for other in members)
        probe, computation = Probe(device, backend, options), Computation(device, ranks_here)
        _take_turns(turns, _Parts(probe, groups, computation, control), record)
    if place.rank == 0:
        if interrupt is not None:
            interrupt.finish_with(lambda: say("interrupted", err=True))
        conclude(options, backend, record.measurements, record.notes)


def _keep(
    options: MeasurementOptions, backend: str, record: MeasurementRecord, turns: Sequence[Turn]
) -> None:
    """Write what was measured before an interrupt."""
    found = record.measurements
    if not found.pairs:
        nothing_measured()
        return
    left = Counter(turn.kind for turn in turns[record.turns_done :])
    parts = [plural(count, f"{kind} turn") for kind, count in left.items()]
    note = f"interrupted: not measured are {', '.join(parts) or 'no turns'}"
    try:
        conclude(options, backend, found, [*record.notes, note], is_partial=True)
    except PipeplanError as error:
        for problem in error.problems:
            print_error(problem)


def _groups(
    turns: Sequence[Turn], device: torch.device, timeout_s: float
) -> Mapping[tuple[int, ...], Any]:
    """Make the groups of all-reduces: by all ranks in one order, before anything is measured."""
    # The connections of all with all, which NCCL makes when they are first used.
    dist.all_reduce(torch.zeros(1, device=device))
    rank, world = dist.get_rank(), tuple(range(dist.get_world_size()))
    wanted = [turn.group for turn in turns if turn.kind == "all-reduce" and turn.group != world]
    timeout = timedelta(seconds=timeout_s)
    made = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in wanted}
    if device.type == "cpu":
        let_others_finish(2 + sum(rank in ranks for ranks in made))
    return {world: None, **made}


def _take_turns(turns: Sequence[Turn], parts: _Parts, record: MeasurementRecord) -> None:
    """Take one turn after another; all ranks learn the results of each, and so that it has ended.

    Nothing is sent while a rank waits for the turn of others.
    """
    printed_s, rank = 0.0, parts.probe.rank
    for number, turn in enumerate(turns):
        mine = parts.of(turn) if rank in turn.ranks else None
        found = parts.ranks.gather(json.dumps(mine))
        if rank == 0:
            line = record.add(turn, {other: json.loads(found[other]) for other in turn.ranks})
            if len(turns) <= _TELL_ALL or time.monotonic() > printed_s + _TELL_EVERY_S:
                printed_s = time.monotonic()
                say(f"[{number + 1}/{len(turns)}] {line}", err=True)


@dataclass(frozen=True)
class _Parts:
    """This rank's parts in turns of every kind.

    Attributes:
        probe: times messages.
        groups: of all-reduces, by their ranks.
        computation: times computation.
        control: process group of all ranks, for words about turns.
    """

    probe: Probe
    groups: Mapping[tuple[int, ...], Any]
    computation: Computation
    control: Any

    @property
    def ranks(self) -> Ranks:
        """All ranks."""
        return Ranks.of_process_group(self.control)

    def of(self, turn: Turn) -> Any:
        """Return this rank's results of a turn, as plain JSON values."""
        meet = partial(self._meet, turn.ranks)
        match turn.kind:
            case "compute":
                is_first = self.probe.rank == turn.group[0]
                return self.computation.part(turn, meet, is_first=is_first)
            case "pair":
                return self._pair(*turn.flows[0])
            case "beside":
                return self._beside(turn, meet)
            case "together":
                return self.probe.flow(turn.flows)
            case "all-reduce":
                return self.probe.reduce(self.groups[turn.group], turn.group[0], len(turn.group))

    def _meet(self, ranks: Sequence[int]) -> None:
        """Wait until all of some ranks are here: the first one hears of each, and answers."""
        word, (first, *others) = torch.zeros(1), ranks
        is_first = self.probe.rank == first
        with talking_to("the ranks whose turn it is"):
            for exchange in (dist.recv, dist.send) if is_first else (dist.send, dist.recv):
                for peer in others if is_first else [first]:
                    exchange(word, peer, group=self.control)

    def _pair(self, first: int, second: int) -> dict[int, list[float]]:
        """Return seconds by bytes of the messages that this rank sent; the first one begins."""
        if self.probe.rank == second:
            self.probe.answer(first)
            return self.probe.ask(first)
        found = self.probe.ask(second)
        self.probe.answer(second)
        return found

    def _beside(self, turn: Turn, meet: Callable[[], None]) -> list[tuple[float, float]]:
        """Return what both take longer at once, by round, of this rank; nothing of its peer."""
        ((first, second),) = turn.flows
        leads = self.probe.rank == first
        exchanging = partial(self.probe.exchange_while, second if leads else first, leads=leads)
        return self.computation.beside_messages(exchanging, meet, leads=leads)
