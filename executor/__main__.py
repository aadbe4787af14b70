"""``torchrun --nproc-per-node N -m executor plan.json``: train by a plan."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from executor.coordinator.watch import is_in_step, run_rank
from executor.launch.command_line import config_of, parser, run_of
from executor.launch.console import (
    print_error_once,
    print_failure,
    record_for_torchrun,
    say,
    show_log,
)
from executor.launch.rank_options import WrongUsageError
from planner.errors import PipeplanError
from planner.prediction import load_plan
from planner.units import format_bytes

if TYPE_CHECKING:
    from executor.training.loop import StepMetrics
    from planner.plan.plan import Plan


def main() -> int:
    """Run and return the exit status: 0 done, 1 it failed, 2 wrong usage, 128 + n by signal n."""
    rank = int(os.environ.get("RANK", "0"))
    show_log(rank)
    try:
        options = parser().parse_args()
    except WrongUsageError as error:
        print_error_once(error, rank)
        raise SystemExit(2) from None
    return run_rank(_status, options, rank)


def _status(options: argparse.Namespace, rank: int) -> int:
    """Run a rank and return its exit status."""
    try:
        _run(options, rank)
    except SystemExit as error:
        message = getattr(error, "message", "")
        if message and rank == 0:
            say(message)
        if message:
            record_for_torchrun(PipeplanError(message))
        return int(error.code or 0)
    except PipeplanError as error:
        print_error_once(error, rank)
        return 1
    except Exception as error:
        _add_hint(error, options)
        print_failure(error, rank)
        return 1
    return 0


def _run(options: argparse.Namespace, rank: int) -> None:
    from executor.distributed.process_group import device_of_this_process
    from executor.training.beginning import restarts
    from executor.training.loop import StepReport
    from executor.training.training import run_emulation, run_training

    plan = load_plan(options.plan)
    config, run = config_of(options), run_of(options)
    resumes = options.resume is not None or restarts() > 0
    report = StepReport(options.metrics, resumes=resumes) if rank == 0 else None
    if options.emulate:
        history = run_emulation(plan, config.steps, run, config.timeline, report)
    else:
        history = run_training(plan, config, run, report)
    # Pipelines side by side tell themselves what all of them have trained.
    if rank == 0 and is_in_step(options) and history:
        print(_summary(history, f"{plan.world_size} ranks", options.emulate), flush=True)
    if rank == 0 and history:
        if not options.emulate and device_of_this_process(options.device).type == "cpu":
            print(_about_memory(plan), file=sys.stderr, flush=True)
        for path in filter(None, (config.timeline, options.metrics)):
            print(f"wrote {path}", flush=True)


def _summary(history: Sequence[StepMetrics], ranks: str, emulated: bool) -> str:
    if emulated:
        median_s = statistics.median(metrics.step_time_s for metrics in history)
        return (
            f"emulated {len(history)} steps on {ranks}: median {median_s:.3f} s "
            f"(predicted {history[0].predicted_time_s:.3f} s)"
        )
    return (
        f"trained {len(history)} steps on {ranks}: loss "
        f"{history[0].loss:.4f} -> {history[-1].loss:.4f}"
    )


def _about_memory(plan: Plan) -> str:
    """Say why the memory of a step's line is more than the plan's."""
    rows = plan.predicted.devices.items()
    most = max(row.peak_memory_bytes / len(plan.members(name)) for name, row in rows)
    return (
        "note: memory is all that the largest process held, with Python, torch and the data in it; "
        f"the plan counts tensors of training alone, {format_bytes(most)} at most"
    )


def _add_hint(error: Exception, options: argparse.Namespace) -> None:
    """End the traceback of an index out of range with what it may come of on text."""
    if isinstance(error, IndexError) and not options.emulate and config_of(options).data == "text":
        error.add_note(
            "note: --data text has 256 kinds of bytes; if the model or its loss looks them up in "
            "something smaller, give it a larger vocabulary or use --data random"
        )


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # Ctrl-C ends a rank at once, even one that waits inside torch, and without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # No thread that waits for ranks which are no more holds this process, or wakes in its ruins.
    os._exit(status)
