"""Checkpoints of pipelines that train side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.checkpoint.ranks import Ranks
from executor.elastic.member import PipelineMember
from executor.elastic.trace import WholeSteps
from executor.launch.config import CheckpointTable

_WRITER = "checkpoint/writer"
_WRITTEN = "checkpoint/step"
_FREE = "free"
_LOOK_S = 0.1


class Writing:
    """One pipeline at a time writes, and no step that is written already.

    The pipelines do not agree at every moment on who is there: one that has just come back may
    think itself the first while another still does. So whoever writes holds an entry of the store
    that all meet at. Who is lost while it writes holds it no longer.

    Args:
        store: that all meet at.
        ranks: of this pipeline, which decide together.
        pipeline: this one.
    """

    def __init__(self, store: Store, ranks: Ranks, pipeline: int) -> None:
        self._store = store
        self._ranks = ranks
        self._pipeline = pipeline

    @contextmanager
    def turn(self, step: int, there: Mapping[int, int], wait_s: float = 0.0) -> Iterator[bool]:
        """Decide whether to write a step's checkpoint inside; all ranks of the pipeline call it.

        Args:
            step: of the checkpoint.
            there: incarnations of the pipelines that take part.
            wait_s: for somebody who is writing; otherwise that step is left to them.
        """
        incarnation = there.get(self._pipeline, 0)
        name = f"{self._pipeline}.{incarnation}"
        incarnations = {f"{number}.{incarnation}" for number, incarnation in there.items()}
        writes: bool = self._ranks.on_first(lambda: self._begin(name, incarnations, step, wait_s))
        try:
            yield writes
            if writes:
                self._ranks.on_first(lambda: self._note(step))
        finally:
            if writes and self._ranks.rank == 0:
                self._store.compare_set(_WRITER, name, _FREE)

    def _begin(self, name: str, incarnations: set[str], step: int, wait_s: float) -> bool:
        until_s = time.monotonic() + wait_s
        while not self._is_taken(name, incarnations):
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        if self._store.add(_WRITTEN, 0) < step:
            return True
        self._store.compare_set(_WRITER, name, _FREE)
        return False

    def _is_taken(self, name: str, incarnations: set[str]) -> bool:
        holder = self._store.compare_set(_WRITER, "", name).decode()
        if holder == name:
            return True
        if holder in incarnations:
            return False
        return bool(self._store.compare_set(_WRITER, holder, name).decode() == name)

    def _note(self, step: int) -> None:
        self._store.add(_WRITTEN, step - self._store.add(_WRITTEN, 0))


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
        member: PipelineMember,
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
