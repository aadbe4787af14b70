"""A pytest session that runs each mutant against the tests that cover it, in forked children.

The session imports the planner and collects the tests once. Then every test runs alone, to see
which lines of the mutated files it covers and what it costs; then every mutant against the tests
that cover its lines, cheapest first, until one fails.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest

from benchmarks.mutants.exchange import exchange, loaded_functions
from benchmarks.mutants.forked import run_forked
from benchmarks.mutants.mutant import Mutant
from benchmarks.mutants.rooms import Room

KILLED, SURVIVED, UNCOVERED, UNCHANGED = "killed", "survived", "not covered", "unchanged"
TEST_CPU_S = 60.0
"""A test that takes longer without a mutant, while its lines are traced, is not used."""
SLOWER = 5
"""Times the CPU time of its tests that a mutant may take, and as many seconds on top."""
PYTEST_OPTIONS = (
    "-q",
    "--disable-warnings",
    "--capture=no",
    "-pno:cacheprovider",
    "-m",
    "extensive or not extensive",
    "-pno:xdist",
    "--timeout=0",  # the limit is one of CPU time
)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Test:
    """A test as it is without a mutant.

    Attributes:
        item: of pytest's collection.
        cpu_s: CPU seconds that it took, with its fixtures, while its lines were traced.
        lines: lines of the mutated files that it ran, by path.
    """

    item: pytest.Item
    cpu_s: float
    lines: Mapping[str, frozenset[int]]

    def covers(self, mutant: Mutant) -> bool:
        """Return whether the test runs lines that the mutant changes."""
        lines = self.lines.get(str(mutant.path), frozenset())
        return not lines.isdisjoint(range(mutant.line, mutant.last_line + 1))

    def is_of(self, room: Room) -> bool:
        """Return whether the test is one of those that a room names."""
        return any(self.item.nodeid.startswith(tests) for tests in room.tests)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        mutant: that was tried.
        result: ``killed``, ``survived``, ``not covered`` or ``unchanged``: its code compiles
            to the same, or cannot be exchanged.
        test: that killed it, empty where it ended the process or none did.
        tests: that cover it.
        tests_run: how many of these were run.
    """

    mutant: Mutant
    result: str
    test: str = ""
    tests: int = 0
    tests_run: int = 0


class MutantSession:
    """The plugin that takes the place of pytest's loop over the tests.

    Args:
        mutants: to try.
        rooms: by the names that mutants have.
        root: of the repository.
        budget_s: CPU seconds of covering tests after which a mutant counts as survived.
        say: is told the progress.
    """

    def __init__(
        self,
        mutants: Sequence[Mutant],
        rooms: Mapping[str, Room],
        root: Path,
        budget_s: float,
        say: Say,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.broken: list[str] = []
        self._mutants = mutants
        self._rooms = rooms
        self._root = root
        self._budget_s = budget_s
        self._say = say
        self._functions: dict[Path, list[FunctionType]] = {}
        self._failed = ""

    def pytest_configure(self) -> None:
        """Have hypothesis stop at the first example that fails."""
        from hypothesis import Phase, settings  # only now, for pytest prepares its import

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", parent=settings(), phases=phases, report_multiple_bugs=False
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test that failed."""
        if report.failed:
            self._failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, then try the mutants."""
        self._functions = _load({mutant.path for mutant in self._mutants}, self._root)
        gc.freeze()
        tests = self._measured(session.items)
        for number, mutant in enumerate(self._mutants, 1):
            room = self._rooms[mutant.room]
            covering = [test for test in tests if test.is_of(room) and test.covers(mutant)]
            outcome = self._tried(mutant, covering)
            self.outcomes.append(outcome)
            place = f"{mutant.path.name}:{mutant.line}"
            self._say(f"{number}/{len(self._mutants)} {place} {outcome.result} {outcome.test}")
        return True

    def _measured(self, items: Sequence[pytest.Item]) -> list[Test]:
        """Return the tests that pass, cheapest first."""
        tests = []
        for number, item in enumerate(items, 1):
            answer = run_forked(partial(self._measure, item), TEST_CPU_S)
            if answer is None or answer["failed"]:
                self.broken.append(item.nodeid)
                continue
            lines = {path: frozenset(lines) for path, lines in answer["lines"].items()}
            tests.append(Test(item, answer["cpu_s"], lines))
            self._say(f"test {number}/{len(items)} {answer['cpu_s']:.2f} s {item.nodeid}")
        return sorted(tests, key=lambda test: (test.cpu_s, test.item.nodeid))

    def _measure(self, item: pytest.Item) -> dict[str, Any]:
        lines: dict[str, set[int]] = {str(path): set() for path in self._functions}
        sys.settrace(_line_tracer(lines))
        begun = time.process_time()
        self._run([item])
        cpu_s = time.process_time() - begun
        sys.settrace(None)
        covered = {path: sorted(numbers) for path, numbers in lines.items()}
        return {"failed": self._failed, "cpu_s": cpu_s, "lines": covered}

    def _tried(self, mutant: Mutant, tests: Sequence[Test]) -> Outcome:
        if not tests:
            return Outcome(mutant, UNCOVERED)
        # The last test may begin just before the budget is spent.
        most_s = min(sum(test.cpu_s for test in tests), self._budget_s + tests[-1].cpu_s)
        items = [test.item for test in tests]
        answer = run_forked(partial(self._try, mutant, items), SLOWER * (1 + most_s))
        if answer is None:
            return Outcome(mutant, KILLED, tests=len(tests))
        return Outcome(mutant, answer["result"], answer["test"], len(tests), answer["tests_run"])

    def _try(self, mutant: Mutant, items: Sequence[pytest.Item]) -> dict[str, Any]:
        try:
            changes = exchange(self._functions[mutant.path], mutant.path, mutant.source)
        except ValueError:  # the free variables of a closure: the fault cannot be put in
            changes = False
        if not changes:
            return {"result": UNCHANGED, "test": "", "tests_run": 0}
        tests_run = self._run(items)
        result = KILLED if self._failed else SURVIVED
        return {"result": result, "test": self._failed, "tests_run": tests_run}

    def _run(self, items: Sequence[pytest.Item]) -> int:
        """Run tests until one fails or the time is up; return how many were run."""
        ends = time.process_time() + self._budget_s
        for number, item in enumerate(items):
            following = items[number + 1] if number + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed or time.process_time() > ends:
                return number + 1
        return len(items)


def run_mutants(
    mutants: Sequence[Mutant], rooms: Mapping[str, Room], root: Path, budget_s: float, say: Say
) -> tuple[list[Outcome], list[str]]:
    """Try mutants against the tests of their rooms.

    Args:
        mutants: to try.
        rooms: by the names that mutants have.
        root: of the repository, which is the working directory.
        budget_s: CPU seconds of covering tests after which a mutant counts as survived.
        say: is told the progress.

    Returns:
        What became of each, and the tests left out since they fail or take long without a mutant.

    Raises:
        RuntimeError: if pytest cannot collect the tests.
    """
    plugin = MutantSession(mutants, rooms, root, budget_s, say)
    tests = sorted({path for mutant in mutants for path in rooms[mutant.room].tests})
    with redirect_stdout(sys.stderr):
        pytest.main([*PYTEST_OPTIONS, *tests], plugins=[plugin])
    if len(plugin.outcomes) != len(mutants):
        raise RuntimeError("pytest ended before every mutant was tried")
    return plugin.outcomes, plugin.broken


def _load(paths: Iterable[Path], root: Path) -> dict[Path, list[FunctionType]]:
    """Import files and return the functions that they define."""
    for path in paths:
        import_module(".".join(path.relative_to(root).with_suffix("").parts))
    return {path: loaded_functions(path) for path in paths}


def _line_tracer(lines: Mapping[str, set[int]]) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that notes the lines run of given files."""

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        lines[frame.f_code.co_filename].add(frame.f_lineno)
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename in lines else None

    return trace_call
