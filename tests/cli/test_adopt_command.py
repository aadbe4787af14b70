"""`pipeplan adopt`: what already runs as a plan that other commands speak about."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from commands import CLUSTERS, pipeplan

from planner import Plan, verify

JOB = """
format = "pipeplan-job/1"
microbatches = 4
samples_per_microbatch = 8
max_stages_per_device = 2
"""
SMALL = """
format = "pipeplan-cluster/1"
name = "small"
switches = ["hub"]

[[devices]]
name = "a"
type = "tiny"

[[devices]]
name = "b"
type = "tiny"

[device_types.tiny]
memory_gib = 0.012
reserved_gib = 0
memory_bandwidth_gb_per_s = 1000
peak_tflop_per_s = { float32 = 1 }

[[links]]
between = ["a", "hub"]
preset = "PCIe4-x16"

[[links]]
between = ["b", "hub"]
preset = "PCIe4-x16"
"""


@pytest.fixture(scope="session")
def graph_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer graph of a small GPT of four blocks."""
    folder = tmp_path_factory.mktemp("adopt")
    job = folder / "job.toml"
    job.write_text(JOB)
    path = folder / "graph.json"
    assert pipeplan("trace", "models.gpt:gpt_tiny", "--job", job, "-o", path).exit_code == 0
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def adopt(graph: Path, folder: Path, *words: object, cluster: Path | None = None) -> Result:
    where = ("--cluster", cluster or CLUSTERS / "single_node.toml", "--job", folder / "job.toml")
    return pipeplan("adopt", graph, *where, "-o", folder / "plan.json", *words)


def test_other_commands_speak_about_an_adopted_plan(graph_path: Path, folder: Path) -> None:
    made = adopt(graph_path, folder, "--stages", "Et|t|ttL")
    assert made.exit_code == 0, made.output
    path = folder / "plan.json"
    assert f"explain it with: pipeplan explain {path}" in made.stdout
    assert verify(Plan.load(path)) == []
    for words in (["verify"], ["simulate"], ["explain"]):
        assert pipeplan(*words, path).exit_code == 0, words


def test_the_command_it_prints_searches_on_from_the_plan(graph_path: Path, folder: Path) -> None:
    made = adopt(graph_path, folder, "--stages", "Et|t|ttL")
    (line,) = [
        row for row in made.stdout.splitlines() if row.startswith("search for a better plan with: ")
    ]
    words = line.removeprefix("search for a better plan with: pipeplan ").split()
    words[words.index("better.json")] = str(folder / "better.json")
    found = pipeplan(*words, "--time-limit", 0.2, "--deterministic")
    assert found.exit_code == 0, found.output
    assert "is ignored" not in found.stderr
    better, adopted = (Plan.load(folder / f"{n}.json") for n in ("better", "plan"))
    assert better.predicted.iteration_time_s <= adopted.predicted.iteration_time_s
    assert better.predicted.lower_bound_s > 0


def test_a_plan_comes_back_from_megatron(graph_path: Path, folder: Path) -> None:
    layout = "Et|t|t|tL"
    made = adopt(graph_path, folder, "--stages", layout, "--pipeline-size", 2, "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["schedule"] == "interleaved-1f1b"
    out = folder / "export"
    out.mkdir()
    exported = pipeplan("export", folder / "plan.json", "--to", "megatron", "-o", out)
    assert exported.exit_code == 0, exported.output
    assert f'--pipeline-model-parallel-layout "{layout}"' in (out / "megatron.sh").read_text()
    assert "Megatron runs the plan's own order, interleaved 1F1B" in exported.stdout


def test_modules_and_a_schedule_of_torch(graph_path: Path, folder: Path) -> None:
    stages, table = folder / "stages.json", folder / "schedule.csv"
    stages.write_text('[["wte", "wpe", "h.0"], ["h.1", "h.2", "h.3", "ln_f", "lm_head"]]')
    table.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    made = adopt(graph_path, folder, "--stages", stages, "--schedule", table, "--json")
    assert made.exit_code == 0, made.output
    data = json.loads(made.stdout)
    assert data["stages"][0] == ["wte", "wpe", "drop", "h.0"]
    assert data["overflow"] == []
    orders = list(Plan.load(folder / "plan.json").orders.values())
    assert orders == [row.replace(",", " ") for row in table.read_text().splitlines()]


def test_microbatches_that_megatron_would_refuse_are_noted(graph_path: Path, folder: Path) -> None:
    (folder / "job.toml").write_text(JOB.replace("microbatches = 4", "microbatches = 5"))
    words = ("--stages", "Et|t|t|tL", "--pipeline-size", 2)
    made = adopt(graph_path, folder, *words)
    assert "note: Megatron-LM needs a multiple of its 2 pipeline ranks" in made.stdout


def test_an_overflow_is_refused_unless_allowed(graph_path: Path, folder: Path) -> None:
    words = ("--stages", "Ett|ttL", "--schedule", "gpipe")
    small = folder / "small.toml"
    refused = adopt(graph_path, folder, *words, cluster=small)
    assert refused.exit_code == 1
    assert "error: stage 0 on a: " in refused.stderr
    assert not (folder / "plan.json").exists()
    allowed = adopt(graph_path, folder, *words, "--allow-overflow", cluster=small)
    assert allowed.exit_code == 0, allowed.output
    assert "note: stage 0 on a: " in allowed.stdout
    explained = pipeplan("explain", folder / "plan.json")
    assert explained.exit_code == 0, explained.output
    assert pipeplan("verify", folder / "plan.json").exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --stages LAYOUT|FILE or --layout TOOL:FILE"),
        (["--stages", "Et|x"], "--stages: character 4, 'x'"),
        (["--stages", "Et|tL"], "t appears 2 times, but the model has 4 blocks"),
        (["--stages", "Et*4L", "--schedule", "x"], "schedule x: no such schedule"),
        (["--stages", "Et*4L", "--devices", "gpu0,moon"], "no device 'moon'"),
        (["--stages", "none.json"], "none.json: no such file"),
        (["--stages", "Et*4L", "--schedule", "none.csv"], "none.csv: no such file"),
        (["--layout", "megatron"], "--layout megatron: expected megatron:FILE or torchtitan:FILE"),
    ],
)
def test_wrong_input_is_told(
    graph_path: Path, folder: Path, words: list[str], message: str
) -> None:
    result = adopt(graph_path, folder, *words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize("text", ['{"a": 1}', "[]", '["wte", "h.0"]', "[[1, 2]]"])
def test_a_file_of_stages_is_a_list_of_lists(graph_path: Path, folder: Path, text: str) -> None:
    stages = folder / "stages.json"
    stages.write_text(text)
    result = adopt(graph_path, folder, "--stages", stages)
    assert result.exit_code == 1
    assert "expected a list" in result.stderr


def test_the_plan_does_not_overwrite_what_it_is_made_from(graph_path: Path, folder: Path) -> None:
    result = adopt(graph_path, folder, "--stages", "Et*4L", "-o", folder / "job.toml")
    assert result.exit_code == 1
    assert "this is an input file of the command" in result.stderr


def test_megatrons_arguments_are_a_plan_of_groups(graph_path: Path, folder: Path) -> None:
    """The graph of the model itself, since its splits are needed."""
    (folder / "args.sh").write_text(
        "ARGS=(\n --num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel\n"
        " --pipeline-model-parallel-size 2 --micro-batch-size 8 --global-batch-size 64\n)\n"
    )
    found = adopt(Path("models.gpt:gpt_tiny"), folder, "--layout", f"megatron:{folder / 'args.sh'}")
    assert found.exit_code == 0, found.output
    assert (
        "sets samples_per_microbatch = 8, microbatches = 8, tensor_parallel = 2, "
        "sequence_parallel = true in the job"
    ) in found.stdout.replace("\n", " ")
    assert "--set tensor_parallel=2 --set sequence_parallel=true --warm-start" in found.stdout
    plan = Plan.load(folder / "plan.json")
    assert verify(plan) == []
    assert [stage.devices for stage in plan.stages] == [("n0/gpu0-1",), ("n0/gpu2-3",)]
    for words in (["verify"], ["simulate"], ["explain"]):
        assert pipeplan(*words, folder / "plan.json").exit_code == 0, words


def test_groups_of_a_layout_are_told_by_options(folder: Path) -> None:
    """The same plan as that of the arguments above, by parts."""
    words = ("--stages", "Ett|ttL", "--set", "tensor_parallel=2")
    assert adopt(Path("models.gpt:gpt_tiny"), folder, *words).exit_code == 0
    plan = Plan.load(folder / "plan.json")
    assert (plan.degree, len(plan.stages)) == (2, 2)


def test_what_a_runtimes_own_words_say_is_not_said_again(graph_path: Path, folder: Path) -> None:
    (folder / "args.sh").write_text("--num-layers 4")
    words = ("--layout", f"megatron:{folder / 'args.sh'}", "--pipeline-size", 2, "--recompute")
    found = adopt(graph_path, folder, *words)
    assert found.exit_code == 1
    assert "--pipeline-size, --recompute: --layout says this already" in found.stderr
