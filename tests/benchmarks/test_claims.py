"""``benchmarks.reporting.claims``: verdicts follow from figures, and lines say what was claimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reporting.claims import (
    Claim,
    LeftOut,
    append,
    begin,
    details,
    markdown,
    met,
    read_entries,
    tell,
    without_data,
)
from planner import PipeplanError

NUMBERS = st.floats(-1e6, 1e6)
HOLDS = {
    "at least": lambda figure, bar: not figure < bar,
    "at most": lambda figure, bar: not figure > bar,
    "below": lambda figure, bar: bar > figure,
}


def claim(**fields: object) -> Claim:
    return Claim.model_validate({"claim": "as fast", "source": "a paper", **fields})


@given(st.sampled_from(sorted(HOLDS)), NUMBERS, NUMBERS)
def test_a_verdict_follows_from_figure_and_bar(sense: str, figure: float, bar: float) -> None:
    found = claim(sense=sense, figure=figure, bar=bar)
    assert found.reached is HOLDS[sense](figure, bar)
    assert found.verdict == ("reached" if found.reached else "**not reached**")
    assert Claim.model_validate_json(found.model_dump_json()) == found


def test_without_a_bar_or_a_run_there_is_no_verdict() -> None:
    assert (claim(figure=1.0).reached, claim(figure=1.0).verdict) == (None, "no bar")
    skipped = claim(bar=1.0, not_run="needs root")
    assert (skipped.reached, skipped.verdict) == (None, "not run: needs root")
    # A strategy that never got to the loss has no figure, but it did run.
    assert claim(bar=1.0).reached is False
    assert met("all", "us", 0, 0).verdict == "not run: no instance"
    assert without_data("all", "us").verdict == "not run: needs --data"


def test_figures_are_told_in_their_unit() -> None:
    found = claim(sense="at most", figure=0.0271, bar=0.05, unit="%")
    assert found.cells == ("as fast", "a paper", "<= 5%", "2.71%", "reached")
    assert met("all", "us", 11, 12).cells[2:] == (">= 12 of 12", "11 of 12", "**not reached**")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"figure": 1.0, "bar": 2.0, "reached": True}, "bar and figure say False"),
        ({"figure": "fast"}, "figure"),
        ({"figur": 1.0}, "figur"),
        ({"kind": "boast"}, "boast"),
    ],
)
def test_a_line_that_is_no_entry_or_contradicts_itself_is_told(
    line: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "claims.jsonl"
    data = {"kind": "claim", "claim": "as fast", "source": "a paper", **line}
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(PipeplanError, match=rf"claims.jsonl:1: .*{said}"):
        read_entries(path)


def test_entries_are_in_the_file_as_soon_as_they_are_known(tmp_path: Path) -> None:
    path = tmp_path / "claims.jsonl"
    path.write_text("of an earlier run\n")
    begin(path)
    append([claim(figure=1.0)], path)
    append([details("T", ["a"], [[1]]), LeftOut(text="the rest")], path)
    found = read_entries(path)
    assert [entry.kind for entry in found] == ["claim", "details", "left_out"]
    # Whoever is killed while it writes leaves half a line.
    path.write_text(path.read_text() + '{"kind": "cla')
    assert read_entries(path) == found
    assert read_entries(tmp_path / "none.jsonl") == ()
    with pytest.raises(PipeplanError, match=r"--claims .*cannot be written"):
        begin(tmp_path / "no" / "folder.jsonl")


def test_what_a_benchmark_found_survives_its_failure(tmp_path: Path) -> None:
    def failing() -> object:
        yield claim(figure=1.0)
        raise RuntimeError("out of memory")

    path = tmp_path / "claims.jsonl"
    with pytest.raises(RuntimeError, match="out of memory"):
        tell(failing(), path)
    assert [entry.kind for entry in read_entries(path)] == ["claim"]


def test_cells_stay_in_their_row() -> None:
    text = markdown([claim(figure=1.0, note="a | b\nc"), LeftOut(text="large ones")])
    (row,) = [line for line in text.splitlines() if "as fast" in line]
    assert row.endswith("| a \\| b c |")
    assert "Left out here: large ones." in text
