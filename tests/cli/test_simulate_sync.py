"""What ``pipeplan simulate --sync`` prints, writes and refuses."""

import io
import json
from pathlib import Path

import pytest
from builders import GIGA, cluster, graph, layer, link, orders, parameter, pipeline
from commands import CLUSTERS, pipeplan
from rich.console import Console

from benchmarks.sync.uniform import uniform_world
from executor.launch.run import RunSettings, sync_of
from planner import Plan
from planner.assembly import plan_by_hand
from planner.cli.sync import with_sync
from planner.errors import PipeplanError
from planner.measured.sync_trace import SyncTrace
from planner.report.comparison import COLUMNS, sync_view
from planner.sync.pipeline_replicas import pipeline_replicas_of
from planner.sync.simulation.comparison import compare_syncs
from planner.sync.simulation.planned import from_plan
from planner.sync.simulation.run import Scenario
from planner.sync.simulation.world import LinkCost
from planner.sync.strategies import parse_sync
from planner.verification import verify

OPTIONS = ("--iterations", 20)


@pytest.fixture(scope="module")
def replicas_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipelines of two stages, each on a node of its own."""
    names = ["n0/a", "n0/b", "n1/a", "n1/b"]
    machines = cluster(names, [link(name, "hub", latency_us=100) for name in names], ["hub"])
    rows = [layer("a", parameters=["v"]), layer("b", parameters=["w"])]
    held = [parameter("v", GIGA // 40), parameter("w", GIGA // 20)]
    the_graph = graph(rows, None, held)
    stages = [(["a"], ["n0/a", "n1/a"]), (["b"], ["n0/b", "n1/b"])]
    placed = pipeline(the_graph, machines, stages)
    plan = plan_by_hand(
        placed,
        orders(**{"n0/a": "0F0 0B0", "n1/a": "0F1 0B1", "n0/b": "1F0 1B0", "n1/b": "1F1 1B1"}),
    )
    path = tmp_path_factory.mktemp("replicas") / "plan.json"
    plan.save(path)
    return path


def test_a_plan_s_world_is_its_first_pipeline(replicas_path: Path) -> None:
    world = from_plan(Plan.load(replicas_path))
    # Forward 1 s, 10**9 bytes over two links of 1 GB/s, forward and backward 1 + 2 s, back again.
    first, second = world.ranks
    assert (world.workers, world.pipelines_per_node, world.slots) == (2, 1, 4)
    assert (first.first_forward_s, first.forward_s, first.backward_s) == (0, 1, 2)
    assert second.first_forward_s == pytest.approx(2, rel=0.01)
    assert second.last_backward_s == pytest.approx(5, rel=0.01)
    assert first.last_backward_s == pytest.approx(8, rel=0.01)
    assert (first.parameter_bytes, second.parameter_bytes) == (GIGA // 10, GIGA // 5)
    assert (first.network_card, second.network_card) == (0, 0)
    assert world.between.latency_s == pytest.approx(2e-4)
    assert world.between.bandwidth_gb_per_s == pytest.approx(1)
    assert world.slowdown == pytest.approx((1, 1))
    assert from_plan(Plan.load(replicas_path), 5).workers == 5


def test_every_strategy_has_a_row(replicas_path: Path) -> None:
    made = pipeplan(
        "simulate", replicas_path, "--sync", "all", *OPTIONS, "--pipelines", 4, "--json"
    )
    report = json.loads(made.stdout)
    names = [row["sync"]["strategy"] for row in report["strategies"]]
    assert len(names) == 16
    assert len(set(names)) == 10
    assert (report["workers"], report["iterations"], report["seeds"]) == (4, 20, 1)
    assert report["strategies"][1]["overlapped_ratio"] == 1


def test_a_table_names_strategies_as_the_command_does(replicas_path: Path) -> None:
    name = "partial_all_reduce:group_size=2,seed=1"
    made = pipeplan("simulate", replicas_path, "--sync", name, *OPTIONS, "--slowness", "slow:0x2")
    assert name in made.stdout
    assert "2 pipelines of" in made.stdout
    assert "target loss" in made.stdout
    assert "trained with SGD and momentum" in made.stdout


def test_a_strategy_that_is_given_twice_has_one_row(replicas_path: Path) -> None:
    twice = ("--sync", "ad_psgd", "--sync", "ad_psgd")
    made = pipeplan("simulate", replicas_path, *twice, *OPTIONS, "--json")
    assert len(json.loads(made.stdout)["strategies"]) == 1


def test_a_narrow_terminal_folds_names_and_cuts_no_figure() -> None:
    world = uniform_world(4, 0.1, 10**7, LinkCost(1e-3, 1.0))
    name = "partial_all_reduce:schedule=static,pipelines_per_node=2"
    found = compare_syncs(Scenario(world, 10), (parse_sync("all_reduce"), parse_sync(name)))
    console = Console(width=80, record=True, file=io.StringIO())
    table, *lines = sync_view(found)
    console.print(table, *lines, sep="\n")
    text = console.export_text()
    assert "…" not in text
    lines = [line.strip() for line in text.splitlines()]
    assert next(line for line in lines if "rate" in line).split() == [
        *("strategy", "rate", "plain", "overlap", "target", "speed-up", "loss", "apart", "mixing")
    ]
    first = next(number for number, line in enumerate(lines) if line.startswith("partial_all_"))
    row = table.rows[1]
    assert lines[first].split()[1:] == " ".join(row[1:]).split()
    assert "".join(line.split()[0] for line in lines[first : first + 5]).startswith(name)
    assert all(f"{column}: " in " ".join(text.split()) for column in COLUMNS)


def test_a_choice_gives_its_reason(replicas_path: Path) -> None:
    options = ("--sync", "choose", *OPTIONS)
    made = pipeplan("simulate", replicas_path, *options)
    assert made.exit_code == 0, made.output
    assert "pipelines are steady" in made.stdout
    data = json.loads(pipeplan("simulate", replicas_path, *options, "--json").stdout)
    assert data["choice"]["reason"] in made.stdout
    assert f"{data['choice']['sync']['strategy']}: " in made.stdout


def test_a_measured_trace_calibrates_the_world(replicas_path: Path, tmp_path: Path) -> None:
    """Computation took twice as long as planned; the message after it takes 0.1 s."""
    plan = Plan.load(replicas_path)
    world, rows = from_plan(plan), []
    for rank, place in enumerate(world.ranks):
        taken = {"compute_s": 2 * place.last_backward_s, "sync_wait_s": 0.1, "members": [0, 1]}
        rows += [
            {"iteration": n, "pipeline_rank": rank, "start_s": 20.0 * n, **taken} for n in (1, 2, 3)
        ]
    trace = {
        "format": "pipeplan-sync-trace/2",
        "sync": {"strategy": "all_reduce", "options": {"overlap": False}},
        "parameter_bytes": [place.parameter_bytes for place in world.ranks],
        "workers": [rows, rows],
    }
    SyncTrace.parse(trace).save(tmp_path / "trace.json")
    options = ("--sync", "all_reduce:overlap=false", *OPTIONS, "--json")
    plain = json.loads(pipeplan("simulate", replicas_path, *options).stdout)
    fitted = json.loads(
        pipeplan(
            "simulate", replicas_path, *options, "--sync-trace", tmp_path / "trace.json"
        ).stdout
    )
    assert fitted["iteration_s"] == pytest.approx(2 * plain["iteration_s"], rel=0.01)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--pipelines", 4), "--pipelines: 4 has no effect without --sync; add --sync all"),
        (("--sync", "all", "--noise", "jitter=0.1"), "--noise: jitter=0.1 has no effect together"),
        (
            ("--sync", "choose", "--sync", "all"),
            "--sync choose cannot be combined with another --sync",
        ),
        (("--sync", "fast"), "sync.strategy: 'fast' is not known"),
        (("--sync", "ad_psgd:pairs=3"), "sync.options of ad_psgd: pairs: "),
        (
            ("--sync", "parameter_server:servers=9", "--pipelines", 4),
            "sync.options of parameter_server: servers: 9, but there are 4 pipelines, which are",
        ),
        (("--sync", "all", "--pipelines", 0), "workers: 0 is not a whole number from 1"),
        (("--sync", "all", "--iterations", 0), "iterations: 0 is not a whole number from 1"),
        (("--sync", "all", "--slowness", "fast"), "slowness: 'fast' cannot be read"),
        (("--sync", "all", "--slowness", "slow:9x2"), "slowness: slow: worker 9 by 2"),
        (("--sync", "all", "--seeds", 0), "seeds: 0 is not a whole number from 1"),
        (("--sync", "all", "-o", "x.json"), "--output: x.json has no effect together"),
        (("--sync", "all", "--pipelines", 1), "workers: one pipeline has nobody to"),
        (("--sync", "all", "--slowness", ""), "slowness: '' cannot be read"),
    ],
)
def test_wrong_options_are_named(
    replicas_path: Path, options: tuple[object, ...], named: str
) -> None:
    result = pipeplan("simulate", replicas_path, *options)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {named}")


def test_options_that_a_plan_s_pipelines_cannot_have_are_refused_wherever_a_plan_is(
    replicas_path: Path,
) -> None:
    plan, name = Plan.load(replicas_path), "parameter_server:servers=9"
    told = "sync.options of parameter_server: servers: 9, but there are 2 pipelines"
    other = plan.model_copy(update={"sync": parse_sync(name)})
    (problem,) = verify(other)
    assert problem.startswith(told)
    for run, which in ((RunSettings(sync=name), plan), (RunSettings(), other)):
        with pytest.raises(PipeplanError, match=told):
            sync_of(which, run)
    kept, reason = with_sync(plan, name)
    assert kept == plan
    assert reason.startswith(f"all_reduce is kept; {name} is not possible: {told}")


def test_a_plan_without_pipelines_says_so(plan_path: Path) -> None:
    result = pipeplan("simulate", plan_path, "--sync", "choose")
    assert result.exit_code == 1
    assert "one pipeline has nobody to synchronise with" in result.stderr


def test_a_word_that_is_no_strategy_is_told_before_the_lack_of_pipelines(tmp_path: Path) -> None:
    placed = pipeline(
        graph([layer("a"), layer("b")]),
        cluster(["x", "y", "z"], [link(name, "hub") for name in "xyz"], ["hub"]),
        [(["a"], ["x", "y"]), (["b"], ["z"])],
    )
    uneven = plan_by_hand(placed, orders(x="0F0 0B0", y="0F1 0B1", z="1F0 1B0 1F1 1B1"))
    uneven.save(tmp_path / "plan.json")
    said = pipeplan("simulate", tmp_path / "plan.json", "--sync", "nope").output
    assert "sync.strategy: 'nope' is not known" in said
    said = pipeplan("simulate", tmp_path / "plan.json", "--sync", "all_reduce").output
    assert "--sync semi_decentralized" in " ".join(said.split())


def test_plan_makes_pipelines_for_a_strategy_between_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    job = tmp_path / "job.toml"
    job.write_text('format = "pipeplan-job/1"\nmicrobatches = 4\n')
    asked = ("plan", "models.gpt:gpt_tiny", "--cluster", CLUSTERS / "irregular.toml", "--job", job)
    made = pipeplan(*asked, "--sync", "ad_psgd", "--time-limit", 0.3, "-o", path)
    assert made.exit_code == 0, made.output
    assert "time and bound assume synchronous pipelines" in made.output
    assert Plan.load(path).sync.strategy == "ad_psgd"
    assert len(pipeline_replicas_of(Plan.load(path))) > 1
    assert pipeplan("verify", path).exit_code == 0


def test_plan_says_what_is_in_the_way_of_pipelines_and_writes_nothing(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('format = "pipeplan-job/1"\nmicrobatches = 4\nreplication = false\n')
    asked = ("plan", "models.gpt:gpt_tiny", "--cluster", CLUSTERS / "irregular.toml", "--job", job)
    made = pipeplan(*asked, "--sync", "ad_psgd", "-o", tmp_path / "plan.json")
    assert made.exit_code == 1
    assert "job.replication: it is false" in made.output
    assert not (tmp_path / "plan.json").exists()
    robust = pipeplan(
        *asked, "--sync", "ad_psgd", "--prefer", "robust", "-o", tmp_path / "plan.json"
    )
    assert robust.exit_code == 1
    assert "robust: " in robust.output
