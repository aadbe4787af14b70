"""``pipeplan replan`` as users call it."""

import json
from pathlib import Path

import pytest
from commands import CLUSTERS, pipeplan

from planner.cluster.cluster import Cluster
from planner.job import Job
from planner.plan.moves import Moves
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.plan.run_command import resume_commands
from planner.search.solve import solve
from planner.tracing.trace import trace

QUICK = ("--deterministic", "--time-limit", 0.3)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = Job(microbatches=4)
    graph = trace("models.gpt:gpt_tiny", job)
    cluster = Cluster.load(CLUSTERS / "irregular.toml")
    source = ModelSource("models.gpt:gpt_tiny", {})
    plan = solve(Problem(graph, cluster, job, source), deterministic=True, time_limit_s=0.3).plan
    path = tmp_path_factory.mktemp("old") / "plan.json"
    plan.save(path)
    return path


@pytest.mark.extensive
def test_a_plan_for_what_is_left_its_moves_and_the_command_to_go_on(
    old: Path, tmp_path: Path
) -> None:
    lost = Plan.load(old).ranks[0]
    path, moves = tmp_path / "new.json", tmp_path / "moves.json"
    done = pipeplan("replan", old, "--lost", lost, "-o", path, "--moves", moves, *QUICK)
    assert done.exit_code == 0, done.output
    plan = Plan.load(path)
    assert lost not in plan.cluster.device_names
    assert Moves.load(moves).new_plan == plan.execution_digest
    commands = resume_commands(plan, path)
    assert commands is not None
    assert all(one.command in done.output for one in commands.hosts)
    assert commands.hosts[0].command.endswith(f"-m executor {path} --resume CHECKPOINTS")
    assert "Plans found" in done.output
    assert pipeplan("verify", path).exit_code == 0


@pytest.mark.extensive
def test_json_tells_the_plan_the_alternatives_and_the_moves(old: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    device = Plan.load(old).ranks[0]
    done = pipeplan("replan", old, "--slow", f"{device}:2", "-o", path, "--json", *QUICK)
    data = json.loads(done.output)
    assert data["plan"] == str(path)
    assert data["iteration_time_s"] == Plan.load(path).predicted.iteration_time_s
    roles = [row["role"] for row in data["alternatives"]]
    assert roles == ["chosen", "fastest found", "fewest bytes"]
    moves = Moves.parse(data["moves"], "moves")
    assert moves.bytes == data["alternatives"][0]["moved_bytes"]


@pytest.mark.extensive
def test_a_device_that_was_lost_comes_back_by_the_whole_cluster(old: Path, tmp_path: Path) -> None:
    lost = Plan.load(old).ranks[0]
    less, back = tmp_path / "less.json", tmp_path / "back.json"
    pipeplan("replan", old, "--lost", lost, "-o", less, *QUICK)
    whole = CLUSTERS / "irregular.toml"
    done = pipeplan("replan", less, "--cluster", whole, "-o", back, *QUICK)
    assert done.exit_code == 0, done.output
    assert Plan.load(back).cluster == Plan.load(old).cluster


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--lost", "old/gpu7"], "--lost: the cluster has no device or node 'old/gpu7'"),
        (["--slow", "old"], "write n0/gpu1:1.5"),
        (["--added", "rack2.toml"], "--added: 'rack2.toml' is not NAME=LIKE"),
        (["--lost", "old", "--cluster", str(CLUSTERS / "irregular.toml")], "leave out the one"),
        ([], "name what was lost, slowed or added"),
        (["--lost", "old", "--slack", "-1"], "slack: -1.0"),
        (["--lost", "old", "--time-limit", "0"], "--time-limit: "),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    old: Path, tmp_path: Path, words: list[str], text: str
) -> None:
    path = tmp_path / "new.json"
    done = pipeplan("replan", old, "-o", path, *words)
    assert done.exit_code == 1
    assert text in done.output
    assert not path.exists()


def test_the_plan_that_training_runs_by_is_not_written_over(old: Path) -> None:
    before = old.read_bytes()
    done = pipeplan("replan", old, "--lost", "old", "-o", old)
    assert done.exit_code == 1
    assert "choose another name" in done.output
    assert old.read_bytes() == before
