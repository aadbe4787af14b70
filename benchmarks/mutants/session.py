"""A pytest session that runs each mutant against the tests that cover it, in forked children.

The session imports the code and collects the tests once. Then every test runs alone, to see which
lines of the mutated files it covers and what it costs; then every mutant against the tests that
cover its lines, cheapest first, until one fails.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.harness import tell
from benchmarks.mutants.mutations import Mutant, exchange, loaded_functions

KILLED, SURVIVED, UNCOVERED, UNCHANGED = "killed", "survived", "not covered", "unchanged"
TEST_CPU_S = 60.0
"""A test that takes longer without a mutant, while its lines are traced, is not used."""
SLOWER = 5
"""Times the CPU time of its tests that a mutant may take, and as many seconds on top."""
DATA_BYTES, WALL_TO_CPU = 4 * 2**30, 30
"""Memory that a child may allocate, and wall time for a second of CPU time on a busy machine."""


class MutantSession:
    """The plugin that takes the place of pytest's loop over the tests.

    Args:
        mutants: to try.
        root: of the repository.
        budget_s: CPU seconds of covering tests after which a mutant counts as survived.
    """

    def __init__(self, mutants: Sequence[Mutant], root: Path, budget_s: float) -> None:
        self.results: list[str] = []
        self._mutants, self._root, self._budget_s = mutants, root, budget_s
        self._functions: dict[Path, list[Any]] = {}
        self._failed = ""

    def pytest_configure(self) -> None:
        """Have hypothesis stop at the first example that fails."""
        from hypothesis import Phase, settings  # only now, for pytest prepares its import

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", phases=phases, report_multiple_bugs=False)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test that failed."""
        if report.failed:
            self._failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests, then try the mutants."""
        for path in {mutant.path for mutant in self._mutants}:
            import_module(".".join(path.relative_to(self._root).with_suffix("").parts))
            self._functions[path] = loaded_functions(path)
        gc.freeze()
        measured = [
            (item, _forked(partial(self._measure, item), TEST_CPU_S)) for item in session.items
        ]
        tests = [(found["cpu_s"], item, found["lines"]) for item, found in measured if found]
        tests.sort(key=lambda test: (test[0], test[1].nodeid))
        for mutant in self._mutants:
            changed = {*range(mutant.line, mutant.last_line + 1)}
            covering = [t for t in tests if not changed.isdisjoint(t[2].get(str(mutant.path), ()))]
            self.results.append(self._tried(mutant, covering))
            tell(f"{mutant.path.name}:{mutant.line} {self.results[-1]}")
        return True

    def _measure(self, item: pytest.Item) -> dict[str, Any] | None:
        """Return CPU seconds and the lines that a test runs by path; None if it fails."""
        lines: dict[str, set[int]] = {str(path): set() for path in self._functions}
        sys.settrace(_line_tracer(lines))
        begin_s = time.process_time()
        self._run([item])
        cpu_s = time.process_time() - begin_s
        sys.settrace(None)
        covered = {path: sorted(numbers) for path, numbers in lines.items()}
        return None if self._failed else {"cpu_s": cpu_s, "lines": covered}

    def _tried(self, mutant: Mutant, tests: Sequence[tuple[float, pytest.Item, Any]]) -> str:
        if not tests:
            return UNCOVERED
        # The last test may begin just before the budget is spent.
        most_s = min(sum(test[0] for test in tests), self._budget_s + tests[-1][0])
        work = partial(self._try, mutant, [item for _, item, _ in tests])
        return _forked(work, SLOWER * (1 + most_s)) or KILLED

    def _try(self, mutant: Mutant, items: Sequence[pytest.Item]) -> str:
        try:
            changes = exchange(self._functions[mutant.path], mutant)
        except ValueError:  # the free variables of a closure: the fault cannot be put in
            changes = False
        if not changes:
            return UNCHANGED
        self._run(items)
        return KILLED if self._failed else SURVIVED

    def _run(self, items: Sequence[pytest.Item]) -> None:
        """Run tests until one fails or the time is up."""
        ends_s = time.process_time() + self._budget_s
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed or time.process_time() > ends_s:
                return


def _line_tracer(lines: Mapping[str, set[int]]) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that notes the lines run of given files."""

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        lines[frame.f_code.co_filename].add(frame.f_lineno)
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename in lines else None

    return trace_call


def _forked(work: Callable[[], Any], cpu_s: float) -> Any:
    """Do work in a child of this process; return its result, None if the child died of it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            seconds = int(cpu_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            with os.fdopen(writer, "w") as answer:
                json.dump(work(), answer)
        finally:
            os._exit(0)
    os.close(writer)
    chunks: list[bytes] = []
    with os.fdopen(reader, "rb", buffering=0) as answer:
        while select.select([answer], [], [], cpu_s * WALL_TO_CPU)[0]:
            chunk = answer.read(1 << 16)
            chunks.append(chunk)
            if not chunk:
                break
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it has no group of its own yet, or is a zombie
    os.waitpid(child, 0)
    text = b"".join(chunks)
    return json.loads(text) if text and not chunks[-1] else None
