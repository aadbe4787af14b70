"""The measured timeline of all ranks."""

from __future__ import annotations

import json
import logging
import socket
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from executor.checkpoint.ranks import Ranks
from executor.distributed.failure import talking_to
from executor.distributed.machines import hardware_name
from executor.distributed.process_group import carrier_of
from executor.runtime.runtime import Span, StepRecord
from executor.training.loop import StepMetrics, peak_memory_bytes
from planner.costs.placement import place_plan
from planner.measured.clocks import CLOCKS_AGREE_S
from planner.measured.timeline import MeasuredTimeline
from planner.plan.operations import parse_operation
from planner.plan.plan import Plan
from planner.plan.programs import Reduce

logger = logging.getLogger(__name__)

_PINGS = 20


@dataclass(frozen=True)
class ClockReading:
    """The offset of rank 0's :func:`time.perf_counter` from this rank's at a moment of this one."""

    moment_s: float
    offset_s: float


def read_clock() -> ClockReading:
    """Compare this rank's clock with rank 0's; all ranks call it.

    Ranks of one host share a clock. The others answer a few pings of rank 0, of which the quickest
    counts (Cristian 1989, "Probabilistic clock synchronization").
    """
    with talking_to("the other ranks, to compare clocks"):
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
        offset_s = 0.0
        for rank, name in enumerate(names):
            if name == names[0]:
                continue
            if dist.get_rank() == 0:
                _answer_pings(rank)
            elif dist.get_rank() == rank:
                offset_s = min(_ping() for _ in range(_PINGS))[1]
        return ClockReading(time.perf_counter(), offset_s)


def on_clock_of_first_s(moment_s: float, before: ClockReading, after: ClockReading) -> float:
    """Return a moment of this rank on rank 0's clock; it drifts steadily between two readings."""
    between_s = max(after.moment_s - before.moment_s, 1e-9)
    share = (moment_s - before.moment_s) / between_s
    return moment_s + before.offset_s + share * (after.offset_s - before.offset_s)


def _ping() -> tuple[float, float]:
    """Round trip in seconds, and rank 0's clock less this one's."""
    moment = torch.zeros(1, dtype=torch.float64)
    begin = time.perf_counter()
    dist.send(moment, 0)
    dist.recv(moment, 0)
    end = time.perf_counter()
    return end - begin, float(moment[0]) - (begin + end) / 2


def _answer_pings(rank: int) -> None:
    moment = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(moment, rank)
        moment[0] = time.perf_counter()
        dist.send(moment, rank)


class TimelineWriter:
    """Collects the iterations of all ranks and writes them at the end.

    Args:
        plan: that runs.
        rank: of this process.
        device: of its tensors.
        path: of the file.
        emulated: whether operations only took their time.
    """

    def __init__(
        self, plan: Plan, rank: int, device: torch.device, path: str, *, emulated: bool
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.device = device
        self.emulated = emulated
        self._path = path
        self._ranks = Ranks.of_process_group()
        self._clock = read_clock()
        self._rows: list[dict[str, Any]] = []

    def add(self, metrics: StepMetrics, record: StepRecord) -> None:
        """Note an iteration of this rank."""
        self._rows.append(
            {
                "step": metrics.step,
                "iteration_time_s": metrics.step_time_s,
                "peak_memory_bytes": peak_memory_bytes(self.device),
                "own_s": record.begin_s,
                "batch_wait_s": record.batch_wait_s,
                "operations": _spans(record.operations),
                "sends": _spans(record.sends),
                "receives": _spans(record.receives),
                "reductions": _spans(record.reductions),
                "optimizer": _spans(record.optimizer),
                "collectives": _spans(record.collectives),
            }
        )

    def save(self) -> None:
        """Write what all ranks did; all ranks call it, the first writes.

        Raises:
            PipeplanError: on every rank, if the file cannot be written.
        """
        after = read_clock()
        self._warn_of_drift(after)
        for row in self._rows:
            row["begin_s"] = on_clock_of_first_s(row["own_s"], self._clock, after)
        mine = {"hardware": _hardware(self.device), "steps": self._rows}
        parts = [json.loads(text) for text in self._ranks.gather(json.dumps(mine))]
        parts = _of_groups(parts, self.plan)
        self._ranks.on_first(lambda: self._timeline(parts).save(self._path))

    def _warn_of_drift(self, after: ClockReading) -> None:
        drift_s = after.offset_s - self._clock.offset_s
        if abs(drift_s) > CLOCKS_AGREE_S:
            logger.warning(
                "%s: the clock of rank %d's host drifted by %.1f ms against that of rank 0 while "
                "they trained; %s is corrected for a steady drift. If it was not steady, times of "
                "messages between the hosts are wrong: synchronise their clocks and measure again",
                *(self.plan.rank_devices[self.rank], self.rank, 1e3 * drift_s, self._path),
            )

    def _timeline(self, parts: Sequence[dict[str, Any]]) -> MeasuredTimeline:
        steps = [*zip(*(part["steps"] for part in parts), strict=True)]
        devices = [
            {"name": name, "rank": place, "hardware": part["hardware"]}
            for place, (name, part) in enumerate(zip(self.plan.ranks, parts, strict=True))
        ]
        return MeasuredTimeline.parse(
            {
                "plan_digest": self.plan.execution_digest,
                "model": self.plan.model.name,
                "cluster": self.plan.cluster.name,
                "emulated": self.emulated,
                "backend": carrier_of(self.device),
                "devices": devices,
                "steps": [self._summary(rows) for rows in steps],
                "operations": list(self._operations(steps)),
                "transfers": list(self._transfers(steps)),
                "reductions": list(self._reductions(steps)),
                "optimizer_steps": [self._on(event) for event in _events(steps, "optimizer")],
            },
            "timeline",
        )

    def _summary(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        def by_device(what: str) -> dict[str, Any]:
            return dict(zip(self.plan.ranks, (row[what] for row in rows), strict=True))

        return {
            "step": rows[0]["step"],
            "iteration_time_s": rows[0]["iteration_time_s"],
            "peak_memory_bytes": by_device("peak_memory_bytes"),
            "batch_wait_s": by_device("batch_wait_s"),
        }

    def _on(self, event: _Event, **fields: Any) -> dict[str, Any]:
        times = {"start_s": event.start_s, "end_s": event.end_s}
        return {"step": event.row["step"], "device": self.plan.ranks[event.rank], **times, **fields}

    def _operations(self, steps: _Steps) -> Iterator[dict[str, Any]]:
        for event in _events(steps, "operations"):
            fields = {"operation": event.what}
            if not self.emulated:
                fields["collective_s"] = event.row["collective_s"].get(event.what)
            yield self._on(event, **fields)

    def _transfers(self, steps: _Steps) -> Iterator[dict[str, Any]]:
        """Yield each transfer, from the moment its send was posted to its arrival."""
        pipeline = place_plan(self.plan)
        posted = {
            (event.row["step"], event.rank, *event.what): event.start_s
            for event in _events(steps, "sends")
        }
        for event in _events(steps, "receives"):
            operation, source = event.what
            start_s = posted[event.row["step"], source, operation, event.rank]
            what = parse_operation(operation)
            assert what is not None
            yield {
                "step": event.row["step"],
                "source": self.plan.ranks[source],
                "target": self.plan.ranks[event.rank],
                "operation": operation,
                "bytes": pipeline.held_of_message(what),
                "start_s": start_s,
                "end_s": max(start_s, event.end_s),
            }

    def _reductions(self, steps: _Steps) -> Iterator[dict[str, Any]]:
        size: Counter[tuple[int, ...]] = Counter()
        for sync in place_plan(self.plan).synchronisations:
            size[sync.stages] += sync.bytes
        for event in _events(steps, "reductions"):
            yield self._on(event, stages=event.what, bytes=size[tuple(event.what)])


_Steps = Sequence[Sequence[dict[str, Any]]]
"""What each rank noted of each iteration."""


class _Event(NamedTuple):
    """Something that a rank did, in seconds since the first rank began the iteration."""

    rank: int
    row: dict[str, Any]
    what: Any
    start_s: float
    end_s: float


def _events(steps: _Steps, kind: str) -> Iterator[_Event]:
    """Yield what all ranks did, iteration by iteration."""
    for rows in steps:
        first_s = min(row["begin_s"] for row in rows)
        for rank, row in enumerate(rows):
            # From the rank's own clock.
            later_s = row["begin_s"] - first_s - row["own_s"]
            for what, start_s, end_s in row[kind]:
                yield _Event(
                    rank, row, what, max(0.0, start_s + later_s), max(0.0, end_s + later_s)
                )


def _of_groups(parts: Sequence[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """Return what the first member of each tensor-parallel group did, with the memory of all.

    Of collectives the least time counts that any member took: others came earlier, and waited.

    Args:
        parts: of all ranks.
        plan: whose groups count; without any, each rank is one of its own.
    """
    place = {name: number for number, name in enumerate(plan.ranks)}
    groups = [[parts[rank] for rank in plan.ranks_of(name)] for name in plan.ranks]
    for group in groups:
        for row, *others in zip(*(part["steps"] for part in group), strict=True):
            row["peak_memory_bytes"] += sum(other["peak_memory_bytes"] for other in others)
            row["collective_s"] = _least_collectives_s([row, *others]) if others else {}
            for kind in ("sends", "receives"):
                # A member may send to several of a group, and receive from several.
                found: dict[tuple[str, int], tuple[float, float]] = {}
                for (what, peer), start_s, end_s in row[kind]:
                    key = what, place[plan.place_of(peer).replica]
                    first_s, last_s = found.get(key, (start_s, end_s))
                    found[key] = min(first_s, start_s), max(last_s, end_s)
                row[kind] = [[[*key], *span] for key, span in found.items()]
    return [group[0] for group in groups]


def _least_collectives_s(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of collectives within each operation, of the member with the fewest.

    Args:
        rows: of all members of a group, of one iteration; they run the same operations.
    """
    found: dict[str, float] = {}
    for row in rows:
        collectives = sorted((start_s, end_s) for _, start_s, end_s in row["collectives"])
        begins = [start_s for start_s, _ in collectives]
        for what, start_s, end_s in row["operations"]:
            inside = collectives[bisect_left(begins, start_s) : bisect_right(begins, end_s)]
            seconds = sum(last_s - first_s for first_s, last_s in inside)
            found[what] = min(seconds, found.get(what, seconds))
    return found


def _spans(spans: Sequence[Span]) -> list[list[Any]]:
    return [[_plain(span.what), span.start_s, span.end_s] for span in spans]


def _plain(what: Any) -> Any:
    """An operation by its name, a message by its operation and peer, a reduction by its stages."""
    if isinstance(what, Reduce):
        return list(what.stages)
    if isinstance(what, tuple) and len(what) == 2:
        return [str(what[0]), what[1]]
    return None if what is None else str(what)


def _hardware(device: torch.device) -> str:
    name = hardware_name(device)
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"
