"""Every share is committed exactly once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PipeplanError
from planner.sync.ledger import WorkUnitLedger

workers = st.integers(0, 3)
actions = st.lists(st.tuples(st.sampled_from("tttccg"), workers, st.integers(0, 9)), max_size=80)


def play(ledger: WorkUnitLedger, steps: list[tuple[str, int, int]]) -> Counter[int]:
    """Any sequence of calls; how often each share was committed."""
    committed = Counter[int]()
    step = Counter[int]()
    held: dict[int, list[int]] = {}
    for action, worker, number in steps:
        if action == "t":
            step[worker] += number > 2  # Else the last message is repeated.
            share = ledger.take(worker, step[worker])
            assert share == ledger.take(worker, step[worker])
            if share is not None and share not in held.setdefault(worker, []):
                held[worker].append(share)
        elif action == "c" and held.get(worker):
            share = held[worker][number % len(held[worker])]
            before = ledger.committed
            assert ledger.commit(worker, share) == ledger.commit(worker, share)
            committed[share] += ledger.committed - before
        elif action == "g":
            ledger.give_back(worker)
    return committed


@given(st.integers(0, 12), actions)
def test_every_share_is_committed_once(total: int, steps: list[tuple[str, int, int]]) -> None:
    ledger = WorkUnitLedger(total)
    committed = play(ledger, steps)
    for worker in range(4):
        ledger.give_back(worker)
    while (share := ledger.take(9, sum(committed.values()))) is not None:
        assert ledger.commit(9, share)
        committed[share] += 1
    report = ledger.report()
    assert sorted(committed.elements()) == list(range(total))
    assert (report["committed"], report["remaining"]) == (sum(committed.values()), 0)
    rows = report["workers"].values()
    assert all(row["taken"] == row["committed"] + row["lost"] for row in rows)
    assert report["repeated"] == sum(row["repeated"] for row in rows)


def test_a_dead_workers_shares_go_to_others_first() -> None:
    ledger = WorkUnitLedger(5)
    assert [ledger.take(0, 1), ledger.take(1, 1), ledger.take(0, 2)] == [0, 1, 2]
    assert ledger.commit(0, 0)
    assert ledger.give_back(0) == (2,)
    assert [ledger.take(1, 2), ledger.take(1, 3)] == [2, 3]
    report = ledger.report()
    assert report == {
        "total": 5,
        "committed": 1,
        "remaining": 4,
        "repeated": 1,
        "workers": {
            0: {"taken": 2, "committed": 1, "repeated": 0, "lost": 1},
            1: {"taken": 3, "committed": 0, "repeated": 1, "lost": 0},
        },
    }


def test_a_commit_after_the_share_went_to_another_does_not_count() -> None:
    ledger = WorkUnitLedger(1)
    ledger.take(0, 1)
    ledger.give_back(0)
    assert not ledger.commit(0, 0)
    assert ledger.take(1, 1) == 0
    assert not ledger.commit(0, 0)
    assert ledger.commit(1, 0)
    assert not ledger.commit(0, 0)
    assert ledger.commit(1, 0)


def test_a_worker_that_returns_counts_its_steps_anew() -> None:
    ledger = WorkUnitLedger(3)
    assert ledger.take(0, 1) == 0
    ledger.commit(0, 0)
    ledger.give_back(0)
    assert ledger.take(0, 1) == 1


def test_a_negative_number_of_shares_is_refused() -> None:
    with pytest.raises(PipeplanError, match="total: -1 work units"):
        WorkUnitLedger(-1)
