"""``python -m executor.coordinator``: what it refuses, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from builders import graph, layer, orders, star
from torch.distributed import Store

from executor.coordinator.__main__ import main
from executor.coordinator.messages import Hello, Message, Take, write_message
from executor.coordinator.secret import key_of, sealed, unsealed
from executor.coordinator.store import DONE, REQUESTS, Meeting
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.plan.problem import ModelSource, Problem

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 1000.0


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Two pipelines of one place, of a model and with a loss of the user's own."""
    job = Job(microbatches=2, loss="lib.net:loss")
    problem = Problem(graph([layer("a")], []), star(2), job, ModelSource("lib.net:make"))
    pipeline = place(problem, [StageSpec(("a",), ("d0", "d1"))])
    path = tmp_path / "a plan.json"
    plan_by_hand(pipeline, orders(d0="0F0 0B0", d1="0F1 0B1")).save(path)
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--steps", "0", "--steps: 0; give 1 or more"),
        ("--steps", "-3", "--steps: -3; give 1 or more"),
        ("--silent", "0", "--silent: 0; give from 0.5 to 1e.06 seconds, or leave it out for 3"),
        ("--silent", "-1", "--silent: -1; give from 0.5"),
        ("--silent", "nan", "--silent: nan; give from 0.5"),
        ("--silent", "inf", "--silent: inf; give from 0.5"),
        ("--log", "/nope/log", "--log: /nope/log: .*no folder /nope; create it"),
        ("--log", "/", "--log: /: .*it is a folder; give the path of a file"),
        ("--listen", "127.0.0.1:99999", "--listen: '127.0.0.1:99999' is not HOST:PORT"),
        ("--listen", "192.0.2.1:29600", "--listen: 192.0.2.1:29600 is no address of this machine"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_the_remedy(
    plan: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    why: str,
) -> None:
    given = {"--listen": f"127.0.0.1:{free_port()}", "--sync": "ad_psgd", option: value}
    words = [word for pair in given.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["coordinator", str(plan), *words])
    assert main() == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.match(f"error: {why}", said)


def test_a_port_that_is_taken_is_named(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        words = ["--listen", address, "--sync", "ad_psgd"]
        monkeypatch.setattr(sys, "argv", ["coordinator", str(plan), *words])
        assert main() == 1
    said = capsys.readouterr().err
    assert f"--listen: {address} is taken by another process; name another port" in said


def test_a_log_with_a_line_that_is_none_is_refused_before_anything_starts(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("nonsense\n")
    words = ["--listen", f"127.0.0.1:{free_port()}", "--sync", "ad_psgd", "--log", str(log)]
    monkeypatch.setattr(sys, "argv", ["coordinator", str(plan), *words])
    assert main() == 1
    assert f"--log: {log}: line 1 is no message; name another --log file" in capsys.readouterr().err


class Running:
    """A coordinator of 2 x 4 shares, and a connection to its store as ranks have it."""

    def __init__(self, plan: Path, silent_s: float) -> None:
        self.meeting = Meeting("127.0.0.1", free_port())
        self.out = plan.with_name("coordinator.out")
        listen = ["--listen", str(self.meeting), "--silent", str(silent_s)]
        given = ["--steps", "4", "--sync", "ad_psgd"]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "executor.coordinator", str(plan), *listen, *given],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.until("torchrun")
        self.store: Store = self.meeting.connect()
        self.key = key_of(self.store)

    def until(self, word: str) -> None:
        until_s = time.monotonic() + MOST_S
        while word not in self.out.read_text():
            assert time.monotonic() < until_s, self.out.read_text()
            time.sleep(0.05)

    def ask(self, message: Message) -> dict:
        self.send(message)
        return self.answer(message)

    def send(self, message: Message) -> None:
        self.store.queue_push(REQUESTS, sealed(self.key, REQUESTS, write_message(message)))

    def answer(self, message: Message) -> dict:
        while True:
            data = self.store.queue_pop(message.queue)
            body = json.loads(unsealed(self.key, message.queue, data))
            if body["kind"] != "again":
                return body

    def begin(self) -> None:
        hellos = [Hello(pipeline=n, place=0, incarnation_id=f"n{n}") for n in (0, 1)]
        for hello in hellos:
            self.send(hello)
        assert {self.answer(hello)["kind"] for hello in hellos} == {"welcome"}

    def end(self) -> None:
        # Also of its children, where it was killed.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def running(plan: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    found = Running(plan, getattr(request, "param", 1000.0))
    try:
        yield found
    finally:
        found.end()


@pytest.mark.extensive
@pytest.mark.parametrize("running", [0.5], indirect=True)
def test_where_all_pipelines_are_lost_it_says_so_and_ends(running: Running) -> None:
    running.begin()
    running.until("are lost")
    answer = running.ask(Hello(pipeline=0, place=0, incarnation_id="back"))
    assert answer["kind"] == "refused"
    assert "--resume" in answer["why"]
    assert running.process.wait() == 1
    said = running.out.read_text()
    assert said.count("all pipelines (0, 1) are lost with 0 of 8 work units done") == 1
    assert "start a new coordinator, and all pipelines, with --resume FOLDER" in said
    assert "Traceback" not in said


def test_it_prints_the_command_of_pipelines_and_at_ctrl_c_how_many_shares_are_done(
    running: Running,
) -> None:
    running.until("--sync")
    command = running.out.read_text().splitlines()[1]
    # With the leave to import what the plan names.
    assert "a plan.json' --model lib.net:make --loss lib.net:loss --pipeline I" in command
    assert command.endswith(f"--coordinator {running.meeting} --steps 4 --sync ad_psgd")
    running.begin()
    for step in (1, 2):
        running.ask(Take(pipeline=0, place=0, incarnation_id="n0", step=step))
    # It answers first, and counts then.
    until_s = time.monotonic() + MOST_S
    while running.store.add(DONE, 0) < 1:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.process.wait() == 130
    said = running.out.read_text()
    assert "interrupted: 1 of 8 work units are done; the pipelines end too" in said
    assert "Traceback" not in said


def test_without_its_store_the_deciding_process_ends_with_one_line(running: Running) -> None:
    running.begin()
    os.kill(running.process.pid, signal.SIGKILL)
    running.until(f"coordinator: the store at {running.meeting} is gone")
    said = running.out.read_text().splitlines()[3:]
    assert len(said) == 1, said
