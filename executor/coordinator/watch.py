"""Ranks of several pipelines that one torchrun started: one that dies does not end the others.

Torchrun ends all ranks as soon as one of its processes ends with a failure. So ``python -m
executor`` forks: torchrun's process only watches, and the child is the rank. When a pipeline is
lost, by SIGKILL say, its watching processes end as if all were well, and the other pipelines go on.
The coordinator runs in the first rank's watching process, which fails at the end if all pipelines
are lost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

from executor.coordinator.notes import report_lines, stranded
from executor.coordinator.server import ServerThread, Serving
from executor.launch.console import print_error, say
from planner.errors import PipeplanError
from planner.prediction import load_plan
from planner.sync.strategies import SYNCHRONOUS, parse_sync

_parent: socket.socket | None = None
"""The connection to the process that watches this rank; None if no process does."""
Run = Callable[[argparse.Namespace, int], int]
"""Runs a rank, by the options of the command line, and returns its exit status."""


def tell_parent(text: str, *sockets: socket.socket) -> bool:
    """Tell the process that watches this one something; return whether there is one.

    Args:
        text: ``begun``, once the rank's pipeline takes part, so that its end is no failure of the
            whole training; or how a coordinator is to serve, as JSON.
        sockets: handed over.
    """
    if _parent is None:
        return False
    with suppress(OSError):
        socket.send_fds(_parent, [text.encode() + b"\n"], [one.fileno() for one in sockets])
    return True


def run_rank(run: Run, options: argparse.Namespace, rank: int) -> int:
    """Run a rank and return its status: in a child process if it is of one of several pipelines.

    Call it before torch is imported and before any thread is started.

    Args:
        run: runs it.
        options: of the command line.
        rank: of torchrun's processes.
    """
    alone = options.coordinator is not None
    if not alone and (int(os.environ.get("WORLD_SIZE", "1")) == 1 or is_in_step(options)):
        return run(options, rank)
    # Connections to ranks that are gone are no news here, and torch, which reads this as it is
    # imported, tells each in 20 lines of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return run(options, rank) if alone else _watched(partial(run, options, rank), rank)


def is_in_step(options: argparse.Namespace) -> bool:
    """Return whether all ranks run in step; also if the options are wrong, which a rank tells."""
    try:
        sync = load_plan(options.plan).sync if options.sync is None else parse_sync(options.sync)
    except PipeplanError:
        return True
    return sync.strategy in SYNCHRONOUS


def _watched(run: Callable[[], int], rank: int) -> int:
    """Run a rank in a child process, and return the status that torchrun is to see."""
    watch = _Watch(run)
    watch.hear()
    status = watch.wait()
    is_lost = status != 0 and watch.has_begun and not watch.signal
    if is_lost:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        print_error(f"rank {rank} ended {how}: its pipeline is lost; the other pipelines go on")
    elif status != 0:
        return 128 - status if status < 0 else status
    while watch.server is not None and not watch.server.wait(0.2):
        if watch.signal:
            return 128 + watch.signal
    report = None if watch.server is None else watch.server.report
    if report is not None and report["remaining"]:
        print_error(stranded(report))
        return 1
    if report is not None and is_lost:
        for line in report_lines(report):
            say(line)
    return 0


class _Watch:
    """Runs a rank as a child process, and a coordinator on a thread if the child asks for one.

    Args:
        run: runs the rank and returns its exit status.

    Attributes:
        server: that serves on a thread of this process, if it does.
        has_begun: whether the rank's pipeline has taken part.
        signal: by which torchrun ends this process; 0: none.
    """

    def __init__(self, run: Callable[[], int]) -> None:
        global _parent
        self.server: ServerThread | None = None
        self.has_begun = False
        self.signal = 0
        self._ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            _parent = theirs
            threading.Thread(target=_end_with_parent, args=(theirs,), daemon=True).start()
            _end_process(run)
        theirs.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hand_on)

    def hear(self) -> None:
        """Take what the child says, until it has ended."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._ours, 2**20, 1)
            if not data:
                return
            for line in data.decode().splitlines():
                if line == "begun":
                    self.has_begun = True
                else:
                    listener = socket.socket(fileno=fds[0])
                    self.server = ServerThread(listener, Serving(**json.loads(line)))

    def wait(self) -> int:
        """Return the child's exit status; negative: by a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _hand_on(self, number: int, _: FrameType | None) -> None:
        """Hand a signal on to the child, which ends by it as torchrun's own process would."""
        self.signal = number
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _end_process(run: Callable[[], int]) -> None:
    status = 1
    try:
        status = run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No thread that waits for other ranks holds the process.
        os._exit(status)


def _end_with_parent(connection: socket.socket) -> None:
    """End this process once the one that watches it is gone: nobody else would."""
    with suppress(OSError):
        connection.recv(1)
    os._exit(1)
