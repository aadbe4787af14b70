"""The picture of a cluster: everything in it once, nothing on top of anything else."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from builders import ROOT, cluster, link
from html_pages import Node, page_of
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster.cluster import Cluster
from planner.report.html.topology_layout import CELL_HEIGHT, CELL_WIDTH, layout


def devices(count: int) -> list[str]:
    return [f"d{index}" for index in range(count)]


def leaf_spine() -> Cluster:
    """Two spines above four leaves of four devices each."""
    names = devices(16)
    links = [link(name, f"leaf{index // 4}", 100) for index, name in enumerate(names)]
    links += [link(f"leaf{a}", f"spine{b}", 25) for a in range(4) for b in range(2)]
    return cluster(names, links, [*(f"leaf{i}" for i in range(4)), "spine0", "spine1"])


def ring(count: int = 8) -> Cluster:
    names = devices(count)
    return cluster(names, [link(names[i], names[(i + 1) % count]) for i in range(count)])


CLUSTERS = {
    "irregular": lambda: Cluster.load(ROOT / "examples/clusters/irregular.toml"),
    "two_nodes": lambda: Cluster.load(ROOT / "examples/clusters/two_nodes.toml"),
    "leaf_spine": leaf_spine,
    "ring": ring,
    "mesh": lambda: cluster(devices(6), [link(a, b) for a, b in combinations(devices(6), 2)]),
    "apart": lambda: cluster(devices(4), [link("d0", "d1"), link("d0", "d1", 2)]),
    "long_chain": lambda: cluster(devices(1500), [link(f"d{i}", f"d{i + 1}") for i in range(1499)]),
    "large_ring": lambda: ring(600),
}


def boxes(found) -> list[tuple[float, float, float, float]]:
    return [(c.x, c.y, c.x + c.width, c.y + c.height) for c in found.cards.values()]


def overlap(first, second) -> bool:
    return (
        first[0] < second[2]
        and second[0] < first[2]
        and first[1] < second[3]
        and second[1] < first[3]
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_everything_has_its_place_and_nothing_overlaps(name):
    the_cluster = CLUSTERS[name]()
    found = layout(the_cluster)
    placed = [device for card in found.cards.values() for device in card.devices]
    assert sorted(placed) == sorted(the_cluster.device_names)
    assert set(the_cluster.switches) <= set(found.cards)
    assert all(box[0] >= 0 and box[1] >= 0 for box in boxes(found))
    if len(found.cards) < 200:
        assert not any(overlap(a, b) for a, b in combinations(boxes(found), 2))
    for card in found.cards.values():
        cells = [card.cell(place) for place in range(len(card.devices))]
        inside = [(x, y, x + CELL_WIDTH, y + CELL_HEIGHT) for x, y in cells]
        assert not any(overlap(a, b) for a, b in combinations(inside, 2))
        for cell in inside:
            assert card.x <= cell[0]
            assert card.y <= cell[1]
            assert cell[2] <= card.x + card.width
            assert cell[3] <= card.y + card.height


@given(st.integers(1, 7), st.integers(0, 4), st.data())
def test_no_wiring_makes_cards_overlap(count, switches, data):
    names = [*devices(count), *(f"s{index}" for index in range(switches))]
    pairs = list(combinations(names, 2))
    chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=14)) if pairs else []
    the_cluster = cluster(devices(count), [link(a, b) for a, b in chosen], names[count:])
    found = layout(the_cluster)
    assert not any(overlap(a, b) for a, b in combinations(boxes(found), 2))
    assert {d for card in found.cards.values() for d in card.devices} == set(devices(count))


def test_columns_put_what_is_nearer_the_centre_to_the_left():
    cards = layout(leaf_spine()).cards
    spines, leaves = ({cards[f"{kind}{i}"].x for i in range(2)} for kind in ("spine", "leaf"))
    assert len(spines) == len(leaves) == 1
    assert max(spines) < min(leaves)
    assert layout(CLUSTERS["two_nodes"]()).is_forest
    assert not layout(leaf_spine()).is_forest


def test_the_picture_is_the_same_in_every_process():
    script = (
        "import sys; sys.path.insert(0, 'tests/report'); sys.path.insert(0, 'tests');"
        "from test_html_topology import CLUSTERS, layout;"
        "print([layout(CLUSTERS[name]()) for name in ('irregular', 'leaf_spine', 'ring', 'apart')])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(ROOT))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def picture_of(timeline) -> Node:
    (svg,) = page_of(timeline).by_id("topology").all("svg")
    return svg


def test_each_device_is_drawn_with_its_stages_and_described(timeline):
    svg = picture_of(timeline)
    names = [node.text for node in svg.all("text") if node.attributes["class"] == "device-name"]
    stages = [node.text for node in svg.all("text") if node.attributes["class"] == "device-stage"]
    cluster_of = timeline.pipeline.problem.cluster
    assert sorted(names) == sorted(cluster_of.device_names)
    for name, told in zip(names, stages, strict=True):
        held = timeline.pipeline.stages_on.get(name, ())
        assert told == ("s" + ",".join(map(str, held)) if held else "idle")
    assert svg.attributes["role"] == "img"
    for index, stage in enumerate(timeline.pipeline.stages):
        assert f"stage {index}" in svg.all("desc")[0].text
        assert stage.spec.devices[0] in svg.all("desc")[0].text


def test_links_are_in_the_picture_and_in_the_table(timeline):
    section = page_of(timeline).by_id("topology")
    count = len(timeline.pipeline.problem.cluster.links)
    assert len(section.all("table")[0].all("tbody")[0].all("tr")) == count
