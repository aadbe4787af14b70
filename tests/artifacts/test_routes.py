"""Routes against every simple path of small clusters."""

from collections.abc import Iterator

import networkx as nx
import pytest
from builders import cluster, link
from hypothesis import given
from strategies import clusters

from planner.cluster.cluster import Cluster, Link


def paths(the_cluster: Cluster, source: str, target: str) -> Iterator[list[Link]]:
    """Every simple path through switches, by every choice of parallel links."""
    wires = nx.MultiGraph()
    wires.add_nodes_from(the_cluster.device_names)
    wires.add_edges_from((*row.between, {"link": row}) for row in the_cluster.links)
    others = set(the_cluster.device_names) - {source, target}
    through = wires.subgraph(set(wires) - others)
    for path in nx.all_simple_edge_paths(through, source, target):
        yield [through.edges[edge]["link"] for edge in path]


@given(clusters(min_devices=2, connected=False))
def test_a_route_is_the_widest_path_and_then_the_quickest(the_cluster: Cluster) -> None:
    for source in the_cluster.device_names:
        for target in the_cluster.device_names:
            if source == target:
                continue
            found = the_cluster.route(source, target)
            rows = [
                (-min(row.bandwidth_gb_per_s for row in path), sum(row.latency_us for row in path))
                for path in paths(the_cluster, source, target)
            ]
            if not rows:
                assert found is None
                continue
            width, latency_us = min(rows)
            assert found is not None
            assert found.bandwidth_gb_per_s == -width
            assert found.latency_s == pytest.approx(latency_us * 1e-6)


@given(clusters(min_devices=2, connected=False))
def test_a_route_occupies_the_links_of_a_path(the_cluster: Cluster) -> None:
    """Its links, shared ones left out, are those of one simple path, in the right direction."""
    for source in the_cluster.device_names:
        for target in set(the_cluster.device_names) - {source}:
            found = the_cluster.route(source, target)
            if found is None:
                continue
            known = []
            for path in paths(the_cluster, source, target):
                here, resources = source, []
                for row in path:
                    forth = row.between[0] == here
                    here = row.between[1] if forth else row.between[0]
                    index = next(i for i, one in enumerate(the_cluster.links) if one is row)
                    direction = 0 if row.duplex == "half" else 1 if forth else -1
                    resources += [] if row.shared else [(index, direction)]
                known.append(tuple(resources))
            assert found.links in known


@given(clusters(min_devices=2, connected=False))
def test_routes_are_the_same_in_both_directions(the_cluster: Cluster) -> None:
    for source in the_cluster.device_names:
        for target in the_cluster.device_names:
            there, back = the_cluster.route(source, target), the_cluster.route(target, source)
            assert (there is None) == (back is None)
            if there is not None and back is not None:
                assert there.bandwidth_gb_per_s == back.bandwidth_gb_per_s
                assert there.latency_s == pytest.approx(back.latency_s)


def test_devices_do_not_forward() -> None:
    chain = cluster(["a", "b", "c"], [link("a", "b"), link("b", "c")])
    assert chain.route("a", "c") is None
    detour = cluster(["a", "b", "c"], [link("a", "b", 9), link("b", "c", 9), link("a", "c", 1)])
    assert detour.route("a", "c").bandwidth_gb_per_s == 1


def test_a_narrower_link_elsewhere_makes_the_quicker_way_the_better_one() -> None:
    """Both ways from a to the second switch are wider than the last link."""
    wires = cluster(
        ["a", "b"],
        [
            link("a", "s1", 10, latency_us=100),
            link("a", "s2", 5, latency_us=1),
            link("s1", "s2", 10, latency_us=100),
            link("s2", "b", 1, latency_us=1),
        ],
        ["s1", "s2"],
    )
    assert wires.route("a", "b").latency_s == pytest.approx(2e-6)


def test_of_equally_wide_parallel_links_the_quicker_one_is_used() -> None:
    wires = cluster(["a", "b"], [link("a", "b", latency_us=9), link("a", "b", latency_us=2)])
    assert wires.route("a", "b").latency_s == pytest.approx(2e-6)
    assert wires.route("a", "b").links == ((1, 1),)


def test_a_device_reaches_itself_at_once() -> None:
    assert cluster(["a"], []).route("a", "a").seconds(10**12) == 0


def test_seconds_are_latency_and_bytes_over_bandwidth() -> None:
    wires = cluster(["a", "b"], [link("a", "b", 4, latency_us=500_000)])
    assert wires.route("a", "b").seconds(8 * 10**9) == pytest.approx(2.5)


def test_link_resources_have_readable_names() -> None:
    wires = cluster(["a", "b"], [link("a", "s"), link("s", "b", duplex="half")], switches=["s"])
    there, back = wires.route("a", "b").links, wires.route("b", "a").links
    assert [wires.link_name(resource) for resource in there] == ["a>s", "s-b"]
    assert [wires.link_name(resource) for resource in back] == ["s-b", "s>a"]


def test_a_changed_copy_of_a_cluster_works_its_routes_out_anew() -> None:
    machines = cluster(["a", "b"], [link("a", "b", gb_per_s=1.0)])
    assert machines.route("a", "b").bandwidth_gb_per_s == 1.0
    assert machines.link_table.s_per_byte[0, 1] == 1e-9
    wider = cluster(["a", "b"], [link("a", "b", gb_per_s=4.0)]).links
    changed = machines.model_copy(update={"links": wider})
    assert changed.route("a", "b").bandwidth_gb_per_s == 4.0
    assert changed.link_table.s_per_byte[0, 1] == 0.25e-9
