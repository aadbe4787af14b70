"""``python -m benchmarks.gpu --minutes 45``: all that a machine's GPUs can show, best first.

The page and its journal (JSON lines, beside it) are kept after every case: what a kill leaves can
be read, and the same command goes on with what is left. A case that hangs or fails is noted, and
the next one begins. Without a GPU, ``--short`` runs a part of it on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TextIO

import torch

from benchmarks import ROOT
from benchmarks.gpu.cases import Case, all_cases
from benchmarks.gpu.report import ended_in, running_in, write_page
from benchmarks.gpu.worker import Batch, add_line

START_S = 120.0
"""Seconds until the first case begins, after which processes count as hanging."""
_LOOK_S = 0.1
_FIRST = ("hangs", "backends", "environment", "models", "parity", "strategies")
"""Sections that come before all others that the machine allows."""
_PAGE = Path(__file__).parent.parent / "GPU.md"


def main(words: Sequence[str] | None = None) -> int:
    """Run what there is time for."""
    options = _options(words)
    gpus = torch.cuda.device_count()
    if not gpus and not options.short:
        print("error: torch sees no GPU here; --short tries this command on the CPU")
        return 1
    journal = options.output.with_suffix(".jsonl")
    cases = all_cases(options.short, gpus)
    until_s = time.monotonic() + 60 * options.minutes
    for batch in batches(cases, options.short):
        left = [case for case in batch if case.key not in ended_in(journal)]
        while left and time.monotonic() < until_s:
            _run(left, journal, options.short, gpus, until_s)
            left = [case for case in left if case.key not in ended_in(journal)]
            write_page(options.output, cases, ended_in(journal), _command(options))
    write_page(options.output, cases, ended_in(journal), _command(options))
    print(f"wrote {options.output} and {journal}")
    return 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--short", action="store_true", help="a part, on the CPU if need be")
    parser.add_argument("--output", type=Path, default=_PAGE, help="the page")
    return parser.parse_args(words)


def _command(options: argparse.Namespace) -> str:
    short = " --short" if options.short else ""
    return f"python -m benchmarks.gpu --minutes {options.minutes:g}{short}"


def batches(cases: Sequence[Case], short: bool) -> Iterator[list[Case]]:
    """Yield the cases that one start of processes can run, of as many ranks each.

    A start takes seconds, so that sections of about the same worth go together.
    """
    for _, wave in groupby(cases, key=lambda case: short or case.section in _FIRST):
        by_ranks = sorted(wave, key=lambda case: case.ranks)
        for _, batch in groupby(by_ranks, key=lambda case: case.ranks):
            yield list(batch)


def _run(cases: Sequence[Case], journal: Path, short: bool, gpus: int, until_s: float) -> None:
    """Run cases until they have ended, one has failed, or time is up.

    Whatever began or should have is noted, so that none is tried twice.
    """
    with tempfile.TemporaryDirectory(prefix="pipeplan-gpu-") as name:
        folder = Path(name)
        plans = [_saved_plan(case, folder / f"{k}.json") for k, case in enumerate(cases)]
        kind = "cuda" if gpus else "cpu"
        keys = [case.key for case in cases]
        batch = Batch(keys, plans, str(journal.resolve()), kind, short, gpus)
        told = folder / "batch.json"
        told.write_text(json.dumps(asdict(batch)))
        errors = folder / "errors.txt"
        with errors.open("w") as file:
            reason = watched(_words(cases[0].ranks, told), cases, journal, file, until_s)
        key = running_in(journal) or _first_left(cases, journal)
        if reason is not None and key is not None:
            add_line(journal, {"end": key, "error": f"{reason}: {_last(errors)}"})


def _saved_plan(case: Case, path: Path) -> str | None:
    """Make and write the plan of a case; None if it has none."""
    if case.shape is None:
        return None
    case.shape.plan().save(path)
    return str(path)


def _words(ranks: int, told: Path) -> list[str]:
    worker = ["-m", "benchmarks.gpu.worker", str(told)]
    if ranks == 1:
        return [sys.executable, *worker]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *start, *worker]


def watched(
    words: Sequence[str],
    cases: Sequence[Case],
    journal: Path,
    errors: TextIO,
    until_s: float,
) -> str | None:
    """Run processes; return why they ended before all cases had.

    Args:
        words: of the command, the last one a file in a folder for what they write.
        cases: that they run.
        journal: in which they note what begins and ends.
        errors: for what they say.
        until_s: when time is up, on the monotonic clock.
    """
    limits = {case.key: case.limit_s for case in cases}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        words,
        cwd=Path(words[-1]).parent,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )
    known, since_s = None, time.monotonic()
    try:
        while child.poll() is None:
            time.sleep(_LOOK_S)
            running, now_s = running_in(journal), time.monotonic()
            if running != known:
                known, since_s = running, now_s
            limit_s = START_S if known is None else limits[known]
            if now_s - since_s > limit_s:
                return f"hung for {limit_s:g} s"
            if now_s > until_s:
                return "stopped, as the time was up"
        return None if child.returncode == 0 else f"failed with status {child.returncode}"
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the processes of a start, if any are left."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _first_left(cases: Sequence[Case], journal: Path) -> str | None:
    done = ended_in(journal)
    return next((case.key for case in cases if case.key not in done), None)


def _last(errors: Path) -> str:
    """The last line that tells an error."""
    lines = [line.strip() for line in errors.read_text().splitlines() if line.strip()]
    named = [line for line in lines if "rror" in line]
    return (named or lines or ["nothing was said"])[-1][:300]


if __name__ == "__main__":
    sys.exit(main())
