"""``pipeplan plan --runtime``: from the option to the files of the tool."""

import json
from pathlib import Path

import pytest
from commands import pipeplan
from tiny_problems import renamed, tiny_problem

from planner.plan.runtime_rules import RULES
from planner.report.summary import runtime_lines

NAMES = ("embed", "layers.0", "layers.1", "norm", "loss")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The words of a command that plans a tiny problem."""
    tiny = tiny_problem(5, layers=len(NAMES), devices=2, microbatches=2, backward="any")
    problem = renamed(tiny, NAMES)
    problem.graph.save(tmp_path / "graph.json")
    (tmp_path / "cluster.json").write_text(problem.cluster.model_dump_json())
    (tmp_path / "job.json").write_text(problem.job.model_dump_json())
    files = ["graph.json", "--cluster", "cluster.json", "--job", "job.json"]
    options = ["--time-limit", "0.05", "--deterministic"]
    return [*(str(tmp_path / word) if ".json" in word else word for word in files), *options]


def test_a_plan_for_a_runtime_says_its_space_and_is_exported(
    words: list[str], tmp_path: Path
) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "out"
    planned = pipeplan("plan", *words, "--runtime", "deepspeed", "-o", plan)
    assert planned.exit_code == 0, planned.output
    assert "space of deepspeed: cuts at " in planned.output
    assert "in the order of 1F1B" in planned.output
    assert "host times of deepspeed per operation and message are unknown" in planned.output
    assert "the bound holds for every plan of this space; its proof allows" in planned.output
    assert json.loads(plan.read_text())["job"]["runtime"] == "deepspeed"
    assert pipeplan("export", plan, "--to", "deepspeed", "-o", folder).exit_code == 0
    verified = pipeplan("verify", plan).output
    assert verified.startswith(f"{plan}: holds; it lies in the space of its bound: cuts at ")


def test_an_unknown_runtime_is_refused_with_the_known_ones(words: list[str]) -> None:
    refused = pipeplan("plan", *words, "--runtime", "jax")
    assert refused.exit_code == 1
    known = (
        "choose from pipeplan, torch, torchtitan, megatron, megatron-blocking, deepspeed, or name"
    )
    assert f"error: --runtime: 'jax' is unknown; {known}" in refused.output


def test_other_runtimes_reduce_in_every_iteration(words: list[str]) -> None:
    sync = ["--runtime", "megatron", "--sync", "semi_decentralized"]
    refused = pipeplan("plan", *words, *sync)
    assert refused.exit_code == 1
    assert "megatron reduces gradients over all pipelines in every iteration" in refused.output


def test_a_sweep_keeps_to_the_runtime(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    swept = pipeplan("sweep", *words, "--runtime", "torch", "-o", folder)
    assert swept.exit_code == 0, swept.output
    plans = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    assert [plan["job"]["replication"] for plan in plans if "stages" in plan] == [False]


OWN = """
format = "pipeplan-runtime/1"
name = "ours"

[behaviour]
send = "blocking"
message_us = 2e6
"""


def test_a_plan_is_replayed_as_another_runtime_runs_it(words: list[str], tmp_path: Path) -> None:
    plan, again, rules = (tmp_path / name for name in ("plan.json", "again.json", "ours.toml"))
    rules.write_text(OWN)
    stages = tmp_path / "stages.json"
    stages.write_text(json.dumps([list(NAMES[:2]), list(NAMES[2:])]))
    problem = words[: words.index("--time-limit")]
    adopted = pipeplan("adopt", *problem, "--stages", stages, "-o", plan)
    assert adopted.exit_code == 0, adopted.output
    assert pipeplan("simulate", plan, "--runtime", rules, "-o", again).exit_code == 0
    data = json.loads(again.read_text())
    assert data["runtime"]["name"] == "ours"
    before_s = json.loads(plan.read_text())["predicted"]["iteration_time_s"]
    assert data["predicted"]["iteration_time_s"] > before_s + 2
    for command in ("verify", "explain"):
        assert pipeplan(command, again, "--runtime", "megatron").exit_code == 0
    assert pipeplan("verify", again).exit_code == 0
    as_run = pipeplan("adopt", *problem, "--stages", stages, "--runtime", rules, "-o", plan)
    assert as_run.exit_code == 0, as_run.output
    assert json.loads(plan.read_text())["predicted"] == data["predicted"]
    both = pipeplan("simulate", plan, "--runtime", "megatron", "--sync", "all")
    assert both.exit_code == 1
    assert "--runtime: megatron has no effect together with --sync" in both.output


def test_host_times_that_nobody_measured_are_said_to_be_unknown() -> None:
    unknown = {name: list(runtime_lines(rules)) for name, rules in RULES.items()}
    assert unknown.pop("pipeplan") == []
    for name, lines in unknown.items():
        (line,) = lines
        assert line.startswith(f"host times of {name} per operation and message are unknown, 0 is")
    megatron = RULES["megatron"]
    assert megatron.interleaved is not None
    timed = megatron.interleaved.model_copy(update={"message_us": 5})
    assert list(runtime_lines(megatron.model_copy(update={"interleaved": timed}))) == []


def test_orders_that_wait_in_a_circle_are_refused(words: list[str], tmp_path: Path) -> None:
    plan, rules = tmp_path / "plan.json", tmp_path / "ours.toml"
    rules.write_text(OWN.replace('"blocking"', '"blocking"\nreceive = "blocking"'))
    stages = tmp_path / "stages.json"
    stages.write_text(json.dumps([list(NAMES[:2]), list(NAMES[2:])]))
    problem = words[: words.index("--time-limit")]
    assert pipeplan("adopt", *problem, "--stages", stages, "-o", plan).exit_code == 0
    for command in ("simulate", "verify", "explain"):
        refused = pipeplan(command, plan, "--runtime", rules)
        assert refused.exit_code == 1
        assert "the orders deadlock: " in refused.output
        assert "under the rules of ours, whose messages block; order its op" in refused.output
    again = tmp_path / "again.json"
    words = ["--runtime", rules, "-o", again, "--time-limit", "0.5", "--deterministic"]
    ordered = pipeplan("plan", plan, *words)
    assert ordered.exit_code == 0, ordered.output
    assert "as run by ours" in ordered.output
    assert pipeplan("verify", again).exit_code == 0
    stages_of = [json.loads(path.read_text())["stages"] for path in (plan, again)]
    assert stages_of[0] == stages_of[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sends = 1", "behaviour.sends: "),
        ('send = "async"', "behaviour.send: "),
        ("message_us = -1", "behaviour.message_us: "),
        ('exchange = "together"', 'exchange = "together" has no effect where sends or receives'),
    ],
)
def test_a_wrong_runtime_file_names_its_field(
    text: str, reason: str, words: list[str], tmp_path: Path
) -> None:
    rules = tmp_path / "ours.toml"
    rules.write_text(f'format = "pipeplan-runtime/1"\n[behaviour]\n{text}\n')
    refused = pipeplan("plan", *words, "--runtime", rules)
    assert refused.exit_code == 1
    assert reason in refused.output
