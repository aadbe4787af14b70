"""What a newcomer stumbles on: overwritten plans, partial presets, units, full memory, types."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from builders import ROOT, boundary, cluster, device_type, graph, layer, link, parameter
from typer.testing import CliRunner

import planner
from planner import Cluster, Job, ModelSource, PipeplanError, Problem, load_plan, solve
from planner.cli.commands import app
from planner.cli.plan import LITTLE, ProgressTable, memory_lines
from planner.cluster.memory_margin import with_memory_margin
from planner.cluster.presets import DEVICES
from planner.search.infeasible import explain
from planner.search.result import HistoryRow
from planner.search.solve import quickly


def test_plan_never_overwrites_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "models.gpt:gpt_tiny", "--cluster"]
    words += [str(ROOT / "examples/clusters/single_node.toml"), "--time-limit", "0.2"]
    words += ["--deterministic", "--no-check"]
    Path("plan.json").write_text("mine")
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1
    assert "plan.json: exists already; name the file to write with -o" in (refused.stderr)
    assert Path("plan.json").read_text() == "mine"
    assert CliRunner().invoke(app, [*words, "-o", "plan.json"]).exit_code == 0
    assert load_plan("plan.json").stages
    assert CliRunner().invoke(app, [*words, "-o", "plan.json"]).exit_code == 0


def test_the_last_bound_is_in_the_table_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    table = ProgressTable(quiet=False)
    for time_s, bound_s in ((1.0, 9.0), (2.0, 9.01), (3.0, 9.02)):
        table.add(HistoryRow(time_s, 10.0, bound_s, "bound: CP-SAT's decisions"))
    table.end()
    bounds = [line.split()[3] for line in capsys.readouterr().err.splitlines()[1:]]
    assert bounds == ["9000", "9020"]


def cluster_file(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(f'format = "pipeplan-cluster/1"\nname = "c"\n{text}')
    return path


NODE = '[[nodes]]\nname = "n"\ndevices = 2\ntype = "A100-80GB"\nlink = "NVLink3"\n'


def test_one_figure_of_a_preset_can_be_set_alone(tmp_path: Path) -> None:
    text = f'[device_types."A100-80GB"]\nreserved_gib = 7\n{NODE}'
    kind = Cluster.load(cluster_file(tmp_path, text)).device_types["A100-80GB"]
    assert kind == DEVICES["A100-80GB"].model_copy(update={"reserved_gib": 7.0})


def test_a_type_without_a_preset_still_needs_all_figures(tmp_path: Path) -> None:
    text = f'[device_types."A100-80"]\nreserved_gib = 7\n{NODE}'
    with pytest.raises(PipeplanError, match="memory_gib"):
        Cluster.load(cluster_file(tmp_path, text))


def network(width: float, more: str = "") -> str:
    ends = [f'[[devices]]\nname = "{name}"\ntype = "RTX-4090"\n' for name in ("a", "b")]
    row = f'[[links]]\nbetween = ["a", "b"]\nbandwidth_gb_per_s = {width}\n{more}'
    return "".join([*ends, row])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (network(25), "links[0].bandwidth_gb_per_s: 25 between 'a' and 'b' is 200 Gbit/s; if a"),
        (network(25), "write 3.125"),
        (network(100), "write 12.5"),
        (network(3.125), None),
        (network(25, 'source = "measured"'), None),
        (network(25, 'source = "datasheet"'), None),
        (f"unusual_figures = true\n{network(25)}", None),
        (
            f'{NODE}[[links]]\nbetween = ["n/gpu0", "n/gpu1"]\nbandwidth_gb_per_s = 25\n',
            None,
        ),
        (
            "".join([network(25).replace("bandwidth_gb_per_s = 25", 'preset = "lan"')])
            + "[link_types.lan]\nbandwidth_gb_per_s = 25\nlatency_us = 5\n",
            'link_types."lan".bandwidth_gb_per_s: 25',
        ),
    ],
)
def test_a_bandwidth_in_gbit_per_s_is_doubted(
    text: str, words: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="planner.cluster"):
        Cluster.load(cluster_file(tmp_path, text))
    assert len(caplog.messages) == (words is not None)
    assert words is None or words in caplog.messages[0]


def plan_with_memory(memory_gib: float) -> planner.Plan:
    """A plan of one device, whose model state takes 12 GB."""
    machines = cluster(["d0"], [], types={"unit": device_type(memory_gib=memory_gib)})
    model = graph([layer("a", parameters=["p"])], [], [parameter("p", 10**9)])
    return solve(Problem(model, machines, Job(microbatches=1, optimizer="sgd_momentum")),
                 time_limit_s=0.1, deterministic=True).plan  # fmt: skip


def test_a_plan_that_fills_a_device_says_so() -> None:
    peak = plan_with_memory(100).predicted.devices["d0"].peak_memory_bytes / 2**30
    assert memory_lines(plan_with_memory(peak / (1 - LITTLE - 0.01))) == []
    (line,) = memory_lines(plan_with_memory(peak / (1 - LITTLE + 0.01)))
    assert "1 device with less than 6% of it free, d0 with 5.0%" in line
    assert "--memory-margin 6%" in line


@pytest.mark.parametrize(
    ("margin", "left"), [("6%", 0.06), ("0.06", 0.06), ("2GiB", 2 / 24), ("2 gib", 2 / 24)]
)
def test_a_margin_of_memory_is_left_free(margin: str, left: float) -> None:
    machines = cluster(["d0"], [], types={"unit": device_type(memory_gib=24, reserved_gib=1)})
    kind = with_memory_margin(machines, margin).device_type("d0")
    assert kind.capacity_bytes == pytest.approx((24 - 1 - left * 24) * 2**30)


@pytest.mark.parametrize(
    ("margin", "message"),
    [
        ("much", "expected a share such as 6% or 0.06"),
        ("-1%", "expected a share"),
        ("100%", "expected a share"),
        ("1.5", "expected a share"),
        ("23GiB", "'unit' has 24 GiB, of which 1 are reserved: nothing is left"),
    ],
)
def test_a_wrong_margin_is_refused(margin: str, message: str) -> None:
    machines = cluster(["d0"], [], types={"unit": device_type(memory_gib=24, reserved_gib=1)})
    with pytest.raises(PipeplanError, match=message):
        with_memory_margin(machines, margin)


def test_a_layer_that_fits_elsewhere_is_not_blamed() -> None:
    """Two layers of 15 GiB, of which a small device must take one: the total is too much."""
    types = {"large": device_type(memory_gib=17), "small": device_type(memory_gib=8)}
    machines = cluster({"d0": "large", "d1": "small"}, [link("d0", "d1")], types=types)
    rows = [layer(name, parameters=[f"p{name}"]) for name in "ab"]
    sizes = [parameter(f"p{name}", 10**9) for name in "ab"]
    model = graph(rows, [boundary("a", "b", bytes_=8)], sizes)
    job = Job(microbatches=1, optimizer="sgd_momentum", replication=False)
    message = str(explain(Problem(model, machines, job), quickly))
    assert "in all, 2 devices have 2" in message
    assert "which fits on a device of type 'large', is left for a smaller one" in message
    assert "alone" not in message


@pytest.fixture(scope="module")
def problem() -> Problem:
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    model = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=8)])
    return Problem(model, machines, Job(microbatches=2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: Job(microbatches=0), "Job: microbatches: expected at least 1"),
        (lambda p: Job(microbatch=3), "microbatch: unknown field .* did you mean 'microbatches'"),
        (lambda p: Job("job.toml"), "name the fields, as in Job.microbatches=32., or Job.load"),
        (lambda p: Job.load("no.toml"), "no.toml: no such file"),
        (lambda p: Job.load(3), "path: expected str or Path, not 3 of type int"),
        (lambda p: planner.trace(3), "model: expected .module:factory."),
        (lambda p: planner.trace("m:f", "job.toml"), "job: expected Job, .*Job.load reads a file"),
        (lambda p: Problem("g.json", p.cluster, p.job), "graph: .*LayerGraph.load reads a file"),
        (lambda p: Problem(p.graph, "c.toml", p.job), "cluster: .*Cluster.load reads a file"),
        (lambda p: Problem(p.graph, p.job, p.cluster), "cluster: expected Cluster, not Job"),
        (lambda p: Problem(p.graph, p.cluster, {"microbatches": 2}), "job: expected Job"),
        (lambda p: replace(p, source="m:f"), "source: expected ModelSource"),
        (lambda p: solve("p"), "problem: expected Problem"),
        (lambda p: solve(p, time_limit_s="5"), "time_limit_s: expected int or float"),
        (lambda p: planner.explain("plan.json"), "plan: .*planner.load_plan reads a file"),
        (lambda p: planner.plot(), "plans: expected Plan"),
        (lambda p: planner.report("plan.json", "a.html"), "plan: expected Plan"),
    ],
)
def test_wrong_arguments_are_told_in_our_words(problem: Problem, call, words: str) -> None:
    with pytest.raises(PipeplanError, match=words):
        call(problem)


def test_jobs_are_copied_and_compared_as_before() -> None:
    job = Job(microbatches=3)
    assert job.model_copy(update={"microbatches": 4}) == Job(microbatches=4)
    assert Job.parse(job.model_dump(mode="json"), "job") == job
    assert ModelSource("m:f").arguments == {}


def test_plans_are_explained_and_shown_from_python(problem: Problem, tmp_path: Path) -> None:
    plan = solve(problem, time_limit_s=0.1, deterministic=True).plan
    told = planner.explain(plan)
    assert told.figures.iteration_time_s == pytest.approx(plan.predicted.iteration_time_s)
    assert str(told).startswith("iteration ")
    (ax,) = planner.plot(plan, path=tmp_path / "plan.png")
    assert ax.get_xlabel().startswith("time")
    planner.report(plan, tmp_path / "plan.html")
    assert (tmp_path / "plan.png").stat().st_size > 0
    assert "<html" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ended": "nothing left to try"}, None),
        ({"lower_bound_s": 1e9}, None),
        ({"tried": 3}, "only 3 layouts could be judged .*--time-limit 15"),
        ({"tried": 9_999}, None),
        ({"tried": 9_999, "processor_share": 0.4}, "the machine was busy: .* 40% of a core"),
        ({"tried": 9_999, "processor_share": 0.9}, None),
    ],
)
def test_a_search_that_was_short_says_so_last(
    problem: Problem, changes: dict, words: str | None
) -> None:
    found = solve(problem, time_limit_s=0.1, deterministic=True)
    limited = replace(
        found, status="feasible", ended="time limit", search_s=5.0, lower_bound_s=1e-6
    )
    told = replace(limited, **changes)
    if words is None:
        assert told.shortcoming() is None
        assert str(told) == told.summary()
    else:
        assert str(told).splitlines()[-1] == told.shortcoming()
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(told.shortcoming())
