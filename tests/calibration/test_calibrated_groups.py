"""A run of tensor-parallel groups corrects what is off of them, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import cluster, device_type, link
from group_problems import split, tiny_problem
from measured_runs import run_of

from planner import PipeplanError, Plan, Problem, adopt, solve, verify
from planner.analysis.deviation import compare_with_measured
from planner.cluster.cluster import Cluster
from planner.costs.group_collectives import inside_times
from planner.interop.calibrate.calibrate import Calibration, calibrate
from planner.interop.calibrate.costs import CostsFile, with_costs
from planner.model.graph_record import GraphRecord
from planner.model.layer_graph import LayerGraph
from planner.prediction import replay

STAGES = [["l0", "l1"], ["l2", "l3"]]


def planned(seed: int = 1, **job: Any) -> Plan:
    """Two stages of two layers on two groups of two, joined by a switch; messages take 5 ms."""
    told = tiny_problem(seed, layers=4, tensor_parallel=2, microbatches=3, **job)
    record = told.graph.record
    # Any layer may begin a stage.
    splits = tuple(
        row.model_copy(
            update={
                "boundaries": tuple(
                    tensor.model_copy(update={"placement": "whole"}) for tensor in row.boundaries
                )
            }
        )
        for row in record.splits
    )
    tensors = tuple(row.model_copy(update={"bytes": 50_000_000}) for row in record.boundaries)
    graph = LayerGraph.from_record(
        record.model_copy(update={"splits": splits, "boundaries": tensors})
    )
    return adopt(replace(told, graph=graph, cluster=on_a_switch()), STAGES)


def on_a_switch(**fields: Any) -> Cluster:
    """Four devices around a switch."""
    names = [f"d{i}" for i in range(4)]
    types = {"unit": device_type(reserved_gib=0.5)}
    links = [link(name, "a", 5) for name in names]
    data = cluster(names, links, ["a"], types).model_dump(mode="json")
    return Cluster.parse({**data, **fields}, "cluster")


def with_rings(plan: Plan) -> Plan:
    """The plan on a cluster whose groups have links of their own, wider than the switch."""
    data = plan.cluster.model_dump(mode="json")
    parallel = plan.tensor_parallel
    assert parallel is not None
    for group in parallel.groups:
        data["links"].append(link(*group.devices, 20, latency_us=5))
    return changed(plan, cluster=Cluster.parse(data, "cluster"))


def changed(plan: Plan, **fields: Any) -> Plan:
    """The plan with other inputs, predicted again."""
    return plan.model_copy(update=fields)


def real_run(real: Plan, plan: Plan, *, collectives: bool = True) -> Any:
    """What a run of a plan measures that takes as long as another one is predicted to."""
    timeline = replay(real)
    run = run_of(plan, [timeline])
    if not collectives:
        return run
    operations = tuple(
        event.model_copy(
            update={
                "collective_s": inside_times(
                    timeline.pipeline, event.what.stage, event.device
                ).seconds(event.what.kind)
            }
        )
        for event in run.operations
    )
    return run.model_copy(update={"operations": operations})


def slower_devices(plan: Plan, factor: float) -> Plan:
    kinds = {
        name: kind.model_copy(
            update={
                "peak_tflop_per_s": {p: x / factor for p, x in kind.peak_tflop_per_s.items()},
                "bandwidth_efficiency": kind.bandwidth_efficiency / factor,
                "operation_overhead_us": kind.operation_overhead_us * factor,
            }
        )
        for name, kind in plan.cluster.device_types.items()
    }
    return changed(plan, cluster=plan.cluster.model_copy(update={"device_types": kinds}))


def slower_links(plan: Plan, factor: float, which: Callable[[tuple[str, str]], bool]) -> Plan:
    links = tuple(
        row.model_copy(
            update={
                "bandwidth_gb_per_s": row.bandwidth_gb_per_s / factor,
                "latency_us": row.latency_us * factor,
            }
        )
        if which(row.between)
        else row
        for row in plan.cluster.links
    )
    return changed(plan, cluster=plan.cluster.model_copy(update={"links": links}))


def is_inside(ends: tuple[str, str]) -> bool:
    """Whether a link joins two devices, which only those of a group have in common."""
    return all(end.startswith("d") for end in ends)


def times_of(record: GraphRecord) -> list[Any]:
    return [row.measured for row in record.splits[0].layers]


def assert_as_measured(result: Calibration, real: Plan, plan: Plan) -> None:
    """The calibrated plan is predicted as the run was, operation by operation."""
    assert result.after_s == pytest.approx(replay(real).iteration_time_s, rel=1e-6, abs=1e-7)
    assert verify(result.plan) == []
    assert result.plan.execution_digest == plan.execution_digest
    expected = {(e.device, e.operation): e.end_s - e.start_s for e in replay(real).operations}
    for event in replay(result.plan).operations:
        seconds = event.end_s - event.start_s
        wanted = expected[event.device, event.operation]
        assert seconds == pytest.approx(wanted, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("seed", "factor"), [(1, 0.5), (2, 1.0), (3, 3.0)])
def test_computation_that_is_off_by_a_factor_is_found(seed: int, factor: float) -> None:
    plan = planned(seed)
    real = slower_devices(plan, factor)
    result = calibrate(plan, real_run(real, plan))
    assert_as_measured(result, real, plan)
    assert result.links == ()
    assert result.plan.cluster.links == plan.cluster.links
    told = {row.name: row for row in plan.model.graph.layers}
    by_kind = {(row.stage, row.kind): row for row in result.times}
    for stage, names in enumerate(STAGES):
        for kind, part in (("F", "forward_s"), ("B", "whole_backward_s")):
            found = sum(
                getattr(row.measured["unit"], part)
                for row in result.plan.model.graph.splits[0].layers
                if row.name in names
            )
            timeline = replay(plan)
            device = plan.stages[stage].devices[0]
            inside_s = inside_times(timeline.pipeline, stage, device).seconds(kind)
            before_s = by_kind[stage, kind].predicted_s - inside_s
            assert found == pytest.approx(factor * before_s, rel=1e-5)
    assert all(layer.measured == {} for layer in told.values())


@pytest.mark.parametrize("factor", [0.4, 2.0])
def test_collectives_that_are_off_by_a_factor_are_found_in_the_links_of_groups(
    factor: float,
) -> None:
    plan = with_rings(planned())
    real = slower_links(plan, factor, is_inside)
    result = calibrate(plan, real_run(real, plan))
    assert_as_measured(result, real, plan)
    assert {row.method for row in result.links} == {"collectives"}
    for before, after, true in zip(
        plan.cluster.links, result.plan.cluster.links, real.cluster.links, strict=True
    ):
        assert (after == before) == (not is_inside(before.between))
        assert after.bandwidth_gb_per_s == pytest.approx(true.bandwidth_gb_per_s, rel=1e-4)
        assert after.latency_us == pytest.approx(true.latency_us, rel=1e-4)
    unchanged = calibrate(plan, real_run(plan, plan))
    for ours, theirs in zip(
        times_of(unchanged.plan.model.graph), times_of(result.plan.model.graph), strict=True
    ):
        for part in ("forward_s", "input_gradient_s", "weight_gradient_s"):
            ours_s, theirs_s = getattr(ours["unit"], part), getattr(theirs["unit"], part)
            assert ours_s == pytest.approx(theirs_s, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_messages_that_are_off_are_found_in_every_link_that_carries_a_part(factor: float) -> None:
    """Links to the switch, which messages use alone: groups have links of their own."""
    plan = with_rings(planned())
    real = slower_links(plan, factor, lambda ends: not is_inside(ends))
    result = calibrate(plan, real_run(real, plan))
    assert_as_measured(result, real, plan)
    for after, true in zip(result.plan.cluster.links, real.cluster.links, strict=True):
        assert after.bandwidth_gb_per_s == pytest.approx(true.bandwidth_gb_per_s, rel=2e-3)


def test_what_shared_links_do_not_explain_is_computation_and_told() -> None:
    """Messages say that links are as planned; collectives over them take three times as long."""
    plan = planned()
    record = plan.model.graph
    (split,) = record.splits
    layers = tuple(
        row.model_copy(
            update={
                "collectives": tuple(
                    each.model_copy(update={"bytes": 3 * each.bytes}) for each in row.collectives
                )
            }
        )
        for row in split.layers
    )
    busier = record.model_copy(update={"splits": (split.model_copy(update={"layers": layers}),)})
    real = changed(plan, model=plan.model.model_copy(update={"graph": busier}))
    result = calibrate(plan, real_run(real, plan))
    assert_as_measured(result, real, plan)
    assert result.links == ()
    (note,) = (note for note in result.notes if "collectives inside" in note)
    assert "counts as computation" in note


def test_without_times_of_collectives_they_are_as_predicted() -> None:
    plan = with_rings(planned())
    real = slower_devices(plan, 2)
    result = calibrate(plan, real_run(real, plan, collectives=False))
    assert_as_measured(result, real, plan)
    assert result.plan.cluster.links == plan.cluster.links


def test_a_comparison_tells_collectives_apart() -> None:
    plan = with_rings(planned())
    real = slower_links(plan, 2, is_inside)
    found = compare_with_measured(plan, replay(plan), real_run(real, plan))
    ratios = [row.ratio for row in found.collectives.values() if row.predicted_s]
    assert ratios == [pytest.approx(2, rel=1e-4)] * len(ratios)
    assert len(ratios) > 1
    assert not compare_with_measured(plan, replay(plan), run_of(plan)).collectives


def test_measured_times_of_groups_are_costs_of_the_next_plan() -> None:
    plan = planned()
    real = slower_devices(plan, 3)
    made = calibrate(plan, real_run(real, plan)).plan
    graph = made.single_device_problem.graph
    saved = LayerGraph.parse(graph.record.model_dump(mode="json"))
    again = with_costs(
        LayerGraph.from_record(plan.model.graph), plan.cluster, CostsFile("graph.json", saved)
    )
    told = Problem(again, plan.cluster, plan.job)
    found = adopt(told, STAGES).predicted.iteration_time_s
    assert found == pytest.approx(replay(real).iteration_time_s, rel=1e-5)
    best = solve(told, time_limit_s=0.3, deterministic=True)
    assert verify(best.plan) == []
    assert best.plan.predicted.lower_bound_s <= found * (1 + 1e-9)


def test_times_of_groups_of_another_size_are_refused() -> None:
    plan = planned()
    made = calibrate(plan, real_run(plan, plan)).plan
    record = plan.model.graph
    rows = [row.model_dump(mode="json") for row in record.layers]
    tensors = [row.model_dump(mode="json") for row in record.boundaries]
    of_four = LayerGraph.parse(
        {**record.model_dump(mode="json"), "splits": [split(rows, tensors, degree=4)]}
    )
    costs = CostsFile("graph.json", made.single_device_problem.graph)
    with pytest.raises(PipeplanError, match="measured over groups of 2 alone, for which this job"):
        with_costs(of_four, plan.cluster, costs)


def test_groups_of_links_of_their_own_speed_keep_it() -> None:
    """The links of one group are slower, and slower still than the plan says; the other's are not.

    All are wider than the way over the switch.
    """
    plan = with_rings(planned())
    parallel = plan.tensor_parallel
    assert parallel is not None
    slow = set(parallel.groups[1].devices)
    plan = slower_links(plan, 2, lambda ends: set(ends) == slow)
    real = slower_links(plan, 1.5, lambda ends: set(ends) == slow)
    result = calibrate(plan, real_run(real, plan))
    assert_as_measured(result, real, plan)
    assert [set(row.before.between) for row in result.links] == [slow]


def test_what_groups_of_a_host_slow_each_other_by_is_no_part_of_their_times() -> None:
    """Both groups compute at once most of the time; a run as predicted leaves all as it is."""
    slowing = [{"devices": [f"d{i}" for i in range(4)], "slowdown": [1, 1, 2, 2]}]
    told = planned()
    plan = adopt(replace(told.single_device_problem, cluster=on_a_switch(hosts=slowing)), STAGES)
    result = calibrate(plan, real_run(plan, plan))
    assert result.after_s == pytest.approx(replay(plan).iteration_time_s, rel=0.02)
    assert verify(result.plan) == []
