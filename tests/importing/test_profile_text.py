"""The two dialects, what is irregular in them, and what is refused."""

import pytest
from profiles import DAPPLE, PIPEDREAM, node, profile

from planner.errors import PipeplanError
from planner.interop.importing.profile_text import Profile, ProfileNode, parse_profile


def refusal(text: str) -> str:
    with pytest.raises(PipeplanError) as caught:
        parse_profile(text, "file.txt")
    return str(caught.value)


def test_a_profile_of_pipedream_is_read_whole() -> None:
    read = parse_profile(PIPEDREAM, "graph.txt")
    assert list(read.nodes) == ["node3", "node1", "node2", "node4", "node5"]
    name = "Linear(in_features=10, out_features=20, bias=True)"
    assert read.nodes["node2"] == ProfileNode("node2", name, 1.0, 3.0, (800,), 880)
    assert set(read.edges) == {
        *(("node4", "node5"), ("node2", "node3"), ("node3", "node4")),
        *(("node2", "node4"), ("node1", "node2")),
    }
    assert read.notes == ()


def test_a_profile_of_dapple_is_read_whole() -> None:
    read = parse_profile(DAPPLE, "bert-pbs-6.txt")
    assert len(read.nodes) == len(read.edges) == 5
    assert read.nodes["node2"] == ProfileNode("node2", "attention_mask", 0.011, 0.0, (3000,), 0)
    assert read.edges[-1] == ("node2", "node5")
    assert read.notes == ()


@pytest.mark.parametrize(
    ("written", "sizes"),
    [
        ("[9.0; 2.0; 2.0]", (9, 2, 2)),
        ("[9]", (9,)),
        ("[9,2]", (9, 2)),
        ("[]", (0,)[:0]),
        ("1e3", (1000,)),
        ("0", (0,)),
    ],
)
def test_sizes_may_be_lists(written: str, sizes: tuple[int, ...]) -> None:
    read = parse_profile(node("a", activation=written), "file.txt")
    assert read.nodes["a"].activation_bytes == sizes


def same(text: str) -> Profile:
    return parse_profile(text, "file.txt")


def test_the_layout_of_a_file_does_not_matter() -> None:
    plain = profile([node("a"), node("b"), node("c")], "a>b b>c")
    expected = same(plain)
    assert same(plain.rstrip("\n")) == expected
    assert same(plain.replace("\t", "   ")) == expected
    assert same(plain.replace("\t", "")) == expected
    assert same(plain.replace("\n", "\r\n")) == expected
    assert same("\ufeff\n" + plain.replace("\n", " \n\n")) == expected
    lines = plain.splitlines()
    between = [lines[0], lines[3], lines[1], lines[4], lines[2]]
    assert same("\n".join(between)) == expected


def test_names_may_hold_what_separates() -> None:
    name = "Block(  (a): Linear(in_features=1, out_features=2) -- x, y=[1; 2])"
    assert same(node("a", name)).nodes["a"].name == name


def test_stages_of_the_file_are_told_and_left() -> None:
    lines = [node(name) + f" -- stage_id={stage}" for stage, name in enumerate("ab")]
    staged = same(profile(lines, "a>b"))
    plain = same(profile([node("a"), node("b")], "a>b"))
    assert (staged.nodes, staged.edges) == (plain.nodes, plain.edges)
    assert staged.notes == (
        "2 nodes with a stage_id, which is ignored: the planner chooses the stages",
    )


def test_repeated_edges_are_told_and_read_once() -> None:
    read = same(profile([node("a"), node("b")], "a>b a>b a>b"))
    assert read.edges == (("a", "b"),)
    assert "2 edges" in read.notes[0]


def test_unknown_fields_are_told() -> None:
    read = same(node("a") + ", memory=7")
    assert "field 'memory' of 1 node is not read" in read.notes


def test_sizes_that_are_no_whole_bytes_are_told_and_rounded_up() -> None:
    read = same(node("a", activation="[1.5; 2]", parameters="0.1"))
    assert read.nodes["a"].activation_bytes == (2, 2)
    assert read.nodes["a"].parameter_bytes == 1
    assert "2 sizes of no whole bytes" in read.notes[0]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["forward", "backward", "activation", "parameters"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nan", "not finite"),
        ("inf", "not finite"),
        ("-0.5", "negative"),
        ("1e30", "more than"),
        ("fast", "no number"),
        ("1_0", "no number"),
        ("", "no number"),
        ("9" * 5000, "not finite"),
    ],
)
def test_a_wrong_figure_is_named_with_line_field_value_and_remedy(
    field: str, value: str, reason: str
) -> None:
    message = refusal(profile([node("a"), node("b", **{field: value})], "a>b"))
    assert message.startswith("file.txt: line 2: b: ")
    name = {"activation": "activation_size", "parameters": "parameter_size"}.get(
        field, f"{field}_compute_time"
    )
    assert f"{name}: '{value[:50]}" in message
    assert reason in message
    assert "expected milliseconds" in message or "expected bytes" in message


def test_a_wrong_element_of_a_list_is_named() -> None:
    assert "activation_size: '-1' is negative" in refusal(node("a", activation="[5; -1]"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "there is no node in it"),
        ("\n \n", "there is no node in it"),
        ("\ta -- b\n", "there is no node in it"),
        (profile([node("a"), node("a")]), "line 2: a is also on line 1"),
        (profile([node("a")], "a>b"), "line 2: edge a -- b: there is no node 'b'"),
        (profile([node("a")], "b>a"), "line 2: edge b -- a: there is no node 'b'"),
        (profile([node("a")], "a>a"), "line 2: this edge closes a cycle of 1 node: a -> a"),
        ("a -- Op -- forward_compute_time=1\n", "no backward_compute_time, activation_size, par"),
        ("a -- Op -- fast=1, slow\n", "line 1: a: 'slow' is no field"),
        (node("a", activation="[1; 2"), "line 1: a: 'activation_size=[1; 2"),
        (node("a", activation="[[1]; 2]"), "is no field"),
        (node("a") + ", parameter_size=3", "line 1: a: parameter_size appears twice"),
        ("hello world\n", "line 1: 'hello world' is neither a node nor an edge"),
        (node("a", activation="[" + "; ".join(["9e13"] * 3) + "]"), "270000000000000 bytes in all"),
        (node("a:b"), "neither a node nor an edge"),
        ("a -- b -- c\n", "neither a node nor an edge"),
        ("\x00\x01\x02", "neither a node nor an edge"),
        ("{}", "neither a node nor an edge"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, expected: str) -> None:
    message = refusal(text)
    assert message.startswith("file.txt: ")
    assert expected in message


def test_a_cycle_is_shown_with_the_line_of_one_of_its_edges() -> None:
    text = profile([node(name) for name in "abcd"], "a>b b>c c>d d>b")
    assert "line 8: this edge closes a cycle of 3 nodes: b -> c -> d -> b" in refusal(text)


def test_all_problems_are_told_at_once() -> None:
    message = refusal(profile([node("a", forward=-1), "what", node("b", backward="x")]))
    assert [line.split(": ")[1] for line in message.splitlines()] == ["line 1", "line 2", "line 3"]


def test_a_file_of_rubbish_is_refused_in_a_few_lines() -> None:
    assert len(refusal("rubbish\n" * 10**5).splitlines()) < 100
    assert len(refusal("x" * 10**6)) < 1000
    assert len(refusal(node("a", "x" * 10**6, forward="y" * 10**6))) < 1000
    assert len(refusal("a -- b -- " + "=" * 10**6)) < 1000


def test_a_cycle_of_ten_thousand_nodes_is_shown_in_short() -> None:
    names = [f"node{index}" for index in range(10**4)]
    ring = " ".join(f"{a}>{b}" for a, b in zip(names, names[1:] + names[:1], strict=True))
    message = refusal(profile(map(node, names), ring))
    assert "cycle of 10,000 nodes" in message
    assert len(message) < 1000
