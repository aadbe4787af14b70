"""Checkpoints of pipelines that train side by side."""

from __future__ import annotations

from executor.config import CheckpointTable
from executor.feed import Feed
from executor.optimisation import Optimisation
from executor.pipelines.member import Member
from executor.pipelines.writing import Writing
from executor.saved_state import SavedState


class PipelineCheckpoints:
    """The first pipeline that is there writes: its own weights, and those of all at the end.

    A step of the whole training is as many shares as there are pipelines. One is written after the
    writer's first share at or beyond it. Checkpoints resume under any plan; shares below the newest
    that others have not ended yet count as seen.

    Args:
        table: where to, and how often; None: never.
        saved: this rank's part.
        feed: that tells how many samples were seen.
        optimisation: of this rank.
        member: whose pipeline it is.
        writing: whose turn it is.
        pipelines: how many there are.
        steps_before: of the whole training, that it resumes after.
        timeout_s: for somebody else who is writing, at the end.
    """

    def __init__(
        self,
        table: CheckpointTable | None,
        saved: SavedState,
        feed: Feed,
        optimisation: Optimisation,
        member: Member,
        writing: Writing,
        pipelines: int,
        steps_before: int,
        timeout_s: float,
    ) -> None:
        self._table = table
        self._saved = saved
        self._feed = feed
        self._optimisation = optimisation
        self._member = member
        self._writing = writing
        self._pipelines = pipelines
        self._steps_before = self._last_step = steps_before
        self._timeout_s = timeout_s

    def after(self, share: int, *, last: bool = False) -> None:
        """Write one if it is due after a share of this pipeline; all its ranks call it."""
        table = self._table
        if table is None:
            return
        step = self._steps_before + (share + 1) // self._pipelines
        is_due = step // table.every > self._last_step // table.every
        if not is_due and not (last and step > self._last_step):
            return
        self._last_step = step
        if not self._member.leads:
            return
        wait_s = self._timeout_s if last else 0.0
        with self._writing.turn(step, self._member.there, wait_s) as writes:
            if writes:
                seen = self._feed.samples_seen_after(share + 1)
                self._saved.save(table.folder, step, self._optimisation, seen, table.keep)
