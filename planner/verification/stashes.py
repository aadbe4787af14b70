"""Stashes on their way to the host and back, by docs/memory.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from planner.plan.operations import Operation, Orders
from planner.verification.costs import PlanCosts
from planner.verification.steps import Step, ended_at


class StashTravel:
    """The host link of every device: one stash at a time is on its way, in the order asked for.

    Args:
        orders: operations by device.
        costs: of the plan.

    Attributes:
        back: copies back to the device, by the backward that needs them.
        changes: by device, moments and the bytes that it holds more from then on.
    """

    def __init__(self, orders: Orders, costs: PlanCosts) -> None:
        self._costs = costs
        # The backward that each operation of an order is followed by, where its stash travels.
        self._behind: dict[Operation, Operation] = {}
        for order in orders.values():
            for place, operation in enumerate(order[1:]):
                stage, kind, microbatch = operation
                travels = order[place] != Operation(stage, "F", microbatch)
                if kind == "B" and travels and costs.bytes[stage].offloaded:
                    self._behind[order[place]] = operation
        self._travels = set(self._behind.values())
        self._gone: set[Operation] = set()
        self._last: dict[str, Step] = {}
        self.back: dict[Operation, Step] = {}
        self.changes: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self._coming: dict[Operation, str] = {}

    def begin(
        self, device: str, operation: Operation, now: float, causes: Sequence[Step | None]
    ) -> None:
        """An operation begins, and asks for the stash of the backward behind it.

        Args:
            device: that runs it.
            operation: which.
            now: the moment.
            causes: what the operation waited for.
        """
        backward = self._behind.get(operation)
        # A backward that an order has before its forward never gets its stash.
        if backward is None or backward not in self._gone:
            return
        step = self._copied(device, backward.stage, now, causes)
        self.back[backward] = step
        self._coming[backward] = device
        self.changes[device].append((step.start_s, self._costs.bytes[backward.stage].offloaded))

    def end(self, ran: Step) -> None:
        """An operation has ended; a forward's stash is to leave."""
        assert ran.operation is not None
        stage, kind, microbatch = ran.operation
        backward, device = Operation(stage, "B", microbatch), ran.devices[0]
        if kind == "F" and backward in self._travels:
            step = self._copied(device, stage, ran.end_s, [ran])
            self._gone.add(backward)
            self.changes[device].append((step.end_s, -self._costs.bytes[stage].offloaded))

    def _copied(self, device: str, stage: int, now: float, causes: Sequence[Step | None]) -> Step:
        """Return a copy that is asked for now: after the one before on the link."""
        before = self._last.get(device)
        start_s = now if before is None else max(now, before.end_s)
        seconds = self._costs.copy_s(stage, device)
        step = Step(start_s, start_s + seconds, (device,), ended_at(start_s, before, *causes))
        self._last[device] = step
        return step

    def is_there(self, operation: Operation, now: float) -> bool:
        """Return whether an operation need not wait for a stash."""
        if operation not in self._travels:
            return True
        return operation in self.back and self.back[operation].end_s <= now

    def next_s(self) -> float:
        """Return when the next stash comes back."""
        return min((self.back[row].end_s for row in self._coming), default=float("inf"))

    def come_back(self, now: float) -> set[str]:
        """Return the devices to which a stash comes back now."""
        there = [row for row in self._coming if self.back[row].end_s <= now]
        return {self._coming.pop(row) for row in there}
