"""What a free device runs next: in a given order, or as a policy decides."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from planner.plan.operations import Operation, Orders


class Policy(Protocol):
    """Decides what a free device runs next."""

    def offer(self, device: str, operation: Operation) -> None:
        """Announce an operation that can run on its device from now on; each is offered once.

        Both a whole backward and its input gradient are offered, whichever the policy will run.
        """

    def choose(self, device: str, now_s: float) -> Operation | None:
        """Return one of the waiting operations, or None to wait for another event."""

    def unfinished(self) -> str:
        """Describe what still waits, for a deadlock's message; empty if all is done."""


class FixedOrder:
    """Runs each device's operations in a given order."""

    def __init__(self, orders: Orders) -> None:
        self._left = {device: list(reversed(order)) for device, order in orders.items()}
        self._available: defaultdict[str, set[Operation]] = defaultdict(set)

    def offer(self, device: str, operation: Operation) -> None:
        """Note that the operation can run once its turn comes."""
        self._available[device].add(operation)

    def choose(self, device: str, now_s: float) -> Operation | None:
        """Return the next operation of the order once it can run."""
        left = self._left.get(device)
        if left and left[-1] in self._available[device]:
            self._available[device].discard(left[-1])
            return left.pop()
        return None

    def unfinished(self) -> str:
        """Describe the operation that each device waits at."""
        return ", ".join(
            f"{device} waits at {left[-1]}" for device, left in self._left.items() if left
        )
