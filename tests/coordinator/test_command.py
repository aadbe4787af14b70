"""``python -m executor.coordinator``: what it refuses, what it prints, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from builders import graph, layer, orders, star

from executor.coordinator.__main__ import main
from executor.coordinator.client import Client, NothingLeftError
from executor.coordinator.wire import Endpoint
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


class Running:
    """A coordinator of 2 x 4 work units, and a client of each pipeline's only rank."""

    def __init__(self, plan: Path, silent_s: float) -> None:
        self.endpoint = Endpoint("127.0.0.1", free_port())
        self.out = plan.with_name("coordinator.out")
        listen = ["--listen", str(self.endpoint), "--silent", str(silent_s)]
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
        self.clients = [Client(self.endpoint, number, 0, 1000.0) for number in (0, 1)]

    def until(self, word: str) -> None:
        until_s = time.monotonic() + MOST_S
        while word not in self.out.read_text():
            assert time.monotonic() < until_s, self.out.read_text()
            time.sleep(0.05)

    def begin(self) -> None:
        for client in self.clients:
            client.begin(f"n{client.pipeline}")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.hello(""), self.clients))

    def end(self) -> None:
        for client in self.clients:
            client.close()
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


def come_back(client: Client) -> None:
    """Say hello until there is nobody left to copy weights from."""
    while True:
        client.begin(f"back{time.monotonic_ns()}")
        client.hello("")


@pytest.mark.extensive
@pytest.mark.parametrize("running", [0.5], indirect=True)
def test_where_all_pipelines_are_lost_it_says_so_and_ends(running: Running) -> None:
    running.begin()
    for client in running.clients:
        client.close()
    back = Client(running.endpoint, 0, 0)
    with pytest.raises(NothingLeftError, match="--resume"):
        come_back(back)
    back.close()
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
    assert command.endswith(f"--coordinator {running.endpoint} --steps 4 --sync ad_psgd")
    running.begin()
    for step in (1, 2):
        running.clients[0].take(step, reduced=True)
    time.sleep(1.0)  # The count comes with a heartbeat.
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.process.wait() == 130
    said = running.out.read_text()
    assert "interrupted: 1 of 8 work units are done; the pipelines end too" in said
    assert "Traceback" not in said
