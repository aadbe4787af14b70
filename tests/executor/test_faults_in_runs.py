"""Pipelines as jobs of their own: one hangs, one is stopped, one killed, and the rest goes on.

All happens in one training, one thing after the other, since starting it takes longest.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from executor_plans import pipeline_of, scheduled, traced
from launch import ROOT, environment

from models import ZOO

pytestmark = pytest.mark.extensive

PIPELINES = 3
FAULTS = "hang_in(0,8,2.5) stop_in(1,16,3) fail_in(2,24)"
SYNC = "semi_decentralized:first_wait_s=1000,most_wait_s=1000"
MOST_S = 1000.0


@dataclass
class Steps:
    """What the coordinator's log says of one incarnation of a pipeline.

    Attributes:
        taken: steps whose share it asked for, before it was given up.
        failed: those after which it told that its average had failed.
    """

    pipeline: int
    taken: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    is_lost: bool = False


def incarnations(log: Path) -> list[Steps]:
    """All incarnations, in the order of their first message."""
    found: dict[str, Steps] = {}
    text = log.read_text() if log.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        message = json.loads(json.loads(line)[1])
        if "incarnation_id" not in message:
            continue
        incarnation = found.setdefault(message["incarnation_id"], Steps(message["pipeline"]))
        if message["kind"] == "take" and not incarnation.is_lost:
            incarnation.taken.append(message["step"])
            incarnation.failed += [] if message["reduced"] else [message["step"] - 1]
        incarnation.is_lost |= message["kind"] == "lost"
    return list(found.values())


def of(log: Path, pipeline: int) -> list[Steps]:
    return [incarnation for incarnation in incarnations(log) if incarnation.pipeline == pipeline]


def named(word: str) -> list[str]:
    """Command lines of processes that have this word, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def until(what: Callable[[], bool], folder: Path) -> None:
    end_s = time.monotonic() + MOST_S
    while not what():
        if time.monotonic() > end_s:
            told = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.out")]
            raise AssertionError("\n".join(told))
        time.sleep(0.1)


def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Training:
    """A coordinator and its pipelines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "messages.jsonl"
        plan = folder / "plan.json"
        graph = traced("gpt_tiny")
        stage = (list(graph.layers), ["d0", "d1", "d2"])
        job = {"microbatches": PIPELINES}
        scheduled(pipeline_of(graph, ZOO["gpt_tiny"], [stage], **job)).save(plan)
        self.address = f"127.0.0.1:{port()}"
        self.shared = ["--steps", "100000", "--sync", SYNC]
        # Less than what stop_in stops for.
        listen = ["--listen", self.address, "--log", str(self.log), "--silent", "1.5"]
        module = ["-m", "executor.coordinator", str(plan), *listen, *self.shared]
        self.coordinator = self.start("coordinator", module)
        until(lambda: "torchrun" in (folder / "coordinator.out").read_text(), folder)
        self.pipelines = [self.start_pipeline(number, plan) for number in range(PIPELINES)]

    def start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("w") as out:
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_pipeline(self, number: int, plan: Path) -> subprocess.Popen[bytes]:
        restarts = ["--max-restarts", "3", "--monitor-interval", "0.2"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        mine = ["--pipeline", str(number), "--coordinator", self.address, *self.shared]
        options = ["--group-timeout", "1", "--data", "random", "--inject", FAULTS]
        module = ["-m", "executor", str(plan), *mine, *options]
        return self.start(f"pipeline{number}", [*torchrun, *restarts, *module])

    def printed(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def end(self) -> None:
        for process in (*self.pipelines, self.coordinator):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """Runs until all faults have happened and all pipelines are back."""
    found = Training(tmp_path_factory.mktemp("faults"))

    def are_back() -> bool:
        last = [of(found.log, number)[-1:] for number in range(PIPELINES)]
        counts = [len(of(found.log, number)) for number in range(PIPELINES)]
        return counts[1] > 1 and counts[2] > 1 and all(r and len(r[0].taken) > 10 for r in last)

    try:
        until(are_back, found.folder)
        yield found
    finally:
        found.end()


def test_who_hangs_within_an_average_is_waited_for_no_longer_than_the_timeout(
    training: Training,
) -> None:
    (only,) = of(training.log, 0)
    assert not only.is_lost
    assert 8 in of(training.log, 1)[0].failed
    assert 8 in of(training.log, 2)[0].failed


def test_who_is_stopped_is_fenced_and_comes_back(training: Training) -> None:
    first, second = of(training.log, 1)[:2]
    assert first.is_lost
    assert first.taken[-1] == 16
    assert second.taken[0] > 16
    assert "pipeline 1 was silent for too long" in training.printed("pipeline1")


def test_who_is_killed_comes_back(training: Training) -> None:
    first, second = of(training.log, 2)[:2]
    assert first.taken[-1] == 24
    assert second.taken[0] > 24


def test_who_was_not_hit_goes_on_meanwhile(training: Training) -> None:
    (only,) = of(training.log, 0)
    assert {16, 24} <= set(only.failed)
    assert sorted(set(only.taken)) == list(range(1, max(only.taken) + 1))
    assert "rror" not in training.printed("pipeline0")


def test_ctrl_c_leaves_no_process_behind(training: Training) -> None:
    """Last in this file: it ends the training, one pipeline, the coordinator, and the others."""
    first, *others = training.pipelines
    os.killpg(first.pid, signal.SIGINT)
    first.wait()
    until(lambda: of(training.log, 0)[-1].is_lost, training.folder)
    os.killpg(training.coordinator.pid, signal.SIGINT)
    assert training.coordinator.wait() == 130
    assert "Traceback" not in training.printed("coordinator")
    for pipeline in others:
        os.killpg(pipeline.pid, signal.SIGINT)
        pipeline.wait()
    until(lambda: not named(training.address), training.folder)
