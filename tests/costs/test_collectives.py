"""All-reduce times by hand, with links shared by several steps."""

import math

import pytest
from builders import GIGA, cluster, link, star
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters

from planner.cluster.cluster import Cluster
from planner.costs.collectives import all_reduce_s

FOUR = ["d0", "d1", "d2", "d3"]


def test_a_ring_of_two_sends_everything_once_each_way() -> None:
    assert all_reduce_s(star(2), ["d0", "d1"], 3 * GIGA) == pytest.approx(3)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_ring_on_a_switch_sends_almost_twice_the_bytes(count: int) -> None:
    """2(r-1) steps, each a part of bytes/r over two hops of half a millisecond."""
    names = [f"d{index}" for index in range(count)]
    expected = 2 * (count - 1) * (GIGA / count / 1e9 + 1e-3)
    assert all_reduce_s(star(count, latency_us=500), names, GIGA) == pytest.approx(expected)


def test_a_tree_is_better_for_small_messages() -> None:
    """A ring of four takes six latencies, a tree of four twice two levels."""
    found = all_reduce_s(star(4, latency_us=500_000), FOUR, 1)
    assert found == pytest.approx(4, rel=1e-6)


def test_a_half_duplex_link_halves_a_ring_of_two() -> None:
    direct = [link("d0", "d1", duplex="half")]
    assert all_reduce_s(cluster(["d0", "d1"], direct), ["d0", "d1"], GIGA) == pytest.approx(2)


def two_machines(uplink_gb_per_s: float, **fields: object) -> Cluster:
    """d0 and d1 behind one switch, d2 and d3 behind another; one cable joins them."""
    links = [link(name, "left" if name in ("d0", "d1") else "right") for name in FOUR]
    cable = link("left", "right", uplink_gb_per_s, **fields)
    return cluster(FOUR, [*links, cable], ["left", "right"])


@pytest.mark.parametrize(
    ("order", "edges_on_cable"), [(["d0", "d1", "d2", "d3"], 1), (["d0", "d2", "d1", "d3"], 2)]
)
def test_ring_edges_through_one_network_card_share_it(
    order: list[str], edges_on_cable: int
) -> None:
    """In each direction; the order of the ring decides how many use it at once."""
    expected = 6 * (GIGA / 4) * edges_on_cable / 0.1e9
    assert all_reduce_s(two_machines(0.1), order, GIGA) == pytest.approx(expected)


def test_on_a_half_duplex_cable_both_directions_share() -> None:
    expected = 6 * (GIGA / 4) * 2 / 0.1e9
    assert all_reduce_s(two_machines(0.1, duplex="half"), FOUR, GIGA) == pytest.approx(expected)


def test_a_shared_fabric_is_never_the_bottleneck() -> None:
    order = ["d0", "d2", "d1", "d3"]
    expected = 6 * (GIGA / 4) / 0.1e9
    assert all_reduce_s(two_machines(0.1, shared=True), order, GIGA) == pytest.approx(expected)


def test_the_slowest_edge_decides() -> None:
    links = [link(name, "hub", 0.2 if name == "d3" else 1) for name in FOUR]
    found = all_reduce_s(cluster(FOUR, links, ["hub"]), FOUR, GIGA)
    assert found == pytest.approx(6 * (GIGA / 4) / 0.2e9)


@pytest.mark.parametrize(("devices", "bytes_"), [(["d0"], GIGA), (["d0", "d1"], 0), ([], GIGA)])
def test_nothing_to_reduce_takes_no_time(devices: list[str], bytes_: int) -> None:
    assert all_reduce_s(star(2, latency_us=1), devices, bytes_) == 0


def test_without_a_path_it_takes_forever() -> None:
    apart = cluster(["d0", "d1"], [])
    assert all_reduce_s(apart, ["d0", "d1"], GIGA) == math.inf


@given(clusters(min_devices=2), st.integers(0, 10**10))
def test_more_bytes_never_take_less_time(the_cluster: Cluster, bytes_: int) -> None:
    names = the_cluster.device_names
    less, more = (all_reduce_s(the_cluster, names, b) for b in (bytes_, 2 * bytes_))
    assert less <= more
