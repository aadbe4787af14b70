"""Runs of tensor-parallel groups are compared with their prediction, and not calibrated from."""

import pytest
from builders import cluster, device_type, link
from group_problems import tiny_problem
from measured_runs import run_of

from planner import PipeplanError, Plan, Problem, adopt
from planner.analysis.deviation import compare_with_measured
from planner.costs.group_collectives import inside_times
from planner.interop.calibration import calibrate
from planner.measured.timeline import MeasuredTimeline
from planner.prediction import replay


def planned(inside_gb_per_s: float) -> Plan:
    """Two stages on two groups of two with links of their own, joined by a switch."""
    told = tiny_problem(1, layers=4, tensor_parallel=2, microbatches=3)
    names = [f"d{i}" for i in range(4)]
    links = [link(name, "a", 5) for name in names]
    links += [link(*pair, inside_gb_per_s) for pair in (("d0", "d1"), ("d2", "d3"))]
    on = cluster(names, links, ["a"], {"unit": device_type(reserved_gib=0.5)})
    return adopt(Problem(told.graph, on, told.job), [["l0", "l1"], ["l2", "l3"]])


def with_collectives(plan: Plan) -> MeasuredTimeline:
    """A run as predicted, with the part of each operation that its collectives take."""
    pipeline, run = replay(plan).pipeline, run_of(plan)
    operations = tuple(
        event.model_copy(
            update={
                "collective_s": inside_times(pipeline, event.what.stage, event.device).seconds(
                    event.what.kind
                )
            }
        )
        for event in run.operations
    )
    return run.model_copy(update={"operations": operations})


def test_a_comparison_tells_collectives_apart() -> None:
    plan, slower = planned(20), planned(10)
    run = with_collectives(slower).model_copy(update={"plan_digest": run_of(plan).plan_digest})
    found = compare_with_measured(plan, replay(plan), run)
    ratios = [row.ratio for row in found.collectives.values() if row.predicted_s]
    assert ratios == [pytest.approx(2, rel=0.1)] * len(ratios)
    assert len(ratios) > 1
    assert not compare_with_measured(plan, replay(plan), run_of(plan)).collectives


def test_a_run_of_groups_is_not_calibrated_from() -> None:
    plan = planned(20)
    with pytest.raises(PipeplanError, match="tensor_parallel = 2: calibrate supports single"):
        calibrate(plan, run_of(plan))
