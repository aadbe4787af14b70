"""Where the coordinator is met, as people write it."""

from __future__ import annotations

import pytest

from executor.coordinator.store import Meeting
from planner.errors import PipeplanError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("node1:29600", "node1", 29600), ("10.0.0.1:1", "10.0.0.1", 1), ("::1:65535", "::1", 65535)],
)
def test_host_and_port_are_read(text: str, host: str, port: int) -> None:
    meeting = Meeting.parse(text)
    assert (meeting.host, meeting.port) == (host, port)
    assert str(meeting) == text


@pytest.mark.parametrize(
    "text", ["", "node1", ":29600", "node1:", "node1:x", "node1:0", "node1:65536", "node1:-1"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PipeplanError, match="is not HOST:PORT, such as node1:29600"):
        Meeting.parse(text)


def test_where_nobody_listens_one_is_told_to_start_it() -> None:
    with pytest.raises(PipeplanError, match=r"nobody answers at 127.0.0.1:1 .*start it first"):
        Meeting.parse("127.0.0.1:1").connect(timeout_s=0.2)
