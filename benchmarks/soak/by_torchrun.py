"""A pipeline of a soak started as users do: by torchrun, which starts ranks again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.processes import ROOT, End, children

_RESTARTS = 1000


@dataclass
class TorchrunJob:
    """One pipeline's torchrun.

    Attributes:
        pipeline, places: which, and how many ranks it has.
        started_s: when its ranks were first seen, each time.
        killed_late: not known of torchrun.
        is_done: it has ended well.
    """

    pipeline: int
    places: int
    arguments: Sequence[str]
    folder: Path
    started_s: list[float] = field(default_factory=list)
    killed_late: int = 0
    is_done: bool = False

    def __post_init__(self) -> None:
        with (self.folder / f"pipeline{self.pipeline}.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--rdzv-backend",
                    "c10d",
                    "--rdzv-endpoint",
                    "localhost:0",
                    "--nproc-per-node",
                    str(self.places),
                    "--max-restarts",
                    str(_RESTARTS),
                    "--monitor-interval",
                    "0.2",
                    "-m",
                    "executor",
                    *self.arguments,
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: frozenset[int] = frozenset()
        self.ranks: dict[int, int] = {}

    def tick(self) -> Iterator[End]:
        """Look who is there."""
        status = self._process.poll()
        if status is not None:
            if not self.is_done:
                self.is_done = True
                yield End(time.monotonic(), self.pipeline, 0, status, len(self.started_s) - 1)
            self.ranks = {}
            return
        pids = sorted(children(self._process.pid))
        if len(pids) == self.places and not self._seen & frozenset(pids):
            self._seen = frozenset(pids)
            self.started_s.append(time.monotonic())
        self.ranks = dict(zip(pids, range(self.places), strict=False))

    def signal(self, number: int) -> None:
        """Send a signal to all that is there."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
            for pid in children(self._process.pid):
                os.kill(pid, number)
            if number == signal.SIGKILL:
                self._process.wait()
