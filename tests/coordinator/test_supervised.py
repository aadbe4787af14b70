"""The process that decides, where it cannot start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from executor.coordinator.store import Meeting
from executor.coordinator.supervised import SupervisedCoordinator, Work
from planner.sync.strategies import parse_sync


def test_one_that_keeps_ending_before_it_serves_is_given_up_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = Work(2, 1, 8, parse_sync("ad_psgd"), 1)
    said: list[str] = []
    is_said = threading.Event()

    def give_up(why: str) -> None:
        said.append(why)
        is_said.set()

    meeting = Meeting("127.0.0.1", server.port)
    folder_for_a_file = tmp_path
    supervised = SupervisedCoordinator(work, meeting, 1.0, give_up, folder_for_a_file)
    try:
        assert is_said.wait(60)
    finally:
        supervised.close()
    assert "ended 3 times before it served, the last time with status 1" in said[0]
    error = capfd.readouterr().err
    assert f"error: {tmp_path}: cannot be read or written (Is a directory)" in error
    assert "Traceback" not in error
