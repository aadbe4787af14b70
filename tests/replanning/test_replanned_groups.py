"""New plans of tensor-parallel groups: what is left of the groups, and what has to move."""

from collections.abc import Mapping

import pytest
from transformers_by_hand import machines, problem, transformer

from planner import Replanned, replan, solve, verify
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.tensor_parallel import grouped_problem
from planner.verification.proof import prove

QUICK = {"deterministic": True, "time_limit_s": 0.2}
EVENTS: Mapping[str, dict] = {
    "a device lost": {"lost": ["n0/gpu1"]},
    "a device of two groups lost": {"lost": ["n0/gpu1", "n0/gpu2"]},
    "a node lost": {"lost": ["n1"]},
    "a device slow": {"slow": {"n1/gpu0": 1.5}},
    "a node added": {"added": ["n2=n1"]},
    "a device exchanged": {"lost": ["n0/gpu0"], "added": ["n0/gpu0=n1/gpu1"]},
    "other machines": {"cluster": machines(1, 4)},
}


@pytest.fixture(scope="module")
def old() -> Plan:
    """Four groups of two devices on two nodes of four."""
    job = {"tensor_parallel": 2, "max_stages_per_device": 1, "min_stages": 2}
    told = problem(transformer(4, degrees=(2,)), machines(2, 4), **job)
    plan = solve(told, time_limit_s=0.5, deterministic=True).plan
    assert len(plan.ranks) == 4
    return plan


@pytest.fixture(scope="module")
def found(old: Plan) -> dict[str, Replanned]:
    return {name: replan(old, **event, **QUICK) for name, event in EVENTS.items()}


@pytest.mark.parametrize("name", EVENTS)
def test_a_new_plan_of_groups_holds_with_its_bound(
    found: dict[str, Replanned], old: Plan, name: str
) -> None:
    plan = found[name].plan
    assert verify(plan) == []
    assert plan.job == old.job
    assert plan.degree == 2
    assert 0 < plan.predicted.lower_bound_s <= plan.predicted.iteration_time_s * (1 + 1e-9)
    assert prove(plan).problems == ()


def members(plan: Plan) -> set[tuple[str, ...]]:
    assert plan.tensor_parallel is not None
    return {group.devices for group in plan.tensor_parallel.groups}


@pytest.mark.parametrize("name", EVENTS)
def test_whole_groups_stay_and_all_others_are_packed_anew(
    found: dict[str, Replanned], old: Plan, name: str
) -> None:
    plan = found[name].plan
    lost = {d for d in old.cluster.device_names if d in EVENTS[name].get("lost", ())}
    there = set(plan.cluster.device_names) - lost
    whole = {group for group in members(old) if there.issuperset(group)}
    assert whole <= members(plan)
    others = set(plan.cluster.device_names) - {device for group in whole for device in group}
    assert len(members(plan) - whole) == len(others) // 2


@pytest.mark.parametrize("name", EVENTS)
def test_groups_lack_what_they_did_not_hold(
    found: dict[str, Replanned], old: Plan, name: str
) -> None:
    """An oracle in sets of names: bytes of all members' weights, without momentum of plain SGD."""
    plan, moves = found[name].plan, found[name].moves
    lost = set(EVENTS[name].get("lost", ())) | (
        set(old.cluster.device_names) - set(plan.cluster.device_names)
    )
    assert plan.tensor_parallel is not None
    graph = grouped_problem(plan.single_device_problem, plan.tensor_parallel).graph
    size = {row.name: row.bytes for row in graph.record.parameters}
    uses = {row.name: set(row.parameters) for row in plan.model.graph.layers}
    held: dict[tuple[str, ...], set[str]] = {}
    for stage in old.stages:
        for group in stage.devices:
            if lost.isdisjoint(old.members(group)):
                held[old.members(group)] = set().union(*(uses[n] for n in stage.layers))
    expected = sum(
        size[parameter]
        for stage in plan.stages
        for group in stage.devices
        for parameter in set().union(*(uses[n] for n in stage.layers))
        - held.get(plan.members(group), set())
    )
    assert moves.bytes == expected


def test_a_slow_device_slows_its_whole_group(found: dict[str, Replanned], old: Plan) -> None:
    plan = found["a device slow"].plan
    slow = next(group for group in members(old) if "n1/gpu0" in group)
    kinds = {name: plan.cluster.type_of(name) for name in plan.cluster.device_names}
    assert {name for name, kind in kinds.items() if "slowed x1.5" in kind} == set(slow)


def test_a_plan_of_any_size_keeps_the_size_of_its_groups(old: Plan) -> None:
    job = old.job.model_copy(update={"tensor_parallel": "any"})
    again = old.model_copy(update={"job": job})
    made = replan(again, lost=["n0/gpu1"], **QUICK).plan
    assert made.job.tensor_parallel == 2
    assert verify(made) == []


def test_where_no_group_is_left_the_remedy_is_told(old: Plan) -> None:
    lost = [group[0] for group in members(old)]
    with pytest.raises(PipeplanError, match=r"no tensor-parallel group of 2.*pipeplan plan"):
        replan(
            old, lost=[*lost, *(set(old.cluster.device_names) - set(lost) - {"n0/gpu1"})], **QUICK
        )


def test_a_plan_of_any_size_that_has_no_groups_stays_one_of_single_devices() -> None:
    job = {"max_stages_per_device": 1, "tensor_parallel": 1}
    told = problem(transformer(4, degrees=(2,)), machines(2, 2), **job)
    plan = solve(told, time_limit_s=0.2, deterministic=True).plan
    fields = {"tensor_parallel": "any", "sequence_parallel": True}
    again = plan.model_copy(update={"job": plan.job.model_copy(update=fields)})
    made = replan(again, lost=["n0/gpu1"], **QUICK).plan
    assert (made.job.tensor_parallel, made.job.sequence_parallel) == (1, False)
    assert made.tensor_parallel is None
    assert verify(made) == []
