"""Whether the clocks of a measured timeline's devices agree: nothing begins before its cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.measured.events import MeasuredOperation, MeasuredTransfer
from planner.measured.timeline import MeasuredTimeline

CLOCKS_AGREE_S = 1e-3
"""Clocks of hosts that are compared over a network agree to about this."""


@dataclass(frozen=True)
class ClockConflict:
    """An operation that began before the message that it needs was sent.

    Attributes:
        sent: the message, on the clock of its source.
        used: the operation, on the clock of the message's target.
        first_s: by how much the first of such operations of the two devices began after its
            message was sent; negative if that was too early as well.
        first_step: the step of that one.
    """

    sent: MeasuredTransfer
    used: MeasuredOperation
    first_s: float
    first_step: int

    def __str__(self) -> str:
        early_s, step = self.sent.start_s - self.used.start_s, self.sent.step
        drifts = abs(self.first_s + early_s) > CLOCKS_AGREE_S and step > self.first_step
        how = "drift apart" if drifts else "differ"
        return (
            f"operations: in step {step}, {self.used.operation} began on {self.used.device!r} "
            f"{1e3 * early_s:,.1f} ms before {self.sent.operation}, whose result it needs, ended "
            f"on {self.sent.source!r} (in step {self.first_step}: {1e3 * self.first_s:,.1f} ms "
            f"after it): the clocks of the two {how}, and times of messages between them are "
            "wrong; synchronise the hosts' clocks and measure again"
        )


def clock_conflict(measured: MeasuredTimeline) -> ClockConflict | None:
    """Return the worst sign that clocks of two devices differ; None if none shows it."""
    found: dict[tuple[str, str], list[tuple[MeasuredTransfer, MeasuredOperation]]] = {}
    for sent, used in _causes(measured):
        found.setdefault((sent.source, sent.target), []).append((sent, used))
    worst, conflict = CLOCKS_AGREE_S, None
    for rows in found.values():
        first_sent, first_used = rows[0]
        sent, used = max(rows, key=lambda row: row[0].start_s - row[1].start_s)
        if sent.start_s - used.start_s > worst:
            worst = sent.start_s - used.start_s
            first_s = first_used.start_s - first_sent.start_s
            conflict = ClockConflict(sent, used, first_s, first_sent.step)
    return conflict


def _causes(measured: MeasuredTimeline) -> Iterator[tuple[MeasuredTransfer, MeasuredOperation]]:
    """Yield each message with the operation that needs it, in order of time."""
    ran = {(row.step, row.device, row.operation): row for row in measured.operations}
    for sent in measured.transfers:
        what = sent.what
        kinds, stage = ("F", what.stage + 1) if what.kind == "F" else ("BI", what.stage - 1)
        for kind in kinds:
            used = ran.get((sent.step, sent.target, f"{stage}{kind}{what.microbatch}"))
            if used is not None:
                yield sent, used
