"""``python -m executor.coordinator PLAN --listen HOST:PORT``: for pipelines started one by one.

Each pipeline is then a torchrun job of its own, so that one that dies ends no other:
``torchrun --nproc-per-node P -m executor PLAN --pipeline I --coordinator HOST:PORT``.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from executor.checkpoint import Checkpoint
from executor.config import TrainingConfig
from executor.coordinator.store import ABOUT, ENDED, REPORT, Meeting
from executor.coordinator.supervised import SupervisedCoordinator, Work, work_of
from executor.run import Run, sync_of
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.sync.strategies import TOGETHER
from planner.verifier import require_valid

SILENT_S = 1.0
_POLL_S = 0.2
_LAST_WAIT_S = 30.0


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
    try:
        options = _options()
        work = _work(options)
        meeting = Meeting.parse(options.listen)
        with _listening(meeting), _supervised(work, meeting, options):
            _tell_how_to_start(options, work)
            store = meeting.connect()
            _print_report(_report(store))
            _wait_for_all(store, work)
    except PipeplanError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _options() -> _Options:
    parser = argparse.ArgumentParser(prog="python -m executor.coordinator", description=__doc__)
    parser.add_argument("plan", help="plan file whose pipelines run side by side")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="in a private network")
    parser.add_argument("--config", metavar="FILE", help="training file (TOML)")
    parser.add_argument("--steps", type=int, help="iterations of the plan in all")
    parser.add_argument("--sync", metavar="NAME[:OPTION=VALUE,...]", help="over the plan's")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="as the pipelines do")
    parser.add_argument(
        "--silent",
        dest="silent_s",
        type=float,
        default=SILENT_S,
        metavar="SECONDS",
        help="a pipeline that gives no sign of life for so long is lost (default 1)",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep all messages there")
    return _Options(**vars(parser.parse_args()))


def _work(options: _Options) -> Work:
    plan = Plan.load(options.plan)
    require_valid(plan)
    config = TrainingConfig.load(options.config) if options.config else TrainingConfig()
    sync = sync_of(plan, Run(sync=options.sync))
    if sync.strategy in TOGETHER:
        raise PipeplanError(
            f"sync: {sync.strategy} runs all pipelines in step and needs no coordinator; start "
            "them with one torchrun, or use another strategy"
        )
    steps = config.steps if options.steps is None else options.steps
    before = 0 if options.resume is None else Checkpoint.open(options.resume).step
    return work_of(plan, steps - before, sync)


@contextmanager
def _listening(meeting: Meeting) -> Iterator[None]:
    """A store at this one address; torch's own would listen at all of the machine."""
    try:
        listener = socket.create_server((meeting.host, meeting.port))
        store = TCPStore(
            meeting.host,
            meeting.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise PipeplanError(f"--listen: {meeting} cannot be used ({reason})") from None
    yield
    del store


@contextmanager
def _supervised(work: Work, meeting: Meeting, options: _Options) -> Iterator[None]:
    meeting.connect().set(ABOUT, json.dumps(work.facts()))
    supervised = SupervisedCoordinator(work, meeting, options.silent_s, options.log, spare=True)
    try:
        yield
    finally:
        supervised.close()


def _tell_how_to_start(options: _Options, work: Work) -> None:
    last = work.pipelines - 1
    given = [f"--steps {options.steps}"] if options.steps is not None else []
    given += [f"--config {options.config}"] if options.config else []
    given += [f"--sync {options.sync}"] if options.sync else []
    given += [f"--resume {options.resume}"] if options.resume else []
    print(
        f"{work.shares} shares for {work.pipelines} pipelines; start each, I from 0 to {last}:\n"
        f"torchrun --nproc-per-node {work.places} --rdzv-backend c10d --rdzv-endpoint "
        f"localhost:0 --max-restarts 3 -m executor {options.plan} --pipeline I --coordinator "
        f"{options.listen} {' '.join(given)}",
        flush=True,
    )


def _report(store: Store) -> dict[str, Any]:
    """Once all shares are done."""
    while not store.check([REPORT]):
        time.sleep(_POLL_S)
    report: dict[str, Any] = json.loads(store.get(REPORT))
    return report


def _wait_for_all(store: Store, work: Work) -> None:
    """Until all have left, or some seconds have passed."""
    until_s = time.monotonic() + _LAST_WAIT_S
    # Those who were lost may be on their way back, to be told that all is done.
    while store.add(ENDED, 0) < work.pipelines * work.places and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def _print_report(report: dict[str, Any]) -> None:
    from executor.coordinator.report import report_lines

    for line in report_lines(report):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
