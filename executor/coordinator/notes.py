"""What ranks leave with the coordinator besides work and groups: messages in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from executor.coordinator.messages import Address, Answer, Write, Wrote


class WritingTurns:
    """One pipeline at a time writes a checkpoint, and no step that is written already.

    The pipelines do not agree at every moment on who is there, so the coordinator decides. Of every
    pipeline one rank asks.
    """

    def __init__(self) -> None:
        self._writer: Address | None = None
        self._written = 0

    def ask(self, write: Write) -> Answer:
        """Give a rank its pipeline's turn, unless another has it or the step is written."""
        is_due = write.step > self._written
        if is_due and self._writer is None:
            self._writer = write.sender
        body = {"kind": "turn", "step": write.step, "is_due": is_due}
        return Answer(write.sender, {**body, "writes": is_due and self._writer == write.sender})

    def end(self, wrote: Wrote) -> None:
        """End a pipeline's turn."""
        if self._writer == wrote.sender:
            self._writer = None
            self._written = max(self._written, wrote.step if wrote.done else 0)

    def lose(self, number: int, incarnation_id: str) -> None:
        """End the turn of an incarnation that is lost."""
        writer = self._writer
        if writer is not None and (writer[0], writer[2]) == (number, incarnation_id):
            self._writer = None


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for people.

    Args:
        report: the coordinator's.
    """
    yield (
        f"{report['committed']} of {report['total']} work units trained, {report['repeated']} of "
        "them again after a loss"
    )
    for number, incarnation in enumerate(report["incarnations"]):
        done = report["workers"].get(str(number), {})
        failed = report["failed"][number]
        without = f", {failed} exchanges failed" if failed else ""
        came_back = f", came back {incarnation - 1} times" if incarnation > 1 else ""
        away = "" if str(number) in (report["last"] or {}) else ", not there at the end"
        yield (
            f"pipeline {number}: {done.get('committed', 0)} work units, {done.get('lost', 0)} lost"
            f"{without}{came_back}{away}"
        )


def stranded(report: Mapping[str, Any]) -> str:
    """Return the message for a training all of whose pipelines are lost.

    Args:
        report: the coordinator's.
    """
    pipelines = ", ".join(map(str, range(len(report["incarnations"]))))
    return (
        f"all pipelines ({pipelines}) are lost with {report['committed']} of "
        f"{report['total']} work units done, and nobody has the weights; start a new "
        f"coordinator, and all pipelines, with --resume FOLDER, that of their last checkpoint"
    )
