"""What a predicted time rests on, worked out by hand on critical paths of a few steps."""

from __future__ import annotations

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, orders, parameter, pipeline
from hypothesis import given
from strategies import plans

from planner.assembly import plan_by_hand
from planner.plan.plan import Plan, TimeProvenance
from planner.prediction import refresh
from planner.simulation.simulator import simulate
from planner.simulation.time_provenance import time_provenance
from planner.verification import verify

MEASURED = {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}


def shares(
    one: object, two: object = None, wire: dict | None = None, **kind: object
) -> TimeProvenance:
    """Two stages in a row: 3 s of layer a on d0, 3 s of layer b on d1, 1 s each way between."""
    rows = [one or layer("a", 1, 2), two or layer("b", 1, 2)]
    wires = [link("d0", "d1", **(wire or {}))]
    machines = cluster(["d0", "d1"], wires, types={"unit": device_type(**kind)})
    placed = pipeline(graph(rows), machines, [(["a"], ["d0"]), (["b"], ["d1"])], microbatches=1)
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="1F0 1B0"))
    assert timeline.iteration_time_s == 8
    found = time_provenance(timeline)
    assert found is not None
    assert found.measured + found.datasheet + found.assumed == pytest.approx(1)
    return found


def measured(name: str) -> dict:
    return layer(name, measured={"unit": MEASURED})


def test_efficiency_of_a_datasheet_is_an_assumption_and_bandwidth_is_not() -> None:
    moving = layer("b", 0, 0, forward_traffic_bytes=10**12, weight_gradient_traffic_bytes=10**12)
    moving["input_gradient_traffic_bytes"] = 10**12
    found = shares(layer("a", 1, 2), moving)
    # Links (2 s) and b (3 s, of memory bandwidth) rest on datasheets, a (3 s) on an efficiency.
    assert (found.measured, found.datasheet, found.assumed) == pytest.approx((0, 5 / 8, 3 / 8))


def test_a_measured_layer_and_a_measured_link_count_as_measured() -> None:
    found = shares(measured("a"), layer("b", 1, 2), {"source": "measured"})
    assert (found.measured, found.datasheet, found.assumed) == pytest.approx((5 / 8, 0, 3 / 8))


@pytest.mark.parametrize("source", ["measured", "assumed"])
def test_a_type_of_one_source_gives_all_its_operations_that_source(source: str) -> None:
    found = shares(layer("a", 1, 2), measured("b"), {"source": "datasheet"}, source=source)
    # a: 3 s of the roofline, b: 3 s measured, links: 2 s of a datasheet.
    assert found.datasheet == pytest.approx(2 / 8)
    assert found.measured == pytest.approx(3 / 8 if source == "assumed" else 6 / 8)


def test_a_layer_of_both_counts_for_each_by_its_time() -> None:
    machines = cluster(["d0"], [])
    two = graph([measured("a"), layer("b", 2, 4)])
    placed = pipeline(two, machines, [(["a", "b"], ["d0"])], microbatches=1)
    found = time_provenance(simulate(placed, orders(d0="0F0 0B0")))
    assert found is not None
    assert (found.measured, found.assumed) == pytest.approx((3 / 9, 6 / 9))


def test_a_layer_that_runs_again_counts_its_forward_twice() -> None:
    """Forward moves data for 1 s, both gradients compute for 1 s each: 1 + (1 + 2) s."""
    row = layer("a", 0, 2, forward_traffic_bytes=10**12)
    stages = [(["a"], ["d0"], ["a"])]
    placed = pipeline(graph([row]), cluster(["d0"], []), stages, microbatches=1)
    found = time_provenance(simulate(placed, orders(d0="0F0 0B0")))
    assert found is not None
    assert (found.datasheet, found.assumed) == pytest.approx((2 / 4, 2 / 4))


@pytest.mark.parametrize("shared", [False, True])
def test_the_weakest_link_of_a_way_counts(shared: bool) -> None:
    wires = [link("d0", "hub", source="measured"), link("d1", "hub", source="assumed")]
    wires[1]["shared"] = shared
    machines = cluster(["d0", "d1"], wires, ["hub"])
    stages = [(["a"], ["d0"]), (["b"], ["d1"])]
    placed = pipeline(graph([measured("a"), measured("b")]), machines, stages, microbatches=1)
    found = time_provenance(simulate(placed, orders(d0="0F0 0B0", d1="1F0 1B0")))
    assert found is not None
    assert (found.measured, found.assumed) == pytest.approx((6 / 8, 2 / 8))


def test_all_reduce_and_optimizer_step_count_too() -> None:
    """Two replicas, 2 * 10**9 bytes each: a ring of 2 steps of 1 GB at 1 GB/s, then the step."""
    row = {**measured("a"), "parameters": ["w"]}
    the_graph = graph([row], parameters=[parameter("w", 5 * 10**8)])
    wires = [link("d0", "d1", source="measured")]
    placed = pipeline(the_graph, cluster(["d0", "d1"], wires), [(["a"], ["d0", "d1"])])
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1"))
    found = time_provenance(timeline)
    # SGD reads weights and gradients and writes weights: 3 * 2 GB at 1000 GB/s.
    step_s = 6e-3
    assert timeline.iteration_time_s == pytest.approx(3 + 2 + step_s)
    assert found is not None
    assert found.datasheet == pytest.approx(step_s / (5 + step_s))
    assert found.measured == pytest.approx(5 / (5 + step_s))


def test_nothing_that_takes_time_rests_on_nothing() -> None:
    placed = pipeline(graph([layer("a", 0, 0)]), cluster(["d0"], []), [(["a"], ["d0"])])
    assert time_provenance(simulate(placed, orders(d0="0F0 0F1 0B0 0B1"))) is None


@given(plans())
def test_shares_sum_to_one_whatever_the_plan(plan: Plan) -> None:
    shares = plan.predicted.time_provenance
    if shares is None:
        assert plan.predicted.iteration_time_s == 0
    else:
        assert shares.measured + shares.datasheet + shares.assumed == pytest.approx(1)


def by_hand() -> Plan:
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    the_graph = graph([layer("a"), measured("b")], [boundary("a", "b")])
    placed = pipeline(the_graph, machines, [(["a"], ["d0"]), (["b"], ["d1"])], microbatches=1)
    return plan_by_hand(placed, orders(d0="0F0 0B0", d1="1F0 1B0"))


def test_wrong_shares_are_named_and_missing_ones_are_not() -> None:
    plan = by_hand()
    data = plan.model_dump(mode="json")
    data["predicted"]["time_provenance"].update(measured=1.0, assumed=0.0)
    problems = verify(Plan.parse(data))
    assert [problem.partition(":")[0] for problem in problems] == [
        "predicted.time_provenance.measured",
        "predicted.time_provenance.assumed",
    ]
    assert "the plan says 1.0, a simulation gives 0.375" in problems[0]
    del data["predicted"]["time_provenance"]
    old = Plan.parse(data)
    assert verify(old) == []
    assert refresh(old).predicted == plan.predicted


def test_the_source_of_a_device_type_leaves_a_bound_proved() -> None:
    plan = by_hand()
    data = plan.model_dump(mode="json")
    data["cluster"]["device_types"]["unit"]["source"] = "measured"
    assert Plan.parse(data).problem.digest == plan.problem.digest
