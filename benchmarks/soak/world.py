"""One training of a soak: pipelines as jobs of their own, and what is done to their ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.by_torchrun import TorchrunJob
from benchmarks.soak.figures import Hit
from benchmarks.soak.processes import ROOT, End, Forks, Job, coordinator_child

GROUP_TIMEOUT_S = 2.0
SILENT_S = 1.0
"""Seconds of silence after which a rank counts as lost, as in the bar of detection."""
_CALM_S = (0.2, 1.2)
_STOP_S = (0.2, 3.5)
_HANG_S = 90.0
_TICK_S = 0.005


@dataclass(frozen=True)
class Case:
    """One training to run, with its failures.

    Attributes:
        strategy: with its options.
        pipelines, places: of the plan.
        events: how many.
        steps: iterations of the plan.
        seed: of the events.
        torchrun: whether ranks are started by torchrun, as users do.
    """

    strategy: str
    pipelines: int
    places: int
    events: int
    steps: int
    seed: int
    torchrun: bool = False


@dataclass
class Run:
    """The outcome of a case.

    Attributes:
        case: what was run.
        log: of the coordinator.
        waits: log of what ranks waited for.
        hits: what was done.
        ends: of ranks.
        strange: ends of ranks of pipelines to which nothing had been done.
        started_s: of each pipeline, when its processes were started.
        killed_late: ranks that did not end by themselves after another of their pipeline.
        hung: whether nothing went on for long, or somebody did not end.
        status: of the coordinator.
        printed: by it.
        wall_s: of it all.
    """

    case: Case
    log: Path
    waits: Path
    hits: list[Hit] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    strange: list[End] = field(default_factory=list)
    started_s: list[list[float]] = field(default_factory=list)
    killed_late: int = 0
    hung: bool = False
    status: int | None = None
    printed: str = ""
    wall_s: float = 0.0


class Progress:
    """Follows the coordinator's log while it grows."""

    def __init__(self, path: Path, places: int) -> None:
        self._path = path
        self._places = places
        self._offset = 0
        self._nonces: dict[int, str] = {}
        self._taken: dict[int, int] = {}
        self.shares = 0
        self.changed_s = time.monotonic()
        self.asked: int | None = None
        """The last pipeline that asked for a group, until it is read."""

    def read(self) -> None:
        """Take in what is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(lines)
        for line in lines.splitlines():
            self._note(json.loads(json.loads(line)[1]))

    def _note(self, message: dict) -> None:
        pipeline, nonce = message.get("pipeline"), message.get("incarnation_id")
        if message["kind"] == "hello" and self._nonces.get(pipeline) != nonce:
            self._nonces[pipeline], self._taken[pipeline] = nonce, 0
        if message["kind"] == "lost" and self._nonces.get(pipeline) == nonce:
            self._taken[pipeline] = 0
        if self._nonces.get(pipeline) != nonce:
            return
        if message["kind"] == "take":
            self._taken[pipeline] += 1
            self.shares += message["place"] == 0
            self.changed_s = time.monotonic()
        if message["kind"] == "ask":
            self.asked = pipeline

    def forget(self, pipeline: int) -> None:
        """Something was done to it: it has to show that it is well."""
        self._taken[pipeline] = -self._places

    def well(self) -> list[int]:
        """Pipelines that take part."""
        return [p for p, taken in sorted(self._taken.items()) if taken > 2 * self._places]


class World:
    """Runs a case.

    Args:
        case: which.
        plan: file of the plan.
        folder: for logs.
        forks: that starts ranks.
    """

    def __init__(self, case: Case, plan: Path, folder: Path, forks: Forks) -> None:
        self._case = case
        self._forks = forks
        self._rng = random.Random(f"{case.strategy} {case.seed}")
        self.run_ = Run(case, folder / "messages.jsonl", folder / "waits.jsonl")
        self._progress = Progress(self.run_.log, case.places)
        address = f"127.0.0.1:{_free_port()}"
        shared = ["--steps", str(case.steps), "--sync", case.strategy]
        self._printed = (folder / "coordinator.log").open("w+")
        self._coordinator = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "executor.coordinator",
                str(plan),
                "--listen",
                address,
                *shared,
                "--log",
                str(self.run_.log),
                "--silent",
                str(SILENT_S),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._await_coordinator()
        self._jobs = [self._job(i, plan, address, shared, folder) for i in range(case.pipelines)]
        self._wake: list[tuple[float, int]] = []
        self._hurt: dict[int, float] = {}
        self._next_s: float | None = None

    def _await_coordinator(self) -> None:
        until_s = time.monotonic() + _HANG_S
        while "torchrun" not in Path(self._printed.name).read_text():
            if self._coordinator.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(Path(self._printed.name).read_text())
            time.sleep(0.1)

    def _job(
        self, pipeline: int, plan: Path, address: str, shared: Sequence[str], folder: Path
    ) -> Job | TorchrunJob:
        arguments = [str(plan), "--pipeline", str(pipeline), "--coordinator", address, *shared]
        arguments += ["--group-timeout", str(GROUP_TIMEOUT_S), "--emulate-speed"]
        arguments += ["--data", "random", "--timeout", "60", "--wait-log", str(self.run_.waits)]
        if self._case.torchrun:
            return TorchrunJob(pipeline, self._case.places, arguments, folder)
        return Job(self._forks, pipeline, self._case.places, arguments, folder)

    def run(self) -> Run:
        """Run until all have ended, or nothing goes on."""
        run, began_s = self.run_, time.monotonic()
        try:
            while not self._is_over():
                self._tick()
                if time.monotonic() - self._progress.changed_s > _HANG_S:
                    run.hung = True
                    break
                time.sleep(_TICK_S)
        finally:
            self._end()
        run.started_s = [job.started_s for job in self._jobs]
        run.killed_late = sum(job.killed_late for job in self._jobs)
        run.status = self._coordinator.wait()
        run.printed = Path(self._printed.name).read_text()
        run.wall_s = time.monotonic() - began_s
        return run

    def _is_over(self) -> bool:
        return self._coordinator.poll() is not None and all(job.is_done for job in self._jobs)

    def _tick(self) -> None:
        self._progress.read()
        if not self._case.torchrun:
            for pid, status in self._forks.ended():
                job = next((j for j in self._jobs if pid in j.ranks), None)
                if job is not None:
                    self._note_end(job.note(pid, status))
        for job in self._jobs:
            for end in job.tick():
                self._note_end(end)
        now_s = time.monotonic()
        for at_s, pid in [row for row in self._wake if row[0] <= now_s]:
            _send(pid, signal.SIGCONT)
            self._wake.remove((at_s, pid))
        self._maybe_hit(now_s)

    def _note_end(self, end: End) -> None:
        self.run_.ends.append(end)
        if end.status and end.pipeline not in self._hurt:
            self.run_.strange.append(end)

    # --- events ----------------------------------------------------------------------------------

    def _maybe_hit(self, now_s: float) -> None:
        case, run = self._case, self.run_
        well = self._progress.well()
        for pipeline in well:
            self._hurt.pop(pipeline, None) if not self._is_stopped() else None
        away = case.pipelines - len(well)
        total = case.steps * case.pipelines
        due = total * (0.02 + 0.88 * len(run.hits) / case.events)
        if len(run.hits) >= case.events or self._progress.shares < due or self._wake:
            self._next_s = None
            return
        overlaps = self._rng.random() < 0.001 and away == 1 and len(well) > 2
        if away and not overlaps:
            self._next_s = None
            return
        if self._next_s is None:
            self._next_s = now_s + self._rng.uniform(*_CALM_S)
        if overlaps or now_s >= self._next_s:
            self._hit(well, now_s, is_alone=not away)

    def _is_stopped(self) -> bool:
        return bool(self._wake)

    def _hit(self, well: Sequence[int], now_s: float, *, is_alone: bool) -> None:
        pipeline = self._rng.choice(well)
        if self._rng.random() < 0.5:
            # Who has just asked is about to average.
            self._progress.asked = None
            until_s = now_s + 0.5
            while self._progress.asked is None and time.monotonic() < until_s:
                time.sleep(0.001)
                self._progress.read()
            if self._progress.asked in well:
                pipeline = self._progress.asked
            time.sleep(self._rng.uniform(0, 0.01))
        kind = self._rng.choices(("kill", "stop", "coordinator"), (0.45, 0.45, 0.1))[0]
        seconds = 0.0
        at_s = time.monotonic()
        if kind == "coordinator":
            child = coordinator_child(self._coordinator.pid, self.run_.log)
            if child is None:
                return
            os.kill(child, signal.SIGKILL)
            pipeline = -1
        else:
            pids = sorted(self._jobs[pipeline].ranks)
            if not pids:
                return
            pid = self._rng.choice(pids)
            self._hurt[pipeline] = at_s
            self._progress.forget(pipeline)
            if kind == "kill":
                _send(pid, signal.SIGKILL)
            else:
                seconds = self._rng.uniform(*_STOP_S)
                _send(pid, signal.SIGSTOP)
                self._wake.append((at_s + seconds, pid))
        self.run_.hits.append(Hit(kind, at_s, pipeline, seconds, is_alone))
        self._next_s = None

    def _end(self) -> None:
        for _, pid in self._wake:
            _send(pid, signal.SIGCONT)
        for job in self._jobs:
            job.signal(signal.SIGKILL)
        if self._coordinator.poll() is None:
            os.killpg(self._coordinator.pid, signal.SIGKILL)
        self._printed.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
