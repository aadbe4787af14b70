"""What takes time in an iteration, and what each waited for."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan.operations import Operation


@dataclass(frozen=True)
class Step:
    """What took time, and the step it waited for, which ended when it began.

    Attributes:
        start_s: when it began.
        end_s: when it ended.
        devices: one; or those that a message or a ring of messages visits, in order.
        cause: None of what began the iteration.
        operation: None of messages, all-reduces and optimizer steps.
    """

    start_s: float
    end_s: float
    devices: tuple[str, ...]
    cause: Step | None
    operation: Operation | None = None

    @property
    def seconds(self) -> float:
        """What it took."""
        return self.end_s - self.start_s


def after(steps: list[Step], seconds: float, devices: tuple[str, ...]) -> Step:
    """Return a step that follows the last of some others."""
    start = max((step.end_s for step in steps), default=0.0)
    return Step(start, start + seconds, devices, ended_at(start, *steps))


def ended_at(now: float, *steps: Step | None) -> Step | None:
    """Return the first of these that ended now."""
    return next((step for step in steps if step is not None and step.end_s == now), None)
