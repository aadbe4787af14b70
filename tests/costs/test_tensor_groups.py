"""Clusters whose devices are tensor-parallel groups, by hand and against messages sent at once."""

import re
from collections.abc import Iterable
from itertools import combinations

import pytest
from builders import GIGA, cluster, device_type, graph, layer, link, star
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster.cluster import Cluster
from planner.cluster.group_packing import packed
from planner.cluster.tensor_groups import TensorGroup, grouped
from planner.costs.roofline import layer_times
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.figures import Collective
from planner.verification.layer_costs import ProblemCosts


def groups(*devices: str) -> list[TensorGroup]:
    """Groups ``g0``, ``g1``, … of devices named in one text each."""
    return [TensorGroup(name=f"g{i}", devices=tuple(x.split())) for i, x in enumerate(devices)]


def two_nodes(uplink_gb_per_s: float = 1, gb_per_s: float = 10) -> Cluster:
    """Two nodes of four devices."""
    names = [f"{node}{index}" for node in "ab" for index in range(4)]
    links = [link(name, name[0], gb_per_s) for name in names]
    return cluster(
        names, [*links, *(link(n, "net", uplink_gb_per_s) for n in "ab")], ["a", "b", "net"]
    )


def test_a_group_has_the_figures_of_all_its_devices() -> None:
    found = grouped(star(4), groups("d0 d1", "d2 d3"))
    assert found.device_names == ("g0", "g1")
    assert [device.type for device in found.devices] == ["unitx2", "unitx2"]
    kind = found.device_type("g0")
    assert (kind.memory_gib, kind.peak_tflop_per_s) == (2048, {"float32": 2})
    assert kind.memory_bandwidth_gb_per_s == 2000
    # A message of 1 GB goes in two halves, each over a link of 1 GB/s.
    route = found.route("g0", "g1")
    assert route is not None
    assert route.seconds(GIGA) == 0.5


def test_collectives_by_hand() -> None:
    kind = grouped(star(4, latency_us=1), groups("d0 d1 d2 d3")).device_type("g0")
    assert kind.group is not None
    # Ring: 6 steps of a quarter; each step crosses two links of 1 us.
    assert kind.group.seconds("all_reduce", GIGA) == pytest.approx(1.5 + 6 * 2e-6)
    assert kind.group.seconds("all_gather", GIGA) == pytest.approx(0.75 + 3 * 2e-6)
    assert kind.group.seconds("reduce_scatter", GIGA) == pytest.approx(0.75 + 3 * 2e-6)
    # Each device sends three quarters of what it has, over its one link, in one step.
    assert kind.group.seconds("all_to_all", GIGA) == pytest.approx(0.75 + 2e-6)
    # A small tensor takes the tree: 4 steps instead of 6, two messages at a time on a link.
    assert kind.group.seconds("all_reduce", 1) == pytest.approx(4 * 2e-6 + 8e-9)
    assert kind.group.seconds("all_reduce", 0) == 0


def test_groups_that_share_a_link_share_its_bandwidth() -> None:
    apart = grouped(two_nodes(), groups("a0 a1", "b0 b1")).device_type("g0")
    across = grouped(two_nodes(), groups("a0 b0", "a1 b1")).device_type("g0")
    assert apart.group is not None
    assert across.group is not None
    # Two steps of half a GB: at 10 GB/s, or over half of an uplink of 1 GB/s.
    assert apart.group.seconds("all_reduce", GIGA) == pytest.approx(0.1)
    assert across.group.seconds("all_reduce", GIGA) == pytest.approx(2)


@given(
    st.integers(1, 2).map(lambda power: 2**power),
    st.floats(0.1, 100),
    st.floats(0.1, 100),
    st.integers(1, 10**9),
)
def test_a_message_takes_as_long_as_its_parts_sent_at_once(
    size: int, uplink: float, gb_per_s: float, bytes_: int
) -> None:
    one = two_nodes(uplink, gb_per_s)
    first, second = (" ".join(f"{node}{i}" for i in range(size)) for node in "ab")
    whole = grouped(one, groups(first, second)).route("g0", "g1")
    parts = one.at_once(tuple(zip(first.split(), second.split(), strict=True)))
    assert whole is not None
    assert parts is not None
    seconds = max(latency_s + bytes_ / size / (width * 1e9) for latency_s, width in parts)
    assert whole.seconds(bytes_) == pytest.approx(seconds)


def test_a_layer_waits_for_its_collectives_in_each_phase() -> None:
    """2 TFLOP/s: half the time; a GB all-reduced by two devices takes a second."""
    row = layer("a", 2, 4)
    exchanged = [("forward", "all_reduce", 2), ("input_gradient", "all_gather", 4)]
    row["collectives"] = [
        {"phase": p, "kind": c, "tensor": "x", "bytes": n * GIGA} for p, c, n in exchanged
    ]
    the_graph = graph([row])
    found = grouped(star(2), groups("d0 d1"))
    a = the_graph.layers["a"]
    times = layer_times(a, "unitx2", found.device_types["unitx2"], "float32")
    assert tuple(times) == pytest.approx((1 + 2, 1 + 2, 1, 4))
    again = layer_times(a, "unitx2", found.device_types["unitx2"], "float32", recompute=True)
    assert again.backward_s == pytest.approx(7)
    forward, inputs, weights, whole = ProblemCosts(found, Job()).seconds(a, "unitx2")
    assert (forward, inputs, weights, whole) == pytest.approx(tuple(times))


def test_figures_of_an_unknown_phase_are_refused() -> None:
    with pytest.raises(ValueError, match="phase"):
        Collective.model_validate(
            {"phase": "back", "kind": "all_reduce", "tensor": "x", "bytes": 1}
        )


def test_groups_on_one_host_slow_each_other_as_their_devices_do() -> None:
    data = star(4).model_dump()
    data["hosts"] = [{"devices": ["d0", "d1", "d2", "d3"], "slowdown": [1, 1.5, 2, 3]}]
    found = grouped(Cluster.from_data(data), groups("d0 d1", "d2 d3"))
    # Two devices are slowed by 1.5 as soon as they run a layer together, four by 3.
    times = layer_times(graph([layer("a", 3)]).layers["a"], "x", found.device_type("g0"), "float32")
    assert times.forward_s == pytest.approx(3 / 2 * 1.5)
    assert [(host.devices, host.slowdown) for host in found.hosts] == [(("g0", "g1"), (1, 2))]


def test_groups_of_other_links_have_types_of_their_own() -> None:
    names = ["a0", "a1", "b0", "b1"]
    links = [link("a0", "hub", 2), link("a1", "hub", 2), link("b0", "hub"), link("b1", "hub")]
    found = grouped(cluster(names, links, ["hub"]), groups("a0 a1", "b0 b1"))
    assert [device.type for device in found.devices] == ["unitx2", "unitx2-2"]


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (("d0 d1", "d1 d2"), r"groups\[0\].devices: 'd1' is named twice"),
        (("d0 d9",), r"groups\[0\].devices: the cluster has no device 'd9'"),
        (("d0 e0",), r"groups\[0\].devices: 'g0' has devices of types other, unit"),
        (("d0 f0",), r"groups\[0\].devices: no path leads from 'd0' to 'f0'"),
    ],
)
def test_groups_that_cannot_be(of: tuple[str, ...], told: str) -> None:
    names = {f"d{i}": "unit" for i in range(4)} | {"e0": "other", "f0": "unit"}
    links = [link(name, "hub") for name in names if name != "f0"]
    one = cluster(names, links, ["hub"], {"unit": device_type(), "other": device_type()})
    with pytest.raises(PipeplanError) as refused:
        grouped(one, groups(*of))
    assert re.search(told, str(refused.value))


# --- which devices -------------------------------------------------------------------------------


def test_groups_lie_within_nodes_and_are_named_by_their_ends() -> None:
    names = [(group.name, group.devices) for group in packed(two_nodes(), 2)]
    assert names == [
        ("a0-1", ("a0", "a1")),
        ("a2-3", ("a2", "a3")),
        ("b0-1", ("b0", "b1")),
        ("b2-3", ("b2", "b3")),
    ]
    assert [group.devices for group in packed(two_nodes(), 3)] == [
        ("a0", "a1", "a2"),
        ("b0", "b1", "b2"),
    ]


def test_pairs_of_wide_links_are_kept_together() -> None:
    names = [f"d{i}" for i in range(4)]
    wide = [link("d0", "d3", 10), link("d1", "d2", 10)]
    one = cluster(names, [*wide, *(link(name, "hub") for name in names)], ["hub"])
    assert [group.devices for group in packed(one, 2)] == [("d0", "d3"), ("d1", "d2")]


def test_devices_of_other_types_are_in_no_group_together() -> None:
    types = {"fast": device_type(), "slow": device_type()}
    kinds = {"d0": "fast", "d1": "slow", "d2": "fast", "d3": "slow"}
    one = cluster(kinds, [link(name, "hub") for name in kinds], ["hub"], types)
    assert [group.devices for group in packed(one, 2)] == [("d0", "d2"), ("d1", "d3")]
    with pytest.raises(PipeplanError, match="no 3 devices of one type"):
        packed(one, 3)


@given(st.lists(st.floats(0.1, 10), min_size=15, max_size=15), st.sampled_from([2, 3]))
def test_groups_are_disjoint_and_the_widest_pair_is_one(widths: list[float], size: int) -> None:
    names = [f"d{i}" for i in range(6)]
    pairs = [*combinations(names, 2)]
    one = cluster(names, [link(*pair, w) for pair, w in zip(pairs, widths, strict=True)])

    def narrowest(devices: Iterable[str]) -> float:
        routes = [one.route(*pair) for pair in combinations(sorted(devices), 2)]
        return min(route.bandwidth_gb_per_s for route in routes if route is not None)

    found = packed(one, size)
    assert len(found) == 6 // size
    assert len({name for group in found for name in group.devices}) == len(found) * size
    if size == 2:
        best = max(narrowest(pair) for pair in pairs)
        assert max(narrowest(group.devices) for group in found) == pytest.approx(best)
