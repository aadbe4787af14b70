"""Values of changes are those worked out by hand.

Forward 1 s and backward 2 s unless told otherwise, 10**9 bytes take a second.
"""

import pytest
from builders import (
    GIGA,
    boundary,
    cluster,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)
from plans_by_hand import chain_plan, crowded_plan, slow_second_stage, value, values

from planner.analysis.what_if import parse_change, what_if
from planner.assembly import plan_by_hand
from planner.simulation.simulator import simulate_plan


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
    found = value(crowded_plan(job_recompute=False), "device d0 memory x2")
    assert (found.replay_s, found.iteration_time_s) == (24, 15)
    assert found.found_by == "same stages, scheduled anew"
    assert found.gain == pytest.approx(1 - 15 / 24)


def test_memory_is_worth_no_more_than_recomputing_would_cost() -> None:
    """Recomputing a, d0 needs no stash and works 4 * 4 s: that is what more memory is against."""
    found = what_if(crowded_plan(), [parse_change("device d0 memory x2")])
    assert (found.plan_s, found.base_s) == (24, 16)
    assert found.values[0].gain == pytest.approx(1 - 15 / 16)


def test_more_memory_where_all_microbatches_fit_is_proved_useless() -> None:
    found = values(crowded_plan(), "device d1 memory x2", "device d0 memory x2")
    assert found["device d1 memory x2"].useless == "same stages"
    assert found["device d1 memory x2"].gain == 0
    assert found["device d0 memory x2"].useless is None


def test_recomputation_costs_a_forward_of_every_microbatch() -> None:
    """d1 would take 4 s for each of four microbatches between 1 s of fill and 2 s of drain."""
    plan = slow_second_stage()
    found = value(plan, "recompute b")
    assert found.iteration_time_s == 1 + 4 * 16 + 2
    assert found.gain == pytest.approx(1 - 67 / 51)
    recomputing = crowded_plan(2.5, recompute=("a",))
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
    found = value(crowded_plan(job_recompute=False), "device d0 memory x0.5")
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
    found = value(plan, "another d0", solve_anew=True, deterministic=True, time_limit_s=0.5)
    assert (found.replay_s, found.iteration_time_s) == (12, 6)
    assert found.found_by == "solved anew"
    assert found.lower_bound_s == pytest.approx(6, rel=1e-4)
    assert found.most_gain == pytest.approx(0.5, rel=1e-3)
    assert "every plan" in found.bound_covers


def test_split_backwards_shorten_the_drain() -> None:
    """Forward 1 s, backward 2 s, two stages: 9 s whole, 7 s if messages go before."""
    plan = chain_plan((1, 2), (1, 2))
    assert simulate_plan(plan).iteration_time_s == 9
    found = value(plan, "with split")
    assert found.replay_s == 9
    assert found.iteration_time_s == found.stages_bound_s == 7
    order = orders(d0="0F0 0F1 0I0 0W0 0I1 0W1", d1="1F0 1I0 1F1 1I1 1W0 1W1")
    split = chain_plan((1, 2), (1, 2), order=order)
    back = value(split, "without split")
    assert back.iteration_time_s == 9
    assert back.replay_s is None


def test_a_freedom_that_the_plan_needs_is_valued_by_solving_without_it() -> None:
    """Two replicas take two microbatches of 3 s each; one device takes four."""
    placed = pipeline(graph([layer("a")], []), star(2), [(["a"], ["d0", "d1"])], microbatches=4)
    plan = plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2 0F3 0B3"))
    quick = value(plan, "without replicas")
    assert (quick.iteration_time_s, quick.why_not) == (
        None,
        "the plan uses what the change takes away",
    )
    found = value(plan, "without replicas", solve_anew=True, deterministic=True, time_limit_s=0.5)
    assert (found.compared_with_s, found.iteration_time_s) == (6, 12)
    assert "no replicas" in found.bound_covers


def test_what_no_plan_can_use_is_proved_useless() -> None:
    """One layer on one device: no link matters, whatever the plan."""
    placed = pipeline(
        graph([layer("a")], []), star(2), [(["a"], ["d0"])], replication=False, microbatches=4
    )
    plan = plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"))
    options = {"solve_anew": True, "deterministic": True, "time_limit_s": 0.5}
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


def test_overlap_is_worth_what_the_last_backward_hides() -> None:
    """Two buckets of 4 s on two replicas: the first sets off 2 s before the last backward ends."""
    layers = graph(
        [layer("a", parameters=["wa"]), layer("b", parameters=["wb"])],
        [boundary("a", "b", bytes_=0)],
        [parameter("wa", elements=GIGA), parameter("wb", elements=GIGA)],
    )
    placed = pipeline(layers, star(2), [(["a", "b"], ["d0", "d1"])], microbatches=3)
    plan = plan_by_hand(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2"))
    found = value(plan, "without overlap")
    assert plan.predicted.iteration_time_s == pytest.approx(18.024)
    assert found.replay_s == pytest.approx(20.024)
