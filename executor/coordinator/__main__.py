"""``python -m executor.coordinator PLAN --listen HOST:PORT``: for pipelines started one by one.

Each pipeline is then a torchrun job of its own, which may run on machines of its own:
``torchrun --nproc-per-node P -m executor PLAN --pipeline I --coordinator HOST:PORT``.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.checkpoint.read import Checkpoint
from executor.coordinator.notes import report_lines, stranded
from executor.coordinator.server import ServerThread, Serving
from executor.coordinator.wire import SECRET_VARIABLE, Endpoint
from executor.coordinator.work import CoordinatorWork
from executor.launch.config import TrainingConfig
from executor.launch.console import print_error, say, show_log
from executor.launch.rank_options import DEFAULT_SILENT_S, LEAST_SILENT_S, require_seconds
from executor.launch.run import RunSettings, sync_of
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.run_command import leave_words
from planner.prediction import load_plan
from planner.records.document import require_file_path
from planner.sync.strategies import SYNCHRONOUS
from planner.verification import require_valid

_LAST_WAIT_S = 30.0
_MOST_S = 1e8
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
    """Serve until all work units are done; return the exit status."""
    show_log()
    try:
        return _serve(_Options(**vars(parser().parse_args())))
    except PipeplanError as error:
        for problem in error.problems:
            print_error(problem)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(options: _Options) -> int:
    require_seconds(options.silent_s, "--silent", LEAST_SILENT_S, DEFAULT_SILENT_S)
    endpoint = Endpoint.parse(options.listen, "--listen")
    plan = load_plan(options.plan)
    work = _work(options, plan)
    if options.log is not None:
        _require_log(options.log)
    listener, store = _listening(endpoint), _store(endpoint.host)
    serving = Serving(work.facts(), options.silent_s, store.port, _LAST_WAIT_S)
    with listener:
        server = ServerThread(listener, serving, options.log)
        _print_how_to_start(options, plan, work)
        try:
            server.wait(_MOST_S)
        except KeyboardInterrupt:
            print(
                f"interrupted: {server.done} of {work.shares} work units are done; the pipelines "
                "end too, as they cannot go on without this process",
                file=sys.stderr,
                flush=True,
            )
            return 130
    if server.report is None:
        return 1
    if server.report["remaining"]:
        print_error(stranded(server.report))
        return 1
    for line in report_lines(server.report):
        say(line)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of every option, with its help."""
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
    return CoordinatorWork.of_plan(plan, steps - before, sync)


def _require_log(path: Path) -> None:
    """Refuse a log that cannot be written."""
    try:
        require_file_path(path)
        path.open("ab").close()
    except OSError as error:
        raise PipeplanError(
            f"--log: {path}: cannot be written: {error.strerror}; name another file"
        ) from None
    except PipeplanError as error:
        raise PipeplanError(f"--log: {problem}" for problem in error.problems) from None


def _listening(endpoint: Endpoint) -> socket.socket:
    """Return a socket that listens at this one address."""
    try:
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        return socket.create_server((endpoint.host, endpoint.port), family=family, backlog=1024)
    except socket.gaierror:
        raise PipeplanError(
            f"--listen: {endpoint}: no machine is known as {endpoint.host!r}; name an address of "
            "this one"
        ) from None
    except OSError as error:
        reason = f"cannot be used ({error.strerror}); name another address"
        raise PipeplanError(
            f"--listen: {endpoint} {_REMEDIES.get(error.errno or 0, reason)}"
        ) from None


def _store(host: str) -> TCPStore:
    """Return a store at a free port of this address, where pipelines make process groups."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _print_how_to_start(options: _Options, plan: Plan, work: CoordinatorWork) -> None:
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
        f"{work.shares} shares for {work.pipelines} pipelines; start each, I from 0 to "
        f"{work.pipelines - 1}:\n{shlex.join(words)}",
        flush=True,
    )
    if not os.environ.get(SECRET_VARIABLE):
        print(
            f"Whoever reaches {options.listen} can take part; {SECRET_VARIABLE} in the environment "
            "of this process and of all pipelines keeps others out.",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
