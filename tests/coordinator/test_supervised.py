"""The process that decides, where it cannot start, or stands still."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from executor.coordinator.store import COORDINATOR_BEATS, Meeting
from executor.coordinator.supervised import CoordinatorWork, SupervisedCoordinator
from planner.sync.strategies import parse_sync


@pytest.mark.extensive
def test_one_that_keeps_ending_before_it_serves_is_given_up_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = CoordinatorWork(2, 1, 8, parse_sync("ad_psgd"), 1)
    said: list[str] = []
    is_said = threading.Event()

    def give_up(why: str) -> None:
        said.append(why)
        is_said.set()

    meeting = Meeting("127.0.0.1", server.port)
    folder_for_a_file = tmp_path
    supervised = SupervisedCoordinator(work, meeting, 1.0, give_up, folder_for_a_file)
    try:
        assert is_said.wait(1000)
    finally:
        supervised.close()
    assert "ended 3 times before it served, the last time with status 1" in said[0]
    error = capfd.readouterr().err
    assert f"error: {tmp_path}: cannot be read or written (Is a directory)" in error
    assert "Traceback" not in error


@pytest.mark.extensive
def test_one_that_stands_still_is_ended_and_another_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting("127.0.0.1", server.port)
    store = meeting.connect()
    work = CoordinatorWork(2, 1, 8, parse_sync("ad_psgd"), 1)
    said: list[str] = []
    supervised = SupervisedCoordinator(work, meeting, 1.0, said.append)
    try:
        await_(lambda: store.add(COORDINATOR_BEATS, 0) > 0)
        stopped = supervised.pid
        os.kill(stopped, signal.SIGSTOP)
        await_(lambda: supervised.pid != stopped)
        beats = store.add(COORDINATOR_BEATS, 0)
        await_(lambda: store.add(COORDINATOR_BEATS, 0) > beats)
        assert not is_running(stopped)
    finally:
        supervised.close()
    assert not said
    assert "the coordinator gave no sign of life for 1 s; its process is ended" in caplog.messages


def test_closing_ends_one_that_stands_still() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting("127.0.0.1", server.port)
    work = CoordinatorWork(2, 1, 8, parse_sync("ad_psgd"), 1)
    supervised = SupervisedCoordinator(work, meeting, 60.0, lambda why: None)
    os.kill(supervised.pid, signal.SIGSTOP)
    supervised.close()
    assert not is_running(supervised.pid)


def test_ctrl_c_does_not_end_one_that_still_imports_torch() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = (meeting := Meeting("127.0.0.1", server.port)).connect()
    work = CoordinatorWork(2, 1, 8, parse_sync("ad_psgd"), 1)
    supervised = SupervisedCoordinator(work, meeting, 60.0, lambda why: None)
    try:
        first = supervised.pid
        os.kill(first, signal.SIGINT)  # At once, before it can have set a handler.
        await_(lambda: store.add(COORDINATOR_BEATS, 0) > 0)
        assert supervised.pid == first
    finally:
        supervised.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def await_(is_so: Callable[[], bool]) -> None:
    """Until something is so; the test's time limit ends one that waits for ever."""
    while not is_so():
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether there is such a process that has been waited for by nobody yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
