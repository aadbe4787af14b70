"""Starting the ranks of a run, collecting what they say, and ending all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TIMED_OUT = 124
"""The exit status of a run that was ended for its time, as timeout(1) has it."""
GRACE_S = 5.0
"""Time from the first failure, or from being asked to end, until a rank is killed."""
POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Launch:
    """A process to start.

    Attributes:
        environment: on top of this process's own.
        death_signal: what it gets the moment this process dies.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    death_signal: signal.Signals


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        status: 0, or the exit status of the rank that failed first; 128 + n for signal n.
        outputs: all lines of each rank, standard output and error as they came.
    """

    status: int
    outputs: tuple[str, ...]


def run_all(launches: Sequence[Launch], *, timeout_s: float | None, echo: bool) -> Outcome:
    """Run processes at the same time; none outlives this call, or this process."""
    started: list[subprocess.Popen[str]] = []
    collected: list[list[str]] = [[] for _ in launches]
    readers: list[threading.Thread] = []
    try:
        for rank, launch in enumerate(launches):
            process = _start(launch)
            started.append(process)
            arguments = (process, rank, collected[rank], echo)
            readers.append(threading.Thread(target=_collect, args=arguments, daemon=True))
            readers[-1].start()
        status = _wait(started, timeout_s)
    finally:
        _end(started)
        for reader in readers:
            reader.join(GRACE_S)
    return Outcome(status, tuple("".join(lines) for lines in collected))


def _start(launch: Launch) -> subprocess.Popen[str]:
    return subprocess.Popen(
        launch.command,
        env={**os.environ, **launch.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=_dies_with(os.getpid(), launch.death_signal),
    )


def _dies_with(parent: int, death_signal: signal.Signals) -> Callable[[], None]:
    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal))
        if os.getppid() != parent:  # It died before it could be asked about.
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _collect(process: subprocess.Popen[str], rank: int, lines: list[str], echo: bool) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if echo:
            print(f"[{rank}] {line}", end="", flush=True)
    process.stdout.close()


def _wait(processes: Sequence[subprocess.Popen[str]], timeout_s: float | None) -> int:
    """Until all have ended, or one has failed."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        if end_s is not None and time.monotonic() > end_s:
            return TIMED_OUT
        time.sleep(POLL_S)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ask first: a torchrun agent ends its worker."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    end_s = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
