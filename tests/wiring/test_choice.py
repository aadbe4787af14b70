"""The wiring that explains pairs, and flows at the same time, of clusters that are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from builders import cluster, link, star
from figures import figures_of, flows, measurements
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.topology.choice import choose_topology, reduction_errors, seconds_together
from planner.topology.measurements import ConcurrentMessages, Measurements, TimedReduction

FOUR = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}
INNER, OUTER = (1e-5, 10.0), (1e-4, 1.0)


def two_hosts(*together: ConcurrentMessages) -> Measurements:
    """Devices a0 and a1, b0 and b1: 10 GB/s inside hosts, 1 GB/s between them."""
    figures = {ends: INNER if ends[0][0] == ends[1][0] else OUTER for ends in combinations(FOUR, 2)}
    return measurements(FOUR, figures, together)


def wires(found: Cluster) -> dict[tuple[str, str], float]:
    return {link.between: link.bandwidth_gb_per_s for link in found.links}


def test_hosts_become_nodes_with_a_link_between_them() -> None:
    taken = choose_topology(two_hosts(), 0.1).taken
    assert taken.topology.cluster.switches == ("a", "b")
    assert wires(taken.topology.cluster) == {
        **{(name, name[0]): 10.0 for name in FOUR},
        ("a", "b"): 1.0,
    }
    assert {link.source for link in taken.topology.cluster.links} == {"measured"}
    route = taken.topology.cluster.route("a0", "b1")
    assert route is not None
    assert route.latency_s == pytest.approx(1e-4, rel=1e-3)


def test_flows_that_share_the_way_between_hosts_keep_the_link() -> None:
    row = flows("from host to host", ("a0", "b0", 0.5), ("a1", "b1", 0.5))
    assert ("a", "b") in wires(choose_topology(two_hosts(row), 0.1).taken.topology.cluster)


def test_flows_between_hosts_that_share_nothing_have_cards_of_their_own() -> None:
    apart = flows("from host to host", ("a0", "b0", 1), ("a1", "b1", 1))
    one_card = flows("one to two in other hosts", ("a0", "b0", 0.5), ("a0", "b1", 0.5))
    found = choose_topology(two_hosts(apart, one_card), 0.1).taken.topology.cluster
    assert wires(found) == {
        **{(name, name[0]): 10.0 for name in FOUR},
        **{(name, "network"): 1.0 for name in FOUR},
    }


@pytest.mark.parametrize(("back_s", "latency_s"), [(1.5e-4, 1.25e-4), (1.8e-3, 1e-4)])
def test_latencies_of_two_ways_are_averaged_only_where_they_are_near(
    back_s: float, latency_s: float
) -> None:
    """100 us one way; of 1.8 ms the other way, the most was not the link's."""
    found = measurements({"a": "a", "b": "b"}, {("a", "b"): (1e-4, 1.0)})
    ways = {**found.ways, ("b", "a"): replace(found.ways["b", "a"], latency_s=back_s)}
    pair = replace(found, ways=ways).pairs["a", "b"]
    assert pair.latency_s == pytest.approx(latency_s)
    assert pair.latency_ratio == pytest.approx(back_s / 1e-4)


def test_a_device_that_sends_to_two_at_full_speed_has_a_link_to_each() -> None:
    full = flows("one to two in other hosts", ("a0", "b0", 1), ("a0", "b1", 1))
    taken = choose_topology(two_hosts(full, full), 0.1).taken
    assert taken.topology.is_pairs
    assert len(taken.topology.cluster.links) == 6


def test_both_ways_at_half_speed_make_links_half_duplex() -> None:
    inner = flows("both ways", ("a0", "a1", 10), ("a1", "a0", 10))
    outer = flows("both ways", ("a1", "b0", 0.5), ("b0", "a1", 0.5))
    found = choose_topology(two_hosts(inner, outer), 0.1).taken.topology.cluster
    assert {link.between: link.duplex for link in found.links} == {
        **{(name, name[0]): "full" for name in FOUR},
        ("a", "b"): "half",
    }


def test_groups_are_found_by_bandwidth_inside_one_host() -> None:
    """Two pairs of GPUs with bridges, and a narrower bus for all."""
    hosts = dict.fromkeys(FOUR, "box")
    found = choose_topology(measurements(hosts, two_hosts_figures()), 0.1).taken
    assert found.topology.title == "a link between switches, grouped by bandwidth"
    assert found.worst.bandwidth == pytest.approx(0)


def two_hosts_figures() -> dict:
    return {ends: (way.latency_s, way.bandwidth_gb_per_s) for ends, way in two_hosts().ways.items()}


def test_figures_of_no_tree_get_a_link_for_every_pair() -> None:
    """A ring: both neighbours are near, whoever is opposite is far."""
    near = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]
    figures = {ends: (1e-5, 4.0 if ends in near else 1.0) for ends in combinations("abcd", 2)}
    choice = choose_topology(measurements(dict.fromkeys("abcd", "host"), figures), 0.1)
    assert choice.taken.topology.is_pairs
    assert {ends: width for ends, (_, width) in figures.items()} == wires(
        choice.taken.topology.cluster
    )
    assert not choice.judged[0].explains


def test_latencies_that_a_switch_cannot_explain_count_too() -> None:
    figures = dict.fromkeys(combinations("abcd", 2), (1e-3, 1.0))
    figures["a", "b"] = figures["c", "d"] = (1e-2, 1.0)
    found = measurements(dict.fromkeys("abcd", "host"), figures)
    assert choose_topology(found, 0.1).taken.topology.is_pairs


def test_tolerance_and_spread_add_up() -> None:
    figures = dict.fromkeys(combinations("abc", 2), (1e-5, 1.0))
    figures["a", "b"] = (1e-5, 0.8)
    figures["b", "c"] = (1e-5, 1.3)
    hosts = dict.fromkeys("abc", "host")
    assert choose_topology(measurements(hosts, figures), 0.1).taken.topology.is_pairs
    steady = choose_topology(measurements(hosts, figures, spread=0.2), 0.1).taken
    assert steady.topology.cluster.switches == ("host",)


def test_pairs_that_are_missing_have_no_link_where_every_pair_has_one() -> None:
    figures = {("a", "b"): (1e-5, 1.0), ("b", "c"): (1e-5, 3.0), ("c", "d"): (1e-5, 1.0)}
    figures["a", "d"], figures["a", "c"] = (1e-5, 3.0), (1e-5, 0.3)
    found = measurements(dict.fromkeys("abcd", "host"), figures)
    assert found.missing == (("b", "d"),)
    taken = choose_topology(found, 0.1).taken
    assert taken.topology.is_pairs
    assert len(taken.topology.cluster.links) == 5


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(PipeplanError, match="no pair of devices was measured"):
        choose_topology(measurements(FOUR, {}), 0.1)


def test_flows_of_a_device_wait_for_the_slowest() -> None:
    """0.1 GB at 1 GB/s beside 0.01 GB at 0.04 GB/s; d > e shares no device with them."""
    rows = [link("a", "b", 1), link("a", "c", 0.04), link("d", "e", 0.1)]
    row = ConcurrentMessages(
        "x", (("a", "b"), ("a", "c"), ("d", "e")), (10**8, 10**7, 10**7), (1, 1, 1)
    )
    found = seconds_together(cluster("abcde", rows), row)
    assert found == pytest.approx((0.25, 0.25, 0.1))


def test_what_a_flow_leaves_when_it_is_through_goes_to_the_others() -> None:
    """a sends at 1 GB/s in all: 0.2 GB to c at 0.2 GB/s for 1 s, 0.8 of 1 GB to b, then the rest.

    At 1 s b has 0.8 GB; 0.2 GB more at 1 GB/s take 0.2 s.
    """
    rows = [link("a", "s", 1), link("b", "s", 1), link("c", "s", 0.2)]
    row = ConcurrentMessages("x", (("a", "b"), ("a", "c")), (10**9, 2 * 10**8), (1, 1))
    assert seconds_together(cluster("abc", rows, "s"), row) == pytest.approx((1.2, 1.2))


def test_flows_of_others_go_on_meanwhile() -> None:
    """Both pairs share a link of 1 GB/s for ever, though one's messages are half as long."""
    rows = [link("a", "s"), link("b", "t"), link("c", "s"), link("d", "t"), link("s", "t")]
    row = ConcurrentMessages("x", (("a", "b"), ("c", "d")), (10**9, 5 * 10**8), (1, 1))
    assert seconds_together(cluster("abcd", rows, "st"), row) == pytest.approx((2, 1))


@st.composite
def trees(draw: st.DrawFn) -> tuple[Cluster, dict[str, str]]:
    """Hosts of uneven size and speed around a network; ports inside are never the narrowest."""
    count = draw(st.integers(1, 4))
    names, wires, switches = {}, [], []
    speeds = st.sampled_from([1.0, 2.5, 6.0])
    for host in "wxyz"[:count]:
        devices = [f"{host}/d{n}" for n in range(draw(st.integers(1 if count > 1 else 2, 4)))]
        names.update(dict.fromkeys(devices, host))
        ends = devices[0]
        if len(devices) > 1:
            ends = host
            switches.append(host)
            width = draw(speeds) * 10
            wires += [link(name, host, width, latency_us=5) for name in devices]
        if count > 1:
            wires.append(link(ends, "network", draw(speeds), latency_us=draw(st.integers(5, 50))))
    all_switches = [*switches, *(["network"] if count > 1 else [])]
    return cluster(list(names), wires, all_switches), names


@given(trees())
def test_trees_of_hosts_are_found_again(case: tuple[Cluster, dict[str, str]]) -> None:
    known, hosts = case
    found = measurements(hosts, figures_of(known))
    taken = choose_topology(found, 0.01).taken
    assert not taken.topology.is_pairs or len(hosts) == 2
    for ends, (latency_s, width) in figures_of(known).items():
        route = taken.topology.cluster.route(*ends)
        assert route is not None
        assert route.bandwidth_gb_per_s == pytest.approx(width, rel=0.011)
        assert route.latency_s == pytest.approx(latency_s, abs=5e-5)


def test_two_ranks_exchange_halves_twice() -> None:
    """By hand: 2 steps of 5 * 10**5 bytes at 1 GB/s with 100 us each; measured 3 ms."""
    row = TimedReduction(("d0", "d1"), 10**6, 3e-3)
    (error,) = reduction_errors(star(4, 1.0, latency_us=50.0), [row])
    assert error.predicted_s == pytest.approx(2 * (1e-4 + 5e-4))
    assert error.ratio == pytest.approx(2.5)


def test_all_reduces_among_devices_without_a_path_are_left_out() -> None:
    known = star(4, 1.0)
    apart, names = known.model_copy(update={"links": known.links[:3]}), known.device_names
    rows = [TimedReduction(names, 10**6, 1e-3), TimedReduction(names[:2], 10**6, 1e-3)]
    assert [error.reduction for error in reduction_errors(apart, rows)] == rows[1:]
