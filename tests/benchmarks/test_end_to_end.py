"""``benchmarks.end_to_end``: the rows of many GPUs come from real commands."""

import sys

import pytest

from benchmarks.end_to_end import __main__ as end_to_end
from benchmarks.end_to_end import large
from planner.errors import PipeplanError

pytestmark = pytest.mark.extensive


@pytest.mark.parametrize("groups", [False, True])
def test_a_row_is_of_three_commands(monkeypatch: pytest.MonkeyPatch, groups: bool) -> None:
    monkeypatch.setattr(large, "MODEL", "models.llama:llama_tiny")
    (row,) = large.large_rows(1.0, [large.Case(1, 8, groups)])
    cells = dict(zip(reversed(large.COLUMNS), reversed(row.cells), strict=True))
    assert cells["verified"] == "yes"
    assert cells["cluster"] == "1 nodes: 8 A100-80GB"
    assert row.plan.microbatches == 8
    assert row.plan.job.tensor_parallel == ("any" if groups else 1)
    assert row.seconds >= 1.0
    # The commands import numpy and more, and the first of them torch.
    assert all(step.peak_bytes > 50e6 for step in row.steps)
    assert row.steps[0].peak_bytes > row.steps[2].peak_bytes


def test_a_command_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "MODEL", "models.llama:nothing")
    with pytest.raises(
        PipeplanError, match=r"pipeplan trace models\.llama:nothing .* ended with 1"
    ):
        list(large.large_rows(1.0, [large.Case(1, 8, False)]))


def test_unknown_sections_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["end_to_end", "--rows", "speed"])
    with pytest.raises(SystemExit) as raised:
        end_to_end.main()
    assert raised.value.code == 2
    assert "speed is not known; choose from trace, plans, large" in capsys.readouterr().err
