"""The times of reductions that run in several buckets."""

from __future__ import annotations

from typing import Any

from executor.lower import Reduce
from executor.recorder import Recorder
from executor.sync.buckets import Bucket


class Spans:
    """Notes each reduction once: from its first bucket's start until the last was waited for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._starts: dict[Reduce, Any] = {}
        self._ends: dict[Reduce, Any] = {}

    def started(self, bucket: Bucket) -> None:
        """A bucket is under way."""
        for reduce in bucket.reduces:
            self._starts.setdefault(reduce, self._recorder.mark())

    def ended(self, bucket: Bucket) -> None:
        """A bucket was waited for."""
        for reduce in bucket.reduces:
            self._ends[reduce] = self._recorder.mark()

    def note(self) -> None:
        """All that were started have ended."""
        for reduce, start in self._starts.items():
            self._recorder.note("reductions", reduce, start, self._ends[reduce])
        self._starts.clear()
        self._ends.clear()
