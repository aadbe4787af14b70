"""Settings for all tests; this folder itself is importable: ``from builders import …``."""

import gc
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The model zoo is not installed, and folders here bear the names of packages there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Tests run side by side: threads of one that wait for each other would take the others' cores. And
# threads add up in no fixed order, where some results are compared bit by bit.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell lets background jobs ignore Ctrl-C, and their children too: tests send it to some.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "quick",
    deadline=None,
    derandomize=True,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make test` leaves two thirds of the examples to `make test-all`, and the extensive tier has all
# of its own.
settings.register_profile("full", parent=settings.get_profile("quick"), max_examples=45)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=1000)
settings.register_profile(
    "soak",
    parent=settings.get_profile("thorough"),
    derandomize=False,
    print_blob=True,
    max_examples=int(os.environ.get("PIPEPLAN_SOAK_EXAMPLES", "10000")),
    database=None,
)
settings.register_profile(
    "exploring", parent=settings.get_profile("thorough"), derandomize=False, print_blob=True
)
settings.load_profile("quick")


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_searched() -> None:
    """Modules and caches of millions of objects cost a third of the time in garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which a tier has no test: importing all takes twenty seconds a process."""
    tier = config.getoption("markexpr")
    if collection_path.suffix != ".py" or tier not in ("extensive", "not extensive"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if tier == "extensive":  # ``seeds`` of tiny_problems marks what it returns.
        return None if "extensive" in text or "seeds(" in text else True
    return True if re.search(r"^pytestmark = .*\bextensive\b", text, re.MULTILINE) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also what takes minutes")
