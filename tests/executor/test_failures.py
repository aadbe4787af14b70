"""When one rank fails, is killed or stops, all end soon, and one can read why."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from executor_plans import cut_pipeline, scheduled, traced
from launch import environment, start, torchrun
from torch.distributed import HashStore
from warm_python import warm_python

from executor.distributed.errors import FollowedError, LostRankError
from executor.distributed.failure import Failures, followed
from executor.distributed.machines import Machine
from planner.plan.plan import Plan

pytestmark = pytest.mark.extensive

HERE = Path(__file__).parent
ENDS_WITHIN_S = 300
"""Half of the time after which ranks give up those that say nothing: nobody waits for that."""
RANKS = 3
Launch = Callable[..., "Run"]


def plan_of(factory: str = "faulty:net") -> Plan:
    graph, devices = traced("gpt_tiny"), ["d0", "d1", "d2"]
    return scheduled(cut_pipeline(graph, factory, [3, 5], devices, microbatches=4))


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    plan_of().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@dataclass
class Run:
    """A run of the plan that may be waited for."""

    process: subprocess.Popen[str]
    moment: Path

    def failed_at(self, timeout_s: float = 1000) -> float:
        """When it went wrong, once it has."""
        end = time.monotonic() + timeout_s
        while not self.moment.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        return float(self.moment.read_text().split()[0])

    def end_by(self, act: Callable[[], object]) -> list[str]:
        """Act once it sleeps; the lines on stderr after that."""
        self.failed_at()
        began_s = time.time()
        act()
        return self.end(since_s=began_s)

    def end(self, since_s: float | None = None) -> list[str]:
        """Its lines on stderr; all processes are gone soon after it went wrong."""
        _, errors = self.process.communicate()
        took_s = time.time() - (self.failed_at() if since_s is None else since_s)
        assert processes(self.moment.parent) == []
        assert self.process.returncode != 0
        assert took_s < ENDS_WITHIN_S
        print(f"all ended after {took_s:.1f} s\n{errors}")
        return errors.splitlines()


def processes(folder: Path) -> list[str]:
    """Command lines that name the folder: torchrun, and its ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in line and "executor" in line:
            found.append(line)
    return found


@pytest.fixture
def launch(plan_path: Path) -> Iterator[Launch]:
    running = []

    def run(fault: str, *options: str, rank: int = 1, python: str = warm_python()) -> Run:
        moment = plan_path.with_name("moment")
        words = {"FAULT": fault, "FAULT_RANK": str(rank), "FAULT_MOMENT": str(moment)}
        # Faults come in training, not in the comparison before it.
        model = ["--model", "faulty:net", "--no-check"]
        command = ["-m", "executor", str(plan_path), *model, *options]
        env = environment(HERE, **words)
        running.append(start(RANKS, *command, "--steps", "4", env=env, python=python))
        return Run(running[-1], moment)

    yield run
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ours(lines: list[str]) -> list[str]:
    """What the executor said."""
    return [line for line in lines if line.startswith(("error: ", "rank "))]


def assert_others_follow(lines: list[str], failed: int, words: str) -> None:
    """Each other rank says one line that names the one that failed."""
    others = [f"error: rank {r}: stopped, because rank {failed} {words}" for r in range(RANKS)]
    assert sorted(ours(lines)[1:]) == [line for r, line in enumerate(others) if r != failed]


def test_an_exception_in_the_data_set_is_told_with_its_place(launch: Launch) -> None:
    lines = launch("exception", "--data", "faulty:Reviews", rank=0).end()
    pattern = (
        r"error: rank 0: data faulty:Reviews\[\d+\] failed: ValueError: no such review "
        r"\(\S*faulty\.py:\d+\)"
    )
    assert re.fullmatch(pattern, ours(lines)[0])
    assert "Traceback" not in "\n".join(lines[: lines.index(ours(lines)[-1]) + 1])
    assert_others_follow(lines, 0, "failed")


def test_an_exception_in_a_backward_ends_all_ranks_with_its_traceback_first(launch: Launch) -> None:
    lines = launch("exception", rank=2).end()
    said = ours(lines)
    assert said[0] == "rank 2 failed:"
    start_ = lines.index(said[0])
    assert lines[start_ + 1].startswith("Traceback")
    assert lines.index("ValueError: no such review") < lines.index(said[1])
    assert "Traceback" not in "\n".join(lines[start_ + 2 : lines.index(said[-1])])
    assert_others_follow(lines, 2, "failed")
    root = next(index for index, line in enumerate(lines) if line.startswith("Root Cause"))
    assert any(re.match(r"\s+rank\s+: 2 ", line) for line in lines[root:])
    assert "ValueError: no such review" in "\n".join(lines[root:])


def test_a_rank_that_was_killed_is_named(launch: Launch) -> None:
    said = ours(launch("kill").end())
    assert len(said) == RANKS - 1
    lost = [line for line in said if "lost rank 1: killed, stopped, or its host is gone" in line]
    assert lost
    pattern = r"error: rank [02]: (lost rank 1: .*|stopped, because rank [02] lost rank 1)"
    assert all(re.fullmatch(pattern, line) for line in said)


def test_a_loss_that_the_watch_found_first_is_told_by_the_main_thread_as_its_own() -> None:
    failures = Failures(HashStore(), 0, [Machine("a", "cpu")] * 2)
    failures.note("rank 0 lost rank 1: killed, stopped, or its host is gone; ended by SIGTERM")
    with pytest.raises(LostRankError, match=r"^lost rank 1: killed") as raised, followed(failures):
        raise LostRankError("could not talk to rank 1")
    assert not isinstance(raised.value, FollowedError)


def test_a_rank_that_was_stopped_counts_as_lost_after_the_timeout(launch: Launch) -> None:
    said = ours(launch("stop", "--timeout", "5").end())
    assert "lost rank 1: killed, stopped, or its host is gone" in said[0]
    # Two wait for it as long: one for its message, the other for a sum with the first.
    waited = (
        r"(rank 1, which was to (send|receive) \d[FB]\d|ranks 0, 2, which sum .*); torch says: "
    )
    assert re.search(waited, said[0])
    pattern = r"error: rank [012]: (lost rank 1: .*|stopped, because rank [02] lost rank 1)"
    assert all(re.fullmatch(pattern, line) for line in said)


def test_ctrl_c_leaves_no_process_behind(launch: Launch) -> None:
    run = launch("sleep", python=sys.executable)
    assert ours(run.end_by(lambda: os.killpg(run.process.pid, signal.SIGINT))) == []


def test_sigterm_to_torchrun_ends_all_ranks(launch: Launch) -> None:
    run = launch("sleep", python=sys.executable)
    said = ours(run.end_by(run.process.terminate))
    assert len(said) == RANKS
    assert all("ended by SIGTERM" in line for line in said)


def test_ranks_do_not_outlive_a_torchrun_that_was_killed(launch: Launch) -> None:
    run = launch("sleep", python=sys.executable)
    said = ours(run.end_by(run.process.kill))
    assert any("the store that the ranks met at is gone" in line for line in said)


def test_torchrun_repeats_at_its_end_what_was_wrong(plan_path: Path) -> None:
    done = torchrun(
        2, "-m", "executor", str(plan_path), "--model", "faulty:net", env=environment(HERE)
    )
    message = "error: the plan has 3 ranks, 2 processes were started"
    lines = done.stderr.splitlines()
    assert [line[: len(message)] for line in ours(lines)] == [message]  # By one rank alone.
    assert lines[0].startswith(message)
    assert any(message in line for line in lines[-3:])


def test_a_plan_file_that_one_rank_lacks_is_refused_by_it(plan_path: Path) -> None:
    for rank in (0, 1):
        plan_of().save(plan_path.with_name(f"plan-{rank}.json"))
    arguments = f"-m executor {plan_path.parent}/plan-$RANK.json --model faulty:net"
    shell = f"exec {sys.executable} {arguments}"
    done = torchrun(RANKS, "--no-python", "sh", "-c", shell, env=environment(HERE))
    assert done.returncode != 0
    said = ours(done.stderr.splitlines())
    assert len(said) == 1
    assert said[0].startswith(f"error: rank 2: {plan_path.parent}/plan-2.json: ")
    assert processes(plan_path.parent) == []


# --- from a script of the user's ----------------------------------------------------------------

SCRIPT = """
from executor import train
from faulty import Reviews, net
from planner import Plan

plan = Plan.load({plan!r})
train(plan, net, Reviews(), steps=4, timeline={timeline!r}, timeout_s=20, check=False)
"""


def test_a_script_that_fails_ends_cleanly_with_its_own_traceback(plan_path: Path) -> None:
    script, moment = plan_path.with_name("executor_script.py"), plan_path.with_name("moment")
    script.write_text(SCRIPT.format(plan=str(plan_path), timeline=f"{plan_path}.timeline"))
    words = {"FAULT": "exception", "FAULT_RANK": "0", "FAULT_MOMENT": str(moment)}
    env = environment(HERE, **words)
    run = Run(start(RANKS, str(script), env=env, python=warm_python()), moment)
    text = "\n".join(run.end())
    assert "terminate called" not in text
    assert "SIGABRT" not in text
    assert text.index("ValueError: no such review") < text.index("stopped, because rank 0 failed")
