"""Ranks that are started again at one store meet each other, and nobody who is no more."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from launch import torchrun
from torch.distributed import HashStore, Store, TCPStore

from executor.distributed.errors import LostRankError
from executor.distributed.machines import Machine
from executor.distributed.meeting import meet


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connected(server: TCPStore) -> Store:
    return TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))


def start(
    server: TCPStore, ranks: dict[int, float], world_size: int, timeout_s: float = 30.0
) -> dict[int, Store | LostRankError]:
    """What ranks find that come after so many seconds each."""
    found: dict[int, Store | LostRankError] = {}

    def come(rank: int, after_s: float) -> None:
        time.sleep(after_s)
        try:
            store = connected(server)
            mine = Machine(f"host {rank}", "cpu")
            found[rank], machines = meet(store, rank, world_size, mine, timeout_s)
            assert [machine.host for machine in machines] == [
                f"host {n}" for n in range(world_size)
            ]
        except LostRankError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=item) for item in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def share(found: dict[int, Store | LostRankError], word: str) -> None:
    """All of them see what one of them leaves, under the one name."""
    stores = [store for store in found.values() if isinstance(store, Store)]
    assert len(stores) == len(found), found
    stores[0].set("said", word)
    assert {store.get("said").decode() for store in stores} == {word}


@pytest.mark.parametrize("order", [{0: 0.0, 1: 0.2, 2: 0.1}, {0: 0.3, 1: 0.0, 2: 0.0}])
def test_every_attempt_has_keys_of_its_own(server: TCPStore, order: dict[int, float]) -> None:
    for attempt in range(3):
        found = start(server, order, 3)
        assert not any(store.check(["said"]) for store in found.values())
        share(found, str(attempt))


def test_an_attempt_that_never_was_whole_is_forgotten(server: TCPStore) -> None:
    for missing in (0, 1, 2):
        ranks = dict.fromkeys({0, 1, 2} - {missing}, 0.0)
        for error in start(server, ranks, 3, timeout_s=0.3).values():
            assert isinstance(error, LostRankError)
    share(start(server, {0: 0.0, 1: 0.4, 2: 0.2}, 3), "whole")


def test_who_did_not_come_is_named(server: TCPStore) -> None:
    error = start(server, {0: 0.0, 2: 0.0}, 4, timeout_s=0.3)[0]
    assert "ranks 1, 3 did not come within 0 s" in str(error)
    start(server, {1: 0.0, 3: 0.0}, 4, timeout_s=0.1)
    error = start(server, {0: 0.0, 2: 0.0}, 4, timeout_s=0.3)[0]
    assert "ranks 1, 3 did not come" in str(error)


def test_one_alone_waits_for_nobody() -> None:
    store, machines = meet(HashStore(), 0, 1, Machine("a", "cpu"), 1.0)
    assert not store.check(["anything"])
    assert machines == [Machine("a", "cpu")]


@pytest.mark.extensive
def test_ranks_that_torchrun_starts_again_meet_at_its_store() -> None:
    worker = str(Path(__file__).with_name("restarted_worker.py"))
    done = torchrun(2, "--max-restarts", "1", "--monitor-interval", "0.2", worker)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.split("\n")) == ["", "rank 0: 4", "rank 1: 4"]
