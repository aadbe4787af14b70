"""Calibrations small enough to work out by hand.

A layer's forward takes 1 s and its backward 2 s, a message 1 s, unless told.
"""

import re
from collections.abc import Sequence

import pytest
from builders import (
    GIGA,
    cluster,
    device_type,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)
from measured_runs import run_of

from planner.analysis.deviation import compare_with_measured, require_timeline_of
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.interop.calibrated_links import fit_pair
from planner.interop.calibration import Calibration, calibrate
from planner.interop.measured_costs import with_measured_times
from planner.measured.clocks import clock_conflict
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan
from planner.report.deviation import comparison_notes
from planner.simulation.simulator import simulate_plan


def plan_of(
    layers: Sequence[dict], the_cluster: Cluster, stages: Sequence[tuple], **texts: str
) -> Plan:
    """A plan for two microbatches, or as many as its orders say."""
    count = 1 + max(int(word[2:]) for text in texts.values() for word in text.split())
    placed = pipeline(graph(layers), the_cluster, stages, microbatches=count)
    return plan_by_hand(placed, orders(**texts))


def with_lengths(plan: Plan, lengths: dict[str, float]) -> MeasuredTimeline:
    """A run as predicted, but for operations of these lengths, such as ``{"0F": 3}``.

    Lengths are by stage and kind, or by the whole name of an operation.
    """
    data = run_of(plan).model_dump(mode="json")
    for event in data["operations"]:
        name = event["operation"]
        length_s = lengths.get(name, lengths.get(name[:2]))
        if length_s is not None:
            event["end_s"] = event["start_s"] + length_s
    return MeasuredTimeline.parse(data, "run")


def measured(result: Calibration, name: str, kind: str = "unit") -> tuple[float, ...]:
    """Forward, both gradients and the whole backward of a layer."""
    row = result.plan.problem.graph.layers[name].measured[kind]
    parts = (row.forward_s, row.input_gradient_s, row.weight_gradient_s, row.whole_backward_s)
    return tuple(round(part, 6) for part in parts)


TWO = [layer("a", 1, 2), layer("b", 3, 4)]
ONE_DEVICE = {"d0": "0F0 0B0 0F1 0B1"}


def test_a_stages_time_is_divided_as_its_layers_were_predicted() -> None:
    plan = plan_of(TWO, star(1), [(("a", "b"), ("d0",))], **ONE_DEVICE)
    result = calibrate(plan, with_lengths(plan, {"0F": 8, "0B": 9}))
    assert measured(result, "a") == (2, 1.5, 1.5, 3)
    assert measured(result, "b") == (6, 3, 3, 6)
    assert (result.before_s, result.after_s) == (pytest.approx(20), pytest.approx(34))


def test_the_median_counts_not_the_mean() -> None:
    plan = plan_of(TWO, star(1), [(("a", "b"), ("d0",))], d0="0F0 0F1 0F2 0B0 0B1 0B2")
    result = calibrate(plan, with_lengths(plan, {"0F0": 100, "0F1": 8, "0F2": 7}))
    assert measured(result, "a")[0] == 2


def test_a_backward_that_recomputes_holds_the_forward_once_more() -> None:
    plan = plan_of(TWO, star(1), [(("a", "b"), ("d0",), ("b",))], **ONE_DEVICE)
    result = calibrate(plan, with_lengths(plan, {"0F": 8, "0B": 15}))
    # Of 15 s the forward of b takes 6 again: 9 are left for gradients.
    assert measured(result, "a") == (2, 1.5, 1.5, 3)
    assert measured(result, "b") == (6, 3, 3, 6)


def test_a_backward_shorter_than_what_it_recomputes_is_told() -> None:
    plan = plan_of(TWO, star(1), [(("a", "b"), ("d0",), ("b",))], **ONE_DEVICE)
    result = calibrate(plan, with_lengths(plan, {"0F": 8, "0B": 5}))
    assert measured(result, "b") == (6, 0, 0, 0)
    assert any("B of stage 0 on unit took less than the forward" in row for row in result.notes)


def test_split_backwards_are_measured_apart_from_whole_ones() -> None:
    plan = plan_of(TWO, star(1), [(("a", "b"), ("d0",))], d0="0F0 0B0 0F1 0I1 0W1")
    result = calibrate(plan, with_lengths(plan, {"0I": 6, "0W": 9, "0B": 12}))
    assert measured(result, "a") == (1, 2, 3, 4)
    assert measured(result, "b") == (3, 4, 6, 8)
    without = plan_of(TWO, star(1), [(("a", "b"), ("d0",))], d0="0F0 0I0 0W0")
    result = calibrate(without, with_lengths(without, {"0I": 6, "0W": 9}))
    assert measured(result, "a") == (1, 2, 3, 5)


def test_layers_without_a_prediction_share_equally() -> None:
    free = [layer("a", 0, 0), layer("b", 0, 0)]
    plan = plan_of(free, star(1), [(("a", "b"), ("d0",))], **ONE_DEVICE)
    result = calibrate(plan, with_lengths(plan, {"0F": 4, "0B": 8}))
    assert measured(result, "a") == measured(result, "b") == (2, 2, 2, 4)


def test_layers_that_did_not_run_on_a_type_are_scaled_as_those_that_did() -> None:
    kinds = {"slow": device_type(), "fast": device_type(peak_tflop_per_s={"float32": 2})}
    wired = cluster({"d0": "slow", "d1": "fast"}, [link("d0", "d1")], types=kinds)
    stages = [(("a",), ("d0",)), (("b",), ("d1",))]
    plan = plan_of(TWO, wired, stages, d0="0F0 0B0", d1="1F0 1B0")
    result = calibrate(plan, with_lengths(plan, {"0F": 3, "0B": 2, "1F": 1.5, "1B": 4}))
    assert measured(result, "a", "slow") == (3, 1, 1, 2)
    assert measured(result, "b", "slow") == (9, 2, 2, 4)
    assert measured(result, "b", "fast") == (1.5, 2, 2, 4)
    assert measured(result, "a", "fast") == (0.5, 1, 1, 2)
    told = "1 of 2 layers did not run on slow; their times there are scaled"
    assert any(note.startswith(told) for note in result.notes)


def test_a_host_whose_devices_slow_each_other_is_calibrated_without_the_slowdown() -> None:
    """The devices compute at half the speed and step at a tenth; links take no time to speak of."""

    def plan_with(**fields: object) -> Plan:
        wired = star(2, 1e9)
        kinds = {"unit": device_type(**fields)}
        hosts = [{"devices": ["d0", "d1"], "slowdown": [1, 1.5]}]
        data = {**wired.model_dump(mode="json"), "device_types": kinds, "hosts": hosts}
        layers = [layer("a", 1, 2, parameters=["v"]), layer("b", 3, 4, parameters=["w"])]
        the_graph = graph(layers, None, [parameter("v", GIGA), parameter("w", GIGA)])
        placed = pipeline(the_graph, Cluster.parse(data, "hosts"), STAGES)
        return plan_by_hand(placed, orders(**ORDERS))

    plan, real = plan_with(), plan_with(peak_tflop_per_s={"float32": 0.5}, optimizer_efficiency=0.1)
    result = calibrate(plan, run_of(plan, [simulate_plan(real)]))
    assert measured(result, "a") == (2, 2, 2, 4)
    assert measured(result, "b") == (6, 4, 4, 8)
    kind = result.plan.cluster.device_types["unit"]
    assert kind.optimizer_efficiency == pytest.approx(0.1, rel=1e-6)
    assert result.after_s == pytest.approx(simulate_plan(real).iteration_time_s, rel=1e-6)


def test_what_no_prediction_counts_has_rows_of_its_own() -> None:
    """All events of the run come 2 s later than predicted, and its step ends 3 s after the last."""
    plan = plan_of(TWO, star(2), STAGES, **ORDERS)
    data = run_of(plan).model_dump(mode="json")
    for name in ("operations", "transfers", "reductions", "optimizer_steps"):
        for event in data[name]:
            event["start_s"] += 2
            event["end_s"] += 2
    data["steps"][0]["iteration_time_s"] += 5
    found = compare_with_measured(plan, simulate_plan(plan), MeasuredTimeline.parse(data, "run"))
    assert [row.measured_s for row in found.outside.values()] == [
        pytest.approx(2),
        pytest.approx(3),
    ]
    assert not found.batches
    assert found.largest[:2] == [
        ("after the last event", pytest.approx(-3)),
        ("before the first operation", pytest.approx(-2)),
    ]


def test_time_spent_on_batches_is_told_where_it_matters() -> None:
    plan = plan_of(TWO, star(2), STAGES, **ORDERS)
    timeline = simulate_plan(plan)
    data = run_of(plan).model_dump(mode="json")
    for wait_s, share in ((0.001, None), (timeline.iteration_time_s / 4, "25%")):
        data["steps"][0]["batch_wait_s"] = {"d0": wait_s, "d1": wait_s / 2}
        run = MeasuredTimeline.parse(data, "run")
        found = compare_with_measured(plan, timeline, run)
        assert found.batches["d0"].measured_s == pytest.approx(wait_s)
        told = [note for note in comparison_notes(found) if "loading batches" in note]
        assert len(told) == (share is not None)
        assert all("note: d0 spends" in note and f"({share})" in note for note in told)


def test_devices_of_one_type_that_differ_are_told() -> None:
    plan = plan_of(TWO, star(2), [(("a", "b"), ("d0", "d1"))], d0="0F0 0B0", d1="0F1 0B1")
    result = calibrate(plan, with_lengths(plan, {"0F0": 4, "0F1": 6}))
    assert measured(result, "a")[0] == 1.25
    told = "F of stage 0 takes 1.50 times as long on d1 as on d0, both of type unit"
    assert any(note.startswith(told) for note in result.notes)


STAGES = [(("a",), ("d0",)), (("b",), ("d1",))]
ORDERS = {"d0": "0F0 0F1 0B0 0B1", "d1": "1F0 1B0 1F1 1B1"}


def with_transfers(plan: Plan, factor: float) -> MeasuredTimeline:
    """A run as predicted, but for messages that take longer by a factor."""
    data = run_of(plan, emulated=True).model_dump(mode="json")
    for event in data["transfers"]:
        event["end_s"] = event["start_s"] + factor * (event["end_s"] - event["start_s"])
    return MeasuredTimeline.parse(data, "run")


def test_links_of_a_slow_route_slow_down_and_so_do_their_like() -> None:
    plan = plan_of(TWO, star(3), STAGES, **ORDERS)
    result = calibrate(plan, with_transfers(plan, 2), links_only=True)
    assert [row.after.bandwidth_gb_per_s for row in result.links] == pytest.approx([0.5] * 3)
    assert [row.method for row in result.links] == ["scaled", "scaled", "as its like"]
    assert [row.after.source for row in result.links] == ["measured", "measured", "assumed"]
    assert result.plan.predicted.lower_bound_s == 0


def test_only_the_narrowest_link_of_a_route_slows_down_and_shared_links_count() -> None:
    wires = [link("d0", "hub", 1, shared=True), link("d1", "hub", 8)]
    plan = plan_of(TWO, cluster(["d0", "d1"], wires, ["hub"]), STAGES, **ORDERS)
    result = calibrate(plan, with_transfers(plan, 2), links_only=True)
    assert [(row.index, row.after.bandwidth_gb_per_s) for row in result.links] == [
        (0, pytest.approx(0.5))
    ]
    quicker = calibrate(plan, with_transfers(plan, 0.1), links_only=True)
    found = {row.index: row.after.bandwidth_gb_per_s for row in quicker.links}
    assert found == {0: pytest.approx(10), 1: pytest.approx(10)}


def test_messages_of_several_sizes_tell_latency_from_bandwidth() -> None:
    route = star(2).route("d0", "d1")
    assert route is not None
    found = fit_pair(("d0", "d1"), route, {GIGA: [1.25], 2 * GIGA: [1.75, 9, 1.75]})
    assert found.method == "fitted"
    assert found.latency_s == pytest.approx(0.75)
    assert found.bandwidth_gb_per_s == pytest.approx(2)
    steep = fit_pair(("d0", "d1"), route, {GIGA: [1], 2 * GIGA: [4]})
    assert steep.latency_s == 0
    shrinking = fit_pair(("d0", "d1"), route, {GIGA: [4], 2 * GIGA: [2]})
    assert shrinking.method == "scaled"


def test_a_message_quicker_than_its_latency_scales_both() -> None:
    route = star(2, latency_us=500_000).route("d0", "d1")
    assert route is not None
    assert route.seconds(GIGA) == 2
    found = fit_pair(("d0", "d1"), route, {GIGA: [0.5]})
    assert (found.latency_s, found.bandwidth_gb_per_s) == (0.25, 4)
    kept = fit_pair(("d0", "d1"), route, {GIGA: [3.0]})
    assert (kept.latency_s, kept.bandwidth_gb_per_s) == (1, 0.5)


def test_waiting_for_a_busy_link_is_no_slow_link() -> None:
    quick = [layer("a", 0.1, 0.1), layer("b", 1, 1)]
    plan = plan_of(quick, star(2), STAGES, **{**ORDERS, "d1": "1F0 1F1 1B0 1B1"})
    run = run_of(plan, emulated=True)
    waits = [event.seconds for event in run.transfers if event.operation == "0F1"]
    assert waits == [pytest.approx(1.9)]
    assert calibrate(plan, run, links_only=True).links == ()


def test_a_comparison_has_every_event_of_both() -> None:
    plan = plan_of(
        TWO,
        star(3),
        [(("a",), ("d0", "d2")), (("b",), ("d1",))],
        d0="0F0 0B0",
        d2="0F1 0B1",
        d1="1F0 1B0 1F1 1B1",
    )
    run = with_lengths(plan, {"0F0": 2, "0F1": 6})
    found = compare_with_measured(plan, simulate_plan(plan), run)
    assert found.kinds["F"].measured_s == 3
    assert found.operations[0, "d2", "F"].ratio == pytest.approx(6)
    assert found.operations[0, "d2", "F"].factor == pytest.approx(6)
    assert all(row.ratio == pytest.approx(1) for row in found.transfers.values())
    assert set(found.transfers) == {("d0", "d1"), ("d2", "d1"), ("d1", "d0"), ("d1", "d2")}
    # d0 works 1 s longer and waits that much less.
    waits = found.waiting["d0"]
    assert waits.predicted_s is not None
    assert waits.measured_s == pytest.approx(waits.predicted_s - 1, abs=1e-6)
    assert found.error == pytest.approx(0)


def test_an_incomplete_run_is_refused() -> None:
    plan = plan_of(TWO, star(2), STAGES, **ORDERS)
    data = run_of(plan).model_dump(mode="json")
    gone = data["operations"].pop()
    with pytest.raises(PipeplanError, match="step 1 has 7 of the plan's 8"):
        require_timeline_of(plan, MeasuredTimeline.parse(data, "run"))
    data["operations"].append({**gone, "operation": "0F9"})
    with pytest.raises(PipeplanError, match=r"0F9 ran on .* where the plan has it not"):
        require_timeline_of(plan, MeasuredTimeline.parse(data, "run"))
    for device in data["devices"]:
        device["rank"] = 1 - device["rank"]
    with pytest.raises(PipeplanError, match="devices: the timeline has d1, d0, the plan d0, d1"):
        require_timeline_of(plan, MeasuredTimeline.parse(data, "run"))


@pytest.mark.parametrize(("factor", "tells"), [(2.9, False), (3.1, True)])
def test_links_that_contradict_the_cluster_are_told(factor: float, tells: bool) -> None:
    """A message of a gigabyte takes so many times the second that the links promise."""
    plan = plan_of(TWO, star(2), STAGES, **ORDERS)
    notes = calibrate(plan, with_transfers(plan, factor), links_only=True).notes
    told = [note for note in notes if "contradict the cluster by more than 3x" in note]
    assert len(told) == tells
    assert all("0.3226 GB/s measured, 1 in the plan" in note for note in told)


@pytest.mark.parametrize(
    ("planned", "ran_on", "told"),
    [
        ("RTX-4090", "AMD EPYC, 1 threads", "these are not the times of RTX-4090"),
        ("RTX-4090", "NVIDIA GeForce RTX 4090", None),
        ("CPU-core", "AMD EPYC, 1 threads", None),
        ("my chip", "AMD EPYC, 1 threads", None),
        ("my chip, an Intel Xeon", "AMD EPYC, 1 threads", "not the times of 'an Intel Xeon'"),
        ("my chip, an AMD EPYC", "an AMD EPYC, 8 threads", None),
    ],
)
def test_a_run_on_other_hardware_is_told(planned: str, ran_on: str, told: str | None) -> None:
    name, _, hardware = planned.partition(", ")
    kind = device_type(hardware=hardware or None)
    wires = cluster({"d0": name, "d1": name}, [link("d0", "d1")], types={name: kind})
    plan = plan_of(TWO, wires, STAGES, **ORDERS)
    data = run_of(plan).model_dump(mode="json")
    for row in data["devices"]:
        row["hardware"] = ran_on
    run = MeasuredTimeline.parse(data, "run")
    for notes in (
        list(comparison_notes(compare_with_measured(plan, simulate_plan(plan), run))),
        calibrate(plan, run).notes,
    ):
        found = [note for note in notes if "ran on" in note]
        assert len(found) == (told is not None)
        assert all(f"2 devices of type {name} ran on {ran_on!r}: " in note for note in found)
        assert all(str(told) in note for note in found)
    slept = run.model_copy(update={"emulated": True})
    compared = compare_with_measured(plan, simulate_plan(plan), slept)
    assert compared.other_hardware == ()


def drifting(plan: Plan, device: str, a_step_s: float) -> MeasuredTimeline:
    """Steps as predicted; the device's clock goes slow, by so much more in each step."""
    data = run_of(plan, [simulate_plan(plan)] * 3).model_dump(mode="json")

    def late_s(step: int, name: str, seconds: float) -> float:
        return max(0.0, seconds - (step - 1) * a_step_s * (name == device))

    for row in (*data["operations"], *data["optimizer_steps"]):
        for moment in ("start_s", "end_s"):
            row[moment] = late_s(row["step"], row["device"], row[moment])
    for row in data["transfers"]:
        row["start_s"] = late_s(row["step"], row["source"], row["start_s"])
        row["end_s"] = max(row["start_s"], late_s(row["step"], row["target"], row["end_s"]))
    return MeasuredTimeline.parse(data, "run")


def test_clocks_that_drift_are_told_and_calibrate_nothing() -> None:
    """A message takes 1 s; 2 s behind, the receiver seems to begin 1 s before it was sent."""
    plan = plan_of(TWO, star(2), STAGES, **ORDERS)
    assert clock_conflict(drifting(plan, "d1", 0)) is None
    assert clock_conflict(drifting(plan, "d1", 0.4)) is None
    run = drifting(plan, "d1", 1.0)
    conflict = compare_with_measured(plan, simulate_plan(plan), run).clock_conflict
    told = (
        r"operations: in step 3, 1F0 began on 'd1' [\d,.]+ ms before 0F0, whose result it needs, "
        r"ended on 'd0' \(in step 1: [\d,.]+ ms after it\): the clocks of the two drift apart"
    )
    assert re.match(told, str(conflict))
    with pytest.raises(PipeplanError, match=told):
        calibrate(plan, run)


def test_costs_of_another_graph_are_refused() -> None:
    traced = graph(TWO)
    times = {"unit": {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}}
    same = graph([layer("a", 1, 2, measured=times), TWO[1]])
    assert with_measured_times(traced, same, "costs.json") is same
    for other, named in (
        (graph([layer("a", 2, 2), TWO[1]]), r"costs.json: layers\[0\].forward_flops: 2000"),
        (graph(TWO[:1]), "costs.json: layers: 1, the model has 2"),
        (graph(TWO, []), "costs.json: boundaries: not that of the model"),
    ):
        with pytest.raises(PipeplanError, match=named):
            with_measured_times(traced, other, "costs.json")
