"""Running a benchmark in its own process: its claims, its time, and other load on the machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

from benchmarks import ROOT
from benchmarks.reporting.claims import Entry, read_entries
from planner import PipeplanError

GRACE_S = 30.0
"""Seconds to take down ranks and namespaces after Ctrl-C."""
LAST_LINES = 40
_TROUBLE = re.compile(r"\w*(Error|Exception|Interrupt)\b|error: ")


@dataclass(frozen=True)
class Ran:
    """The result of a run.

    Attributes:
        status: ``ran``, or ``failed: …`` or ``not run: …`` with the reason.
        entries: its claims as far as it got.
        seconds: that it took; None if it did not run.
        others_cores: cores that other jobs kept busy meanwhile; None where that is not known.
        is_interrupted: whether Ctrl-C ended it.
    """

    status: str
    entries: tuple[Entry, ...] = ()
    seconds: float | None = None
    others_cores: float | None = None
    is_interrupted: bool = False

    @property
    def is_well(self) -> bool:
        """Whether it ran to its end."""
        return self.status == "ran"


def run(words: Sequence[str], limit_s: float, grace_s: float = GRACE_S) -> Ran:
    """Run ``python -m WORDS --claims FILE``; its standard error is passed on.

    Args:
        words: of the command line.
        limit_s: after which it is stopped, as by Ctrl-C.
        grace_s: how long it may take to stop before it is killed.
    """
    with tempfile.TemporaryDirectory(prefix="pipeplan-bench-") as folder:
        claims = Path(folder) / "claims.jsonl"
        begin_s, busy_s, own_s = time.monotonic(), _busy_s(), _own_s()
        status, is_interrupted = _watched([*words, "--claims", str(claims)], limit_s, grace_s)
        wall_s, busy_after_s = time.monotonic() - begin_s, _busy_s()
        others = None
        if busy_s is not None and busy_after_s is not None:
            others = max(0.0, busy_after_s - busy_s - (_own_s() - own_s)) / wall_s
        try:
            entries = read_entries(claims)
        except PipeplanError as error:
            entries, status = (), f"failed: {'; '.join(error.problems)}"
        return Ran(status, entries, wall_s, others, is_interrupted)


def _watched(words: Sequence[str], limit_s: float, grace_s: float) -> tuple[str, bool]:
    """Its status, and whether Ctrl-C ended it."""
    child = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # Ctrl-C is for us: the child is told to stop once, in order.
        start_new_session=True,
        text=True,
        errors="replace",
    )
    assert child.stderr is not None, "it is piped"
    last: deque[str] = deque(maxlen=LAST_LINES)
    reader = Thread(target=_pass_on, args=(child.stderr, last), daemon=True)
    reader.start()
    is_interrupted = False
    try:
        child.wait(limit_s)
        status = "ran" if child.returncode == 0 else ""
    except subprocess.TimeoutExpired:
        _stop(child, grace_s)
        status = f"failed: stopped after its limit of {limit_s:g} s"
    except KeyboardInterrupt:
        _stop(child, grace_s)
        status, is_interrupted = "failed: interrupted", True
    reader.join(timeout=2.0)
    return status or f"failed: status {child.returncode}{_reason(last)}", is_interrupted


def _python_path() -> str:
    """Ours first, then what the user has."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _pass_on(lines: IO[str], last: deque[str]) -> None:
    for line in lines:
        last.append(line.rstrip())
        print(f"  {line.rstrip()}", file=sys.stderr, flush=True)


def _reason(last: Sequence[str]) -> str:
    """The last line that names an error, or else the last one."""
    said = [line.strip() for line in last if line.strip()]
    named = [line for line in said if _TROUBLE.match(line)]
    return f": {(named or said)[-1][:300]}" if said else ""


def _stop(child: subprocess.Popen[str], grace_s: float) -> None:
    """Stop a process as Ctrl-C does, so that it cleans up; then by force."""
    try:
        os.killpg(child.pid, signal.SIGINT)
        child.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    except ProcessLookupError:
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait()


def _busy_s() -> float | None:
    """Seconds that all cores of this machine were at work, idle and waiting left out."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft = map(int, fields[:7])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the processor seconds of this process and its ended children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
