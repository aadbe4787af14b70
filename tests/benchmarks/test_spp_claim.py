"""SPP against the baselines of its own paper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from chains import chain

from benchmarks.rivals.spp_claim import CLAIMED, OwnRow, own_row, report


def test_each_planner_has_its_own_stages_and_schedule() -> None:
    """Two layers of 1 s and 2 s on two devices, four microbatches, nothing to send or to reduce.

    Two stages take (4 + 1) * 3 s under GPipe and 1F1B; two replicas of both layers take 2 * 6 s.
    """
    problem = chain((1, 2), (1, 2), microbatches=4).problem
    pair = SimpleNamespace(problem=lambda: problem, name=("two", "star"))
    row = own_row(pair)  # type: ignore[arg-type]
    assert row.times_s["GPipe"] == pytest.approx(15)
    assert row.times_s["data parallelism"] == pytest.approx(12, rel=1e-3)
    assert row.times_s["SPP"] == pytest.approx(12, rel=1e-3)
    assert row.gains["GPipe"] == pytest.approx(0.25, rel=1e-2)


def test_the_page_tells_the_largest_gain_and_what_does_not_fit() -> None:
    def of(spp: float | None, gpipe: float | None) -> OwnRow:
        times_s = {"SPP": spp, "data parallelism": None, "GPipe": gpipe, "PipeDream": 2.0}
        return OwnRow(profile="p", cluster=f"random {gpipe}", times_s=times_s)

    rows = [of(1.0, 3.0), of(4.0, 4.0), of(None, 9.0)]
    page = report(rows)
    assert CLAIMED == 1.57
    gpipe = "at most 200 % (p on random 3.0; reached), 73 % in the geometric mean of 2 pairs"
    assert f"- over GPipe: {gpipe}, slower on 0" in page
    others = "at most 100 % (p on random 3.0; not reached), 0 % in the geometric mean of 2 pairs"
    for name in ("PipeDream", "the best of them in each pair"):
        assert f"- over {name}: {others}, slower on 1" in page
    assert "data parallelism:" not in page
    assert "| p | random 9.0 | - | - | 9000.0 | 2000.0 | - |" in page
