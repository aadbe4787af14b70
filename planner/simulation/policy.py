"""What a free device runs next, in a given order."""

from __future__ import annotations

from collections import defaultdict

from planner.plan.operations import Operation, Orders


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
