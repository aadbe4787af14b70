"""Measure how many small faults in the code of rooms their tests notice.

Usage: python -m benchmarks.mutants [--rooms NAMES] [--sample N] [--seed S] [--budget SECONDS]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from contextlib import redirect_stdout

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # a forked child has one thread alone

import pytest  # noqa: E402

from benchmarks import ROOT  # noqa: E402
from benchmarks.harness import heading, table  # noqa: E402
from benchmarks.mutants import session  # noqa: E402
from benchmarks.mutants.mutations import sample  # noqa: E402

ROOMS = {
    "verification": (
        ("planner/verification/*.py", "planner/prediction.py"),
        ("tests/costs", "tests/executor/test_issue_order.py", "tests/simulation", "tests/verifier"),
    ),
    "simulation": (
        ("planner/simulation/simulator.py", "planner/simulation/timeline.py"),
        ("tests/costs", "tests/simulation", "tests/verifier", "tests/what_if"),
    ),
    "costs": (
        ("planner/costs/*.py",),
        ("tests/costs", "tests/simulation", "tests/verifier", "tests/what_if"),
    ),
}
"""Files to mutate and the tests that have to notice; adapt it when modules or tests move."""
PYTEST_OPTIONS = ("-q", "--disable-warnings", "--capture=no", "-pno:cacheprovider", "-pno:xdist")
WIDEST = 70
"""Characters of code shown."""


def main() -> None:
    """Mutate a sample of each room, run its tests and print a Markdown report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--sample", type=int, default=100, help="mutants of a room (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--budget", type=float, default=10.0, help="CPU seconds of tests a mutant")
    options = parser.parse_args()
    print(heading("Mutation testing", " ".join(["python -m benchmarks.mutants", *sys.argv[1:]])))
    for room in options.rooms:
        print(_room(room, options))


def _room(room: str, options: argparse.Namespace) -> str:
    """Return the share of mutants killed, and those that were not.

    Raises:
        RuntimeError: if a file of the room is missing, or pytest ends before all were tried.
    """
    patterns, tests = ROOMS[room]
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    if not all(any(ROOT.glob(pattern)) for pattern in (*patterns, *tests)):
        raise RuntimeError(f"{room}: a file has moved; benchmarks/mutants/__main__.py names it")
    mutants = sample(paths, options.sample, options.seed)
    plugin = session.MutantSession(mutants, ROOT, options.budget)
    with redirect_stdout(sys.stderr):
        pytest.main([*PYTEST_OPTIONS, "--timeout=0", "-m", "", *tests], plugins=[plugin])
    if len(plugin.results) != len(mutants):
        raise RuntimeError("pytest ended before every mutant was tried")
    found = list(zip(mutants, plugin.results, strict=True))
    counts = Counter(plugin.results)
    tried = len(found) - counts[session.UNCHANGED]
    left = [
        (f"{mutant.path.name}:{mutant.line}", _code(mutant.before), _code(mutant.after), result)
        for mutant, result in found
        if result in (session.SURVIVED, session.UNCOVERED)
    ]
    killed = f"{100 * counts[session.KILLED] / max(tried, 1):.1f} % of {tried} mutants killed"
    return f"## {room}\n\n{killed}.\n\n{table(('not killed', 'code', 'mutant', 'why'), left)}"


def _code(text: str) -> str:
    """Return code in one table cell."""
    return "`" + " ".join(text.split())[:WIDEST].replace("|", "\\|") + "`"


if __name__ == "__main__":
    main()
