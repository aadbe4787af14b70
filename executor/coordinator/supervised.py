"""The coordinator as a process of its own; when it ends or stands still, another one goes on."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from executor.coordinator.serve import Stillness
from executor.coordinator.store import COORDINATOR_BEATS, Meeting
from planner.plan.plan import Plan, Sync
from planner.sync.pipeline_replicas import pipeline_replicas_of, pipelines_per_node

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
"""Seconds between two looks at the process."""
_PAUSE_S = 0.2
"""Before it is started again, so that one that cannot start does not take a core."""
_MOST_FAILURES = 3
"""Processes in a row that may end before they serve."""


@dataclass(frozen=True)
class CoordinatorWork:
    """The work that a coordinator hands out.

    Attributes:
        pipelines: how many.
        places: of each.
        shares: of data, to be trained once each.
        sync: the strategy with its options.
        pipelines_per_node: that share a node.
    """

    pipelines: int
    places: int
    shares: int
    sync: Sync
    pipelines_per_node: int

    def facts(self) -> dict[str, Any]:
        """Return the work as JSON, which all compare."""
        return {
            "pipelines": self.pipelines,
            "places": self.places,
            "shares": self.shares,
            "sync": self.sync.model_dump(mode="json"),
            "pipelines_per_node": self.pipelines_per_node,
        }


class SupervisedCoordinator:
    """Keeps a coordinator running until it is closed.

    Args:
        work: to hand out.
        meeting: whose store exists.
        silent_s: a rank that gives no sign of life for so long is lost, and so is the process that
            serves.
        give_up: told why, on another thread, where processes keep ending before they serve.
        log: file of messages, from which a process that is started again goes on; None: a temporary
            one.
    """

    def __init__(
        self,
        work: CoordinatorWork,
        meeting: Meeting,
        silent_s: float,
        give_up: Callable[[str], None],
        log: Path | None = None,
    ) -> None:
        self._folder = None if log else tempfile.TemporaryDirectory(prefix="pipeplan-")
        log = log or Path(self._folder.name if self._folder else ".") / "messages.jsonl"
        self._command = [
            *(sys.executable, "-m", "executor.coordinator.child"),
            *(str(meeting), meeting.prefix, json.dumps(work.facts()), str(silent_s), str(log)),
        ]
        self._give_up = give_up
        self._store = meeting.connect()
        self._silent_s = silent_s
        self._beats = self._beats_now()
        self._stillness = Stillness()
        self._failures = 0
        self._closed = False
        self._lock = threading.Lock()
        self._process = self._started()
        self._thread = threading.Thread(target=self._run, name="pipeplan-keeper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the process that serves now."""
        return self._process.pid

    def close(self) -> None:
        """End it for good."""
        with self._lock:
            self._closed = True
            self._process.kill()  # One that is stopped would not end before it is continued.
        self._thread.join()
        if self._folder is not None:
            self._folder.cleanup()

    def _started(self) -> subprocess.Popen[bytes]:
        # It tells in its own words what torch would warn of in C++ frames.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        # Ctrl-C is for this process, which ends that one. That one inherits the blocked signal: a
        # handler of its own would come too late, while it still imports torch.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=quiet)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _run(self) -> None:
        # Where another process holds the store and has ended, nothing is left to keep.
        with suppress(DistError):
            self._keep()

    def _keep(self) -> None:
        while True:
            status = self._status()
            with self._lock:
                if self._closed:
                    return
            if self._keeps_failing():
                self._give_up(
                    f"coordinator: its process ended {_MOST_FAILURES} times before it served, the "
                    f"last time with status {status}; mend what it says above, and start again"
                )
                return
            logger.warning("the coordinator ended (%s); another goes on", status)
            time.sleep(_PAUSE_S)
            with self._lock:
                if self._closed:
                    return
                self._process = self._started()

    def _keeps_failing(self) -> bool:
        """Return whether the process that ended has never served, like those before it."""
        beats = self._beats_now()
        self._failures = self._failures + 1 if beats == self._beats else 0
        self._beats = beats
        return self._failures == _MOST_FAILURES

    def _beats_now(self) -> int:
        return int(self._store.add(COORDINATOR_BEATS, 0))

    def _status(self) -> int:
        """Wait for the serving process to end, and return its status; end one that stands still."""
        self._stillness = Stillness()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(_LOOK_S)
            if self._stands_still():
                logger.warning(
                    "the coordinator gave no sign of life for %g s; its process is ended",
                    self._silent_s,
                )
                self._process.kill()

    def _stands_still(self) -> bool:
        """Whether it served, and has given no sign of life since for too long."""
        beats = self._beats_now()
        still_s = self._stillness.seconds(beats, time.monotonic())
        return beats != self._beats and still_s > self._silent_s


def work_of(plan: Plan, steps: int, sync: Sync) -> CoordinatorWork:
    """Return the work that a coordinator hands out for some iterations of a plan.

    Raises:
        PipeplanError: if the plan has no pipelines of their own.
    """
    replicas = pipeline_replicas_of(plan)
    return CoordinatorWork(
        pipelines=len(replicas),
        places=len(replicas[0].devices),
        shares=max(0, steps) * len(replicas),
        sync=sync,
        pipelines_per_node=pipelines_per_node(replicas),
    )
