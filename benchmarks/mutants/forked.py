"""Work in a forked child, within limits, so that nothing it does to the process remains."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import Any, NoReturn

DATA_BYTES = 4 * 2**30
"""Memory that a child may allocate; a mutant may grow a list for ever."""
WALL_TO_CPU = 30
"""Wall time allowed for a second of CPU time: on a busy machine a child waits for its turn."""


def run_forked(work: Callable[[], Any], cpu_s: float) -> Any:
    """Return what the work comes to, as JSON holds it; None if the child died of it.

    Args:
        work: to do in a child of this process.
        cpu_s: CPU time after which the child is ended.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work_and_exit(work, cpu_s, writer)
    os.close(writer)
    try:
        text = _read(reader, cpu_s * WALL_TO_CPU)
    finally:
        os.close(reader)
        _end(child)
    return json.loads(text) if text else None


def _work_and_exit(work: Callable[[], Any], cpu_s: float, writer: int) -> NoReturn:
    try:
        os.setsid()
        seconds = int(cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        answer = json.dumps(work()).encode()
        while answer:
            answer = answer[os.write(writer, answer) :]
    finally:
        os._exit(0)


def _read(reader: int, wall_s: float) -> bytes:
    """Read to the end; an answer that does not begin within a time is none."""
    chunks: list[bytes] = []
    while select.select([reader], [], [], wall_s)[0]:
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
    return b""


def _end(child: int) -> None:
    """Kill a child with all that it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it has no group of its own yet, or is a zombie
    os.waitpid(child, 0)
