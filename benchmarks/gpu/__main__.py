"""``python -m benchmarks.gpu --minutes 5``: what a GPU can show, in order of worth.

Each case runs in processes of its own, so that one that hangs, crashes or fails loses only itself.
The journal and the page are written after every case. The same command with the same folder tries
again what failed or was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.gpu.cases import Case, all_cases
from benchmarks.harness import heading, table
from planner.records.document import write_atomically

CORES_OF_A_LANE, FEWEST_LANES = 3, 2
START_S = 30.0
"""Seconds for the processes of a case to start, in addition to the case's own."""


def main(words: Sequence[str] | None = None) -> int:
    """Run what there is time for; return 1 if a case failed, missed a bar or was not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--short", action="store_true", help="tiny models, on the CPU if need be")
    parser.add_argument(
        "--only", nargs="+", metavar="CASES", help="words of their names: models, parity, memory"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder (default: gpu)")
    options = parser.parse_args(words)
    if not torch.cuda.is_available() and not options.short:
        print("error: torch sees no GPU here; --short rehearses on the CPU")
        return 1
    only = options.only or [""]
    cases = [c for c in all_cases(short=options.short) if any(word in c.key for word in only)]
    if not cases:
        print(f"error: --only {' '.join(only)}: no case has such a word in its name")
        return 1
    run = Run(cases, options.output.resolve(), options.short, 60 * options.minutes)
    run.all()
    left = len(run.left())
    print(f"wrote {run.page}; of {len(cases)} cases {left} failed or were not reached")
    return 1 if left else 0


class Run:
    """One run of the list.

    Args:
        cases: The cases, in order of worth.
        folder: For the journal ``gpu.jsonl`` and the page ``GPU.md``.
        short: Whether the cases are those of the short form.
        seconds: Time from now on.
    """

    def __init__(self, cases: Sequence[Case], folder: Path, short: bool, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.journal, self.page = folder / "gpu.jsonl", folder / "GPU.md"
        self._cases, self._short = cases, short
        self._until_s = time.monotonic() + seconds
        self._kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._noting = threading.Lock()

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the last row of each case by its key; a half-written last line is none."""
        found = {}
        for line in self.journal.read_text().splitlines() if self.journal.exists() else []:
            with suppress(json.JSONDecodeError):
                row = json.loads(line)
                found[row["case"]] = row
        return found

    def left(self) -> list[Case]:
        """Return the cases that failed, missed a bar or were not reached."""
        rows = self.rows()
        return [case for case in self._cases if case.key not in rows or case.faults(rows[case.key])]

    def all(self) -> None:
        """Run what is left: first in several lanes, then the timed cases alone."""
        lanes = max(FEWEST_LANES, (os.cpu_count() or 1) // CORES_OF_A_LANE)
        for is_timed, found in groupby(self.left(), key=lambda case: case.is_timed):
            with ThreadPoolExecutor(1 if is_timed else lanes) as pool:
                list(pool.map(self._one, found))

    def _one(self, case: Case) -> None:
        begin_s = time.monotonic()
        limit_s = min(START_S + case.limit_s, self._until_s - begin_s)
        figures = self.figures(case, limit_s) if limit_s > 0 else {"error": "no time"}
        if "error" in figures and time.monotonic() >= self._until_s:
            return  # Not reached or cut off, which says nothing of the case.
        took_s = round(time.monotonic() - begin_s, 1)
        row = {"case": case.key, "kind": self._kind, "took_s": took_s, **figures}
        with self._noting:
            with self.journal.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._write_page()
        faults = case.faults(row)
        result = f"{'FAILED' if faults else 'ok':6}  {took_s:5.1f} s  {case.key}"
        print("  ".join((result, *faults)), flush=True)

    def _write_page(self) -> None:
        rows = self.rows()
        cells = [_cells(case, rows.get(case.key)) for case in self._cases]
        first = heading("The executor on a GPU", "benchmarks/gpu/run.sh")
        write_atomically(self.page, f"{first}\n{table(('Case', 'Result', 'Figures'), cells)}")

    def figures(self, case: Case, limit_s: float) -> dict[str, Any]:
        """Run a case in processes of its own; return its figures, or its error."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        several = [*torchrun, str(case.ranks)] if case.ranks > 1 else []
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with tempfile.TemporaryDirectory(prefix="pipeplan-gpu-") as name:
            result, errors = Path(name) / "figures.json", Path(name) / "errors.txt"
            words = [case.key, str(result), self._kind, *(["--short"] if self._short else [])]
            with errors.open("w") as file:
                child = subprocess.Popen(
                    [sys.executable, *several, "-m", "benchmarks.gpu.probes", *words],
                    cwd=self.journal.parent,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                    stderr=file,
                )
                with suppress(subprocess.TimeoutExpired):
                    child.wait(limit_s)
            status = child.returncode
            _kill(name)
            child.wait()
            if status == 0 and result.exists():
                return dict(json.loads(result.read_text()))
            ending = "hung" if status is None else f"status {status}"
            return {"error": f"{ending}: {_last_error(errors.read_text())}"}


def _kill(word: str) -> None:
    """Kill all processes with a word in their command line: ranks are no children of ours."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _last_error(text: str) -> str:
    """Return the last line that tells an error, but of ranks that stopped as another failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    own = [line for line in named if "FollowedError" not in line]
    told = (own or named or lines or ["nothing was said"])[-1]
    return re.sub(r"^(\[rank\d+\]: *)+", "", told)[:300]


def _cells(case: Case, row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return [case.key, "not run", ""]
    hidden = ("case", "kind", "error", "cluster")
    shown = {name: f"{x:.3g}" if isinstance(x, float) else x for name, x in row.items()}
    figures = ", ".join(f"{name} {x}" for name, x in shown.items() if name not in hidden)
    cells = [case.key, "; ".join(case.faults(row)) or "ok", figures]
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]


if __name__ == "__main__":
    sys.exit(main())
