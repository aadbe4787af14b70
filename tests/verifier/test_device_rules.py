"""A layer that only some device types can run is on no other."""

import json

import pytest
from builders import cluster, device_type, graph, layer, link, orders, pipeline

from planner.assembly import plan_by_hand
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.verification import verify

TYPES = {"gpu": device_type(), "cpu": device_type()}
CLUSTER = cluster({"g": "gpu", "c": "cpu"}, [link("g", "c")], types=TYPES)


def bound_graph(*device_types: str) -> LayerGraph:
    return graph([layer("a", device_types=list(device_types)), layer("b")])


def problems_of(first: str, second: str, the_graph: LayerGraph) -> list[str]:
    stages = [(["a"], [first]), (["b"], [second])]
    placed = pipeline(the_graph, CLUSTER, stages, microbatches=1)
    texts = {first: "0F0 0B0", second: "1F0 1B0"}
    return verify(plan_by_hand(placed, orders(**texts)))


def test_a_layer_may_be_on_its_device_type() -> None:
    assert problems_of("c", "g", bound_graph("cpu")) == []
    assert problems_of("g", "c", bound_graph("gpu", "cpu")) == []


def test_a_layer_on_another_device_type_is_named() -> None:
    (problem,) = problems_of("g", "c", bound_graph("cpu"))
    assert problem.startswith("stages[0].devices: device 'g' is of type 'gpu', but layer 'a' runs")


def test_a_layer_that_no_device_can_run_is_no_problem_to_solve() -> None:
    with pytest.raises(PipeplanError, match="layer 'a' runs on device types tpu only"):
        Problem(bound_graph("tpu"), CLUSTER)


def test_a_rule_survives_saving_and_no_rule_leaves_files_as_they_were() -> None:
    bound, free = bound_graph("cpu"), bound_graph()
    copy = LayerGraph.parse(json.loads(bound.record.model_dump_json()))
    assert copy.layers["a"].device_types == ("cpu",)
    assert copy.digest == bound.digest != free.digest
    assert "device_types" not in free.record.model_dump_json()
    assert (free.nodes["a"]["device_types"], bound.nodes["a"]["device_types"]) == ((), ("cpu",))


def test_a_stage_recomputes_only_where_the_job_allows_it() -> None:
    def problems_under(job_allows: bool) -> list[str]:
        stages = [(["a"], ["g"], ["a"]), (["b"], ["c"])]
        placed = pipeline(bound_graph(), CLUSTER, stages, microbatches=1, recompute=job_allows)
        return verify(plan_by_hand(placed, orders(g="0F0 0B0", c="1F0 1B0")))

    assert problems_under(True) == []
    (problem,) = problems_under(False)
    assert problem.startswith("stages[0].recompute: 1 layer, but job.recompute is false; ")
