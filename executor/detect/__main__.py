"""``python -m executor.detect``, also under torchrun: a cluster file from what is measured."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from executor.detect.interrupt import Interrupt
from executor.detect.options import MeasurementOptions, parse_options
from executor.launch.console import print_error, print_error_once, print_failure
from executor.launch.rank_options import WrongUsageError
from planner.errors import PipeplanError, print_in_any_encoding

MODULE = "executor.detect"


def main() -> int:
    """Measure and return the exit status: 0 done, 1 it failed, 2 wrong usage, 130 interrupted."""
    print_in_any_encoding()
    if "RANK" not in os.environ:
        _start_ranks(sys.argv[1:])
    rank = int(os.environ["RANK"])
    try:
        options = parse_options()
    except WrongUsageError as error:
        print_error_once(error, rank)
        return 2
    interrupt = Interrupt() if rank == 0 else None
    if rank > 0 and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # Ctrl-C ends the others at once, even if they wait inside torch, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _measure(options, rank, interrupt)
    except Exception as error:
        if interrupt is not None:
            interrupt.give_way()
        if isinstance(error, PipeplanError):
            print_error_once(error, rank)
        else:
            print_failure(error, rank)
        return 1
    return 0


def _start_ranks(words: Sequence[str]) -> NoReturn:
    """Be torchrun for the ranks of this machine; what one process can refuse is refused."""
    options = parse_options(words)
    try:
        ranks = _checked_ranks(options)
    except PipeplanError as error:
        for problem in error.problems:
            print_error(problem)
        sys.exit(1)
    # Ranks that share cores compute by one thread each, as in training.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(_torchrun(["--nproc-per-node", str(ranks), "-m", MODULE, *words]))


def _torchrun(words: Sequence[str]) -> int:
    """Run torchrun within this process; returns the status of the rank that failed first.

    What ranks say is enough: torchrun alone would add a traceback of its own.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(words)))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print_error(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}")
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _checked_ranks(options: MeasurementOptions) -> int:
    from executor.distributed.process_group import device_of_this_process, require_backend
    from planner.records.document import require_file_path

    require_file_path(options.output)
    device = device_of_this_process(options.device)
    require_backend(options.backend, device)
    ranks = options.ranks or _devices_here(device.type)
    options.require_ranks(ranks)
    return ranks


def _devices_here(kind: str) -> int:
    if kind == "cuda":
        import torch

        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0))


def _measure(options: MeasurementOptions, rank: int, interrupt: Interrupt | None) -> None:
    from planner.records.document import require_file_path

    if rank == 0:
        require_file_path(options.output)
    from executor.detect.run import measure

    measure(options, interrupt)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # No thread that waits for ranks which are no more holds this process.
    os._exit(status)
