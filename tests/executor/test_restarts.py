"""Trainings that are killed or told to stop, and started again by the same command."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from executor_plans import scheduled, zoo_pipeline
from launch import ROOT, environment, start
from thread_ranks import some, together

from executor.checkpoint import Checkpoint, Ranks, save_checkpoint
from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from executor.training.beginning import Beginning
from executor.training.saved_state import warn_of_schedule
from planner.errors import PipeplanError
from planner.plan.plan import Plan

HERE = Path(__file__).parent
STEPS = 6


def plan_of(ranks: int, name: str = "gpt_tiny") -> Plan:
    cuts, devices = ([4], ["d0", "d1"]) if ranks == 2 else ([], ["d0"])
    fields = {"optimizer": "adamw", "learning_rate": 0.003}
    return scheduled(zoo_pipeline(name, cuts, devices, 2, **fields))


class Training:
    """A folder with plans of one and two ranks, a training file and checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved = folder / "saved"
        self.running: list[subprocess.Popen[str]] = []
        for ranks in (1, 2):
            plan_of(ranks).save(folder / f"plan{ranks}.json")

    def configure(self, every: int = 2, saves: bool = True, pause_s: float = 0.0, **extra: object):
        rows = {"steps": STEPS, "data": "slow_rows:Rows", **extra}
        text = 'format = "pipeplan-train/1"\n'
        text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in rows.items())
        text += f'[data_arguments]\npause_s = {pause_s}\n[schedule]\nkind = "cosine"\n'
        if saves:
            text += f'[checkpoint]\nfolder = "{self.saved}"\nevery = {every}\nkeep = 1\n'
        (self.folder / "train.toml").write_text(text)

    def start(
        self, ranks: int, *options: str, restarts: int = 0, **env: str
    ) -> subprocess.Popen[str]:
        own = [str(self.folder / f"plan{ranks}.json"), "--config", str(self.folder / "train.toml")]
        arguments = ["-m", "executor", *own, *options]
        if ranks == 1:
            command = [sys.executable, *arguments]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            found = subprocess.Popen(command, cwd=ROOT, env=environment(HERE, **env), **pipes)
        else:
            arguments = [f"--max-restarts={restarts}", *arguments]
            found = start(ranks, *arguments, env=environment(HERE, **env), python=sys.executable)
        self.running.append(found)
        return found

    def run(self, ranks: int, *options: str, restarts: int = 0, **env: str) -> tuple[int, str]:
        process = self.start(ranks, *options, restarts=restarts, **env)
        out, error = process.communicate()
        return process.returncode, out + error

    def until(self, word: str, process: subprocess.Popen[str]) -> list[str]:
        """Read lines of stdout until one has the word."""
        lines = []
        for line in process.stdout:
            lines.append(line)
            if word in line:
                return lines
        raise AssertionError([*lines, process.communicate()])


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    found = Training(tmp_path)
    yield found
    for process in found.running:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    """The parameters after an uninterrupted training of so many ranks."""
    found: dict[int, dict] = {}

    def parameters(ranks: int) -> dict:
        if ranks not in found:
            training = Training(tmp_path_factory.mktemp("whole"))
            training.configure()
            status, text = training.run(ranks)
            assert status == 0, text
            found[ranks] = everything(training.saved)
        return found[ranks]

    return parameters


def everything(folder: Path) -> dict:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.step == STEPS
    return checkpoint.read(checkpoint.names())


def assert_as(whole: dict, folder: Path) -> None:
    found = everything(folder)
    assert found.keys() == whole.keys()
    assert all(found[name].equal(tensor) for name, tensor in whole.items())


def steps_of(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("step ")]


@pytest.mark.extensive
@pytest.mark.parametrize(("kill", "resumed"), [("0:2", None), ("1:22", 4)])
def test_torchrun_restarts_go_on_from_the_newest_checkpoint(
    training: Training, whole: Callable, kill: str, resumed: int | None
) -> None:
    training.configure()
    note = str(training.folder / "killed")
    status, text = training.run(2, restarts=1, KILL=kill, KILL_NOTE=note)
    assert status == 0, text
    if resumed is None:
        assert f"restart 1: no checkpoint in {training.saved}: training begins at step 1" in text
    else:
        assert f"restart 1: resumes from {training.saved}/step-0000000{resumed}, after" in text
    assert steps_of(text)[-(STEPS - (resumed or 0)) :] == [*range((resumed or 0) + 1, STEPS + 1)]
    assert steps_of(text).count(1) == (2 if resumed is None else 1) - (kill == "0:2")
    assert_as(whole(2), training.saved)


@pytest.mark.extensive
def test_a_restart_without_a_folder_for_checkpoints_says_that_it_begins_anew(
    training: Training,
) -> None:
    training.configure(saves=False)
    note = str(training.folder / "killed")
    status, text = training.run(2, restarts=1, KILL="1:11", KILL_NOTE=note)
    assert status == 0, text
    assert "restart 1: no [checkpoint] folder: training begins at step 1" in text


@pytest.mark.extensive
def test_one_command_starts_and_resumes(training: Training, whole: Callable) -> None:
    training.configure()
    resume = ["--resume", str(training.saved)]
    status, text = training.run(1, *resume, "--steps", "3")
    assert status == 0, text
    assert f"no checkpoint in {training.saved}: training begins at step 1" in text
    assert "has checkpoints already" not in text
    status, text = training.run(1, *resume)
    assert f"resumes from {training.saved}/step-00000003, after step 3" in text
    assert (status, steps_of(text)) == (0, [4, 5, 6])
    assert "the learning rate's schedule was kind cosine, warmup_steps 0, " in text
    assert "steps 3, here it is kind cosine, " in text
    assert "the factor of step 4 is 0.25, not 0;" in text
    status, text = training.run(1, *resume)
    assert (status, steps_of(text)) == (0, [])
    assert "nothing to do: " in text


SENT = {
    "SIGTERM to torchrun": (2, lambda process: process.terminate(), "SIGTERM"),
    "Ctrl-C": (2, lambda process: os.killpg(process.pid, signal.SIGINT), "SIGINT"),
    "SIGTERM alone": (1, lambda process: process.terminate(), "SIGTERM"),
}


@pytest.mark.extensive
@pytest.mark.parametrize("how", SENT)
def test_a_signal_writes_a_checkpoint_and_the_training_goes_on(
    training: Training, whole: Callable, how: str
) -> None:
    ranks, send, name = SENT[how]
    training.configure(every=1000, pause_s=0.3)
    process = training.start(ranks)
    lines = training.until("step    1", process)
    send(process)
    out, error = process.communicate()
    lines += out.splitlines()
    assert process.returncode == (1 if ranks == 2 else 128 + signal.Signals[name]), error
    step = Checkpoint.open(training.saved).step
    assert 1 <= step < STEPS
    told = f"stopped by {name} after step {step}: resume with --resume {training.saved}"
    assert told in lines, (lines, error)
    training.configure()
    status, text = training.run(ranks, "--resume", str(training.saved))
    assert (status, steps_of(text)) == (0, [*range(step + 1, STEPS + 1)])
    assert_as(whole(ranks), training.saved)


@pytest.mark.extensive
def test_a_step_that_outlasts_the_grace_time_ends_with_a_word(training: Training) -> None:
    training.configure(every=1000, pause_s=20)
    file = training.folder / "train.toml"
    file.write_text(file.read_text() + "grace_s = 1\n")
    process = training.start(1)
    training.until("waiting for a row", process)
    time.sleep(3)
    process.terminate()
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM came 1 s ago and the step has not ended: stopped without a check" in error


@pytest.mark.extensive
def test_checkpoints_of_others_are_not_overwritten(training: Training) -> None:
    training.configure()
    plan_of(1, "llama_tiny").save(training.folder / "plan1.json")
    status, text = training.run(1, "--steps", "2")
    assert status == 0, text
    before = sorted(path.name for path in training.saved.iterdir())
    plan_of(1).save(training.folder / "plan1.json")
    for options in ([], ["--resume", str(training.saved)]):
        status, text = training.run(1, *options)
        assert status == 1
        assert "it is of 'llama_tiny', the plan of 'gpt_tiny'" in text
        assert sorted(path.name for path in training.saved.iterdir()) == before


@pytest.mark.extensive
def test_beginning_anew_keeps_what_is_newer_and_restarts_do_not_take_it_up(
    training: Training, whole: Callable
) -> None:
    training.configure()
    assert training.run(2)[0] == 0
    note = str(training.folder / "killed")
    status, text = training.run(2, restarts=1, KILL="1:5", KILL_NOTE=note)
    assert status == 0, text
    assert f"{training.saved} has checkpoints already, up to step-00000006; they stay" in text
    assert steps_of(text)[-STEPS:] == [1, 2, 3, 4, 5, 6]
    assert_as(whole(2), training.saved)


# --- ranks that do not see the same ---------------------------------------------------------------


def agreed(folders: list[Path]) -> list:
    def of(ranks: object) -> object:
        run = RunSettings(resume=folders[ranks.rank])
        found = Beginning(TrainingConfig(), run, ranks.rank).agreed(ranks, lambda _: 0)
        return found and found.step

    return together(len(folders), of)


def test_ranks_agree_on_the_newest_checkpoint_that_all_see(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for step in (1, 2):
        save_checkpoint(folders[0], step, some(step), {})
    shutil.copytree(*folders)
    save_checkpoint(folders[0], 3, some(3), {})
    assert agreed(folders) == [2, 2]
    assert agreed([tmp_path / "none", tmp_path / "none"]) == [None, None]
    errors = agreed([folders[0], tmp_path / "none"])
    assert all(isinstance(error, PipeplanError) for error in errors)
    words = "the ranks see different checkpoints, the newest of rank 0 step-00000003, rank 1 none"
    assert words in str(errors[1])


def test_ranks_of_a_host_that_was_not_started_again_follow_those_that_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 4, some(4), {})
    config = TrainingConfig.parse({"checkpoint": {"folder": str(tmp_path), "every": 1}}, "test")
    beginnings = [Beginning(config, RunSettings(), 0)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    beginnings.append(Beginning(config, RunSettings(), 1))
    assert beginnings[0].checkpoint is None
    found = together(2, lambda ranks: beginnings[ranks.rank].agreed(ranks, lambda _: 0))
    assert [checkpoint.step for checkpoint in found] == [4, 4]


def test_a_restart_goes_on_from_what_its_own_training_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from a later step that an earlier training left in the folder."""
    save_checkpoint(tmp_path, 9, some(9), {})
    config = TrainingConfig.parse({"checkpoint": {"folder": str(tmp_path), "every": 1}}, "test")
    first = Beginning(config, RunSettings(), 0)
    assert first.agreed(Ranks.alone(), lambda _: 0) is None
    first.tell(20)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Beginning(config, RunSettings(), 0).checkpoint is None
    save_checkpoint(tmp_path, 2, some(2), {})
    assert Beginning(config, RunSettings(), 0).checkpoint.step == 2
    (tmp_path / ".begun").write_text("yesterday")
    with pytest.raises(PipeplanError, match=r"\.begun: not a time in seconds; delete the file"):
        Beginning(config, RunSettings(), 0)


def test_a_step_that_is_named_and_missing_is_refused(tmp_path: Path) -> None:
    run = RunSettings(resume=tmp_path / "step-00000009")
    with pytest.raises(PipeplanError, match="step-00000009: no such folder"):
        Beginning(TrainingConfig(), run, 0)


# --- the learning rate's schedule -----------------------------------------------------------------


def lowered(step: int) -> float:
    """A schedule of one's own."""
    return float(os.environ.get("LOWERED", "1")) / step


COSINE = {"kind": "cosine", "warmup_steps": 2}
SCHEDULES = {
    "the same": (COSINE, 8, COSINE, 8, None),
    "a constant goes on": ({}, 8, {}, 12, None),
    "longer": (
        COSINE,
        8,
        COSINE,
        12,
        r"was kind cosine, .*, steps 8, here it is kind cosine, .*, steps 12",
    ),
    "longer in the warm-up": (
        {**COSINE, "warmup_steps": 5},
        8,
        {**COSINE, "warmup_steps": 5},
        9,
        "",
    ),
    "another end": (COSINE, 8, {**COSINE, "final_factor": 0.1}, 8, "final_factor 0.1"),
    "another kind": (COSINE, 8, {**COSINE, "kind": "linear"}, 8, "here it is kind linear"),
    "a function goes on": (
        {"kind": "test_restarts:lowered"},
        8,
        {"kind": "test_restarts:lowered"},
        12,
        None,
    ),
    "another function": ({"kind": "test_restarts:lowered"}, 8, {}, 8, "constant"),
}


@pytest.mark.parametrize("case", SCHEDULES)
@pytest.mark.parametrize("done", [4, 8])
def test_a_schedule_that_goes_on_otherwise_is_told(
    tmp_path: Path, case: str, done: int, caplog: pytest.LogCaptureFixture
) -> None:
    before, steps, after, steps_after, message = SCHEDULES[case]
    first = TrainingConfig.parse({"steps": steps, "schedule": before}, "before")
    save_checkpoint(tmp_path, done, {}, {"schedule": first.schedule_facts(done)})
    config = TrainingConfig.parse({"steps": steps_after, "schedule": after}, "after")
    warn_of_schedule(Checkpoint.open(tmp_path), config)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (message is not None)
    assert message is None or re.search(message, told[0])
