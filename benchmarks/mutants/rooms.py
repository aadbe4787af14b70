"""The rooms whose code is mutated and the tests that have to notice.

Adapt this file when modules or tests move; nothing else names them. A test is worth listing if it
runs the code in its own process within seconds: the selection by covered lines does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """Code to mutate.

    Attributes:
        modules: glob patterns of its files, relative to the repository.
        tests: test files and folders, relative to the repository.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]


TESTS = (
    "tests/costs",
    "tests/replanning/test_machines.py",
    "tests/simulation",
    "tests/solver/test_bounds.py",
    "tests/solver/test_side_by_side.py",
    "tests/verifier",
    "tests/what_if",
    "tests/wiring/test_reductions_and_latencies.py",
)
"""One pool for the rooms that are checked by what is simulated with them."""
VERIFIER_TESTS = (
    "tests/costs",
    "tests/executor/test_issue_order.py",
    "tests/simulation/test_runtime_rules.py",
    "tests/simulation/test_shared_links.py",
    "tests/simulation/test_unequal_microbatches.py",
    "tests/verifier",
)

ROOMS = {
    "verification": Room(("planner/verification/*.py", "planner/prediction.py"), VERIFIER_TESTS),
    "simulation": Room(
        (
            "planner/simulation/simulator.py",
            "planner/simulation/timeline.py",
            "planner/simulation/critical_path.py",
        ),
        TESTS,
    ),
    "costs": Room(("planner/costs/*.py",), TESTS),
}
