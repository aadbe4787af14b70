"""Copies of offloaded stashes to the host and back (docs/memory.md, Offloaded stashes)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import copy_s
from planner.plan.operations import Operation, Orders
from planner.plan.stash_offload import brought_back_during


@dataclass(frozen=True)
class CopyEvent:
    """A stash on its way over the host link of a device.

    Attributes:
        device: whose link it is.
        operation: the forward after which it goes to the host, or the backward for which it comes
            back.
        start_s, end_s: of the copy.
        bytes: that are copied.
    """

    device: str
    operation: Operation
    start_s: float
    end_s: float
    bytes: int

    @property
    def is_out(self) -> bool:
        """Whether it goes to the host."""
        return self.operation.kind == "F"


class StashCopies:
    """The copies of one replay: each is timed the moment it can be.

    A stash is to go to the host when its forward ends, and to come back when the operation before
    its backward starts. On the host link of a device one stash is on its way at a time, in the
    order in which they are to.

    Args:
        pipeline: the stages.
        orders: operations by device; None: nobody knows them, and no stash leaves.

    Attributes:
        events: all copies so far.
        coming: ends of copies back that are under way, a heap, each with its backward.
    """

    def __init__(self, pipeline: PlacedPipeline, orders: Orders | None) -> None:
        self._pipeline = pipeline
        offloads = [stage.offload_bytes > 0 for stage in pipeline.stages]
        self._backwards = brought_back_during(orders or {}, offloads)
        self._leaving = {row._replace(kind="F") for row in self._backwards.values()}
        self._free_s: dict[str, float] = {}
        self._gone: set[Operation] = set()
        self.coming: list[tuple[float, Operation]] = []
        self._away = set(self._backwards.values())
        self._offered: set[Operation] = set()
        self.events: list[CopyEvent] = []

    def start(self, device: str, operation: Operation, now: float) -> None:
        """Note that an operation starts: the stash for the next one is to come back."""
        backward = self._backwards.get(operation)
        # Orders with a backward before its forward deadlock there: its stash never comes.
        if backward is not None and backward._replace(kind="F") in self._gone:
            heapq.heappush(self.coming, (self._copy(device, backward, now), backward))

    def finish(self, device: str, operation: Operation, now: float) -> None:
        """Note that an operation ends: a forward's stash is to go to the host."""
        if operation in self._leaving:
            self._copy(device, operation, now)
            self._gone.add(operation)

    def _copy(self, device: str, operation: Operation, now: float) -> float:
        """Return when a copy ends that is asked for now."""
        bytes_ = self._pipeline.stages[operation.stage].offload_bytes
        start_s = max(now, self._free_s.get(device, 0.0))
        end_s = start_s + copy_s(self._pipeline.problem, device, bytes_)
        self._free_s[device] = end_s
        self.events.append(CopyEvent(device, operation, start_s, end_s, bytes_))
        return end_s

    def is_away(self, backward: Operation) -> bool:
        """Return whether a backward whose gradient is there has to wait for its stash.

        It is then returned by :meth:`arrived` once the stash has come.
        """
        if backward in self._away:
            self._offered.add(backward)
        return backward in self._away

    def arrived(self, now: float) -> Iterator[Operation]:
        """Yield the backwards that waited only for the stashes that have come back by now."""
        while self.coming and self.coming[0][0] == now:
            backward = heapq.heappop(self.coming)[1]
            self._away.discard(backward)
            if backward in self._offered:
                yield backward
