"""Messages of one size: what is put down to latency and what to bandwidth.

Two devices on one link; both stages hold the same parameter, so that its gradients are summed over
the link. An all-reduce of two takes two steps of half its bytes in both directions at once.
"""

import pytest
from builders import boundary, cluster, graph, layer, link, orders, parameter, pipeline
from measured_runs import run_of

from planner.assembly import plan_by_hand
from planner.interop.calibrated_links import SHORT_S
from planner.interop.calibration import Calibration, calibrate
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan

MESSAGE = 196 * 1024
REDUCED = 154_000_000
FILE = {"gb_per_s": 1.0, "latency_us": 200.0}


def plan_of(message: int = MESSAGE, reduced: int = REDUCED, **file: float) -> Plan:
    """Two stages that send messages of one size, on a link as its file says."""
    held = [parameter("w", reduced // 4)] if reduced else []
    names = {"parameters": [row["name"] for row in held]}
    the_graph = graph(
        [layer("a", **names), layer("b", **names)], [boundary("a", "b", bytes_=message)], held
    )
    wired = cluster(["d0", "d1"], [link("d0", "d1", **{**FILE, **file})])
    placed = pipeline(the_graph, wired, [(("a",), ("d0",)), (("b",), ("d1",))])
    return plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))


def run_with(plan: Plan, message_s: float, reduced_s: float = 0.0) -> MeasuredTimeline:
    """As predicted, but for messages and all-reduces."""
    data = run_of(plan, emulated=True).model_dump(mode="json")
    for event in data["transfers"]:
        event["end_s"] = event["start_s"] + message_s
    for event in data["reductions"]:
        event["end_s"] = event["start_s"] + reduced_s
    return MeasuredTimeline.parse(data, "run")


def run_with_two_sizes(
    plan: Plan, latency_s: float, gb_per_s: float, reduced_s: float
) -> MeasuredTimeline:
    """The messages of the second microbatch are twice as large."""
    data = run_with(plan, 1.0, reduced_s).model_dump(mode="json")
    for event in data["transfers"]:
        event["bytes"] = MESSAGE * (1 + int(event["operation"][-1]))
        event["end_s"] = event["start_s"] + latency_s + event["bytes"] / (gb_per_s * 1e9)
    return MeasuredTimeline.parse(data, "run")


def calibrated(plan: Plan, run: MeasuredTimeline) -> Calibration:
    return calibrate(plan, run, links_only=True)


def figures(result: Calibration) -> tuple[float, float]:
    """Bandwidth in GB/s and latency in us of the link now."""
    (row,) = result.plan.cluster.links
    return row.bandwidth_gb_per_s, row.latency_us


def test_a_small_message_does_not_spoil_an_all_reduce() -> None:
    plan = plan_of()
    result = calibrated(plan, run_with(plan, 2.3e-3, 0.120))
    bandwidth, latency_us = figures(result)
    assert bandwidth == 1.0
    assert latency_us == pytest.approx(2300 - 196 * 1024 / 1000)
    assert [row.method for row in result.links] == ["latency"]
    (change,) = result.reductions
    assert change.before.predicted_s == pytest.approx(0.1544)
    assert change.after.predicted_s == pytest.approx(0.154 + 2 * latency_us * 1e-6)
    assert any("1 of 1 device pairs cannot separate" in note for note in result.notes)


def test_a_small_message_that_was_quick_does_not_widen_a_link() -> None:
    plan = plan_of(message=20_000, reduced=0)
    assert figures(calibrated(plan, run_with(plan, 205e-6))) == (1.0, pytest.approx(185))
    # Quicker than its bytes alone should be: the bandwidth must be more than the file's.
    bandwidth, _ = figures(calibrated(plan, run_with(plan, 10e-6)))
    assert bandwidth > 2


def test_a_large_messages_excess_is_bandwidth() -> None:
    plan = plan_of(message=100_000_000, reduced=0)
    result = calibrated(plan, run_with(plan, 0.4002))
    assert figures(result) == (pytest.approx(0.25), 200)
    assert [row.method for row in result.links] == ["scaled"]


def test_a_message_is_short_up_to_its_latency_or_the_cost_of_software() -> None:
    for latency_us, longest_s in ((0.0, SHORT_S), (200.0, SHORT_S), (5000.0, 5e-3)):
        for share, bandwidth in ((0.9, 1.0), (1.1, 0.5)):
            plan = plan_of(round(share * longest_s * 1e9), reduced=0, latency_us=latency_us)
            slow = run_with(plan, latency_us * 1e-6 + 2 * share * longest_s)
            assert figures(calibrated(plan, slow))[0] == pytest.approx(bandwidth)


def test_several_sizes_are_fitted_whatever_an_all_reduce_took() -> None:
    plan = plan_of()
    result = calibrated(plan, run_with_two_sizes(plan, 0.5e-3, 2.0, 0.1))
    assert figures(result) == (pytest.approx(2, rel=1e-3), pytest.approx(500, rel=1e-3))
    assert [row.method for row in result.links] == ["fitted"]


def test_a_calibration_that_spoils_an_all_reduce_is_told() -> None:
    plan = plan_of()
    result = calibrated(plan, run_with_two_sizes(plan, 0.2e-3, 0.1, 0.120))
    assert result.reductions[0].is_worse
    (note,) = [row for row in result.notes if "made the prediction of 1 of 1 all-reduces" in row]
    assert "stages 0-1: 154.4 ms predicted before, 1540 ms after, 120 ms measured" in note


def test_all_reduces_that_links_do_not_explain_are_told() -> None:
    plan = plan_of(message=100_000_000)
    result = calibrated(plan, run_with(plan, 0.1002, 0.3))
    assert result.links == ()
    (note,) = [row for row in result.notes if row.startswith("all-reduces are predicted from")]
    assert "154.4 ms predicted before, 154.4 ms after, 300 ms measured" in note
