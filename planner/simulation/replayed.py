"""The timeline of placed stages from the times of their program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from planner.costs.placed_pipeline import PlacedPipeline, Transfer
from planner.plan.operations import Kind, Operation
from planner.program.lower.lower import Lowered
from planner.program.program import COMPUTE, KINDS, MAKERS, REPLICAS
from planner.program.replay import Times
from planner.simulation.timeline import (
    CopyEvent,
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)


def timeline_of(
    lowered: Lowered, times: Times, by_microbatch: Sequence[PlacedPipeline] = ()
) -> Timeline:
    """Return the timeline of a replayed program.

    Args:
        lowered: the program and its stages.
        times: of its tasks.
        by_microbatch: the stages with the times and messages of each microbatch, where these
            differ.
    """
    return _Reader(lowered, times, by_microbatch).timeline()


class _Reader:
    """The events of a replay; tasks are numbered as :mod:`planner.program.program` says."""

    def __init__(
        self, lowered: Lowered, times: Times, by_microbatch: Sequence[PlacedPipeline]
    ) -> None:
        self._lowered, self._times, self._by_microbatch = lowered, times, by_microbatch
        self._placed, self._program = lowered.placed, lowered.program
        self._spans = list(zip(times.start_s.tolist(), times.end_s.tolist(), strict=True))
        tasks = self._program.tasks
        self._roles, self._resources = tasks["role"].tolist(), tasks["resource"].tolist()
        self._operations = [
            Operation(stage, cast(Kind, KINDS[kind]), microbatch)
            for stage, kind, microbatch in zip(
                *(tasks[field].tolist() for field in ("stage", "kind", "microbatch")), strict=True
            )
        ]
        self._links = [
            None if link < 0 else lowered.network.links[link] for link in times.slowed_by.tolist()
        ]
        self._transfers: dict[tuple[object, ...], Transfer] = {}

    def timeline(self) -> Timeline:
        """Return all events."""
        placed, syncs = self._placed, self._placed.synchronisations
        first = int(self._program.numbers["first_late"])
        steps = dict(enumerate(placed.devices, first + len(syncs)))
        gathering = [number for number, sync in enumerate(syncs) if sync.gathers]
        reductions = [self._collective(number, first + number) for number in range(len(syncs))]
        gathers = [
            self._collective(number, n, is_gather=True)
            for n, number in enumerate(gathering, first + len(syncs) + len(steps))
        ]
        runs = list(self._runs())
        owner = {(run.operation.stage, run.operation.microbatch): run.device for run in runs}
        messages = self._messages(owner)
        return Timeline(
            placed,
            tuple(runs),
            tuple(sorted(messages, key=lambda event: (event.start_s, event.operation))),
            tuple(sorted(reductions, key=lambda event: (event.start_s, event.number))),
            {name: self._spans[n][1] for n, name in steps.items()},
            dict(self._steps_s(steps)),
            dict(self._made_s()),
            tuple(gathers),
            tuple(sorted(self._copies(owner), key=lambda event: event.start_s)),
        )

    def _runs(self) -> Iterator[OperationEvent]:
        """Yield the operations in order of start, those of a device in its order."""
        order, devices = self._times.order, self._placed.devices
        for n in order[np.argsort(self._times.start_s[order], kind="stable")].tolist():
            yield OperationEvent(devices[self._resources[n]], self._operations[n], *self._spans[n])

    def _messages(self, owner: dict[tuple[int, int], str]) -> Iterator[TransferEvent]:
        for n in range(self._lowered.copies.start):
            if self._roles[n] == COMPUTE:
                continue
            stage, kind, microbatch = self._operations[n]
            made = Operation(stage + (-1 if kind == "F" else 1), kind, microbatch)
            ends = owner[made.stage, microbatch], owner[stage, microbatch]
            transfer = self._transfer(made, *ends)
            yield TransferEvent(*ends, made, *self._spans[n], transfer, self._links[n])

    def _transfer(self, made: Operation, source: str, target: str) -> Transfer:
        placed = self._by_microbatch[made.microbatch] if self._by_microbatch else self._placed
        key = id(placed), made.kind, made.stage, source, target
        if key not in self._transfers:
            of = placed.forward_transfer if made.kind == "F" else placed.backward_transfer
            self._transfers[key] = of(made.stage, source, target)
        return self._transfers[key]

    def _collective(self, number: int, n: int, *, is_gather: bool = False) -> SynchronisationEvent:
        sync = self._placed.synchronisations[number]
        return SynchronisationEvent(sync, *self._spans[n], number, is_gather, self._links[n])

    def _steps_s(self, steps: dict[int, str]) -> Iterator[tuple[str, float]]:
        """Yield the seconds of optimizer steps: differences of moments are rounded."""
        for (n, name), device in zip(steps.items(), self._program.devices, strict=True):
            start_s, end_s = self._spans[n]
            alone_s = self._placed.optimizer_s[name]
            yield name, end_s - start_s if device["is_slowed"] else alone_s

    def _made_s(self) -> Iterator[tuple[tuple[int, int, str], float]]:
        program, first = self._program, int(self._program.numbers["first_late"])
        for replica in program[REPLICAS][: program.numbers["replicas"]]:
            device = self._placed.devices[replica["device"]]
            for maker in range(replica["maker"], replica["maker_end"]):
                key = int(program[MAKERS][maker]) - first, int(replica["stage"]), device
                yield key, float(self._times.made_s[maker])

    def _copies(self, owner: dict[tuple[int, int], str]) -> Iterator[CopyEvent]:
        for n in self._lowered.copies:
            stage, _, microbatch = operation = self._operations[n]
            bytes_ = self._placed.stages[stage].offload_bytes
            yield CopyEvent(owner[stage, microbatch], operation, *self._spans[n], bytes_)
