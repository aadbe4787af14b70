"""The times and the memory of plans of tensor-parallel groups, whose devices are the groups."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from builders import cluster, device_type, link, star
from group_problems import tiny_graph, tiny_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agreement import assert_they_agree

from planner import Job, Plan, Problem, verify
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.group_packing import packed_in_turn
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.prediction import refresh


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two types of devices on switches with links of any duplex, some pairs joined directly."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    kinds = {f"d{i}": rng.choice(["fast", "slow"]) for i in range(8)}
    types = {
        "fast": device_type(peak_tflop_per_s={"float32": 3}, reserved_gib=1),
        "slow": device_type(
            operation_overhead_us=5, by_class={"product": {"efficiency": 0.3, "ramp_up_us": 2}}
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


def plan_of(problem: Problem, sizes: Sequence[int], rng: random.Random) -> Plan | None:
    """A plan of two stages on groups, perhaps with replicas; None if there are too few of them.

    The first devices are in groups of the first size, the others in such of the second.
    """
    cluster_names = problem.cluster.device_names
    halves = (cluster_names[::2], cluster_names[1::2])
    groups = [
        group
        for size, names in zip(sizes, halves, strict=True)
        for group in packed_in_turn(problem.cluster, [size], names)
    ]
    if len(groups) < 2:
        return None
    rng.shuffle(groups)
    parallel = TensorParallel(groups=tuple(groups))
    if parallel.degrees == (1,):
        return None
    if len(problem.cluster.hosts) and len(parallel.degrees) > 1:
        with pytest.raises(PipeplanError, match="have several numbers of devices in one host"):
            grouped_problem(problem, parallel)
        return None
    found = grouped_problem(problem, parallel)
    names, first = list(found.graph.layers), groups[0].name
    size = len(groups[-1].devices)
    others = [group.name for group in groups[:0:-1] if len(group.devices) == size]
    cuts = (
        list(range(1, len(names)))
        if found.job.cuts is None
        else [names.index(name) for name in found.job.cuts]
    )
    if not cuts:
        return None
    cut, replicas = rng.choice(cuts), tuple(others[: rng.randint(1, 2)])
    again = rng.sample(names, 2) if problem.job.recompute else []
    specs = [
        StageSpec(tuple(part), on, tuple(name for name in part if name in again))
        for part, on in ((names[:cut], (first,)), (names[cut:], replicas))
    ]
    orders: dict[str, list[Operation]] = {first: [], **{name: [] for name in replicas}}
    for m in range(problem.job.microbatches):
        for stage, device in enumerate((first, replicas[m % len(replicas)])):
            orders[device] += [Operation(stage, "F", m), Operation(stage, "B", m)]
    orders[first].sort(key=lambda operation: operation.kind == "B")
    plan = plan_by_hand(place(found, specs), {name: tuple(row) for name, row in orders.items()})
    return plan.of_problem(problem, parallel)


def plan_of_pairs(problem: Problem) -> Plan:
    found = (plan_of(problem, (2, 2), random.Random(seed)) for seed in range(20))
    return next(plan for plan in found if plan is not None)


@settings(max_examples=25)
@given(
    clusters(),
    st.integers(0, 10**6),
    st.sampled_from([(2, 2), (3, 3), (1, 2), (2, 3), (4, 1)]),
    st.booleans(),
    st.booleans(),
)
def test_both_give_plans_of_groups_the_same_figures(
    the_cluster: Cluster, seed: int, sizes: Sequence[int], recompute: bool, shard_optimizer: bool
) -> None:
    rng = random.Random(seed)
    is_mixed = len(set(sizes)) > 1
    degree = "any" if is_mixed else sizes[0]
    fields = {"recompute": recompute, "shard_optimizer": shard_optimizer}
    job = Job(microbatches=3, tensor_parallel=degree, **fields)
    degrees = sorted({size for size in sizes if size > 1})
    rules = RuntimeRules(group_messages="whole" if is_mixed else rng.choice(["whole", "parts"]))
    problem = Problem(tiny_graph(rng, 4, degrees), the_cluster, job, runtime=rules)
    plan = plan_of(problem, sizes, rng)
    if plan is None:
        return
    assert_they_agree(plan)
    assert verify(refresh(plan)) == []


@pytest.mark.parametrize("change", [{"iteration_time_s": 0.999}, {"bubble": 0.9}])
def test_a_wrong_prediction_of_a_plan_of_groups_is_found(change: dict[str, Any]) -> None:
    problem = tiny_problem(3, microbatches=3, tensor_parallel=2)
    plan = plan_of_pairs(problem)
    wrong = {k: v * getattr(plan.predicted, k) for k, v in change.items()}
    changed = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=wrong)})
    assert next(iter(change)) in " ".join(verify(changed))
    assert verify(plan) == []


def test_group_figures_in_the_cluster_of_a_plan_are_refused() -> None:
    problem = tiny_problem(3, microbatches=3, tensor_parallel=2)
    plan = plan_of_pairs(problem)
    flat = plan.on_groups
    assert "cluster.device_types.unitx2.group" in " ".join(verify(flat))
    assert star(2).device_types["unit"].group is None
