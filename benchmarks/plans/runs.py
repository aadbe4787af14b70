"""Runs of builds on problems: a process each, and rows that a later call does not repeat."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import ROOT
from benchmarks.plans.cases import Case
from planner import PipeplanError

WORKER = Path(__file__).with_name("worker.py")
MOST_TIMES, MOST_MORE_S = 40.0, 900.0
"""Times its limit, and seconds more, after which a run is stopped by the clock on the wall."""
_DIGEST = """
import hashlib, pathlib, planner
folder, found = pathlib.Path(planner.__file__).parent, hashlib.sha256()
for path in sorted(folder.rglob("*.py")):
    found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
print(found.hexdigest()[:12])
"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Build:
    """An installed Pipeplan.

    Attributes:
        name: for tables.
        python: its interpreter.
        root: its checkout; None: the installed package is used.
    """

    name: str
    python: Path
    root: Path | None = None

    @classmethod
    def at(cls, place: Path) -> Build:
        """Return the build of an interpreter, or of a checkout with one in ``.venv``.

        Raises:
            PipeplanError: if there is no interpreter.
        """
        root = place if place.is_dir() else None
        python = place / ".venv" / "bin" / "python" if root else place
        if not python.is_file():
            raise PipeplanError(f"--compare {place}: there is no {python}; give a checkout with it")
        return cls("other build", python, root)

    def run(self, words: Sequence[str | Path], limit_s: float = 900.0) -> tuple[int, str]:
        """Run the interpreter; return its exit status and standard output, or its last error."""
        path = {"PYTHONPATH": str(self.root)} if self.root else {}
        try:
            ran = subprocess.run(
                [self.python, "-P", *words],
                env={**os.environ, **path},
                cwd=self.root,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"stopped after {limit_s:.0f} s on the wall"
        return ran.returncode, ran.stdout or ran.stderr[-300:]

    def digest(self) -> str:
        """Return the digest of its planner's code, by which rows are known.

        Raises:
            PipeplanError: if the interpreter cannot import planner.
        """
        status, told = self.run(["-c", _DIGEST])
        if status:
            raise PipeplanError(f"{self.python} cannot import planner: {told}")
        return told.strip()


@dataclass(frozen=True)
class Series:
    """What a column of the page is of: a build, perhaps without parts of its search.

    Attributes:
        build: that runs.
        digest: of the build.
        without: parts of the search that are left out.
    """

    build: Build
    digest: str
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"without {', '.join(self.without)}" if self.without else self.build.name


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Attributes:
        output: folder of rows and plans.
        clock: ``cpu``, ``wall``, or ``work`` for the deterministic mode.
        workers: threads of a search.
    """

    output: Path
    clock: str = "cpu"
    workers: int = 1

    @property
    def rows_file(self) -> Path:
        """The file of rows, a JSON object a line."""
        return self.output / "rows.jsonl"

    def rows(self) -> list[Row]:
        """Return the rows of earlier calls."""
        if not self.rows_file.exists():
            return []
        return [json.loads(line) for line in self.rows_file.read_text().splitlines()]


@dataclass(frozen=True)
class Run:
    """A problem for a series, a limit and a random seed."""

    part: str
    case: Case
    series: Series
    seconds: float
    seed: int
    settings: Settings

    @property
    def key(self) -> Row:
        """What a row is known by."""
        return {
            "part": self.part,
            "problem": self.case.name,
            "build": self.series.digest,
            "without": list(self.series.without),
            "seconds": self.seconds,
            "seed": self.seed,
            "clock": self.settings.clock,
            "workers": self.settings.workers,
        }

    def row(self, judge: Build | None) -> Row:
        """Run it, check the plan with its own build and with the judge, and return the row."""
        limit_s = MOST_TIMES * self.seconds + MOST_MORE_S
        with TemporaryDirectory() as name:
            folder = Path(name)
            plan, task = folder / "plan.json", self._task(folder)
            row = {**self.key, "group": self.case.group, "known_s": self.case.known_s}
            row |= _ask(self.series.build, folder, task, limit_s)
            if plan.exists():
                if "is_proved" not in row:
                    row |= _proved(self.series.build, plan)
                if judge is not None:
                    check = _ask(judge, folder, {**task, "action": "check"}, limit_s)
                    row |= {f"judge_{word}": value for word, value in check.items()}
                self.kept.parent.mkdir(parents=True, exist_ok=True)
                self.kept.write_bytes(gzip.compress(plan.read_bytes(), 6, mtime=0))
        return row

    def _task(self, folder: Path) -> Row:
        """Return what the worker is to do."""
        words = ("without", "seconds", "seed", "clock", "workers")
        return {
            **{word: self.key[word] for word in words},
            "action": "schedule" if self.case.is_schedule else "solve",
            "problem": self.case.make(),
            "plan": str(folder / "plan.json"),
        }

    def warm_up(self) -> None:
        """Run it for a second and forget it, so that what a build compiles once is in its cache.

        One problem of each group is enough: groups differ in the features that are compiled.
        """
        with TemporaryDirectory() as name:
            task = replace(self, seconds=1.0)._task(Path(name))
            _ask(self.series.build, Path(name), task, MOST_MORE_S)

    @property
    def kept(self) -> Path:
        """The file of its plan, compressed, beside the rows."""
        words = [self.part, self.case.name, self.series.name, f"{self.seconds:g}", str(self.seed)]
        name = " ".join(words).replace("/", "-").replace(" ", "_")
        return self.settings.output / "plans" / self.series.digest / f"{name}.json.gz"


def _ask(build: Build, folder: Path, task: Row, limit_s: float) -> Row:
    """Return what the worker prints, or why it printed nothing."""
    path = folder / "task.json"
    path.write_text(json.dumps(task))
    status, told = build.run([WORKER, path], limit_s)
    try:
        found: Row = json.loads(told.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"exit status {status}: {told[-300:]}"}
    return found


def _proved(build: Build, plan: Path) -> Row:
    """Return what ``pipeplan verify --prove`` says of the plan's certificate."""
    status, told = build.run(["-m", "planner.cli", "verify", plan, "--prove"])
    return {"is_proved": status == 0, **({"proof_error": told} if status else {})}


def run_all(runs: Sequence[Run], judges: Sequence[Build], jobs: int) -> Iterator[Row]:
    """Yield the rows of runs, those of earlier calls first, others as they are known.

    Args:
        runs: in the order in which they start.
        judges: builds; a plan is judged by one that did not make it.
        jobs: how many run at a time.
    """
    settings = runs[0].settings
    settings.output.mkdir(parents=True, exist_ok=True)
    rows = (row for row in settings.rows() if _is_result(row))
    known = {_text(_key_of(row, runs[0].key)): row for row in rows}
    yield from (known[_text(run.key)] for run in runs if _text(run.key) in known)

    def one(run: Run) -> Row:
        judge = next((build for build in judges if build != run.series.build), None)
        row = run.row(judge)
        with settings.rows_file.open("a") as file:
            print(json.dumps(row), file=file)
        _say(run, row)
        return row

    missing = [run for run in runs if _text(run.key) not in known]
    for run in {(run.series.build, run.case.group): run for run in missing}.values():
        run.warm_up()
    with ThreadPoolExecutor(jobs) as executor:
        yield from executor.map(one, missing)


def _is_result(row: Row) -> bool:
    """Return whether a search ended: with a plan, or by saying that there is none."""
    return "time_s" in row or str(row.get("error", "")).startswith("InfeasibleError: ")


def _key_of(row: Row, like: Row) -> Row:
    return {word: row.get(word) for word in like}


def _text(key: Row) -> str:
    return json.dumps(key, sort_keys=True)


def _say(run: Run, row: Row) -> None:
    time_s, bound_s = row.get("time_s"), row.get("bound_s")
    what = (
        row.get("error") if time_s is None else f"{time_s * 1e3:.2f} ms, bound {bound_s * 1e3:.2f}"
    )
    words = (run.series.name, f"{run.seconds:g} s", f"seed {run.seed}", run.case.name, what)
    print(*words, f"{row.get('cpu_s', 0):.1f} CPU s", sep="  ", file=sys.stderr, flush=True)


def this_build() -> Build:
    """Return the build of this checkout."""
    return Build("this build", Path(sys.executable), ROOT)
