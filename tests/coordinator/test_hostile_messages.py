"""No sequence of messages ends a coordinator, and its log brings it back as it was."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_coordinator import STRATEGIES, coordinator
from torch.distributed import DistError

from executor.coordinator.log import MessageLog
from executor.coordinator.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Hello,
    Message,
    write_message,
)
from executor.coordinator.secret import SECRET_VARIABLE, key_of, sealed, unsealed
from executor.coordinator.serve import Service
from executor.coordinator.state import Coordinator
from executor.coordinator.store import REQUESTS
from planner.errors import PipeplanError

PIPELINES, PLACES = 2, 2
IDS = st.sampled_from(["a", "b", "c", "d"])


class AllServedError(Exception):
    """The queue is empty."""


class Store:
    """A store in this process; also where it is met."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[bytes]] = defaultdict(deque)
        self.values: dict[str, Any] = {}
        self.is_met = False

    def connect(self) -> Store:
        if self.is_met:
            raise DistError("the thread that keeps time has nothing to do here")
        self.is_met = True
        return self

    def queue_push(self, queue: str, data: bytes) -> None:
        self.queues[queue].append(data)

    def queue_pop(self, queue: str) -> bytes:
        if not self.queues[queue]:
            raise AllServedError
        return self.queues[queue].popleft()

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        return self.values.setdefault(key, value).encode()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]


def served(
    strategy: str, requests: list[bytes], log: Path, foreign: Sequence[bytes] = ()
) -> tuple[Service, Store]:
    """A coordinator that has taken in messages of the training, and then some of nobody's."""
    store = Store()
    key = key_of(store)  # type: ignore[arg-type]
    store.queues[REQUESTS].extend(sealed(key, REQUESTS, data) for data in requests)
    store.queues[REQUESTS].extend(foreign)
    made = coordinator(strategy, PIPELINES, PLACES, 6)
    service = Service(made, store, MessageLog(log), silent_s=5.0)  # type: ignore[arg-type]
    with pytest.raises(AllServedError):
        service.run()
    return service, store


def told(store: Store, queue: str) -> dict[str, Any]:
    """The last answer in a rank's queue."""
    key = key_of(store)  # type: ignore[arg-type]
    return json.loads(unsealed(key, queue, store.queues[queue][-1]))


def message(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# Pipelines, places and steps that there are, that there are not, and that no integer holds.
NUMBERS = st.sampled_from([0, 0, 0, 1, 1, 1, 2, 2**62, 2**64, -1])
STEPS = st.sampled_from([1, 1, 2, 2, 3, 4, 7, 2**62, 0])
RANK = {"pipeline": NUMBERS, "place": NUMBERS, "incarnation_id": IDS}
HELLOS = st.builds(message, kind=st.just("hello"), **RANK)
QUESTIONS = st.builds(
    message, kind=st.sampled_from(["take", "ask"]), **RANK, step=STEPS, reduced=st.booleans()
)
FINDINGS = st.builds(message, kind=st.just("lost"), pipeline=NUMBERS, incarnation_id=IDS)
GARBAGE = st.one_of(
    st.binary(max_size=30),
    st.just(b"[" * MAX_MESSAGE_BYTES),
    st.just(b" " * (MAX_MESSAGE_BYTES + 1)),
    st.builds(message, kind=st.text(max_size=4), pipeline=st.none() | st.integers()),
)
MESSAGES = st.one_of(HELLOS, QUESTIONS, QUESTIONS, FINDINGS, st.just(message(kind="late")), GARBAGE)


@given(
    strategy=st.sampled_from(STRATEGIES),
    requests=st.lists(MESSAGES, max_size=60),
    foreign=st.lists(MESSAGES, max_size=5),
)
def test_no_sequence_of_messages_ends_a_coordinator(
    tmp_path_factory: pytest.TempPathFactory,
    strategy: str,
    requests: list[bytes],
    foreign: list[bytes],
) -> None:
    log = tmp_path_factory.mktemp("log") / "messages.jsonl"
    service, _ = served(strategy, requests, log, foreign)
    again, _ = served(strategy, [], log)
    assert again.coordinator.report() == service.coordinator.report()
    assert list(again.coordinator.incarnations()) == list(service.coordinator.incarnations())
    for pipeline in range(PIPELINES):
        for place in range(PLACES):
            hello = Hello(pipeline=pipeline, place=place, incarnation_id=f"new{pipeline}")
            again.coordinator.handle(hello, 1e9)
    there = {(n, name) for n, name, _ in again.coordinator.incarnations()}
    assert there == {(pipeline, f"new{pipeline}") for pipeline in range(PIPELINES)}


def test_what_names_no_place_of_the_plan_is_not_logged(tmp_path: Path) -> None:
    requests = [
        message(kind="lost", pipeline=PIPELINES, incarnation_id="a"),
        write_message(Hello(pipeline=PIPELINES, place=0, incarnation_id="a")),
        write_message(Hello(pipeline=0, place=PLACES, incarnation_id="a")),
    ]
    _, store = served("ad_psgd", requests, tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == b""
    for queue in (f"answers/{PIPELINES}.0.a", f"answers/0.{PLACES}.a"):
        assert told(store, queue)["kind"] == "refused"


def test_a_message_that_cannot_be_handled_is_named_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who serves, and by each who follows the log."""
    handle = Coordinator.handle

    def broken(self: Coordinator, taken: Message, now_s: float) -> list[Answer]:
        if taken.incarnation_id == "bad":
            raise ZeroDivisionError("a mistake")
        return handle(self, taken, now_s)

    monkeypatch.setattr(Coordinator, "handle", broken)
    hellos = [
        write_message(Hello(pipeline=0, place=0, incarnation_id=name)) for name in ("bad", "good")
    ]
    for requests in (hellos, []):
        caplog.clear()
        service, _ = served("ad_psgd", requests, tmp_path / "log")
        assert list(service.coordinator.incarnations()) == [(0, "good", frozenset({0}))]
        (line,) = [record.getMessage() for record in caplog.records]
        assert "bad" in line
        assert "is skipped: 'ZeroDivisionError: a mistake'" in line


def test_a_greeting_that_comes_again_does_not_end_a_later_incarnation(tmp_path: Path) -> None:
    hellos = [
        write_message(Hello(pipeline=0, place=place, incarnation_id=name))
        for name in ("old", "new", "old")
        for place in range(PLACES)
    ]
    service, store = served("ad_psgd", hellos, tmp_path / "log")
    assert list(service.coordinator.incarnations()) == [(0, "new", frozenset({0, 1}))]
    assert told(store, "answers/0.0.old") == {"kind": "fenced"}


def test_messages_of_others_and_for_other_queues_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hello = write_message(Hello(pipeline=0, place=0, incarnation_id="a"))
    foreign = [hello, b"", sealed(b"another key", REQUESTS, hello), bytes(32) + hello]
    service, _ = served("ad_psgd", [], tmp_path / "log", foreign)
    assert list(service.coordinator.incarnations()) == []
    assert len(caplog.records) == len(foreign)
    key = b"key"
    with pytest.raises(PipeplanError, match="nobody of this training"):
        unsealed(key, "answers/1", sealed(key, "answers/0", hello))


def test_who_has_another_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    monkeypatch.setenv(SECRET_VARIABLE, "a long one")
    key = key_of(store)
    assert key == key_of(store)
    monkeypatch.setenv(SECRET_VARIABLE, "another")
    with pytest.raises(PipeplanError, match="PIPEPLAN_SECRET: another value than that of the coo"):
        key_of(store)
    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(PipeplanError, match="PIPEPLAN_SECRET: no value"):
        key_of(store)
    assert key_of(Store()) != key  # type: ignore[arg-type]
