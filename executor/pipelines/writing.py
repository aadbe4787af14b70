"""Whose turn it is to write a checkpoint, among pipelines that train side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.checkpoint import Ranks

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
        """Whether to write a step's checkpoint, inside; all ranks of the pipeline call it.

        Args:
            step: of the checkpoint.
            there: lives of the pipelines that take part.
            wait_s: for somebody who is writing; otherwise that step is left to them.
        """
        life = there.get(self._pipeline, 0)
        name = f"{self._pipeline}.{life}"
        lives = {f"{number}.{life}" for number, life in there.items()}
        writes: bool = self._ranks.on_first(lambda: self._begin(name, lives, step, wait_s))
        try:
            yield writes
            if writes:
                self._ranks.on_first(lambda: self._note(step))
        finally:
            if writes and self._ranks.rank == 0:
                self._store.compare_set(_WRITER, name, _FREE)

    def _begin(self, name: str, lives: set[str], step: int, wait_s: float) -> bool:
        until_s = time.monotonic() + wait_s
        while not self._is_taken(name, lives):
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        if self._store.add(_WRITTEN, 0) < step:
            return True
        self._store.compare_set(_WRITER, name, _FREE)
        return False

    def _is_taken(self, name: str, lives: set[str]) -> bool:
        holder = self._store.compare_set(_WRITER, "", name).decode()
        if holder == name:
            return True
        if holder in lives:
            return False
        return bool(self._store.compare_set(_WRITER, holder, name).decode() == name)

    def _note(self, step: int) -> None:
        self._store.add(_WRITTEN, step - self._store.add(_WRITTEN, 0))
