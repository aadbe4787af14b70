"""Checkpoints of pipelines that train in parallel."""

from __future__ import annotations

from collections.abc import Callable

from executor.checkpoint.ranks import Ranks
from executor.coordinator.client import Client
from executor.elastic.member import PipelineMember
from executor.elastic.trace import WholeSteps
from executor.launch.config import CheckpointTable

Save = Callable[[CheckpointTable, int, int], None]
"""Writes this rank's part of a checkpoint: where to, after which step, and after which unit."""


class PipelineCheckpoints:
    """The first pipeline that is there writes: its own weights, and those of all at the end.

    One is written after the writer's first work unit at or beyond a step of the whole training that
    has one. Checkpoints resume under any plan; units below the newest that others have not ended
    yet count as seen. The coordinator gives one pipeline at a time the turn to write.

    Args:
        table: where to, and how often; None: never.
        steps: of the whole training.
        member: whose pipeline it is.
        client: of the coordinator.
        ranks: of this pipeline, which decide together.
        save: called by every rank of the pipeline that writes.
    """

    def __init__(
        self,
        table: CheckpointTable | None,
        steps: WholeSteps,
        member: PipelineMember,
        client: Client,
        ranks: Ranks,
        save: Save,
    ) -> None:
        self._table = table
        self._steps = steps
        self._member = member
        self._client = client
        self._ranks = ranks
        self._save = save
        self._last_step = steps.before

    def after(self, share: int) -> None:
        """Write one if it is due after a work unit of this pipeline; all its ranks call it."""
        table, step = self._table, self._steps.done_after(share)
        if table is not None and step // table.every > self._last_step // table.every:
            self._write(table, step, share)

    def at_end(self, share: int, wait_s: float) -> None:
        """Write one after the last work unit of all, if none was due then; all ranks call it.

        Args:
            share: the last one.
            wait_s: for another pipeline that is writing.
        """
        table, step = self._table, self._steps.done_after(share)
        if table is not None and step > self._last_step:
            self._write(table, step, share, wait_s)

    def _write(self, table: CheckpointTable, step: int, share: int, wait_s: float = 0.0) -> None:
        self._last_step = step
        if not self._member.leads:
            return
        client, done = self._client, False
        if not self._ranks.on_first(lambda: client.may_write(step, wait_s)):
            return
        try:
            self._save(table, step, share)
            done = True
        finally:
            if self._ranks.rank == 0:
                client.has_written(step, done=done)
