"""The comparison with torch's pipelining, on a model so small that only its form counts."""

import sys

import pytest
from warm_python import warm_python

from benchmarks.executor.compare_peers import COLUMNS, peers
from benchmarks.executor.peers.cases import Case, Schedule

pytestmark = pytest.mark.extensive


@pytest.fixture(autouse=True)
def _ranks_share_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("PYTHON_EXEC", warm_python())  # What torchrun starts ranks with.


WHOLE: Schedule = "1f1b"
SPLIT: Schedule = "zb-v"
TINY = {"layers": 4, "width": 16, "heads": 2, "sequence_length": 8}


def test_both_runtimes_compute_the_same_in_the_same_order() -> None:
    cases = [Case("gpt", schedule, microbatches=4, arguments=TINY) for schedule in (WHOLE, SPLIT)]
    rows = peers(cases, rounds=1, launches=2)
    assert [row.schedule for row in rows] == [WHOLE, SPLIT]
    for row in rows:
        assert row.worst_error < 1e-5
        assert row.worst_loss_error < 1e-5
        assert len(row.step_time.values) == len(row.core_time.values) == 2
        assert row.step_time.median > 0
        assert row.core_time.median > 0
        assert len(row.memory_ratios) == len(row.orders) == row.ranks == 2
        assert row.memory_ratio <= 1.0
        assert len(row.cells) == len(COLUMNS)
        is_split = any("W" in order for order in row.orders)
        assert is_split == (row.schedule == SPLIT)
