"""The checker's own contraction of a cluster and its layers gives the planner's figures."""

import random
from typing import Any

import pytest
from builders import cluster, device_type, link, star
from group_problems import tiny_graph, tiny_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Job, Plan, Problem, verify
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.group_packing import packed
from planner.costs.placement import StageSpec, place
from planner.plan.operations import Operation
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.prediction import refresh
from planner.simulation.simulator import simulate_plan
from planner.verification.costs import PlanCosts
from planner.verification.replay import replay
from planner.verification.tensor_groups import contracted

RELATIVE = 1e-9


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two types of devices on switches with links of any duplex, some pairs joined directly."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    kinds = {f"d{i}": rng.choice(["fast", "slow"]) for i in range(8)}
    types = {
        "fast": device_type(peak_tflop_per_s={"float32": 3}, reserved_gib=1),
        "slow": device_type(
            operation_overhead_us=5,
            by_class={"product": {"efficiency": 0.3, "ramp_up_us": 2}},
        ),
    }
    hubs = ["a", "b"]
    between = {"duplex": rng.choice(["half", "full"]), "latency_us": rng.choice([0, 30])}
    links = [link("a", "b", rng.uniform(0.1, 2), **between)]
    for name in kinds:
        fields = {"latency_us": rng.choice([0, 3]), "duplex": rng.choice(["half", "full"])}
        links.append(link(name, rng.choice(hubs), rng.uniform(0.5, 5), **fields))
    for _ in range(rng.randint(0, 4)):
        pair = rng.sample(sorted(kinds), 2)
        links.append(link(*pair, rng.uniform(1, 20), shared=rng.random() < 0.3))
    data = cluster(kinds, links, hubs, types).model_dump()
    if rng.random() < 0.5:
        slowdown = [1.0, *sorted(rng.uniform(1, 5) for _ in range(7))]
        data["hosts"] = [{"devices": list(kinds), "slowdown": slowdown}]
    return Cluster.from_data(data)


def plan_of(problem: Problem, degree: int, rng: random.Random) -> Plan | None:
    """A plan of two stages on groups, perhaps with replicas; None if there are too few of them."""
    groups = packed(problem.cluster, degree)
    if len(groups) < 2:
        return None
    parallel = TensorParallel(degree=degree, groups=groups)
    found = grouped_problem(problem, parallel)
    names, (first, *others) = list(found.graph.layers), [group.name for group in groups]
    cuts = (
        list(range(1, len(names)))
        if found.job.cuts is None
        else [names.index(name) for name in found.job.cuts]
    )
    if not cuts:
        return None
    cut, replicas = rng.choice(cuts), tuple(others[: rng.randint(1, 2)])
    specs = [StageSpec(tuple(names[:cut]), (first,)), StageSpec(tuple(names[cut:]), replicas)]
    orders: dict[str, list[Operation]] = {first: [], **{name: [] for name in replicas}}
    for m in range(problem.job.microbatches):
        for stage, device in enumerate((first, replicas[m % len(replicas)])):
            orders[device] += [Operation(stage, "F", m), Operation(stage, "B", m)]
    orders[first].sort(key=lambda operation: operation.kind == "B")
    plan = plan_by_hand(place(found, specs), {name: tuple(row) for name, row in orders.items()})
    return plan.of_problem(problem, parallel)


@settings(max_examples=25)
@given(clusters(), st.integers(0, 10**6), st.sampled_from([2, 3]))
def test_both_contractions_give_the_same_figures(
    the_cluster: Cluster, seed: int, degree: int
) -> None:
    rng = random.Random(seed)
    job = Job(microbatches=3, tensor_parallel=degree, recompute=False)
    rules = RuntimeRules(group_messages=rng.choice(["whole", "parts"]))
    problem = Problem(tiny_graph(rng, 4, [degree]), the_cluster, job, runtime=rules)
    plan = plan_of(problem, degree, rng)
    if plan is None:
        return
    timeline, seen = simulate_plan(plan), contracted(plan)
    found = replay(seen, seen.parsed_orders(), PlanCosts(seen))
    assert found.iteration_time_s == pytest.approx(timeline.iteration_time_s, rel=RELATIVE)
    peaks = {device: found.peak_bytes(device) for device in found.memory}
    assert peaks == timeline.peak_memory_bytes
    theirs, ours = plan.on_groups.cluster, seen.cluster
    assert [device.type for device in ours.devices] == [device.type for device in theirs.devices]
    for name in ours.device_types:
        mine, other = (row.device_types[name].group for row in (ours, theirs))
        assert mine is not None
        assert other is not None
        for collective in mine.collectives:
            for bytes_ in (1, 10**6, 10**9):
                seconds = other.seconds(collective, bytes_)  # type: ignore[arg-type]
                assert mine.seconds(collective, bytes_) == pytest.approx(seconds, rel=RELATIVE)
    assert verify(refresh(plan)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"iteration_time_s": 0.999},
        {"bubble": 0.9},
    ],
)
def test_a_wrong_prediction_of_a_plan_of_groups_is_found(change: dict[str, Any]) -> None:
    problem = tiny_problem(3, microbatches=3, tensor_parallel=2)
    plan = next(p for s in range(20) if (p := plan_of(problem, 2, random.Random(s))) is not None)
    wrong = {k: v * getattr(plan.predicted, k) for k, v in change.items()}
    changed = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=wrong)})
    assert next(iter(change)) in " ".join(verify(changed))
    assert verify(plan) == []


def test_group_figures_in_the_cluster_of_a_plan_are_refused() -> None:
    problem = tiny_problem(3, microbatches=3, tensor_parallel=2)
    plan = next(p for s in range(20) if (p := plan_of(problem, 2, random.Random(s))) is not None)
    flat = plan.on_groups
    assert "cluster.device_types.unitx2.group" in " ".join(verify(flat))
    assert star(2).device_types["unit"].group is None
