"""Commands on plans whose devices are tensor-parallel groups."""

import json
from pathlib import Path

import pytest
from commands import CLUSTERS, ROOT, pipeplan

from planner import Cluster, Job, Plan, Problem, verify
from planner.analysis.sweep.points import sizes_of
from planner.assembly import plan_by_hand
from planner.cluster.tensor_groups import TensorGroup
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import ModelSource
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.report.summary import group_lines
from planner.schedules.best import best_schedule
from planner.verification.verify import save_valid

GRAPH = ROOT / "tests" / "data" / "formats" / "graph-2.json"
CLUSTER = CLUSTERS / "irregular.toml"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups") / "plan.json"
    options = ("--deterministic", "--time-limit", 0.2, "--set", "tensor_parallel=2", "-o", path)
    result = pipeplan("plan", GRAPH, "--cluster", CLUSTER, *options)
    assert result.exit_code == 0
    assert "each device above is a tensor-parallel group of 2 devices" in result.output
    return path


def test_splits_are_kept_in_the_graph(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    command = ("trace", "models.gpt:gpt_tiny", "--split", 2, "--split", 4, "-o", path)
    assert pipeplan(*command).exit_code == 0
    found = LayerGraph.load(path).record
    assert [(split.degree, split.sequence) for split in found.splits] == [(2, False), (4, False)]
    assert found.splits == LayerGraph.load(GRAPH).record.splits


def test_the_proof_of_a_plan_of_groups_is_checked(planned: Path) -> None:
    result = pipeplan("verify", planned, "--prove")
    assert result.exit_code == 0
    assert "proved: no plan with" in result.output
    assert "in tensor-parallel groups of 2 takes less" in result.output


def test_figures_are_those_of_all_devices(planned: Path) -> None:
    plan = Plan.load(planned)
    data = json.loads(pipeplan("simulate", planned, "--json").stdout)
    assert data["iteration_time_s"] == plan.predicted.iteration_time_s
    assert set(data["devices"]) == set(plan.ranks)
    assert len(plan.rank_devices) == 2 * len(plan.ranks)


@pytest.fixture(scope="module")
def of_two_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stages on pairs of devices and, between them, on a single one: the ends share a parameter."""
    graph, cluster = LayerGraph.load(GRAPH), Cluster.load(CLUSTER)
    job = Job(microbatches=4, tensor_parallel="any")
    big = ("big/gpu0", "big/gpu1", "big/gpu2", "big/gpu3")
    groups = [("first", big[:2]), ("last", big[2:]), ("alone", ("ws0",))]
    parallel = TensorParallel(
        groups=tuple(TensorGroup(name=name, devices=devices) for name, devices in groups)
    )
    problem = Problem(graph, cluster, job, ModelSource("models.gpt:gpt_tiny"))
    layers = list(graph.layers)
    parts = zip((layers[:2], layers[2:4], layers[4:]), ("first", "alone", "last"), strict=True)
    stages = [StageSpec(tuple(names), (on,)) for names, on in parts]
    pipeline = place(grouped_problem(problem, parallel), stages)
    schedule = best_schedule(pipeline, backward="whole")
    assert schedule is not None
    plan = plan_by_hand(pipeline, schedule.orders).of_problem(problem, parallel)
    assert group_lines(plan) == [
        "the devices above are tensor-parallel groups: first, last of 2 devices; alone of 1 device"
    ]
    path = tmp_path_factory.mktemp("groups") / "plan.json"
    save_valid(plan, path)
    return path


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("explain",), "alone"),
        (("report", "-o", "report.html"), "wrote"),
        (("plan", "--time-limit", "0.2", "-o", "scheduled.json"), "wrote"),
    ],
)
def test_commands_take_a_plan_of_groups_of_several_sizes(
    of_two_sizes: Path,
    command: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_commands_take_a_plan_of_groups(of_two_sizes, command, told, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        ("replan", "--lost", "ws0", "-o", "new.json"),
        ("export", "--to", "megatron"),
        ("export", "--to", "torch-csv"),
    ],
)
def test_commands_for_groups_of_one_size_say_so(
    of_two_sizes: Path, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    result = pipeplan(name, of_two_sizes, *options)
    assert result.exit_code == 1
    assert "they have 1 and 2 devices, and this takes groups of one size only" in result.output


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("explain",), "big/gpu"),
        (("report", "-o", "plot.png"), "wrote"),
        (("report", "-o", "report.html"), "wrote"),
        (("simulate", "-o", "again.json", "--noise", "jitter=0.05"), "wrote"),
        (("explain", "--apply", "reschedule all stages", "-o", "edited.json"), "wrote"),
        (("plan", "--time-limit", "0.2", "-o", "scheduled.json"), "wrote"),
    ],
)
def test_commands_take_a_plan_of_groups(
    planned: Path,
    command: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    result = pipeplan(name, planned, *options)
    assert result.exit_code == 0
    assert told in result.output
    for path in tmp_path.glob("*.json"):
        assert Plan.load(path).tensor_parallel == Plan.load(planned).tensor_parallel
        assert pipeplan("verify", path).exit_code == 0


def test_a_lost_device_takes_its_group_along(planned: Path, tmp_path: Path) -> None:
    new, moves = tmp_path / "new.json", tmp_path / "moves.json"
    limits = ("--deterministic", "--time-limit", 0.2)
    command = ("replan", planned, "--lost", "big/gpu1", "-o", new, "--moves", moves, *limits)
    result = pipeplan(*command)
    assert result.exit_code == 0, result.output
    plan = Plan.load(new)
    assert verify(plan) == []
    assert plan.tensor_parallel is not None
    before, after = Plan.load(planned).tensor_parallel, plan.tensor_parallel.groups
    assert before is not None
    assert set(after) == {group for group in before.groups if "big/gpu1" not in group.devices}
    assert {move["target"] for move in json.loads(moves.read_text())["moves"]} <= set(plan.ranks)


def test_compare_plans_every_size_of_groups(tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    words = ("--planners", "grid", "--time-limit", 0.3, "--set", "tensor_parallel=2")
    command = ("compare", GRAPH, "--cluster", CLUSTER, *words, "--best-baseline", best, "--json")
    result = pipeplan(*command)
    assert result.exit_code == 0, result.output
    ours, grid = json.loads(result.stdout)
    assert [ours["tensor_parallel"], grid["tensor_parallel"]] == [2, 2]
    assert ours["iteration_time_s"] <= grid["iteration_time_s"] * (1 + 1e-9)
    assert Plan.load(best).degree == 2
    assert pipeplan("verify", best).exit_code == 0


def test_a_sweep_keeps_the_batch_and_plans_groups(tmp_path: Path) -> None:
    words = ("--global-batch", 8, "--microbatch-samples", "2,4", "--set", "tensor_parallel=2")
    limits = ("--deterministic", "--time-limit", 0.1)
    command = ("sweep", "models.gpt:gpt_tiny", "--cluster", CLUSTER, *words, *limits)
    result = pipeplan(*command, "-o", tmp_path / "sweep", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["points"]
    batches = [(row["samples_per_microbatch"], row["microbatches"]) for row in rows]
    assert batches == [(2, 4), (4, 2)]
    for row in rows:
        plan = Plan.load(tmp_path / "sweep" / row["plan"])
        assert plan.degree == 2
        assert row["degrees"] == [2]
        assert row["devices_used"] == plan.world_size
        assert row["iteration_time_s"] == plan.predicted.iteration_time_s
        assert verify(plan) == []
    # The same command solves nothing again and shows the groups beside the devices.
    shown = pipeplan(*command, "-o", tmp_path / "sweep").output.splitlines()
    title = next(line.split() for line in shown if "microbatches" in line)
    assert title[1:4] == ["devices", "group", "microbatches"]
    degrees = [line.partition(" of 9 ")[2].split()[0] for line in shown if " of 9 " in line]
    assert degrees == ["2", "2"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--global-batch", 8, "--microbatches", 4), "microbatches: the global batch fixes"),
        (("--global-batch", 9, "--microbatch-samples", "2"), "into microbatches of 2 samples"),
    ],
)
def test_a_batch_that_cannot_be_kept_is_told(words: tuple, told: str, tmp_path: Path) -> None:
    result = pipeplan("sweep", GRAPH, "--cluster", CLUSTER, *words, "-o", tmp_path / "sweep")
    assert result.exit_code == 1
    assert told in result.output


def test_microbatch_sizes_to_try_divide_the_batch() -> None:
    assert sizes_of(48) == (1, 2, 4, 8, 16)
    assert sizes_of(12) == (1, 2, 4)
    assert sizes_of(7) == (1,)
