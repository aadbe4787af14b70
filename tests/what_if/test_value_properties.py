"""Values are never worse than the plan replayed, nor better than their bounds."""

from dataclasses import replace
from itertools import pairwise

import pytest
from builders import cluster, link
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_by_hand import values
from strategies import plans

from planner.analysis.what_if import parse_change, what_if
from planner.analysis.what_if.altered import alter, unaltered
from planner.assembly import plan_by_hand
from planner.costs.placement import place
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate

pytestmark = pytest.mark.extensive


@given(plans(), st.data(), st.sampled_from(["x0.5", "x2", "x8"]))
def test_a_value_is_the_replays_or_better_and_no_better_than_its_bound(
    plan: Plan, data: st.DataObject, factor: str
) -> None:
    device = data.draw(st.sampled_from(plan.cluster.device_names))
    layer_ = data.draw(st.sampled_from(sorted(plan.problem.graph.layers)))
    again = any(layer_ in stage.recompute for stage in plan.stages)
    texts = [f"device {device} speed {factor}", f"{'keep' if again else 'recompute'} {layer_}"]
    if plan.cluster.links:
        link_ = "-".join(data.draw(st.sampled_from(plan.cluster.links)).between)
        texts.append(f"link {link_} bandwidth {factor}")
    found = what_if(plan, [parse_change(text) for text in texts])
    assert found.base_s <= found.plan_s
    for row in found.values:
        altered = alter(unaltered(plan), parse_change(row.change))
        replayed = simulate(place(altered.problem, altered.stages, altered.sync), altered.orders)
        assert row.replay_s == replayed.iteration_time_s
        assert row.iteration_time_s <= row.replay_s
        assert row.stages_bound_s <= row.iteration_time_s * (1 + 1e-9)
        assert row.gain <= row.most_gain_of_stages + 1e-9 or row.useless == "same stages"
        if row.useless == "same stages":
            assert row.gain <= 0.001 + 1e-9


@st.composite
def star_plans(draw: st.DrawFn) -> Plan:
    """Plans on stars, where a device has one link and routes never change."""
    plan = draw(plans())
    names = plan.cluster.device_names
    rows = [
        link(
            name,
            "hub",
            draw(st.sampled_from([0.1, 0.5, 2.0])),
            latency_us=draw(st.sampled_from([0.0, 10_000.0])),
            duplex=draw(st.sampled_from(["full", "half"])),
        )
        for name in names
    ]
    kinds = {name: kind.model_dump() for name, kind in plan.cluster.device_types.items()}
    the_cluster = cluster(
        {device.name: device.type for device in plan.cluster.devices}, rows, ["hub"], kinds
    )
    problem = replace(plan.problem, cluster=the_cluster)
    return plan_by_hand(place(problem, unaltered(plan).stages), plan.parsed_orders())


@given(star_plans(), st.data())
def test_better_machines_are_never_slower(plan: Plan, data: st.DataObject) -> None:
    device = data.draw(st.sampled_from(plan.cluster.device_names))
    texts = [
        f"link {device}-hub bandwidth x2",
        f"links like {device}-hub bandwidth x2",
        f"link {device}-hub latency x0.5",
        f"device {device} speed x2",
        f"device {device} memory x2",
    ]
    found = what_if(plan, [parse_change(text) for text in texts])
    assert len(found.values) == len(texts)
    for row in found.values:
        assert row.gain >= 0
        assert row.iteration_time_s <= found.base_s


@given(star_plans(), st.data())
def test_a_wider_link_of_its_own_is_never_slower_than_a_less_wide_one(
    plan: Plan, data: st.DataObject
) -> None:
    """Shared links have no queues, so nothing overtakes."""
    rows = [row.model_copy(update={"shared": True}) for row in plan.cluster.links]
    problem = replace(plan.problem, cluster=plan.cluster.model_copy(update={"links": tuple(rows)}))
    plan = plan_by_hand(place(problem, unaltered(plan).stages), plan.parsed_orders())
    device = data.draw(st.sampled_from(plan.cluster.device_names))
    found = values(plan, *(f"link {device}-hub bandwidth x{n}" for n in (1, 2, 4, 8)))
    replays = [found[f"link {device}-hub bandwidth x{n}"].replay_s for n in (1, 2, 4, 8)]
    for wider, narrower in pairwise(reversed(replays)):
        assert wider <= narrower * (1 + 1e-9)


@settings(max_examples=10)
@given(plans())
def test_solving_anew_is_never_worse_than_the_replay_and_keeps_its_bound(plan: Plan) -> None:
    device = plan.ranks[0]
    texts = [f"device {device} speed x2", f"another {device}"]
    options = {"solve_anew": True, "deterministic": True, "time_limit_s": 0.3}
    for row in values(plan, *texts, **options).values():
        assert row.replay_s is None or row.iteration_time_s <= row.replay_s
        if row.lower_bound_s is not None:
            assert row.lower_bound_s <= row.iteration_time_s * (1 + 1e-9)
