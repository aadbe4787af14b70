"""Layer graphs of profiles against figures counted by hand and by networkx."""

from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import DAPPLE, PIPEDREAM, imported, node, profile

from planner.cluster.presets import DEVICES
from planner.costs.roofline import layer_times
from planner.errors import PipeplanError
from planner.interop.importing.imported import ImportOptions
from planner.interop.importing.profile_graph import ProfileGraph
from planner.interop.importing.profile_text import parse_profile
from planner.model.layer_graph import LayerGraph

V100 = "V100-16GB"


def graph_of(text: str, **options: object) -> LayerGraph:
    profile_graph = ProfileGraph(parse_profile(text, "file.txt"), ImportOptions(**options))
    return profile_graph.layer_graph("model", 1)


def tensors(graph: LayerGraph) -> dict[str, tuple[int, set[str]]]:
    """Bytes and users of each boundary by name, layers by identifier."""
    return {
        boundary.name.replace(":Op", ""): (
            boundary.bytes,
            {user.partition(":")[0] for user in boundary.users},
        )
        for boundary in graph.record.boundaries
    }


def layer_of(graph: LayerGraph, identifier: str) -> dict:
    return next(graph.nodes[name] for name in graph.layers if name.startswith(f"{identifier}:"))


# --- layers ---------------------------------------------------------------------------------------


def test_every_node_is_a_layer_with_its_time_and_weights() -> None:
    graph = graph_of(PIPEDREAM)
    assert list(graph.layers) == [
        "node1:Input0",
        "node2:Linear",
        "node3:ReLU(inplace)",
        "node4:Add",
        "node5:Linear",
    ]
    times = [layer.measured[V100] for layer in graph.record.layers]
    assert sum(t.forward_s for t in times) == pytest.approx((2 + 1 + 0.5 + 0.125 + 0.25) * 1e-3)
    backward_s = sum(t.input_gradient_s + t.weight_gradient_s for t in times)
    assert backward_s == pytest.approx((3 + 0.25 + 1) * 1e-3)
    assert [(p.bytes, p.elements) for p in graph.record.parameters] == [(880, 220), (84, 21)]
    assert sum(row.stash_bytes for row in graph.record.layers) == 400 + 3 * 800 + 40
    assert graph.record.precision == "float32"


def test_long_names_lose_their_arguments_and_stay_apart() -> None:
    long = "Linear(in_features=1024, out_features=36560, bias=True)"
    names = list(graph_of(profile([node("a", long), node("b", long), node("c", "  x\t\x1b[1m ")])))
    assert names == ["a:Linear", "b:Linear", "c:x ?[1m"]
    assert all(len(name) < 150 for name in graph_of(node("a" * 100, "x" * 10**5)).layers)


@pytest.mark.parametrize("device_type", [V100, "H200"])
@pytest.mark.parametrize("other", ["A10", "CPU-core"])
def test_other_devices_scale_by_their_peak(device_type: str, other: str) -> None:
    graph = graph_of(PIPEDREAM, device_type=device_type)
    here, there = DEVICES[device_type], DEVICES[other]
    peak = [kind.peak_tflop_per_s["float32"] * kind.efficiency for kind in (here, there)]
    for layer in graph.record.layers:
        measured = layer.measured[device_type]
        unmeasured = layer.model_copy(update={"measured": {}})
        roofline = layer_times(unmeasured, device_type, here, "float32")
        assert roofline.forward_s == pytest.approx(measured.forward_s, rel=1e-6)
        assert roofline.input_gradient_s == pytest.approx(measured.input_gradient_s, rel=1e-6)
        assert roofline.weight_gradient_s == pytest.approx(measured.weight_gradient_s, rel=1e-6)
        scaled = layer_times(layer, other, there, "float32")
        assert scaled.forward_s == pytest.approx(
            measured.forward_s * peak[0] / peak[1], rel=1e-6, abs=1e-12
        )


@pytest.mark.parametrize("device_type", DEVICES)
def test_the_longest_times_and_largest_sizes_are_representable(device_type: str) -> None:
    row = node("a", forward=1e8, backward=1e8, activation=1e14, parameters=1e14)
    (layer,) = graph_of(row, device_type=device_type).record.layers
    assert layer.measured[device_type].forward_s == pytest.approx(1e5)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.text("[];=-.0123456789 \t\nnodeNaN", max_size=8))),
    st.sampled_from([PIPEDREAM, DAPPLE]),
)
def test_any_edit_of_a_file_is_read_or_refused(edits: list[tuple[float, str]], text: str) -> None:
    for place, put in edits:
        at = round(place * len(text))
        text = text[:at] + put + text[at + len(put) // 2 :]
    try:
        graph, problems = graph_of(text), ()
    except PipeplanError as error:
        graph, problems = None, error.problems
    assert all(problem.startswith("file.txt: ") for problem in problems)
    if graph is not None:
        assert LayerGraph.parse(graph.record.model_dump(mode="json")).record == graph.record


# --- backward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identifier", "input_ms", "weight_ms"),
    [
        ("a", 0, 4),  # weights, and nothing before it that learns
        ("b", 2, 2),  # weights and a gradient to hand back
        ("c", 4, 0),  # no weights
        ("d", 4, 0),  # no weights, nothing before it: whatever it does is no weight gradient
        ("e", 2, 2),  # what is before it takes time in the backward
    ],
)
def test_the_backward_is_split_by_what_a_layer_has_to_do(
    identifier: str, input_ms: float, weight_ms: float
) -> None:
    text = profile(
        [
            node("x", backward=0),
            node("a", backward=4, parameters=4),
            node("b", backward=4, parameters=4),
            node("c", backward=4),
            node("d", backward=4),
            node("e", backward=4, parameters=4),
        ],
        "x>a a>b b>c d>e",
    )
    times = layer_of(graph_of(text), identifier)["measured"][V100]
    assert times["input_gradient_s"] == pytest.approx(input_ms * 1e-3)
    assert times["weight_gradient_s"] == pytest.approx(weight_ms * 1e-3)


def test_tensors_carry_a_gradient_behind_the_first_thing_that_learns() -> None:
    graph = graph_of(DAPPLE)
    carries = {b.producer.partition(":")[2]: b.requires_grad for b in graph.record.boundaries}
    assert carries == {
        **{"input_ids": False, "attention_mask": False},
        **{"embeddings": True, "layer_0": True},
    }


def test_an_odd_number_of_bytes_is_no_trouble() -> None:
    graph = graph_of(profile([node("a", activation=7, parameters=6), node("b")], "a>b"))
    assert [(p.bytes, p.elements) for p in graph.record.parameters] == [(6, 2)]
    assert [(b.bytes, b.shape) for b in graph.record.boundaries] == [(7, (2,))]


# --- boundaries -----------------------------------------------------------------------------------


def test_one_tensor_goes_to_all_users_of_a_node() -> None:
    text = profile(map(node, "abcd"), "a>b a>c a>d b>d a>d")
    assert tensors(graph_of(text)) == {"a": (100, {"b", "c", "d"}), "b": (100, {"d"})}


def test_items_take_their_element_of_a_list_and_others_all_of_it() -> None:
    text = profile(
        [
            node("lstm", activation="[50; 7; 3; 1]"),
            node("out", "__getitem__(0)", activation=50),
            node("state", "__getitem__(1)", activation=7),
            node("other"),
            node("end"),
        ],
        "lstm>out lstm>state lstm>other out>end state>end other>end",
    )
    made = {name: row for name, row in tensors(graph_of(text)).items() if "lstm" in name}
    assert made == {
        "lstm[0]": (50, {"out", "other"}),
        "lstm[1]": (7, {"state", "other"}),
        "lstm[2, 3]": (4, {"other"}),
    }


def test_a_list_of_a_thousand_elements_has_a_short_name() -> None:
    sizes = "[" + "; ".join(["1"] * 1000) + "]"
    items = [node("b", "__getitem__(7)"), node("c")]
    text = profile([node("a", activation=sizes), *items], "a>b a>c")
    assert tensors(graph_of(text)) == {
        "a[0, 1, 2, …, 999]": (999, {"c"}),
        "a[7]": (1, {"b", "c"}),
    }


def test_elements_that_nobody_reads_are_kept_and_not_sent() -> None:
    text = profile([node("lstm", activation="[50; 7]"), node("out", "__getitem__(1)")], "lstm>out")
    graph = graph_of(text)
    assert tensors(graph) == {"lstm[1]": (7, {"out"})}
    assert layer_of(graph, "lstm")["stash_bytes"] == 57


@pytest.mark.parametrize(("sizes", "bytes_"), [("[50; 7]", 57), ("50", 50), ("[]", 0)])
def test_an_item_without_a_size_takes_all(sizes: str, bytes_: int) -> None:
    text = profile([node("a", activation=sizes), node("b", "__getitem__(5)")], "a>b")
    assert tensors(graph_of(text)) == {"a": (bytes_, {"b"})}


def test_items_are_views_of_what_their_producer_keeps() -> None:
    items = [node(name, "__getitem__(0)", activation=50) for name in ("b", "c")]
    text = profile(
        [node("a", activation="[50; 7]"), *items, node("d", activation=9)], "a>b b>c c>d"
    )
    graph = graph_of(text)
    stashes = {name.partition(":")[0]: row.stash_bytes for name, row in graph.layers.items()}
    assert stashes == {"a": 57, "b": 0, "c": 0, "d": 9}
    assert {b.saved_by for b in graph.record.boundaries} == {"a:Op"}


def test_an_item_larger_than_its_producer_is_no_view() -> None:
    text = profile([node("a", activation=0), node("b", "__getitem__(0)", activation=50)], "a>b")
    assert layer_of(graph_of(text), "b")["stash_bytes"] == 50


@pytest.mark.parametrize(
    ("text", "edges"),
    [
        (node("a"), 0),
        (profile(map(node, "abc")), 0),
        (profile(map(node, "abcd"), "a>c b>c"), 2),
        (profile(map(node, "abcd"), "a>b a>c d>c"), 3),
    ],
)
def test_any_number_of_beginnings_and_ends_is_fine(text: str, edges: int) -> None:
    assert graph_of(text).number_of_edges() == edges


@st.composite
def profiles(draw: st.DrawFn) -> str:
    """Profiles without cycles, nodes in any order."""
    names = [f"node{index}" for index in range(draw(st.integers(1, 9)))]
    rows = [
        node(
            name,
            forward=draw(st.integers(0, 9)),
            backward=draw(st.integers(0, 2)),
            activation=draw(st.integers(0, 9)),
            parameters=draw(st.sampled_from([0, 0, 4])),
        )
        for name in names
    ]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=15)) if pairs else []
    return profile(draw(st.permutations(rows)), " ".join(f"{a}>{b}" for a, b in edges))


@given(profiles())
def test_any_graph_keeps_its_edges_gradients_and_cuts(text: str) -> None:
    read = parse_profile(text, "file.txt")
    oracle = nx.DiGraph(list(read.edges))
    oracle.add_nodes_from(read.nodes)
    graph = graph_of(text)
    edges = {(a.partition(":")[0], b.partition(":")[0]) for a, b in graph.edges}
    assert edges == set(oracle.edges)
    learns = {name for name, row in read.nodes.items() if row.parameter_bytes or row.backward_ms}
    for boundary in graph.record.boundaries:
        producer = boundary.producer.partition(":")[0]
        reached = nx.ancestors(oracle, producer) | {producer}
        assert boundary.requires_grad == bool(reached & learns)
    order = [name.partition(":")[0] for name in graph.layers]
    for cut in range(1, len(order)):
        before = set(order[:cut])
        crossing = {edge[0] for edge in nx.edge_boundary(oracle, before)}
        assert sum(b.bytes for b in graph.crossing(list(graph.layers)[:cut])) == sum(
            sum(read.nodes[name].activation_bytes) for name in crossing
        )


# --- what is assumed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (profile([node("a", activation="[1; 2]"), node("b")], "a>b"), "1 edge from nodes with"),
        (
            profile([node("a", activation="[1; 2]"), node("b", "__getitem__(2)")], "a>b"),
            "1 __getitem__ of an element that has no size",
        ),
        (node("a", parameters=4, backward=0), "1 node with parameters but no backward time"),
        (profile(map(node, "abc"), "a>b"), "1 node without edges"),
        (node("a", forward=0, backward=0), "every time is 0"),
        (PIPEDREAM, "Input nodes take 2 ms, 25% of all time"),
        (node("a", activation=3000), "every activation size is a multiple of 1000"),
        (PIPEDREAM, "times are those of V100-16GB for the whole batch"),
        (PIPEDREAM, "backward is split half and half"),
    ],
)
def test_what_is_assumed_is_told(text: str, expected: str, tmp_path: Path) -> None:
    assert any(expected in note for note in imported(tmp_path, text).notes)


def test_a_plain_profile_is_told_its_rules_only(tmp_path: Path) -> None:
    text = profile([node("a", parameters=4), node("b")], "a>b")
    notes = imported(tmp_path, text, samples_per_microbatch=3).notes
    assert len(notes) == 3
    assert "3 samples per microbatch, as given" in notes


def test_inputs_take_no_time_on_demand(tmp_path: Path) -> None:
    read = imported(tmp_path, PIPEDREAM, free_inputs=True)
    times = {layer.name: layer.measured[V100].forward_s for layer in read.graph.record.layers}
    assert times["node1:Input0"] == 0
    assert sum(times.values()) == pytest.approx((1 + 0.5 + 0.125 + 0.25) * 1e-3)
    assert any("25% of all time, probably to load data: counted as 0" in n for n in read.notes)
