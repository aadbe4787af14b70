"""A rank's line to the coordinator, where the store ends."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import TCPStore

from executor.coordinator.line import Channel
from executor.coordinator.messages import Hello
from executor.coordinator.store import REQUESTS, Meeting
from planner.errors import PipeplanError


def test_a_rank_that_waits_is_told_that_the_store_is_gone() -> None:
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    meeting = Meeting("127.0.0.1", servers[0].port)
    other = meeting.connect()
    line = Channel(meeting.connect(), "answers", str(meeting), b"key")

    def end_once_asked() -> None:
        other.queue_pop(REQUESTS)
        servers.clear()

    thread = threading.Thread(target=end_once_asked)
    thread.start()
    hello = Hello(pipeline=0, place=0, incarnation_id="a")
    with pytest.raises(PipeplanError, match=f"the store at {meeting} is gone: .*--resume FOLDER"):
        line.asked(hello, lambda body: body["kind"] == "welcome")
    thread.join()
