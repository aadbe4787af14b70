"""A measurement from the meeting of the ranks to the cluster file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from executor.detect.compute import Computation
from executor.detect.interrupt import Interrupt, nothing_measured
from executor.detect.options import MeasurementOptions
from executor.detect.probe import Probe
from executor.detect.record import MeasurementRecord, about_this_rank, members_of
from executor.detect.report import conclude
from executor.detect.turns import Turn, TurnTaking, all_turns
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
from planner.tracing.torch_private import default_store

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
        store = PrefixStore("measured links", default_store())
        taking = TurnTaking(store, place.rank, place.world_size, options.timeout_s)
        abouts = taking.gather(about_this_rank(device, options.host))
        members, types = members_of(abouts)
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
        _take_turns(turns, _Parts(probe, groups, computation, taking), record)
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
    nouns = {
        "compute": "group{} of ranks that compute",
        "beside": "rank{} that compute beside messages",
        "pair": "pair{} of devices",
        "together": "trial{} of flows at the same time",
        "all-reduce": "group{} of all-reduces",
    }
    parts = [f"{n} {nouns[kind].format('s' * (n > 1))}" for kind, n in left.items()]
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
        let_others_finish(1 + sum(rank in ranks for ranks in made))
    return {world: None, **made}


def _take_turns(turns: Sequence[Turn], parts: _Parts, record: MeasurementRecord) -> None:
    printed_s, rank, taking = 0.0, parts.probe.rank, parts.taking
    for number, turn in enumerate(turns):
        if rank in turn.ranks:
            taking.await_turn(number)
            taking.done(number, len(turn.ranks), parts.of(number, turn))
        if rank == 0:
            line = record.add(turn, {other: taking.found(number, other) for other in turn.ranks})
            if len(turns) <= _TELL_ALL or time.monotonic() > printed_s + _TELL_EVERY_S:
                printed_s = time.monotonic()
                say(f"[{number + 1}/{len(turns)}] {line}", err=True)
    # Nobody leaves while others talk.
    taking.await_turn(len(turns))


@dataclass(frozen=True)
class _Parts:
    """This rank's parts in turns of every kind."""

    probe: Probe
    groups: Mapping[tuple[int, ...], Any]
    computation: Computation
    taking: TurnTaking

    def of(self, number: int, turn: Turn) -> Any:
        """Return this rank's results of a turn, as plain JSON values."""
        meetings = count()

        def meet() -> None:
            self.taking.meet(f"{number}.{next(meetings)}", len(turn.ranks))

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
