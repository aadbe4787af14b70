"""Files with endless values or errors: refused in a few lines, never with another exception."""

import copy
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import cluster, device_type
from small_plan import PLAN, refusal

from planner.cluster.cluster import Cluster
from planner.errors import MOST_CHARACTERS, MOST_PROBLEMS, PipeplanError, first_problems, shorten
from planner.job import Job
from planner.model.graph_record import GraphRecord, graph_digest
from planner.model.layer_graph import LayerGraph
from planner.model.measured_costs import Costs
from planner.plan.operations import parse_order
from planner.plan.plan import Plan, gap
from planner.records.document import MOST_JSON_BYTES, MOST_TOML_BYTES, read_json, read_toml
from planner.verification import verify

FEW_CHARACTERS = 400
FORMATS = Path(__file__).resolve().parents[1] / "data" / "formats"
JOB = 'format = "pipeplan-job/1"\n'
CLUSTER = 'format = "pipeplan-cluster/1"\n'


# --- what a message may hold ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, MOST_PROBLEMS, MOST_PROBLEMS + 1])
def test_a_few_problems_are_told_as_they_are(count: int) -> None:
    problems = tuple(f"problem {index}" for index in range(count))
    assert PipeplanError(problems).problems == problems


@pytest.mark.parametrize("more", [2, 3, 10**4])
def test_of_many_problems_the_rest_is_counted(more: int) -> None:
    problems = [f"problem {index}" for index in range(MOST_PROBLEMS + more)]
    found = PipeplanError(iter(problems)).problems
    assert found == (*problems[:MOST_PROBLEMS], f"… and {more} more")
    assert first_problems(found) == found


def test_an_endless_problem_is_cut() -> None:
    (found,) = PipeplanError("x" * 10**6).problems
    assert found == "x" * (MOST_CHARACTERS - 1) + "…"


@pytest.mark.parametrize("value", ["word", 5, 2.5, True, None])
def test_a_short_value_is_shown_as_it_is(value: object) -> None:
    assert shorten(value) == repr(value)


def test_a_value_that_has_no_text_is_named_by_its_kind() -> None:
    nest: list[Any] = []
    for _ in range(10**5):
        nest = [nest]
    assert shorten(nest) == "a very large list"
    assert shorten(10**10**4) == "a very large int"
    assert len(shorten("x" * 10**6)) == 60


# --- endless files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "text", "reason"),
    [
        (Job.load, JOB + "x = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        (Job.load, JOB + "microbatches = " + "9" * 5000, "digits"),
        (Job.load, JOB + "microbatches = 0x" + "f" * 5000, "digits"),
        (Job.load, "format = 0x" + "f" * 5000, "format: expected 'pipeplan-job/1'"),
        (Job.load, JOB + 'precision = "' + "x" * 10**5 + '"', "precision"),
        (Cluster.load, CLUSTER + "x = " + "{y = " * 5000, "nested too deeply"),
        (Cluster.load, 'format = "' + "x" * 10**5 + '"', "format: expected"),
        (Cluster.load, CLUSTER + 'name = ["' + "x" * 10**5 + '"]', "name"),
    ],
)
def test_an_endless_toml_file_is_refused_in_a_line(
    load: Callable[[Path], object], text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text)
    found = refusal(load, path)
    assert reason in found
    assert len(found) < FEW_CHARACTERS


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (',"x":' + "[" * 900 + "]" * 900 + "}", "recursion limit"),
        (',"ranks":["\\ud800"]}', "hex escape"),
        (',"x":"' + "x" * 10**5 + '"}', "x: unknown field"),
        (',"ranks":"' + "x" * 10**5 + '"}', "ranks: "),
        (',"' + "x" * 10**5 + '":1,"' + "x" * 10**5 + '":1}', "appears twice"),
    ],
)
def test_an_endless_plan_is_refused_without_being_repeated(
    end: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    data = {key: value for key, value in PLAN.items() if key != "ranks" or "ranks" not in end}
    path.write_text(json.dumps(data)[:-1] + end)
    found = refusal(Plan.load, path)
    assert reason in found
    assert len(found) < FEW_CHARACTERS


def test_a_million_wrong_words_are_told_in_a_few_lines() -> None:
    with pytest.raises(PipeplanError, match=r"orders\['d0'\]: word 1 is 'x'") as raised:
        parse_order("x " * 10**6, "orders['d0']")
    assert raised.value.problems[-1] == f"… and {10**6 - MOST_PROBLEMS} more"
    with pytest.raises(PipeplanError) as raised:
        parse_order("x" * 10**6, "orders['d0']")
    assert len(str(raised.value)) < FEW_CHARACTERS


# --- figures beyond any machine -------------------------------------------------------------------


@pytest.mark.parametrize("value", [2**63, 10**400])
@pytest.mark.parametrize(
    ("part", "fields"),
    [
        (
            "layers",
            "forward_flops input_gradient_flops weight_gradient_flops forward_traffic_bytes "
            "input_gradient_traffic_bytes weight_gradient_traffic_bytes stash_bytes",
        ),
        ("boundaries", "bytes"),
        ("parameters", "elements bytes"),
    ],
)
def test_a_count_beyond_64_bits_is_refused(part: str, fields: str, value: int) -> None:
    for field in fields.split():
        data = copy.deepcopy(PLAN["model"]["graph"])
        data[part][0][field] = value
        with pytest.raises(PipeplanError, match=rf"{part}\[0\]\.{field}: .*less than") as raised:
            LayerGraph.parse(data)
        assert len(str(raised.value)) < FEW_CHARACTERS


def test_the_largest_counts_can_be_judged() -> None:
    """The figures are absurd, and a plan with them is told to be wrong rather than breaking."""
    data = copy.deepcopy(PLAN)
    for row in data["model"]["graph"]["layers"]:
        row.update({key: 2**63 - 1 for key, value in row.items() if isinstance(value, int)})
    data["model"]["graph_digest"] = graph_digest(GraphRecord.parse(data["model"]["graph"], "graph"))
    assert any(problem.startswith("memory of ") for problem in verify(Plan.parse(data)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("memory_gib", value) for value in (1e-300, 1e300)],
        *[("memory_bandwidth_gb_per_s", value) for value in (5e-324, 1e300)],
        ("efficiency", 5e-324),
        ("peak_tflop_per_s", {"float32": 5e-324}),
        ("peak_tflop_per_s", {"float32": 1e308}),
    ],
)
def test_a_device_beyond_any_machine_is_refused(field: str, value: object) -> None:
    with pytest.raises(PipeplanError, match=rf"device_types\.unit\.{field}"):
        cluster(["d0"], [], types={"unit": device_type(**{field: value})})


@pytest.mark.parametrize("microbatches", [65537, 10**9])
def test_a_plan_has_as_many_microbatches_as_a_job_at_most(microbatches: int) -> None:
    with pytest.raises(PipeplanError, match=r"plan: microbatches: .*65536"):
        Plan.parse({**PLAN, "microbatches": microbatches})


def test_a_prediction_that_no_float_can_stand_for_is_refused() -> None:
    data = copy.deepcopy(PLAN)
    data["predicted"]["devices"]["d0"]["peak_memory_bytes"] = 10**400
    with pytest.raises(PipeplanError, match=r"predicted\.devices\.d0\.peak_memory_bytes: "):
        Plan.parse(data)


def test_a_bound_too_small_for_a_quotient_is_no_bound() -> None:
    assert gap(1.0, 5e-324) is None
    data = copy.deepcopy(PLAN)
    data["predicted"]["lower_bound_s"] = 5e-324
    data["provenance"]["bound_covers"] = {"space": Plan.parse(PLAN).job.space.model_dump()}
    assert verify(Plan.parse(data)) == []


# --- a million entries ----------------------------------------------------------------------------

MILLION = 10**6
MOST_CPU_S, MOST_MORE_BYTES = 5.0, 300 * 2**20
"""A second is enough; but for the memory, the machine may be slow."""


def with_a_million(place: str) -> Any:
    data = copy.deepcopy(PLAN)
    wrong, names = [1] * MILLION, ["l0"] * MILLION
    match place:
        case "wrong layers":
            data["stages"][0]["layers"] = wrong
        case "layers":
            data["stages"][0]["layers"] = names
        case "devices":
            data["cluster"]["devices"] = wrong
        case "stages":
            data["stages"] = wrong
        case "ranks":
            data["ranks"] = names
        case "shapes":
            data["model"]["graph"]["boundaries"] = wrong
    return data


@pytest.mark.parametrize(
    "place", ["wrong layers", "layers", "devices", "stages", "ranks", "shapes"]
)
def test_a_million_entries_are_refused_at_the_first(place: str) -> None:
    data = with_a_million(place)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(PipeplanError) as raised:
        Plan.parse(data, "plan.json")
    (problem,) = raised.value.problems
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert len(problem) < FEW_CHARACTERS
    assert after.ru_utime - before.ru_utime < MOST_CPU_S
    assert (after.ru_maxrss - before.ru_maxrss) * 1024 < MOST_MORE_BYTES


def test_an_object_of_a_million_entries_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({str(index): 1 for index in range(MILLION)}))
    with pytest.raises(PipeplanError, match="an object has 1,000,000 entries, the first '0'"):
        Plan.load(path)


def test_a_million_objects_are_refused_before_they_are_checked(tmp_path: Path) -> None:
    """In a list they would take a gigabyte."""
    path = tmp_path / "plan.json"
    data = copy.deepcopy(PLAN)
    data["model"]["graph"]["layers"] = [{"name": "x"}] * MILLION
    path.write_text(json.dumps(data))
    del data
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(PipeplanError, match=r": more than 500,000 objects; name another file"):
        Plan.load(path)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < MOST_CPU_S
    assert (after.ru_maxrss - before.ru_maxrss) * 1024 < MOST_MORE_BYTES


def test_a_file_may_hold_as_many_objects_as_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.write_text('[{}, {"in": {}}]')
    assert read_json(path, most_objects=3) == [{}, {"in": {}}]
    with pytest.raises(PipeplanError, match=r"events\.json: more than 2 objects; name"):
        read_json(path, most_objects=2)


def test_files_of_many_bytes_are_refused_unread(tmp_path: Path) -> None:
    for name, most in (("plan.json", MOST_JSON_BYTES), ("job.toml", MOST_TOML_BYTES)):
        path = tmp_path / name
        path.touch()
        os.truncate(path, most + 1)  # It takes no place on the disk.
        with pytest.raises(PipeplanError, match=f"{most + 1:,} bytes; at most {most:,} are read"):
            (read_json if name.endswith("json") else read_toml)(path)


def test_a_large_file_that_holds_is_read_as_a_small_one_is() -> None:
    """Beyond 64 KiB lists end at their first wrong entry; what is read is the same."""
    data = json.loads(json.dumps(PLAN))
    small = Plan.parse(data, "small")
    data["job"]["model_arguments"] = {"text": "x" * 2**17}
    large = Plan.parse(data, "large")
    assert large.model_copy(update={"job": small.job}) == small
    assert type(large.stages[0]) is type(small.stages[0])
    data["stages"][0]["layers"] = [1, 2]
    data["microbatches"] = "many"
    with pytest.raises(PipeplanError) as raised:
        Plan.parse(data, "large")
    assert [problem.split(": ")[1] for problem in raised.value.problems] == [
        "stages[0].layers[0]",
        "microbatches",
    ]


def test_lists_of_right_entries_have_an_end_too() -> None:
    """Entries of half a kilobyte, each right, are refused by their number."""
    costs = json.loads((FORMATS / "costs-1-942a8b8.json").read_text())
    few = costs["kinds"]
    costs["kinds"] = [{**few[0], "sizes": few[0]["sizes"][:1] * 1025}]
    with pytest.raises(PipeplanError, match=r"kinds\[0\]\.sizes: expected 1024 .* found 1025"):
        Costs.parse(costs, "costs")
    costs["kinds"] = [{**few[0], "sizes": []}] * 10_001
    with pytest.raises(PipeplanError, match="kinds: expected 10000 of them at most, found 10001"):
        Costs.parse(costs, "costs")
