"""What a measured all-reduce proves of links, and no more than that."""

import pytest
from builders import cluster, graph, layer, link, orders, parameter, pipeline, star
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import run_of

from planner.analysis.deviation import compare_with_measured
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.collectives import all_reduce_s
from planner.interop.calibrate.links import least_bandwidths_gb_per_s
from planner.measured.timeline import MeasuredTimeline
from planner.simulation.simulator import simulate_plan

BYTES = 400_000_000


def proven(the_cluster: Cluster, names: list[str], measured_s: float) -> dict[int, float]:
    """From one all-reduce of 400 MB among devices of a cluster."""
    the_graph = graph([layer("a", parameters=["w"])], parameters=[parameter("w", BYTES // 4)])
    placed = pipeline(the_graph, the_cluster, [(("a",), names)], microbatches=len(names))
    texts = {name: f"0F{n} 0B{n}" for n, name in enumerate(names)}
    plan = plan_by_hand(placed, orders(**texts))
    data = run_of(plan).model_dump(mode="json")
    for event in data["reductions"]:
        event["end_s"] = event["start_s"] + measured_s
    run = MeasuredTimeline.parse(data, "run")
    compared = compare_with_measured(plan, simulate_plan(plan), run)
    return least_bandwidths_gb_per_s(placed, run, compared)


def names_of(count: int) -> list[str]:
    return [f"d{index}" for index in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("fields", "copies"), [({}, 1), ({"duplex": "half"}, 2), ({"shared": True}, 1)]
)
def test_a_ring_without_latency_proves_the_bandwidth_of_its_links(
    count: int, fields: dict, copies: int
) -> None:
    # Each device sends 2(r-1)/r of the bytes and receives as many, over one wire if half duplex.
    seconds = 2 * (count - 1) / count * BYTES * copies / 2.5e9
    found = proven(star(count, **fields), names_of(count), seconds)
    assert found == {index: pytest.approx(2.5, rel=1e-6) for index in range(count)}


@given(st.data(), st.integers(2, 6), st.sampled_from([0.0, 50.0, 5000.0]))
def test_no_link_is_said_to_carry_more_than_it_does(
    data: st.DataObject, count: int, latency_us: float
) -> None:
    kinds = st.sampled_from([{}, {"duplex": "half"}, {"shared": True}])
    fields = [data.draw(kinds) for _ in range(count)]
    widths = [data.draw(st.floats(0.1, 10)) for _ in range(count)]

    def wired(gb_per_s: list[float]) -> Cluster:
        rows = zip(names_of(count), gb_per_s, fields, strict=True)
        wires = [link(d, "hub", width, latency_us=latency_us, **more) for d, width, more in rows]
        return cluster(names_of(count), wires, ["hub"])

    true_s = all_reduce_s(wired(widths), names_of(count), BYTES)
    found = proven(wired([1.0] * count), names_of(count), true_s)
    for index, least in found.items():
        assert least <= widths[index] * (1 + 1e-6)


def test_links_that_ring_and_tree_do_not_both_use_are_left_alone() -> None:
    # Ring d0 d1 d2 d0, tree d0-d1 and d0-d2: the link d1-d2 is the ring's alone.
    wires = [link("d0", "d1"), link("d0", "d2"), link("d1", "d2")]
    found = proven(cluster(names_of(3), wires), names_of(3), 1.0)
    assert found == {index: pytest.approx(4 / 3 * BYTES * 1e-9, rel=1e-6) for index in (0, 1)}


def test_a_short_all_reduce_proves_nothing() -> None:
    assert proven(star(2, 1000), names_of(2), 0.5) == {}
    assert proven(star(2, 100, latency_us=1e6), names_of(2), 0.5) == {}
    assert proven(star(2), names_of(2), 0.0) == {}
