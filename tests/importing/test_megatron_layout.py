"""Megatron-LM's layout grammar: what its documentation says, written out and read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PipeplanError
from planner.interop.division import MOST_SYMBOLS, parse_layout, render_layout

LETTERS = st.sampled_from("EtmL|")


@st.composite
def repeated(draw: st.DrawFn) -> tuple[str, str]:
    """A character as the layout has it and as it is meant: ``t*3`` and ``ttt``."""
    letter = draw(LETTERS)
    times = draw(st.none() | st.integers(0, 12))
    comma = draw(st.sampled_from(["", ","]))
    if times is None:
        return letter + comma, letter
    return f"{letter}*{times}{comma}", letter * times


@st.composite
def grouped(draw: st.DrawFn) -> tuple[str, str]:
    """A group in parentheses with its number."""
    inside = draw(st.lists(repeated(), min_size=1, max_size=4))
    times = draw(st.integers(0, 5))
    text, meant = ("".join(column) for column in zip(*inside, strict=True))
    return f"({text})*{times}", meant * times


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        # The example of Megatron-LM's page on custom layouts: 61 blocks and one of MTP, PP16 VPP2.
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        # Its note on empty stages.
        ("E||t|L", ["E", "", "t", "L"]),
        # The help text of --pipeline-model-parallel-layout.
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        # The comments of its parser, which tell how groups and bars meet.
        ("tE(tt|mm|tm)*2,LE", ["tEtt", "mm", "tmtt", "mm", "tmLE"]),
        ("(tm)*3", ["tmtmtm"]),
        ("tm,(Et|)*2", ["tmEt", "Et", ""]),
        ("(|tm)*2,Et", ["", "tm", "tmEt"]),
        # Published recipes.
        ("Et|(tt|)*29,t,L", ["Et", *["tt"] * 29, "tL"]),
        ("Et*16|t*16|t*16|t*12,m,L", ["E" + "t" * 16, "t" * 16, "t" * 16, "t" * 12 + "mL"]),
    ],
)
def test_published_layouts_have_their_stages(text: str, stages: list[str]) -> None:
    assert parse_layout(text) == tuple(stages)
    assert parse_layout(render_layout(stages)) == tuple(stages)


def test_the_published_example_is_61_blocks_on_32_virtual_stages() -> None:
    stages = parse_layout("Et*3|(tt|)*29,m|L")
    assert len(stages) == 16 * 2
    assert "".join(stages).count("t") == 61


@given(st.lists(repeated() | grouped(), max_size=8))
def test_every_layout_of_the_grammar_means_its_parts_one_after_another(
    parts: list[tuple[str, str]],
) -> None:
    text = "".join(text for text, _ in parts)
    assert parse_layout(text) == tuple("".join(meant for _, meant in parts).split("|"))


@given(st.lists(st.text("EtmL", max_size=9), min_size=1, max_size=40))
def test_what_is_written_reads_the_same(stages: list[str]) -> None:
    assert parse_layout(render_layout(stages)) == tuple(stages)


@given(st.integers(3, 60), st.integers(3, 60))
def test_repetitions_are_drawn_together(stages: int, blocks: int) -> None:
    assert len(render_layout(["E", *["t" * blocks] * stages, "L"])) < 20


@pytest.mark.parametrize(
    ("text", "position", "remedy"),
    [
        ("Ex", 2, "expected one of E (embedding)"),
        ("et", 1, "E)"),
        ("E(tt", 2, "no ')' closes"),
        ("E(tt)", 6, "expected *n after ')'"),
        ("Ett)*2", 4, "no '(' opens"),
        ("E()*2", 2, "nothing is in these parentheses"),
        ("((t|)*2)*3", 2, "do not nest"),
        ("t*", 3, "expected a number"),
        ("t*2*3", 4, "write one number"),
        ("*3", 1, "there is nothing before '*'"),
        ("3t", 1, "follows '*' only"),
        ("'EtL'", 1, "belong to the shell"),
        ("Et | tL", 3, "no white space"),
        ("t*٣", 3, "expected a number"),
        ("E,t*3,x", 7, "expected one of"),
    ],
)
def test_what_is_wrong_is_named_by_position_and_remedy(
    text: str, position: int, remedy: str
) -> None:
    with pytest.raises(PipeplanError) as caught:
        parse_layout(text, "--megatron-layout")
    assert f"--megatron-layout: character {position}, " in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    "text", ["t*99999999999999", "(t*99999|)*99999", "t*99999" * 9, "(t)*9" * 9**5]
)
def test_a_layout_cannot_ask_for_endless_layers(text: str) -> None:
    with pytest.raises(PipeplanError, match=r"too large a number|more than 100,000"):
        parse_layout(text)
    assert MOST_SYMBOLS == 100_000


@given(st.text("EtmL|(),*0129 x", max_size=14))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        stages = parse_layout(text)
    except PipeplanError:
        return
    assert set("".join(stages)) <= set("EtmL")
