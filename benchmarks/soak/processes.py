"""Processes of a soak: pipelines' ranks, forked from one that has imported torch already.

A restarted rank so is there in a fraction of a second, where torchrun's takes seconds to import;
all else is as torchrun does it: the variables it sets, a store that is not of a rank, and when one
rank ends with an error the others are ended too and all are started again.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore

from benchmarks import ROOT

_GRACE_S = 10.0
"""Ranks that are told to end are killed after so long."""
_TICK_S = 0.02


class Forks:
    """A process that has imported what a rank needs, and forks ranks."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.processes"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._ended: list[tuple[int, int]] = []
        self._unread = b""
        self._pids: list[int] = []

    def start(self, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        """Start ``python -m executor``; its process id."""
        assert self._server.stdin is not None
        order = {"arguments": list(arguments), "env": dict(env), "log": str(log)}
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        while not self._pids:
            self._read(60.0)
        return self._pids.pop(0)

    def ended(self) -> list[tuple[int, int]]:
        """Process ids and statuses of those that ended since the last time."""
        self._read(0.0)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End it; ranks go on."""
        self._server.kill()
        self._server.wait()

    def _read(self, timeout_s: float) -> None:
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], timeout_s)[0]:
            return
        data = os.read(self._server.stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError("the process that forks ranks has ended")
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            row = json.loads(line)
            if "status" in row:
                self._ended.append((row["pid"], row["status"]))
            else:
                self._pids.append(row["pid"])


@dataclass(frozen=True)
class End:
    """The end of a rank's process.

    Attributes:
        at_s: when, on the monotonic clock.
        pipeline, place: which it was.
        status: as of :class:`subprocess.Popen`: negative for a signal.
        attempt: of its job.
    """

    at_s: float
    pipeline: int
    place: int
    status: int
    attempt: int


@dataclass
class Job:
    """One pipeline's ranks, started again together when one fails.

    Attributes:
        pipeline, places: which, and how many ranks it has.
        arguments: of ``python -m executor``.
        folder: for what the ranks print.
        started_s: when each attempt was, on the monotonic clock.
        killed_late: ranks that did not end within some seconds of being told to.
        is_done: all have ended well.
    """

    forks: Forks
    pipeline: int
    places: int
    arguments: Sequence[str]
    folder: Path
    ranks: dict[int, int] = field(default_factory=dict)
    started_s: list[float] = field(default_factory=list)
    killed_late: int = 0
    is_done: bool = False

    def __post_init__(self) -> None:
        self._ending_s: float | None = None
        self._failed = False
        self.start()

    def start(self) -> None:
        """Start all ranks, with a new store."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        attempt = len(self.started_s)
        self.started_s.append(time.monotonic())
        for place in range(self.places):
            log = self.folder / f"pipeline{self.pipeline}.{place}.{attempt}.log"
            pid = self.forks.start(self.arguments, self._env(place, attempt), log)
            self.ranks[pid] = place

    def _env(self, place: int, attempt: int) -> dict[str, str]:
        mine = {
            "RANK": place,
            "LOCAL_RANK": place,
            "WORLD_SIZE": self.places,
            "LOCAL_WORLD_SIZE": self.places,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_RUN_ID": f"pipeline{self.pipeline}",
        }
        return {name: str(value) for name, value in mine.items()}

    def note(self, pid: int, status: int) -> End:
        """One of its ranks has ended."""
        end = End(
            time.monotonic(),
            self.pipeline,
            self.ranks.pop(pid),
            status,
            len(self.started_s) - 1,
        )
        self._failed |= status != 0
        if self.ranks and self._failed and self._ending_s is None:
            self._ending_s = time.monotonic() + _GRACE_S
            self.signal(signal.SIGTERM)
        if not self.ranks:
            self.is_done = not self._failed
            self._failed, self._ending_s = False, None
            if not self.is_done:
                self.start()
        return end

    def tick(self) -> tuple[End, ...]:
        """Kill ranks that do not end."""
        if self._ending_s is not None and time.monotonic() > self._ending_s:
            self._ending_s = time.monotonic() + _GRACE_S
            self.killed_late += len(self.ranks)
            self.signal(signal.SIGKILL)
        return ()

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that are there."""
        for pid in list(self.ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def coordinator_child(parent: int, log: Path) -> int | None:
    """The process id of the coordinator that serves: the one that writes the log."""
    return next((pid for pid in children(parent) if _writes(Path(f"/proc/{pid}"), log)), None)


def children(parent: int) -> list[int]:
    """The process ids of a process's children."""
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [int(entry.name) for entry in entries if _parent_of(entry) == parent]


def _parent_of(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None


def _writes(entry: Path, path: Path) -> bool:
    try:
        for link in (entry / "fd").iterdir():
            if link.readlink() == path:
                flags = (entry / "fdinfo" / link.name).read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                    return True
    except OSError:
        return False
    return False


# --- the process that forks --------------------------------------------------------------------


def main() -> None:
    """Fork ranks on the orders that come in; tell who was started, and who has ended."""
    import executor.elastic.run
    import executor.training.loop
    import executor.training.training  # noqa: F401
    from benchmarks.soak.plans import soak_plan

    # What tracing a model imports takes longer than torch itself.
    soak_plan(1, 1, 1.0)
    unread = b""
    while True:
        _tell_ended()
        if not select.select([0], [], [], _TICK_S)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            _tell({"pid": _forked(json.loads(line))})


def _tell(row: Mapping[str, int]) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")


def _tell_ended() -> None:
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _tell({"pid": pid, "status": os.waitstatus_to_exitcode(status)})
    except ChildProcessError:
        return


def _forked(order: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    target = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ.update(order["env"])
    sys.argv = ["executor", *order["arguments"]]
    status = 1
    try:
        from executor.__main__ import main as run_rank

        status = run_rank()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
