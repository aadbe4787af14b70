"""Several boxes as one cluster: names, the cards that join them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import cluster, device_type, link, star

from planner.cluster.cluster import Cluster
from planner.cluster.hardware import LinkType
from planner.cluster.merge import (
    NETWORK,
    MergedBox,
    card_of_device,
    cards_of,
    detours,
    merged,
    network_link,
    renamed,
)
from planner.errors import PipeplanError

TEN = LinkType(bandwidth_gb_per_s=10, latency_us=7)


def machine(**fields: object) -> Cluster:
    """Two sockets, each with two GPUs on a switch; a card beside each switch, one on top."""
    inner = [link(f"gpu{n}", f"pcie{n // 2}", 30, latency_us=2) for n in range(4)]
    inner += [link(f"nic{n}", f"pcie{n}", 30, latency_us=1) for n in range(2)]
    inner += [link(f"pcie{n}", "top", 15, latency_us=1) for n in range(2)]
    return cluster(
        [f"gpu{n}" for n in range(4)],
        [*inner, link("nic2", "top", 30, latency_us=1)],
        ["pcie0", "pcie1", "top", "nic0", "nic1", "nic2"],
        **fields,
    )


def box(name: str, one: Cluster | None = None, cards: tuple[str, ...] = ()) -> MergedBox:
    own = renamed(one or machine(), name)
    return MergedBox(own, cards_of(own, cards, name), f"{name}.toml")


def test_boxes_are_joined_by_the_cards_nearest_to_each_gpu() -> None:
    boxes = [box("a"), box("b")]
    made = merged(boxes, TEN, "two")
    assert made.device_names == tuple(f"{host}/gpu{n}" for host in "ab" for n in range(4))
    assert card_of_device(made, boxes) == {
        f"{host}/gpu{n}": f"{host}/nic{n // 2}" for host in "ab" for n in range(4)
    }
    route = made.route("a/gpu0", "b/gpu3")
    assert route is not None
    # gpu0-pcie0-nic0-network and back down: 2 + 1 + 7 microseconds each.
    assert (route.bandwidth_gb_per_s, route.latency_s) == (10, pytest.approx(20e-6))
    inside = made.route("b/gpu0", "b/gpu3")
    assert inside is not None
    assert inside.bandwidth_gb_per_s == 15
    # Two messages out of one switch share its card, those of two switches do not.
    pairs = (("a/gpu0", "b/gpu0"), ("a/gpu1", "b/gpu1"), ("a/gpu2", "b/gpu2"))
    assert [width for _, width in made.at_once(pairs) or ()] == [5, 10]


def test_a_card_may_be_far_and_a_device_its_own() -> None:
    boxes = [box("a", cards=("nic2",)), box("b", star(2), cards=("d?",))]
    made = merged(boxes, TEN, "two")
    assert set(card_of_device(made, boxes).values()) == {"a/nic2", "b/d0", "b/d1"}
    route = made.route("a/gpu0", "b/d1")
    assert route is not None
    assert (route.bandwidth_gb_per_s, route.latency_s) == (10, pytest.approx(18e-6))


def test_pairs_that_the_network_joins_better_than_their_box_are_found() -> None:
    boxes = [box("a"), box("b", star(2, 100), cards=("hub",))]
    wide = merged(boxes, LinkType(bandwidth_gb_per_s=25), "two")
    assert [(a, b, *widths) for a, b, *widths in detours(wide, boxes)] == [
        ("a/gpu0", "a/gpu2", 15, 25)
    ]
    assert not list(detours(merged(boxes, TEN, "two"), boxes))


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_merged_cluster_is_the_same_when_read_again(tmp_path: Path, suffix: str) -> None:
    data = machine().model_dump() | {"currency": "EUR"}
    data["hosts"] = [{"devices": ["gpu0", "gpu1"], "slowdown": [1, 2]}]
    made = merged([box("a", Cluster.parse(data, "a")), box("b")], TEN, "two")
    assert made.currency == "EUR"
    assert [host.devices for host in made.hosts] == [("a/gpu0", "a/gpu1")]
    path = tmp_path / f"two.{suffix}"
    made.save(path)
    assert Cluster.load(path) == made


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(PipeplanError, match=r"b\.toml: the name 'a/gpu0' is also in a\.toml; give"):
        merged([box("a"), MergedBox(box("a").cluster, (), "b.toml")], TEN, "two")
    faster = machine(types={"unit": device_type(memory_gib=3)})
    with pytest.raises(PipeplanError, match=r"b\.toml: device type 'unit' has other figures"):
        merged([box("a"), box("b", faster)], TEN, "two")
    named = cluster(["a"], [link("a", NETWORK)], [NETWORK])
    with pytest.raises(PipeplanError, match="the name 'network' is also in the switch that joins"):
        merged([MergedBox(named, ("a",), "n.toml"), box("b")], TEN, "two")
    prices = [
        MergedBox(one.cluster.model_copy(update={"currency": money}), one.cards, one.title)
        for one, money in ((box("a"), "EUR"), (box("b"), "USD"))
    ]
    with pytest.raises(PipeplanError, match="currency: the files have EUR and USD"):
        merged(prices, TEN, "two")
    with pytest.raises(PipeplanError, match=r"s\.toml: has no network cards .* one of hub, d0, d1"):
        cards_of(star(2), (), "s.toml")
    with pytest.raises(PipeplanError, match="no card, switch or device is called mlx"):
        cards_of(machine(), ("mlx",), "m.toml")


@pytest.mark.parametrize(
    ("text", "gb_per_s", "latency_us"),
    [("100gbit", 12.5, 20), ("12.5GB/s", 12.5, 20), ("InfiniBand-NDR", 50, 5)],
)
def test_the_network_is_a_preset_or_a_bandwidth(
    text: str, gb_per_s: float, latency_us: float
) -> None:
    kind = network_link(text)
    assert (kind.bandwidth_gb_per_s, kind.latency_us) == (gb_per_s, latency_us)
    assert network_link(text, 3).latency_us == 3


@pytest.mark.parametrize("text", ["100", "100 Gb/s", "fast", "-1gbit", ""])
def test_another_network_is_refused(text: str) -> None:
    with pytest.raises(PipeplanError, match=r"--network .*: expected a preset of a link"):
        network_link(text)
    with pytest.raises(PipeplanError, match="--network: bandwidth_gb_per_s"):
        network_link("0gbit")
