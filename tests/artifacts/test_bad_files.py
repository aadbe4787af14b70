"""Wrong files are refused with the place and the reason, never with another exception."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import cluster, graph, layer
from hypothesis import example, given
from hypothesis import strategies as st
from small_plan import PLAN, refusal
from strategies import json_values

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.records.formats import check_format

LOADERS = {"plan": Plan.load, "graph": LayerGraph.load, "cluster": Cluster.load}


# --- any file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "line 1, column 1: not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"format": "pip', "cut off"),
        (b"[]", "expected an object with a field 'format', found a list"),
        (b"3", "expected an object with a field 'format', found 3"),
        (b"null", "expected an object with a field 'format', found null"),
        (b"{}", "format: expected"),
        (b'{"format": null}', "format: expected"),
        (b'{"format": 1}', "format: expected"),
        (b'{"format": "pipeplan-recipe/1"}', "format: expected"),
        (b'{"format": "pipeplan-job/1"}', "format: expected"),
        (b'{"format": NaN}', "NaN is not a number"),
        (b'{"x": -Infinity}', "-Infinity is not a number"),
        (b'{"x": 1, "x": 2}', "key 'x' appears twice"),
        (b'{"y": {"x": 1, "x": 1}}', "key 'x' appears twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"x": 1' + b"0" * 5000 + b"}", "digits"),
    ],
)
def test_a_broken_json_file_is_refused(
    kind: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{kind}.json"
    path.write_bytes(content)
    assert reason in refusal(LOADERS[kind], path)


@pytest.mark.parametrize("load", [*LOADERS.values(), Job.load])
def test_a_missing_file_and_a_folder_are_refused(
    load: Callable[[Path], object], tmp_path: Path
) -> None:
    assert "no such file" in refusal(load, tmp_path / "nothing.json")
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read" in refusal(load, tmp_path / "folder.json")


@given(st.one_of(json_values, st.text(alphabet="pipeplan/0129²\u0661- ", max_size=14)))
@example("pipeplan/²")
@example("pipeplan/" + "9" * 5000)
@example("pipeplan/0")
@example("pipeplan/01")
def test_any_other_format_is_refused(value: object) -> None:
    if value == "pipeplan/8":
        return
    with pytest.raises(PipeplanError, match="some file: format"):
        check_format({"format": value}, "pipeplan/8", "some file")


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_cut_plan_is_refused_wherever_it_is_cut(share: float, folder: Path) -> None:
    text = json.dumps(PLAN, indent=1)
    path = folder / "cut.json"
    path.write_text(text[: int(share * len(text))])
    assert "not valid JSON" in refusal(Plan.load, path)


def test_a_toml_file_in_place_of_a_plan_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('format = "pipeplan-cluster/1"\n')
    assert "a TOML file where a JSON file is expected" in refusal(Plan.load, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


# --- clusters -------------------------------------------------------------------------------------

DEVICES = '[[devices]]\nname = "x"\ntype = "A10"\n[[devices]]\nname = "y"\ntype = "L4"\n'
LINK = '[[links]]\nbetween = ["x", "y"]\n'
NODE = '[[nodes]]\nname = "n"\ndevices = 2\ntype = "A10"\nlink = "NVLink3"\n'
TYPE = "[device_types.A10]\nmemory_bandwidth_gb_per_s = 1\npeak_tflop_per_s = { float32 = 1 }\n"


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        (DEVICES + LINK + "bandwidth = 5\n", "links[0].bandwidth", "unknown field (value 5)"),
        (DEVICES + 'colour = "red"\n', "devices[1].colour", "unknown field"),
        ('colour = "red"\n' + DEVICES, "colour", "unknown field"),
        (DEVICES + LINK + "bandwidth_gb_per_s = -5\n", "links[0].bandwidth_gb_per_s", "-5"),
        (
            DEVICES + LINK + "bandwidth_gb_per_s = 0\n",
            "links[0].bandwidth_gb_per_s",
            "above 0",
        ),
        (DEVICES + LINK + "bandwidth_gb_per_s = nan\n", "links[0].bandwidth_gb_per_s", "finite"),
        (DEVICES + LINK + "bandwidth_gb_per_s = inf\n", "links[0].bandwidth_gb_per_s", "finite"),
        (DEVICES + LINK + 'bandwidth_gb_per_s = "5"\n', "links[0].bandwidth_gb_per_s", "'5'"),
        (DEVICES + LINK + "bandwidth_gb_per_s = true\n", "links[0].bandwidth_gb_per_s", "True"),
        (DEVICES + LINK + "latency_us = -1\n", "links[0].latency_us", "-1"),
        (DEVICES + LINK + 'duplex = "both"\n', "links[0].duplex", "'full' or 'half'"),
        (DEVICES + LINK, "links[0]", "give bandwidth_gb_per_s or a preset"),
        (DEVICES + LINK + 'preset = "NVLink9"\n', "links[0]", "'NVLink9' is unknown"),
        (DEVICES.replace("L4", "RTX4090"), "", "'RTX4090' is unknown; define [device_types."),
        (DEVICES.replace("L4", "RTX4090"), "", "choose one such as RTX-4090, "),
        (NODE.replace("NVLink3", "string"), "nodes[0].link", "'string' is unknown"),
        (NODE.replace("2", "0"), "nodes[0].devices", "expected at least 1"),
        (NODE.replace("2", "2.5"), "nodes[0].devices", "integer"),
        (NODE.replace("2", "100000"), "nodes[0].devices", "4096"),
        (NODE.replace('type = "A10"', ""), "nodes[0].type", "missing"),
        (NODE.replace('"n"', '"a b"'), "nodes[0].name", "'a b'"),
        (NODE.replace('"n"', f'"{"n" * 111}"'), "nodes[0].name", "match pattern"),
        (DEVICES.replace('"y"', '"a b"'), "devices[1].name", "'a b'"),
        ('switches = ["a b"]\n' + DEVICES, "switches[0]", "'a b'"),
        (NODE.replace('"n"', '""'), "nodes[0].name", "at least 1 character"),
        (DEVICES + LINK.replace('"y"', '"z"') + "bandwidth_gb_per_s = 1\n", "", "unknown device"),
        (DEVICES + LINK.replace('"y"', '"x"') + "bandwidth_gb_per_s = 1\n", "", "'x' to itself"),
        (DEVICES + LINK.replace(', "y"', "") + "bandwidth_gb_per_s = 1\n", "links[0].between", ""),
        (DEVICES.replace('"y"', '"x"'), "", "'x' is used twice"),
        ('switches = ["x"]\n' + DEVICES, "", "'x' is used twice"),
        ("", "devices", "has none"),
        (DEVICES + TYPE.replace("A10", "mine"), "device_types.mine.memory_gib", "missing"),
        (DEVICES + TYPE + "memory_gib = -8\n", "device_types.A10.memory_gib", "-8"),
        (DEVICES + TYPE + "memory_gib = 8\nreserved_gib = 8\n", "device_types.A10", "nothing of"),
        (DEVICES + TYPE + "memory_gib = 8\nefficiency = 1.5\n", "device_types.A10", "1.5"),
        (
            DEVICES + TYPE.replace("{ float32 = 1 }", "{}") + "memory_gib = 8\n",
            "device_types.A10.peak_tflop_per_s",
            "1 or more of them, found none",
        ),
        (DEVICES + LINK + "bandwidth_gb_per_s = 2024-01-01\n", "", "date"),
    ],
)
def test_a_wrong_cluster_file_names_the_field(
    text: str, field: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('format = "pipeplan-cluster/1"\n' + text)
    found = refusal(Cluster.load, path)
    assert f"{path}: {field}" in found
    assert reason in found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("format = ", "not valid TOML"),
        ('format = "pipeplan-cluster/1"\n[[devices', "not valid TOML"),
        ('format = "a"\nformat = "b"', "not valid TOML"),
        (
            "name = 'x'",
            "format: expected 'pipeplan-cluster/1', but the field",
        ),
        ("format = 'pipeplan-cluster/2'", "newer"),
        ("format = 'pipeplan-job/1'", "format: expected"),
    ],
)
def test_a_cluster_file_that_is_none_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert reason in refusal(Cluster.load, path)


def test_all_wrong_fields_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    links = (LINK + "bandwidth_gb_per_s = -1\n") * 2
    path.write_text('format = "pipeplan-cluster/1"\nsize = 3\n' + DEVICES + links)
    found = refusal(Cluster.load, path).splitlines()
    assert [line.split(": ")[1] for line in sorted(found)] == [
        "links[0].bandwidth_gb_per_s",
        "links[1].bandwidth_gb_per_s",
        "size",
    ]


def test_a_suggestion_is_never_the_name_that_was_refused(tmp_path: Path) -> None:
    """``devices`` is a field of nodes and of the file, but not of a device."""
    path = tmp_path / "cluster.toml"
    path.write_text('format = "pipeplan-cluster/1"\n' + DEVICES + "devices = 2\n")
    found = refusal(Cluster.load, path)
    assert "devices[1].devices: unknown field" in found
    assert "did you mean 'devices'" not in found


# --- jobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("microbatches = 0", "microbatches"),
        ("microbatches = 100000", "microbatches"),
        ("microbatches = 2.5", "microbatches"),
        ("micro_batches = 2", "micro_batches"),
        ('precision = "fp32"', "precision"),
        ('optimizer = "adam"', "optimizer"),
        ("learning_rate = 0", "learning_rate"),
        ("learning_rate = nan", "learning_rate"),
        ("samples_per_microbatch = -1", "samples_per_microbatch"),
        ("max_stages = 0", "max_stages"),
        ("max_stages_per_device = 17", "max_stages_per_device"),
        ("replication = 1", "replication"),
        ("[model_arguments]\nsizes = [[1]]", "model_arguments.sizes"),
        ("[model_arguments]\nwidth = inf", "model_arguments.width"),
        ('[inputs.x]\nshape = [-1]\ndtype = "int64"', "inputs.x.shape[0]"),
        ('[inputs.x]\nshape = [1]\ndtype = "int8"', "inputs.x.dtype"),
        ('[inputs.x]\nshape = [1]\ndtype = "int64"\nbelow = 0', "inputs.x.below"),
    ],
)
def test_a_wrong_job_file_names_the_field(text: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('format = "pipeplan-job/1"\n' + text)
    assert f"{path}: {field}" in refusal(Job.load, path)


# --- layer graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda g: g["layers"].append(g["layers"][0]), "layers: 2 of them have the same name"),
        (lambda g: g["layers"].reverse(), "goes from 'a' back to 'b'"),
        (lambda g: g["layers"][0].update(parameters=["v"]), "unknown parameter 'v'"),
        (lambda g: g["layers"][0].update(forward_flops=-1), "layers[0].forward_flops"),
        (lambda g: g["layers"][0].update(forward_flops=1.5), "layers[0].forward_flops"),
        (lambda g: g["layers"][0].update(flops=1), "layers[0].flops: unknown field"),
        (lambda g: g["layers"][0].pop("stash_bytes"), "layers[0].stash_bytes: this field is mis"),
        (lambda g: g["boundaries"].append(g["boundaries"][0]), "boundaries: 2 of them"),
        (lambda g: g["boundaries"][0].update(users=["c"]), "unknown layer 'c'"),
        (lambda g: g["boundaries"][0].update(users=[]), "boundaries[0].users"),
        (lambda g: g["boundaries"][0].update(users=["a"]), "from 'a' back to 'a'"),
        (lambda g: g["boundaries"][0].update(saved_by="c"), "unknown layer 'c'"),
        (lambda g: g["boundaries"][0].update(requires_grad=1), "boundaries[0].requires_grad"),
        (lambda g: g["parameters"].append(g["parameters"][0]), "parameters: 2 of them"),
        (lambda g: g.update(flop_coverage=1.1), "flop_coverage"),
        (lambda g: g.update(layers=[]), "layers"),
        (lambda g: g.update(samples_per_microbatch=0), "samples_per_microbatch"),
    ],
)
def test_a_wrong_layer_graph_names_the_place(
    edit: Callable[[Any], object], reason: str, tmp_path: Path
) -> None:
    data = copy.deepcopy(PLAN["model"]["graph"])
    edit(data)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    assert reason in refusal(LayerGraph.load, path)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(samples_per_microbatch=2), "samples_per_microbatch = 1, the job says 2"),
        (Job(precision="bfloat16"), "traced in float32"),
    ],
)
def test_a_job_must_fit_its_graph(job: Job, reason: str) -> None:
    with pytest.raises(PipeplanError, match=reason):
        Problem(graph([layer("a")]), cluster(["d0"], []), job)


def test_a_device_without_the_jobs_precision_is_refused() -> None:
    low = graph([layer("a")], precision="bfloat16")
    with pytest.raises(PipeplanError, match=r"'unit' has no peak_tflop_per_s .*it has float32"):
        Problem(low, cluster(["d0"], []), Job(precision="bfloat16"))
    seconds = {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}
    measured = graph([layer("a", measured={"unit": seconds})], precision="bfloat16")
    assert Problem(measured, cluster(["d0"], []), Job(precision="bfloat16")).graph is measured


TIMES = ("forward_s", "input_gradient_s", "weight_gradient_s")


def test_a_link_is_named_by_its_ends(tmp_path: Path) -> None:
    """``links[0]`` alone says little in a file of many links."""
    path = tmp_path / "cluster.toml"
    for wrong in ("bandwidth_gb_per_s = 0\n", "latency_us = 3\n"):
        path.write_text('format = "pipeplan-cluster/1"\n' + DEVICES + LINK + wrong)
        found = refusal(Cluster.load, path)
        assert "links[0]" in found
        assert "the link between 'x' and 'y'" in found


def test_a_nan_is_named_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    row = layer("a", measured={"unit": dict.fromkeys(TIMES, 1.0) | {"forward_s": float("nan")}})
    path.write_text(json.dumps({"format": "pipeplan-graph/2", "layers": [row]}))
    said = refusal(LayerGraph.load, path)
    assert "layers[0].measured.unit.forward_s: NaN is not a number" in said


def test_a_file_of_another_kind_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "pipeplan/1"}')
    assert "this is a plan, give a layer graph" in refusal(LayerGraph.load, path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("global_batch_size", "are samples_per_microbatch times microbatches: set these"),
        ("gradient_accumulation_steps", "it is called microbatches"),
        ("microbatch_size", "it is called samples_per_microbatch"),
    ],
)
def test_names_of_other_tools_are_translated(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'format = "pipeplan-job/1"\n{name} = 64\n')
    assert refusal(Job.load, path).endswith(said)
