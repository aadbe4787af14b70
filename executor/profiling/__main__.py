"""``python -m executor.profiling MODEL``: measure layers on this device, for ``plan --costs``."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.launch.console import print_error, say
from executor.launch.rank_options import add_device_option
from planner.cluster.device_types import cpu_type, gpu_type
from planner.cluster.hardware import GIB
from planner.errors import PipeplanError, print_in_any_encoding
from planner.job import Job, job_with

if TYPE_CHECKING:
    import torch

    from executor.profiling.profile import ProfileRequest

_INTERRUPTED = "interrupted: what was measured is kept; the same command goes on"
_NOT_BEGUN = "interrupted: nothing was measured yet"


def main(words: list[str] | None = None) -> int:
    """Measure what the command line asks for; returns the exit status."""
    print_in_any_encoding()
    options = parser().parse_args(words)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        status, document, line = _profiled(options)
    if options.json:
        print(json.dumps(document, indent=1))
    elif line:
        say(line)
    return status


def _profiled(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """The exit status, what to say of it to programs, and to people on stdout."""
    # Imports torch, which takes seconds that help and wrong usage are told without.
    from executor.profiling.profile import profile

    try:
        request = _request(options)
        costs = profile(request, lambda line: say(line, err=True))
    except PipeplanError as error:
        for problem in error.problems:
            print_error(problem)
        return 1, {"error": list(error.problems)}, ""
    except KeyboardInterrupt:
        told = _INTERRUPTED if Path(options.output).is_file() else _NOT_BEGUN
        say(told, err=True)
        return 130, {"error": [told]}, ""
    fields = costs.model_dump(mode="json", exclude={"kinds", "format"})
    document = {"written": [str(request.output)], **fields, "kinds": len(costs.kinds)}
    return 0, document, f"wrote {request.output}"


def _request(options: argparse.Namespace) -> ProfileRequest:
    from executor.distributed.process_group import device_of_this_process
    from executor.profiling.measure import Patience
    from executor.profiling.profile import ProfileRequest

    job = job_with(Job.load(options.job) if options.job else Job(), options.set or [])
    device = device_of_this_process(options.device)
    if options.threads is not None:
        _set_threads(options.threads, device)
    if not 0 <= options.seconds < float("inf"):
        raise PipeplanError(f"--seconds: {options.seconds}; give 0 or more")
    return ProfileRequest(
        model=options.model,
        job=job,
        sizes=_sizes(options.samples, job),
        device=device,
        device_type=options.type or _device_type(device),
        output=options.output,
        patience=Patience(options.seconds),
    )


def parser() -> argparse.ArgumentParser:
    """Every option with its help."""
    found = argparse.ArgumentParser(
        prog="python -m executor.profiling",
        description="Measure what each distinct layer of a model costs on this device, one layer "
        "at a time; the whole model is never held. Plan with the file: pipeplan plan --costs.",
    )
    found.add_argument("model", help="module:factory, or hf:ClassName, hf:CONFIG.json")
    found.add_argument("--job", metavar="FILE", help="precision, loss, inputs (TOML)")
    found.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="a model argument; may be repeated"
    )
    found.add_argument(
        "--samples",
        metavar="N,N,...",
        help="microbatch sizes (default: the job's, half of it and twice it)",
    )
    add_device_option(found.add_argument)
    found.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    found.add_argument(
        "--type",
        metavar="NAME",
        help="device type in cluster files (default: the preset of this GPU, or CPU-core)",
    )
    found.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="time to measure each layer and size for, at least three rounds (default: 1)",
    )
    found.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("costs.json"),
        metavar="FILE",
        help="costs file to write; an existing one is extended (default: costs.json)",
    )
    found.add_argument(
        "--json", action="store_true", help="one JSON document on stdout: what was written"
    )
    return found


def _set_threads(threads: int, device: torch.device) -> None:
    import torch

    if threads < 1:
        raise PipeplanError(f"--threads: {threads}; give 1 or more")
    if device.type != "cpu":
        raise PipeplanError(
            f"--threads: {threads}; they are of a CPU, and a GPU would be measured; add "
            "--device cpu, or leave them out"
        )
    torch.set_num_threads(threads)


def _sizes(text: str | None, job: Job) -> tuple[int, ...]:
    own = job.samples_per_microbatch
    if text is None:
        return tuple(sorted({max(1, own // 2), own, 2 * own}))
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= 2**20 for part in parts):
        raise PipeplanError(f"--samples: {text!r}; give sizes such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _device_type(device: torch.device) -> str:
    """The name that ``executor.detect`` gives the device in a cluster file."""
    if device.type == "cpu":
        return cpu_type().name
    import torch

    from executor.distributed.machines import hardware_name

    memory_gib = torch.cuda.get_device_properties(device).total_memory / GIB
    return gpu_type(hardware_name(device), memory_gib).name


if __name__ == "__main__":
    sys.exit(main())
