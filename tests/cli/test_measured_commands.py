"""``pipeplan simulate --against``, ``calibrate`` and ``plan --costs`` on a plan of the zoo."""

import json
from pathlib import Path

import pytest
from commands import CLUSTERS, pipeplan
from measured_runs import run_of

from planner import Cluster, LayerGraph, Plan, simulate
from planner.costs.roofline import layer_times
from planner.model.figures import MeasuredTimes
from planner.plan.operations import KIND_LABELS, Kind
from planner.units import format_seconds


def slower(plan: Plan, factor: float) -> Plan:
    """The plan on devices that take longer for everything by a factor."""
    kinds, precision = plan.cluster.device_types, plan.job.precision
    layers = []
    for layer in plan.problem.graph.record.layers:
        rows = {kind: layer_times(layer, kind, kinds[kind], precision) for kind in kinds}
        measured = {
            kind: MeasuredTimes(**{name: factor * s for name, s in times._asdict().items()})
            for kind, times in rows.items()
        }
        layers.append(layer.model_copy(update={"measured": measured}))
    graph = plan.model.graph.model_copy(update={"layers": tuple(layers)})
    return plan.model_copy(update={"model": plan.model.model_copy(update={"graph": graph})})


@pytest.fixture
def run_path(plan_path: Path, tmp_path: Path) -> Path:
    """A run in which operations took twice as long; four times in the first of three steps."""
    plan, path = Plan.load(plan_path), tmp_path / "measured.json"
    warm, settled = (simulate(slower(plan, factor)) for factor in (4, 2))
    run_of(plan, [warm, settled, settled]).save(path)
    return path


def kinds_of(plan: Plan) -> set[Kind]:
    return {operation.kind for order in plan.parsed_orders().values() for operation in order}


def test_a_run_is_compared_kind_by_kind_and_in_all(plan_path: Path, run_path: Path) -> None:
    made = pipeplan("simulate", plan_path, "--against", run_path, "--json")
    assert made.exit_code == 0, made.output
    report, plan = json.loads(made.stdout), Plan.load(plan_path)
    against = report["against"]
    assert against["steps"] == [2, 3]
    measured_s = simulate(slower(plan, 2)).iteration_time_s
    assert against["iteration"]["measured_s"] == pytest.approx(measured_s, abs=1e-9)
    assert against["iteration"]["predicted_s"] == report["iteration_time_s"]
    assert against["error"] == pytest.approx(report["iteration_time_s"] / measured_s - 1, abs=1e-6)
    assert set(against["kinds"]) == kinds_of(plan)
    # Short operations are told to the nanosecond.
    assert all(row["ratio"] == pytest.approx(2, rel=1e-2) for row in against["operations"])
    assert all(row["ratio"] == pytest.approx(1, rel=1e-2) for row in against["optimizer"].values())
    assert sum(row["count"] for row in against["kinds"].values()) == sum(
        len(order.split()) for order in plan.orders.values()
    )


def test_a_comparison_is_printed(plan_path: Path, run_path: Path) -> None:
    output = pipeplan("simulate", plan_path, "--against", run_path).stdout
    plan = Plan.load(plan_path)
    measured = format_seconds(simulate(slower(plan, 2)).iteration_time_s)
    for words in (
        *(f"{kind} {KIND_LABELS[kind]}" for kind in kinds_of(plan)),
        *("optimizer step", "waiting", "Largest errors", "Transfers"),
        f"iteration {format_seconds(plan.predicted.iteration_time_s)} predicted, {measured} "
        "measured (median of 2 steps from step 2), error -",
    ):
        assert words in output


def test_a_prediction_or_a_run_of_another_plan_is_refused(
    plan_path: Path, run_path: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    pipeplan("simulate", plan_path, "--trace", trace)
    result = pipeplan("simulate", plan_path, "--against", trace)
    assert result.exit_code == 1
    assert "the prediction that `pipeplan simulate --trace` writes" in result.stderr
    data = json.loads(plan_path.read_text())
    device, order = next(iter(data["orders"].items()))
    assert order.startswith("0F0 0F1")
    data["orders"][device] = order.replace("0F0 0F1", "0F1 0F0", 1)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))
    against, calibrate = ("simulate", other, "--against", run_path), ("profile", other, run_path)
    for command in (against, (*calibrate, "-o", tmp_path / "made.json")):
        result = pipeplan(*command)
        assert result.exit_code == 1
        assert f"error: {run_path}: plan_digest: the timeline was measured with" in result.stderr


def test_a_calibrated_plan_predicts_the_run_and_can_be_planned_from(
    plan_path: Path, run_path: Path, tmp_path: Path
) -> None:
    made, graph, cluster = (tmp_path / name for name in ("made.json", "g.json", "c.toml"))
    options = ("--graph", graph, "--cluster", cluster)
    result = pipeplan("profile", plan_path, run_path, "-o", made, *options)
    assert result.exit_code == 0, result.output
    before, after = Plan.load(plan_path), Plan.load(made)
    measured_s = simulate(slower(before, 2)).iteration_time_s
    assert after.predicted.iteration_time_s == pytest.approx(measured_s, rel=1e-3)
    assert after.predicted.lower_bound_s == 0
    figures = [before.predicted.iteration_time_s, after.predicted.iteration_time_s, measured_s]
    texts = [format_seconds(value) for value in figures]
    assert f"iteration {texts[0]} predicted before, {texts[1]} after" in result.stdout
    assert pipeplan("verify", made).exit_code == 0
    assert pipeplan("simulate", made, "--against", run_path).exit_code == 0
    assert Cluster.load(cluster) == after.cluster
    assert LayerGraph.load(graph).digest == after.model.graph_digest

    job = tmp_path / "job.json"
    job.write_text(after.job.model_dump_json())
    again = tmp_path / "again.json"
    common = ("--cluster", cluster, "--job", job, "--time-limit", 0.2, "-o", again)
    planned = pipeplan("plan", "models.gpt:gpt_tiny", "--costs", graph, *common)
    assert planned.exit_code == 0, planned.output
    assert Plan.load(again).model.factory == "models.gpt:gpt_tiny"
    assert Plan.load(again).model.graph_digest == after.model.graph_digest
    refused = pipeplan(
        "plan", "models.gpt:gpt_tiny", "--costs", graph, "--set", "width=256", *common
    )
    assert refused.exit_code == 1
    assert f"--costs {graph}: layers[0]" in refused.stderr


def test_an_emulated_run_calibrates_links_alone(plan_path: Path, tmp_path: Path) -> None:
    plan, path, made = Plan.load(plan_path), tmp_path / "run.json", tmp_path / "made.json"
    run_of(plan, emulated=True).save(path)
    refused = pipeplan("profile", plan_path, path, "-o", made)
    assert refused.exit_code == 1
    assert f"error: {path}: the compute in this timeline was emulated" in refused.stderr
    assert "--links-only" in refused.stderr
    done = pipeplan("profile", plan_path, path, "-o", made, "--links-only", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["operations"] == []
    assert report["predicted_after_s"] == pytest.approx(report["measured_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("-o", "no/such/folder/plan.json"), "cannot be written"),
        (("-o", "made.json", "--cluster", "cluster.yaml"), "--cluster cluster.yaml: expected"),
        (("-o", "made.json", "--graph", "graph.toml"), "--graph graph.toml: expected"),
        (("-o", "made.json", "--graph", "made.json"), "--graph made.json: this is another output"),
        (("-o", "run.json"), "--output run.json: this is an input file"),
    ],
)
def test_outputs_that_cannot_be_are_refused_first(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = pipeplan("profile", plan_path, "run.json", *options)
    assert result.exit_code == 1
    assert named in result.stderr


def test_costs_must_be_measured_times(plan_path: Path, tmp_path: Path) -> None:
    cluster = CLUSTERS / "single_node.toml"
    options = ("--cluster", cluster, "--costs", plan_path, "-o", tmp_path / "plan.json")
    result = pipeplan("plan", "models.gpt:gpt_tiny", *options)
    assert result.exit_code == 1
    assert "this is a plan, give a costs file, as `pipeplan profile` writes it" in result.stderr
    traced = tmp_path / "graph.json"
    pipeplan("trace", "models.gpt:gpt_tiny", "-o", traced)
    result = pipeplan("plan", "models.gpt:gpt_tiny", *options[:2], "--costs", traced, *options[4:])
    assert result.exit_code == 1
    assert "layers: none has measured times; give what `pipeplan profile` wrote" in result.stderr
