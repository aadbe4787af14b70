"""JSON Schemas: those kept in schemas/, and what they accept beside what the loaders do."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from builders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from small_plan import a_plan
from typer.testing import CliRunner

from executor.launch.config import TrainingConfig
from executor.launch.train_schema import TRAIN
from planner import Cluster, Job, LayerGraph, PipeplanError, Plan
from planner.cli.commands import app
from planner.cluster.cluster_file import cluster_toml
from planner.measured.sync_trace import SyncStep, SyncTrace
from planner.model.measured_costs import Costs, LayerKind, SizedCosts, Timing
from planner.plan.plan import Sync
from planner.plan.sweep_index import SweepIndex
from planner.schemas import ARTIFACTS, json_schema, schema_text

ALL = {**ARTIFACTS, "train": TRAIN}
SCHEMAS = {kind: json_schema(artifact) for kind, artifact in ALL.items()}
VALIDATORS = {kind: Draft202012Validator(schema) for kind, schema in SCHEMAS.items()}


def holds(kind: str, data: Any) -> bool:
    return VALIDATORS[kind].is_valid(data)


def records(schema: Any) -> list[dict[str, Any]]:
    """All objects with named fields in a schema."""
    if isinstance(schema, list):
        return [row for part in schema for row in records(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "object" and "properties" in schema else []
    return own + [row for part in schema.values() for row in records(part)]


@pytest.mark.parametrize("kind", ALL)
def test_the_kept_schema_is_what_the_records_say(kind: str) -> None:
    kept = (ROOT / "schemas" / f"{kind}.json").read_text(encoding="utf-8")
    assert kept == schema_text(ALL[kind]), "run `make schemas`"


@pytest.mark.parametrize("kind", ALL)
def test_schemas_are_valid_and_say_which_they_are(kind: str) -> None:
    schema = SCHEMAS[kind]
    Draft202012Validator.check_schema(schema)
    assert schema["$id"].startswith("urn:pipeplan")
    assert schema["title"].startswith("Pipeplan")
    assert len({SCHEMAS[other]["$id"] for other in ALL}) == len(ALL)
    assert "format" in schema["required"]


@pytest.mark.parametrize("kind", ALL)
def test_every_field_has_a_meaning(kind: str) -> None:
    found = records(SCHEMAS[kind])
    assert found
    for record in found:
        assert record["additionalProperties"] is False
        for name, field in record["properties"].items():
            assert field.get("description"), name


def test_units_are_told() -> None:
    device = SCHEMAS["cluster"]["$defs"]["DeviceType"]["properties"]
    assert device["memory_gib"]["description"].endswith("Unit: GiB (2^30 bytes).")
    predicted = SCHEMAS["plan"]["$defs"]["Predicted"]["properties"]
    assert predicted["iteration_time_s"]["description"].endswith("Unit: s.")


def examples() -> list[tuple[str, Path]]:
    folders = {"clusters": "cluster", "jobs": "job", "train": "train"}
    return [
        (kind, path)
        for folder, kind in folders.items()
        for path in sorted((ROOT / "examples" / folder).glob("*.toml"))
    ]


@pytest.mark.parametrize(("kind", "path"), examples(), ids=lambda value: str(value)[-20:])
def test_examples_hold(kind: str, path: Path) -> None:
    VALIDATORS[kind].validate(tomllib.loads(path.read_text()))


def test_a_plan_and_its_parts_hold() -> None:
    plan = a_plan()
    VALIDATORS["plan"].validate(plan.model_dump(mode="json"))
    VALIDATORS["graph"].validate(plan.model.graph.model_dump(mode="json"))
    VALIDATORS["job"].validate(plan.job.model_dump(mode="json"))
    VALIDATORS["cluster"].validate(plan.cluster.model_dump(mode="json"))
    VALIDATORS["cluster"].validate(tomllib.loads(cluster_toml(plan.cluster)))


def test_costs_sweeps_and_traces_of_synchronisation_hold() -> None:
    took = Timing(median_s=2e-3, low_s=1e-3, high_s=3e-3, repeats=7)
    times = dict.fromkeys(("forward", "backward", "input_gradient", "weight_gradient"), took)
    held = dict.fromkeys(("stash", "weight_stash", "forward", "backward"), 64)
    size = SizedCosts(
        samples_per_microbatch=2,
        forward_flops=10,
        **times,
        **{f"{name}_bytes": bytes_ for name, bytes_ in held.items()},
    )
    costs = Costs(
        model="m",
        precision="float32",
        device_type="A10",
        hardware="a card",
        made_with={"torch": "2.13.0"},
        date="2026-11-23",
        kinds=(LayerKind(layers=("a", "b"), sizes=(size,)),),
    )
    VALIDATORS["costs"].validate(costs.model_dump(mode="json"))
    sweep = SweepIndex(inputs={"model": "m"}, no_plan={"lab-2-devices-4x1.json": "does not fit"})
    VALIDATORS["sweep"].validate(sweep.model_dump(mode="json"))
    step = SyncStep(iteration=1, start_s=0, compute_s=1, sync_wait_s=0.5, members=(0, 1))
    trace = SyncTrace(sync=Sync(), parameter_bytes=(8,), workers=((step,), (step,)))
    VALIDATORS["sync-trace"].validate(trace.model_dump(mode="json"))


def test_a_plan_with_an_unknown_or_wrong_field_is_refused() -> None:
    data = a_plan().model_dump(mode="json")
    assert not holds("plan", data | {"speed": 3})
    assert not holds("plan", data | {"microbatches": 0})
    assert not holds("plan", data | {"format": "pipeplan/99"})
    assert not holds("plan", {name: value for name, value in data.items() if name != "orders"})


CLUSTER: dict[str, Any] = {
    "format": "pipeplan-cluster/1",
    "nodes": [{"name": "n0", "devices": 2, "type": "A10", "link": "PCIe4-x16"}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": []},
        {"nodes": [{"name": "n 0", "devices": 2, "type": "A10", "link": "PCIe4-x16"}]},
        {"nodes": [{"name": "n0", "devices": 0, "type": "A10", "link": "PCIe4-x16"}]},
        {"nodes": [{"name": "n0", "devices": 2, "type": "A10"}]},
        {"links": [{"between": ["n0"], "preset": "PCIe4-x16"}]},
        {"links": [{"between": ["n0/gpu0", "n0/gpu1"]}]},
        {"links": [{"between": ["n0/gpu0", "n0/gpu1"], "bandwidth": 3}]},
        {"links": [{"between": ["n0/gpu0", "n0/gpu1"], "bandwidth_gb_per_s": 0}]},
        {"device_types": {"mine": {"memory_gib": 24}}},
    ],
)
def test_what_the_loader_refuses_of_a_cluster_file_the_schema_does_too(
    change: dict[str, Any],
) -> None:
    assert holds("cluster", CLUSTER)
    Cluster.from_data(CLUSTER)
    assert not holds("cluster", CLUSTER | change)
    with pytest.raises(PipeplanError):
        Cluster.from_data(CLUSTER | change)


def test_short_forms_of_cluster_files_hold() -> None:
    own = {"bandwidth_gb_per_s": 12.5, "latency_us": 3}
    node = {"name": "n0", "devices": 2, "type": "mine", "link": own, "price_per_hour": 2}
    kind = {"memory_gib": 24, "memory_bandwidth_gb_per_s": 1, "peak_tflop_per_s": {"float32": 1}}
    link = {"between": ["n0", "core"], "preset": "Ethernet-10G", "latency_us": 50}
    data = {
        "format": "pipeplan-cluster/1",
        "currency": "EUR",
        "switches": ["core"],
        "nodes": [node],
        "device_types": {"mine": kind | {"by_class": {"product": {"efficiency": 0.6}}}},
        "links": [link],
    }
    VALIDATORS["cluster"].validate(data)
    Cluster.from_data(data)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**22),
    # JSON Schema takes 4.0 for an integer, the loaders do not.
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer()),
    st.sampled_from(["", "float32", "adamw", "mse", "a:b", "a:", "a:b:c", "cosine", "text"]),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["shape", "dtype", "kind", "x"]), st.integers(0, 2)),
)


@pytest.mark.parametrize(("kind", "record"), [("job", Job), ("train", TrainingConfig)])
@given(data=st.data())
def test_schema_and_loader_agree_on_any_value_of_any_field(
    kind: str, record: Any, data: st.DataObject
) -> None:
    field = data.draw(st.sampled_from(sorted({*record.model_fields, "unknown"})))
    value = data.draw(VALUES)
    artifact = {"format": ALL[kind].format, field: value}
    try:
        record.parse(artifact, "file")
        loads = True
    except PipeplanError as error:
        loads = False
        # Rules between fields are the loader's alone.
        between = ("remove them", "of 20 steps", "set tensor_parallel", "set expert_parallel")
        if any(words in str(error) for words in between):
            return
    assert holds(kind, artifact) == loads


def test_files_may_name_their_schema(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('"$schema" = "job.schema.json"\nformat = "pipeplan-job/1"\nmicrobatches = 4\n')
    assert Job.load(job) == Job(microbatches=4)
    assert holds("job", tomllib.loads(job.read_text()))
    plan = a_plan()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"$schema": "plan.schema.json"} | plan.model_dump(mode="json")))
    assert Plan.load(path) == plan
    Plan.load(path).save(path)
    assert "$schema" not in json.loads(path.read_text())
    graph = plan.model.graph.model_dump(mode="json")
    named = LayerGraph.parse({"$schema": "graph.schema.json"} | graph)
    assert named.digest == LayerGraph.parse(graph).digest


def test_a_schema_key_that_is_no_address_is_refused() -> None:
    with pytest.raises(PipeplanError, match=r"\$schema: expected the address .* found 3"):
        Plan.parse({"$schema": 3} | a_plan().model_dump(mode="json"))


def test_inside_a_file_no_schema_is_named() -> None:
    data = a_plan().model_dump(mode="json")
    data["job"]["$schema"] = "job.schema.json"
    assert not holds("plan", data)
    with pytest.raises(PipeplanError, match=r"job\.\$schema: unknown field"):
        Plan.parse(data)


def test_the_command_prints_schemas() -> None:
    printed = CliRunner().invoke(app, ["verify", "--schema", "job"])
    assert printed.exit_code == 0
    assert printed.output == schema_text(ALL["job"])
    of_executor = CliRunner().invoke(app, ["verify", "--schema", "train"])
    assert of_executor.output == schema_text(TRAIN)


def test_the_command_refuses_other_kinds() -> None:
    unknown = CliRunner().invoke(app, ["verify", "--schema", "clustr"])
    assert unknown.exit_code == 1
    assert (
        "--schema 'clustr': there is no such kind; there are plan, graph, cluster" in unknown.output
    )
