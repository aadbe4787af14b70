"""The timeline of placed stages from the times of their program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from planner.costs.placed_pipeline import PlacedPipeline, Transfer
from planner.plan.operations import Kind, Operation
from planner.program.lower.lower import Lowered
from planner.program.lower.room import MESSAGE_TASK
from planner.program.program import COMPUTE, EFFECTS, KINDS, MAKERS, REPLICAS
from planner.program.replay import Times
from planner.simulation.timeline import (
    CopyEvent,
    Event,
    Longs,
    OperationEvent,
    OptimizerEvent,
    Reals,
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
        self._ran = times.order[np.argsort(times.start_s[times.order], kind="stable")]
        self._resources = tasks["resource"].tolist()
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
        last = first + len(syncs)
        steps = {
            n: OptimizerEvent(name, *self._spans[n]) for n, name in enumerate(placed.devices, last)
        }
        gathering = [number for number, sync in enumerate(syncs) if sync.gathers]
        reductions = {n: self._collective(n - first, n) for n in range(first, last)}
        gathers = {
            n: self._collective(number, n, is_gather=True)
            for n, number in enumerate(gathering, last + len(steps))
        }
        runs = dict(self._runs())
        owner = {(e.operation.stage, e.operation.microbatch): e.device for e in runs.values()}
        messages, copies = dict(self._messages(owner)), dict(self._copies(owner))
        by_task: dict[int, Event] = {**runs, **messages, **copies, **reductions, **steps, **gathers}
        return Timeline(
            placed,
            tuple(runs.values()),
            tuple(messages.values()),
            tuple(sorted(reductions.values(), key=lambda event: (event.start_s, event.number))),
            {step.device: step.end_s for step in steps.values()},
            dict(self._steps_s(steps.values())),
            tuple(steps.values()),
            tuple(gathers.values()),
            tuple(sorted(copies.values(), key=lambda event: event.start_s)),
            by_task,
            self._causes(by_task),
            self._changes(),
        )

    def _changes(self) -> tuple[Longs, Reals, Longs]:
        """Return what tasks hold from their starts on, and what no more from their ends on."""
        effect, times = self._program.tasks["effect"], self._times
        (tasks,) = np.nonzero(effect >= 0)
        of = self._program[EFFECTS][effect[tasks]]
        bytes_ = np.concatenate([of["start_bytes"], of["end_bytes"]])
        devices = np.concatenate([of["start_device"], of["end_device"]])
        moments_s = np.concatenate([times.start_s[tasks], times.end_s[tasks]])
        changes = bytes_ != 0
        return devices[changes], moments_s[changes], bytes_[changes]

    def _causes(self, by_task: Mapping[int, Event]) -> list[int]:
        """Return the task with an event that the start of each waited for last."""
        times, tasks = self._times, self._program.tasks
        causes = times.cause.copy()
        # A reduction waits for the last backwards of all replicas that make its gradients.
        ran = self._ran[tasks["makes"][self._ran] >= 0]
        last = np.full(self._program.numbers["replicas"], -1)
        last[tasks["replica"][ran]] = ran  # Of several of a replica the last counts.
        for n, replica in zip(last, self._program[REPLICAS], strict=False):
            for maker in range(replica["maker"], replica["maker_end"]):
                reduction = self._program[MAKERS][maker]
                if causes[reduction] < 0 and times.made_s[maker] == times.start_s[reduction]:
                    causes[reduction] = n
        # What is released as another starts waited for what that waited for.
        (starting,) = np.nonzero(tasks["at_start"] >= 0)
        released = tasks["at_start"][starting]
        is_by = causes[released] == starting
        causes[released[is_by]] = causes[starting[is_by]]
        has_event = np.zeros(len(tasks) + 1, dtype=bool)
        has_event[[*by_task, -1]] = True
        # Of all messages of an exchange the one that is needed comes first.
        runs = np.flatnonzero((tasks["role"] == COMPUTE) & (tasks["kind"] != KINDS.index("W")))
        of = tasks[runs]
        count = self._lowered.rows.numbers["microbatches"]
        place = (of["stage"] * 2 + (of["kind"] == KINDS.index("F"))) * count + of["microbatch"]
        needed = self._lowered.room[MESSAGE_TASK][place]
        arrives = (needed >= 0) & (times.end_s[needed] == times.start_s[runs])
        arrives &= ~has_event[causes[runs]]
        causes[runs[arrives]] = needed[arrives]
        while not has_event[causes].all():
            causes = np.where(has_event[causes], causes, causes[causes])
        found: list[int] = causes.tolist()
        return found

    def _runs(self) -> Iterator[tuple[int, OperationEvent]]:
        """Yield the operations in order of start, those of a device in its order."""
        devices = self._placed.devices
        for n in self._ran.tolist():
            device = devices[self._resources[n]]
            yield n, OperationEvent(device, self._operations[n], *self._spans[n])

    def _messages(self, owner: dict[tuple[int, int], str]) -> Iterator[tuple[int, TransferEvent]]:
        """Yield the messages in order of start, at one moment in that of what they carry."""
        tasks = self._program.tasks[: self._lowered.copies.start]
        (sent,) = np.nonzero(tasks["role"] != COMPUTE)
        of, start_s = tasks[sent], self._times.start_s[sent]
        made_by = of["stage"] + np.where(of["kind"] == KINDS.index("F"), -1, 1)
        order = np.lexsort((of["microbatch"], of["kind"], made_by, start_s))
        for n in map(int, sent[order]):
            stage, kind, microbatch = self._operations[n]
            made = Operation(stage + (-1 if kind == "F" else 1), kind, microbatch)
            ends = owner[made.stage, microbatch], owner[stage, microbatch]
            transfer = self._transfer(made, *ends)
            yield n, TransferEvent(*ends, made, *self._spans[n], transfer, self._links[n])

    def _transfer(self, made: Operation, source: str, target: str) -> Transfer:
        placed = self._by_microbatch[made.microbatch] if self._by_microbatch else self._placed
        key = id(placed), made.kind, made.stage, source, target
        if key not in self._transfers:
            self._transfers[key] = placed.transfer(made.stage, made.kind, source, target)
        return self._transfers[key]

    def _collective(self, number: int, n: int, *, is_gather: bool = False) -> SynchronisationEvent:
        sync = self._placed.synchronisations[number]
        return SynchronisationEvent(sync, *self._spans[n], number, is_gather, self._links[n])

    def _steps_s(self, steps: Iterable[OptimizerEvent]) -> Iterator[tuple[str, float]]:
        """Yield the seconds of optimizer steps: differences of moments are rounded."""
        for step, device in zip(steps, self._program.devices, strict=True):
            alone_s = self._placed.optimizer_s[step.device]
            yield step.device, step.end_s - step.start_s if device["is_slowed"] else alone_s

    def _copies(self, owner: dict[tuple[int, int], str]) -> Iterator[tuple[int, CopyEvent]]:
        for n in self._lowered.copies:
            stage, _, microbatch = operation = self._operations[n]
            bytes_ = self._placed.stages[stage].offload_bytes
            yield n, CopyEvent(owner[stage, microbatch], operation, *self._spans[n], bytes_)
