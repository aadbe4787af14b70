"""Pipelines of tensor-parallel groups: as those of devices that are as fast as a group."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import cluster, device_type, link
from transformers_by_hand import problem, transformer

from planner.assembly import plan_by_hand
from planner.cluster.group_packing import packed
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.schedules.best import best_schedule
from planner.sync.simulation.comparison import compare_syncs
from planner.sync.simulation.planned import from_plan
from planner.sync.simulation.run import Scenario

JOB = {"equal_pipelines": True, "max_stages_per_device": 1, "recompute": False}


def two_pipelines(told: Problem, names: Sequence[str]) -> Plan:
    """Two stages of two blocks on four devices: the first two hold the first stage."""
    layers = list(told.graph.layers)
    specs = [
        StageSpec(tuple(layers[:4]), tuple(names[:2])),
        StageSpec(tuple(layers[4:]), tuple(names[2:])),
    ]
    pipeline = place(told, specs)
    schedule = best_schedule(pipeline, backward="whole")
    assert schedule is not None
    return plan_by_hand(pipeline, schedule.orders)


def of_groups() -> Plan:
    """Groups of two devices, which share all of every layer."""
    devices = [f"n{node}/gpu{gpu}" for node in range(4) for gpu in range(2)]
    links = [link(name, name.partition("/")[0], 100) for name in devices]
    links += [link(f"n{node}", "hub", 10) for node in range(4)]
    machines = cluster(devices, links, ["hub", *(f"n{node}" for node in range(4))])
    told = problem(transformer(4, degrees=(2,)), machines, tensor_parallel=2, **JOB)
    parallel = TensorParallel(degree=2, groups=packed(machines, 2))
    plan = two_pipelines(grouped_problem(told, parallel), [group.name for group in parallel.groups])
    return plan.of_problem(told, parallel)


def of_fast_devices() -> Plan:
    """Devices twice as fast, with twice the memory and inner links.

    Tensors are twice as large: all of a group's devices have them whole.
    """
    names = [f"n{node}/gpu0-1" for node in range(4)]
    links = [link(name, name.partition("/")[0], 200) for name in names]
    links += [link(f"n{node}", "hub", 10) for node in range(4)]
    one = device_type()
    twice = {
        "memory_gib": 2 * one["memory_gib"],
        "peak_tflop_per_s": {name: 2 * x for name, x in one["peak_tflop_per_s"].items()},
        "memory_bandwidth_gb_per_s": 2 * one["memory_bandwidth_gb_per_s"],
    }
    hubs = ["hub", *(f"n{node}" for node in range(4))]
    machines = cluster(names, links, hubs, {"unit": device_type(**twice)})
    told = problem(transformer(4), machines, **JOB)
    record = told.graph.record
    tensors = tuple(row.model_copy(update={"bytes": 2 * row.bytes}) for row in record.boundaries)
    graph = LayerGraph.from_record(record.model_copy(update={"boundaries": tensors}))
    return two_pipelines(replace(told, graph=graph), names)


def test_groups_are_simulated_as_devices_of_their_speed_and_links() -> None:
    groups, devices = from_plan(of_groups()), from_plan(of_fast_devices())
    assert groups.workers == devices.workers == 2
    for one, other in zip(groups.ranks, devices.ranks, strict=True):
        assert one.parameter_bytes == other.parameter_bytes > 0
        for field in ("first_forward_s", "last_backward_s", "forward_s", "backward_s"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-9), field
    for field in ("within", "between"):
        one, other = getattr(groups, field), getattr(devices, field)
        assert one.latency_s == pytest.approx(other.latency_s)
        assert one.bandwidth_gb_per_s == pytest.approx(other.bandwidth_gb_per_s)


def test_all_strategies_run_between_pipelines_of_groups() -> None:
    rows, others = (
        compare_syncs(Scenario(from_plan(plan), iterations=4)).results
        for plan in (of_groups(), of_fast_devices())
    )
    assert len(rows) > 3
    for mine, theirs in zip(rows, others, strict=True):
        assert mine.iterations_per_s == pytest.approx(theirs.iterations_per_s, rel=1e-6)
