"""Checkpoints of pipelines that train side by side."""

from __future__ import annotations

from collections.abc import Callable

from executor.config import CheckpointTable
from executor.pipelines.member import Member
from executor.pipelines.steps import WholeSteps
from executor.pipelines.writing import Writing

Save = Callable[[CheckpointTable, int, int], None]
"""Writes this rank's part of a checkpoint: where to, after which step, and after which share."""


class PipelineCheckpoints:
    """The first pipeline that is there writes: its own weights, and those of all at the end.

    One is written after the writer's first share at or beyond a step of the whole training that
    has one. Checkpoints resume under any plan; shares below the newest that others have not ended
    yet count as seen.

    Args:
        table: where to, and how often; None: never.
        steps: of the whole training.
        member: whose pipeline it is.
        writing: whose turn it is.
        save: what whoever writes does.
    """

    def __init__(
        self,
        table: CheckpointTable | None,
        steps: WholeSteps,
        member: Member,
        writing: Writing,
        save: Save,
    ) -> None:
        self._table = table
        self._steps = steps
        self._member = member
        self._writing = writing
        self._save = save
        self._last_step = steps.before

    def after(self, share: int) -> None:
        """Write one if it is due after a share of this pipeline; all its ranks call it."""
        table, step = self._table, self._steps.done_after(share)
        if table is not None and step // table.every > self._last_step // table.every:
            self._write(table, step, share)

    def at_end(self, share: int, wait_s: float) -> None:
        """Write one after the last share of all, if none was due then; all ranks call it.

        Args:
            share: the last one.
            wait_s: for somebody else who is writing.
        """
        table, step = self._table, self._steps.done_after(share)
        if table is not None and step > self._last_step:
            self._write(table, step, share, wait_s)

    def _write(self, table: CheckpointTable, step: int, share: int, wait_s: float = 0.0) -> None:
        self._last_step = step
        if not self._member.leads:
            return
        with self._writing.turn(step, self._member.there, wait_s) as writes:
            if writes:
                self._save(table, step, share)
