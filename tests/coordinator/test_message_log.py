"""The coordinator's log: what is read, what is cut off, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.coordinator.log import MessageLog
from executor.coordinator.messages import Hello, Message, Take
from planner.errors import PipeplanError

HELLO = Hello(pipeline=0, place=0, incarnation_id="a")
TAKES = [Take(pipeline=0, place=0, incarnation_id="a", step=step) for step in (1, 2, 3)]


def written(path: Path, messages: list[Message]) -> MessageLog:
    log = MessageLog(path)
    list(log.new_messages())
    log.open()
    for at_s, message in enumerate(messages):
        log.append(message, at_s)
    return log


def read(path: Path) -> list[Message]:
    return [message for message, _ in MessageLog(path).new_messages()]


def test_messages_come_back_in_order_with_their_times(tmp_path: Path) -> None:
    written(tmp_path / "log", [HELLO, *TAKES])
    found = list(MessageLog(tmp_path / "log").new_messages())
    assert found == [(message, float(k)) for k, message in enumerate([HELLO, *TAKES])]


def test_a_file_that_does_not_exist_is_an_empty_log(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_an_unfinished_last_line_is_cut_off_by_who_goes_on(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "log"
    written(path, [HELLO, TAKES[0]])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + kept])
    assert read(path) == [HELLO]
    written(path, [TAKES[1]])
    assert read(path) == [HELLO, TAKES[1]]


def test_who_follows_reads_what_is_new_and_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer, follower = written(path, [HELLO]), MessageLog(path)
    assert [m for m, _ in follower.new_messages()] == [HELLO]
    assert list(follower.new_messages()) == []
    writer.append(TAKES[0], 1.0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert list(follower.new_messages()) == []
    path.write_bytes(whole)
    assert [m for m, _ in follower.new_messages()] == [TAKES[0]]
    writer.append(TAKES[1], 2.0)
    follower.open()
    assert path.read_bytes() == whole


CORRUPT = ["", "nonsense", "[1]", '[1, "{}"]', '["x", "{}"]', '{"a": 1}', "[1, 2]", "[" * 9999]


@pytest.mark.parametrize("line", CORRUPT)
def test_a_corrupt_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log"
    written(path, [HELLO, TAKES[0]])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[1], ""]))
    with pytest.raises(PipeplanError, match=r"log: line 2 is no message; name another --log file"):
        read(path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe\n")
    with pytest.raises(PipeplanError, match="line 1"):
        read(tmp_path / "log")
