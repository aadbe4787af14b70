"""The log of a rank's waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executor.coordinator import waits
from executor.coordinator.waits import LEAST_S, WaitLog


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(waits, "time", found)
    return found


def test_waits_that_take_long_are_noted_with_whom_they_were_for(
    clock: Clock, tmp_path: Path
) -> None:
    path = tmp_path / "waits.jsonl"
    first, second = WaitLog(path, 3, 1), WaitLog(path, 0, 0)
    with first.waiting("push", 2) as whom:
        clock.now_s += 1.5
        whom.append(0)
    with first.waiting("pull", 2):
        clock.now_s += 0.9 * LEAST_S

    def lose() -> None:
        with second.waiting("loss", 2):
            clock.now_s += 2.0
            raise ConnectionError

    with pytest.raises(ConnectionError):
        lose()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pushed = {"at_s": 100.0, "seconds": 1.5, "pipeline": 3, "place": 1}
    assert rows[0] == {**pushed, "why": "push", "whom": [2, 0], "outcome": "answered"}
    found = [(row["pipeline"], row["why"], row["whom"], row["outcome"]) for row in rows]
    assert found == [(3, "push", [2, 0], "answered"), (0, "loss", [2], "ConnectionError")]


def test_without_a_file_nothing_is_noted(clock: Clock) -> None:
    with WaitLog().waiting("share"):
        clock.now_s += 60.0
