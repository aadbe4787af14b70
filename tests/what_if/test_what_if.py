"""Values of changes are those worked out by hand, and never worse than the plan replayed.

By hand: forward 1 s and backward 2 s unless told otherwise, 10**9 bytes take a second.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from builders import (
    GIGA,
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    link,
    orders,
    pipeline,
    star,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans

import planner.what_if.search as what_if_search
from planner.artifacts.plan import Plan
from planner.assemble import plan_by_hand
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.explain import explain
from planner.simulator import simulate, simulate_plan
from planner.what_if import Value, WhatIf, default_changes, parse_change, what_if
from planner.what_if.altered import alter, unaltered

GIB = 2**30


def chain_plan(
    *seconds: tuple[float, float], bytes_: int = 0, order: dict | None = None, **job: object
) -> Plan:
    """A stage on a device of its own for every (forward, backward), around one switch."""
    names = "abcdefgh"[: len(seconds)]
    rows = [layer(name, *times) for name, times in zip(names, seconds, strict=True)]
    the_graph = graph(
        rows,
        [boundary(u, v, bytes_=bytes_) for u, v in pairwise(names)],
        samples_per_microbatch=job.get("samples_per_microbatch", 1),
    )
    stages = [([name], [f"d{index}"]) for index, name in enumerate(names)]
    placed = pipeline(the_graph, star(len(names)), stages, **job)
    return plan_by_hand(placed, order or orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))


def slow_second_stage() -> Plan:
    """1 s of fill, 4 * 12 s, 2 s of drain: 51 s."""
    return chain_plan(
        (1, 2),
        (4, 8),
        microbatches=4,
        order=orders(d0="0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", d1="1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"),
    )


def crowded(
    memory_gib: float = 1.5, recompute: tuple[str, ...] = (), job_recompute: bool = True
) -> Plan:
    """A microbatch at a time on d0, whose stash is 1 GiB; alternating, 24 s."""
    rows = [layer("a", stash_bytes=GIB), layer("b")]
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)])
    types = {"unit": device_type(), "small": device_type(memory_gib=memory_gib)}
    the_cluster = cluster({"d0": "small", "d1": "unit"}, [link("d0", "d1")], types=types)
    stages = [(["a"], ["d0"], recompute), (["b"], ["d1"])]
    placed = pipeline(the_graph, the_cluster, stages, microbatches=4, recompute=job_recompute)
    return plan_by_hand(
        placed,
        orders(d0="0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", d1="1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"),
    )


def values(plan: Plan, *texts: str, **options: object) -> dict[str, Value]:
    found = what_if(plan, [parse_change(text) for text in texts], **options)
    return {value.change: value for value in found.values}


def value(plan: Plan, text: str, **options: object) -> Value:
    return values(plan, text, **options)[text]


# --- by hand --------------------------------------------------------------------------------------


def test_a_faster_bottleneck_shortens_the_iteration() -> None:
    """Twice as fast, d1 takes 4 * 6 s: 27 s, and no schedule of these stages takes less."""
    found = value(slow_second_stage(), "device d1 speed x2")
    assert found.iteration_time_s == found.replay_s == found.stages_bound_s == 27
    assert found.found_by == "same plan replayed"
    assert found.gain == pytest.approx(1 - 27 / 51)
    assert found.most_gain_of_stages == pytest.approx(1 - 27 / 51)
    assert found.useless is None


def test_a_faster_device_beside_the_bottleneck_gives_fill_and_drain_only() -> None:
    found = value(slow_second_stage(), "device d0 speed x2")
    assert found.iteration_time_s == found.stages_bound_s == 49.5


def test_what_does_not_touch_the_binding_device_is_proved_useless() -> None:
    """Nothing crosses the links; d1's bound is reached without the change already."""
    found = value(slow_second_stage(), "link d0-hub bandwidth x2")
    assert (found.iteration_time_s, found.stages_bound_s, found.gain) == (51, 51, 0)
    assert found.useless == "same stages"
    assert found.most_gain_of_stages == 0


def test_one_of_two_narrow_links_gives_nothing_and_both_give_all() -> None:
    """Three transfers of 8 s, 38 s in all; of 4 s they take 22 s."""
    plan = chain_plan(
        (1, 2),
        (1, 2),
        bytes_=8 * GIGA,
        microbatches=3,
        order=orders(d0="0F0 0F1 0F2 0B0 0B1 0B2", d1="1F0 1B0 1F1 1B1 1F2 1B2"),
    )
    found = values(plan, "link d0-hub bandwidth x2", "links like d0-hub bandwidth x2")
    assert found["link d0-hub bandwidth x2"].replay_s == 38
    assert found["links like d0-hub bandwidth x2"].replay_s == 22
    assert next(iter(found)) == "links like d0-hub bandwidth x2"


def test_more_memory_gains_by_another_order() -> None:
    """With two microbatches in flight stage 1 never waits: 1 + 4 * 3 + 2 s."""
    found = value(crowded(job_recompute=False), "device d0 memory x2")
    assert (found.replay_s, found.iteration_time_s) == (24, 15)
    assert found.found_by == "same stages, scheduled anew"
    assert found.gain == pytest.approx(1 - 15 / 24)


def test_memory_is_worth_no_more_than_recomputing_would_cost() -> None:
    """Recomputing a, d0 needs no stash and works 4 * 4 s: that is what more memory is against."""
    found = what_if(crowded(), [parse_change("device d0 memory x2")])
    assert (found.plan_s, found.base_s) == (24, 16)
    assert found.values[0].gain == pytest.approx(1 - 15 / 16)


def test_more_memory_where_all_microbatches_fit_is_proved_useless() -> None:
    found = values(crowded(), "device d1 memory x2", "device d0 memory x2")
    assert found["device d1 memory x2"].useless == "same stages"
    assert found["device d1 memory x2"].gain == 0
    assert found["device d0 memory x2"].useless is None


def test_recomputation_costs_a_forward_of_every_microbatch() -> None:
    """d1 would take 4 s for each of four microbatches between 1 s of fill and 2 s of drain."""
    plan = slow_second_stage()
    found = value(plan, "recompute b")
    assert found.iteration_time_s == 1 + 4 * 16 + 2
    assert found.gain == pytest.approx(1 - 67 / 51)
    recomputing = crowded(2.5, recompute=("a",))
    found = value(recomputing, "keep a")
    # 6 s a microbatch one by one; with two in flight 15 s. Recomputing took 28 s.
    assert found.replay_s == 24
    assert found.iteration_time_s == 15


def test_a_wider_link_that_changes_the_way_may_cost_and_says_so() -> None:
    """Data leaves the direct link, 1 s, for a wider way of 5 s latency and 1 / 1.8 s."""
    the_graph = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=GIGA)])
    wires = [link("d0", "d1"), link("d0", "hub", 2), link("hub", "d1", 0.9, latency_us=5e6)]
    the_cluster = cluster(["d0", "d1"], wires, ["hub"])
    placed = pipeline(the_graph, the_cluster, [(["a"], ["d0"]), (["b"], ["d1"])], microbatches=1)
    plan = plan_by_hand(placed, orders(d0="0F0 0B0", d1="1F0 1B0"))
    found = value(plan, "link hub-d1 bandwidth x2")
    assert found.compared_with_s == 8
    assert found.iteration_time_s == pytest.approx(6 + 2 * (5 + 1 / 1.8))
    assert found.gain < 0
    assert found.found_by == "same plan replayed"


def test_a_change_that_does_not_fit_memory_says_so() -> None:
    found = value(crowded(job_recompute=False), "device d0 memory x0.5")
    assert (found.iteration_time_s, found.gain, found.replay_s) == (None, None, None)
    assert "do not fit memory" in found.why_not


def test_smaller_microbatches_shorten_fill_and_drain() -> None:
    """Two equal stages: (2 + 1) * 3 s; of half the size (4 + 1) * 1.5 s."""
    plan = chain_plan((1, 2), (1, 2), samples_per_microbatch=2)
    assert simulate_plan(plan).iteration_time_s == 9
    found = value(plan, "microbatches x2")
    assert found.iteration_time_s == found.stages_bound_s == 7.5
    assert "in proportion" in found.assumes


def test_another_device_is_valued_by_solving_anew() -> None:
    """Four microbatches of 3 s on one device; two replicas take two each."""
    placed = pipeline(graph([layer("a")], []), star(1), [(["a"], ["d0"])], microbatches=4)
    plan = plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"))
    found = value(plan, "another d0", solve_anew=True, deterministic=True, time_limit_s=2)
    assert (found.replay_s, found.iteration_time_s) == (12, 6)
    assert found.found_by == "solved anew"
    assert found.lower_bound_s == pytest.approx(6, rel=1e-4)
    assert found.most_gain == pytest.approx(0.5, rel=1e-3)
    assert "every plan" in found.bound_covers


def test_what_no_plan_can_use_is_proved_useless() -> None:
    """One layer on one device: no link matters, whatever the plan."""
    placed = pipeline(
        graph([layer("a")], []), star(2), [(["a"], ["d0"])], replication=False, microbatches=4
    )
    plan = plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"))
    options = {"solve_anew": True, "deterministic": True, "time_limit_s": 2}
    found = value(plan, "link d0-hub bandwidth x2", **options)
    assert (found.iteration_time_s, found.useless) == (12, "any plan")


def test_a_gain_of_the_search_alone_is_not_the_changes() -> None:
    """A bad order is put right without any change: both rows count from there."""
    plan = chain_plan(
        (1, 2), (1, 2), microbatches=2, order=orders(d0="0F0 0B0 0F1 0B1", d1="1F0 1B0 1F1 1B1")
    )
    found = what_if(plan, [parse_change("link d0-hub bandwidth x2")])
    assert (found.plan_s, found.base_s) == (12, 9)
    assert found.base_found_by == "same stages, scheduled anew"
    assert (found.values[0].compared_with_s, found.values[0].gain) == (9, 0)


def test_a_plan_beyond_memory_has_nothing_to_compare_with() -> None:
    with pytest.raises(PipeplanError, match="overflows memory"):
        what_if(crowded(0.5))


def test_all_changes_that_cannot_be_made_are_told() -> None:
    changes = [parse_change(text) for text in ("recompute x", "device d9 speed x2", "another d0")]
    with pytest.raises(PipeplanError) as error:
        what_if(slow_second_stage(), changes)
    assert len(error.value.problems) == 2


def test_changes_beyond_a_quick_answer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if_search, "MOST_EVENTS", 40)
    changes = [parse_change(f"device d1 speed x{factor}") for factor in (2, 3, 4)]
    found = what_if(slow_second_stage(), changes)
    assert (len(found.values), found.left_out) == (1, 2)
    thorough = what_if(
        slow_second_stage(), changes, solve_anew=True, deterministic=True, time_limit_s=0.1
    )
    assert (len(thorough.values), thorough.left_out) == (3, 0)


# --- properties -----------------------------------------------------------------------------------


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
        replayed = simulate(place(altered.problem, altered.stages), altered.orders)
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


# --- the usual changes ----------------------------------------------------------------------------


@given(plans())
def test_the_usual_changes_can_all_be_made(plan: Plan) -> None:
    changes = default_changes(plan, explain(simulate_plan(plan)), devices=True)
    assert len(set(changes)) == len(changes)
    for change in changes:
        alter(unaltered(plan), change)
        assert parse_change(str(change)) == change


def test_the_usual_changes_are_about_what_binds() -> None:
    def texts(plan: Plan) -> list[str]:
        return [str(c) for c in default_changes(plan, explain(simulate_plan(plan)))]

    assert texts(slow_second_stage()) == [
        "device d1 speed x1.2",
        "device d0 speed x1.2",
        "type unit speed x1.2",
    ]
    assert "device d0 memory x1.2" in texts(crowded())
    assert "recompute a" in texts(crowded())
    assert "keep a" in texts(crowded(2.5, recompute=("a",)))
    slow_links = chain_plan((1, 2), (1, 2), bytes_=8 * GIGA)
    assert texts(slow_links)[:2] == [
        "link d0-hub bandwidth x2",
        "links like d0-hub bandwidth x2",
    ]
    assert "microbatches x2" in texts(chain_plan((1, 2), (1, 2), samples_per_microbatch=2))


# --- limits ---------------------------------------------------------------------------------------

SEARCH = {"solve_anew": True, "deterministic": True, "time_limit_s": 0.5}


def test_the_same_seed_gives_the_same_values() -> None:
    first, second = (what_if(crowded(), seed=3, **SEARCH) for _ in range(2))
    assert first == second
    assert first.solved_anew


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(what_if_search, "solve", stop)
    found: WhatIf = what_if(crowded(), [parse_change("device d0 memory x2")], **SEARCH)
    assert found.interrupted
    assert found.values[0].iteration_time_s == 15
    assert found.values[0].lower_bound_s is None


def test_steps_are_told_as_they_are_through() -> None:
    told: list = []
    what_if(crowded(), [parse_change("device d0 memory x2")], progress=told.append, **SEARCH)
    assert [(row.step, row.change) for row in told if row.step == "solved"] == [
        ("solved", None),
        ("solved", "device d0 memory x2"),
    ]
    elapsed = [row.elapsed_s for row in told]
    assert elapsed == sorted(elapsed)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(PipeplanError, match="time_limit_s"):
        what_if(crowded(), time_limit_s=0)
