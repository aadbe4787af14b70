"""``python -m executor.coordinator PLAN --listen HOST:PORT``: for pipelines started one by one.

Each pipeline is then a torchrun job of its own, so that one that dies ends no other:
``torchrun --nproc-per-node P -m executor PLAN --pipeline I --coordinator HOST:PORT``.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from executor.checkpoint.read import Checkpoint
from executor.coordinator.log import MessageLog, report_lines
from executor.coordinator.secret import SECRET_VARIABLE, key_of
from executor.coordinator.store import ABOUT, DONE, ENDED, REPORT, STRANDED, Meeting
from executor.coordinator.supervised import CoordinatorWork, SupervisedCoordinator, work_of
from executor.launch.config import TrainingConfig
from executor.launch.console import print_error, say, show_log
from executor.launch.rank_options import DEFAULT_SILENT_S, require_silent
from executor.launch.run import RunSettings, sync_of
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.run_command import leave_words
from planner.prediction import load_plan
from planner.records.document import require_file_path
from planner.sync.strategies import SYNCHRONOUS
from planner.verification import require_valid

_POLL_S = 0.2
_LAST_WAIT_S = 30.0
_STRANDED_WAIT_S = 5.0
"""Seconds in which pipelines that come back late are still refused with the reason."""
_REMEDIES = {
    errno.EADDRINUSE: "is taken by another process; name another port, or end that process",
    errno.EADDRNOTAVAIL: "is no address of this machine; name one that it has, as `ip address` "
    "lists them",
    errno.EACCES: "may not be listened at; name a port from 1024 on",
}


@dataclass(frozen=True)
class _Options:
    plan: str
    listen: str
    config: str | None
    steps: int | None
    sync: str | None
    resume: Path | None
    silent_s: float
    log: Path | None


def main() -> int:
    """Serve until all shares are done; returns the exit status."""
    show_log()
    try:
        options = _Options(**vars(parser().parse_args()))
        return _serve(options)
    except PipeplanError as error:
        for problem in error.problems:
            print_error(problem)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(options: _Options) -> int:
    require_silent(options.silent_s)
    meeting = Meeting.parse(options.listen, field="--listen")
    plan = load_plan(options.plan)
    work = _work(options, plan)
    if options.log is not None:
        _require_log(options.log)
    with _listening(meeting), _supervised(work, meeting, options) as failures:
        store = meeting.connect()
        _tell_how_to_start(options, plan, work)
        try:
            return _until_the_end(store, work, failures, options)
        except KeyboardInterrupt:
            done = store.add(DONE, 0)
            print(
                f"interrupted: {done} of {work.shares} work units are done; the pipelines end "
                "too, as they cannot go on without this process",
                file=sys.stderr,
                flush=True,
            )
            return 130


def _until_the_end(
    store: Store, work: CoordinatorWork, failures: Sequence[str], options: _Options
) -> int:
    """Wait for it, and say what became of the work."""
    while not store.check([REPORT]):
        if failures:
            raise PipeplanError(failures)
        if store.check([STRANDED]):
            print_error(_stranded(json.loads(store.get(STRANDED)), options))
            time.sleep(_STRANDED_WAIT_S)
            return 1
        time.sleep(_POLL_S)
    for line in report_lines(json.loads(store.get(REPORT))):
        say(line)
    _wait_for_all(store, work)
    return 0


def _stranded(report: Mapping[str, Any], options: _Options) -> str:
    pipelines = ", ".join(map(str, range(len(report["incarnations"]))))
    log = "" if options.log is None else ", another --log file"
    return (
        f"all pipelines ({pipelines}) are lost with {report['committed']} of "
        f"{report['total']} work units done, and nobody has the weights; start a new "
        f"coordinator{log}, and all pipelines, with --resume FOLDER, that of their last checkpoint"
    )


def parser() -> argparse.ArgumentParser:
    """Every option with its help."""
    found = argparse.ArgumentParser(prog="python -m executor.coordinator", description=__doc__)
    found.add_argument("plan", help="plan file with data-parallel pipelines")
    found.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="address to listen on, in a private network",
    )
    found.add_argument("--config", metavar="FILE", help="training file (TOML)")
    found.add_argument("--steps", type=int, help="total iterations of the plan")
    found.add_argument(
        "--sync",
        metavar="NAME[:OPTION=VALUE,...]",
        help="synchronisation strategy, overrides the plan's",
    )
    found.add_argument(
        "--resume", type=Path, metavar="DIR", help="the checkpoints from which the pipelines resume"
    )
    found.add_argument(
        "--silent",
        dest="silent_s",
        type=float,
        default=DEFAULT_SILENT_S,
        metavar="SECONDS",
        help="a pipeline without heartbeats for this long counts as lost (default "
        f"{DEFAULT_SILENT_S:g})",
    )
    found.add_argument(
        "--log", type=Path, metavar="FILE", help="file in which all messages are kept"
    )
    return found


def _work(options: _Options, plan: Plan) -> CoordinatorWork:
    require_valid(plan)
    if options.steps is not None and options.steps < 1:
        raise PipeplanError(f"--steps: {options.steps}; give 1 or more iterations in all")
    config = TrainingConfig.load(options.config) if options.config else TrainingConfig()
    sync = sync_of(plan, RunSettings(sync=options.sync))
    if sync.strategy in SYNCHRONOUS:
        raise PipeplanError(
            f"sync: {sync.strategy} runs all pipelines in step and needs no coordinator; start "
            "them with one torchrun, or use another strategy"
        )
    steps = config.steps if options.steps is None else options.steps
    before = 0 if options.resume is None else Checkpoint.open(options.resume).step
    return work_of(plan, steps - before, sync)


def _require_log(path: Path) -> None:
    """Refuse a log before anything is started: the process that writes it would end at once."""
    try:
        require_file_path(path)
        path.open("ab").close()
        deque(MessageLog(path).new_messages(), maxlen=0)
    except OSError as error:
        raise PipeplanError(
            f"--log: {path}: cannot be written: {error.strerror}; name another file"
        ) from None
    except PipeplanError as error:
        raise PipeplanError(f"--log: {problem}" for problem in error.problems) from None


@contextmanager
def _listening(meeting: Meeting) -> Iterator[None]:
    """A store at this one address; torch's own would listen at all of the machine."""
    try:
        family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
        listener = socket.create_server((meeting.host, meeting.port), family=family)
        store = TCPStore(
            meeting.host,
            meeting.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except socket.gaierror:
        raise PipeplanError(
            f"--listen: {meeting}: no machine is known as {meeting.host!r}; name an address of "
            "this one"
        ) from None
    except (RuntimeError, OSError) as error:
        reason = f"cannot be used ({str(error).splitlines()[0]}); name another address"
        remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, reason)
        raise PipeplanError(f"--listen: {meeting} {remedy}") from None
    yield
    del store


@contextmanager
def _supervised(work: CoordinatorWork, meeting: Meeting, options: _Options) -> Iterator[list[str]]:
    """Keeps it running; yields why it does not any more, if so."""
    store = meeting.connect()
    key_of(store)
    store.set(ABOUT, json.dumps(work.facts()))
    failures: list[str] = []
    supervised = SupervisedCoordinator(
        work, meeting, options.silent_s, failures.append, options.log
    )
    try:
        yield failures
    finally:
        supervised.close()


def _tell_how_to_start(options: _Options, plan: Plan, work: CoordinatorWork) -> None:
    last = work.pipelines - 1
    words = ["torchrun", "--nproc-per-node", str(work.places)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "3"]
    words += ["-m", "executor", options.plan, *leave_words(plan)]
    words += ["--pipeline", "I", "--coordinator", options.listen]
    given = {
        "--steps": options.steps,
        "--config": options.config,
        "--sync": options.sync,
        "--resume": options.resume,
    }
    for option, value in given.items():
        words += [] if value is None else [option, str(value)]
    print(
        f"{work.shares} shares for {work.pipelines} pipelines; start each, I from 0 to {last}:\n"
        f"{shlex.join(words)}",
        flush=True,
    )
    if not os.environ.get(SECRET_VARIABLE):
        print(
            f"Whoever reaches {options.listen} can take part; {SECRET_VARIABLE} in the environment "
            "of this process and of all pipelines keeps others out.",
            flush=True,
        )


def _wait_for_all(store: Store, work: CoordinatorWork) -> None:
    """Wait until all have left, or some seconds have passed."""
    until_s = time.monotonic() + _LAST_WAIT_S
    # Those who were lost may be on their way back, to be told that all is done.
    while store.add(ENDED, 0) < work.pipelines * work.places and time.monotonic() < until_s:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
