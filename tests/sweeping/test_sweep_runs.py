"""Sweeps: what is solved, what is kept, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_sweeps import JOB, QUICK, chain, ring

from planner import Plan, sweep, verify
from planner.analysis.sweep.points import Point
from planner.analysis.sweep.rows import SweepRow
from planner.analysis.sweep.run import SweepResult
from planner.errors import PipeplanError
from planner.plan.sweep_index import INDEX_NAME
from planner.search.solve import solve


def swept(folder: Path, **changes: Any) -> SweepResult:
    """Four points: one and two devices, two and four microbatches."""
    given: dict[str, Any] = {
        "graphs": chain(),
        "clusters": {"ring": ring(2)},
        "job": JOB,
        "folder": folder,
        "microbatches": [2, 4],
        "devices": [1, 2],
        **QUICK,
        **changes,
    }
    return sweep(**given)


class Asked:
    """Notes the points that are solved, and may stop as if by Ctrl-C."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.points: list[Point] = []
        self._stop_after = stop_after

    def __call__(self, done: int, total: int, row: SweepRow | None) -> None:
        if row is not None:
            self.points.append(row.point)
        if len(self.points) == self._stop_after:
            raise KeyboardInterrupt


def test_every_point_has_a_plan_for_its_batch_and_devices(tmp_path: Path) -> None:
    graphs = [chain(1), chain(2)]
    result = swept(tmp_path / "s", graphs=graphs, clusters={"a": ring(2), "b": ring(3)})
    assert len(result.rows) == result.solved == 16
    for row in result.rows:
        plan = Plan.load(tmp_path / "s" / str(row.plan))
        assert verify(plan) == []
        assert plan.job.samples_per_microbatch == row.point.samples_per_microbatch
        assert plan.microbatches == plan.job.microbatches == row.point.microbatches
        assert plan.predicted.iteration_time_s == row.iteration_time_s
        assert len(plan.ranks) == len(row.used) <= row.point.devices
        assert plan.cluster.device_names == row.chosen


def test_one_device_takes_every_layer_of_every_microbatch(tmp_path: Path) -> None:
    """Four layers of 3 s a sample; two devices share them, with a fill and a drain of 6 s."""
    rows = {row.point: row for row in swept(tmp_path / "s").rows}
    assert rows[Point("ring", 1, 1, 2)].iteration_time_s == pytest.approx(24.0)
    assert rows[Point("ring", 1, 1, 4)].time_per_sample_s == pytest.approx(12.0)
    assert rows[Point("ring", 2, 1, 4)].iteration_time_s == pytest.approx(30.0, rel=1e-6)


def test_what_was_solved_is_not_solved_again(tmp_path: Path) -> None:
    more, lost = Asked(), Asked()
    result = swept(tmp_path / "s")
    same = swept(tmp_path / "s")
    assert (same.rows, same.solved) == (result.rows, 0)
    wider = swept(tmp_path / "s", progress=more, microbatches=[4, 8])
    assert more.points == [Point("ring", 1, 1, 8), Point("ring", 2, 1, 8)]
    assert [row.point.microbatches for row in wider.rows] == [4, 8, 4, 8]
    # A plan whose file is gone is found again.
    (tmp_path / "s" / str(result.rows[1].plan)).unlink()
    assert swept(tmp_path / "s", progress=lost).rows == result.rows
    assert lost.points == [result.rows[1].point]


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    asked, rest = Asked(stop_after=2), Asked()
    result = swept(tmp_path / "s", progress=asked)
    assert [row.point for row in result.rows] == asked.points
    assert result.solved == len(result.open) == 2
    whole = swept(tmp_path / "s", progress=rest)
    assert tuple(rest.points) == result.open
    assert whole.rows == swept(tmp_path / "other").rows


def test_a_search_that_was_cut_short_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*args: Any, **settings: Any) -> Any:
        return replace(solve(*args, **settings), ended="interrupted")

    monkeypatch.setattr("planner.analysis.sweep.engines.solve", cut)
    result = swept(tmp_path / "s")
    assert result.rows == ()
    assert len(result.open) == 4


def test_a_point_without_a_plan_says_why_and_stops_nothing(tmp_path: Path) -> None:
    clusters = {"ring": ring(2), "small": ring(2, memory_gib=1e-6)}
    result = swept(tmp_path / "s", clusters=clusters)
    assert [row.plan is None for row in result.rows] == [False] * 4 + [True] * 4
    reasons = {row.reason for row in result.rows[4:]}
    assert all("fits" in str(reason) for reason in reasons)
    assert not any(row.on_front for row in result.rows[4:])
    # They are not tried again either.
    again = swept(tmp_path / "s", clusters=clusters)
    assert (again.rows, again.solved) == (result.rows, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"graphs": chain(1, 5)}, "graphs.1: 'sha256:"),
        ({"clusters": {"ring": ring(2, memory_gib=7)}}, "clusters.ring: 'sha256:"),
        ({"seed": 3}, "seed: 0 there, 3 now; .* name another folder, or sweep as before"),
        ({"time_limit_s": 0.3}, "time_limit_s: 0.2 there, 0.3 now"),
        ({"job": JOB.model_copy(update={"recompute": False})}, "job.recompute: True there, False"),
    ],
)
def test_points_of_another_sweep_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    swept(tmp_path / "s", microbatches=[2], devices=[1])
    before = (tmp_path / "s" / INDEX_NAME).read_bytes()
    with pytest.raises(PipeplanError, match=reason):
        swept(tmp_path / "s", **changes)
    assert (tmp_path / "s" / INDEX_NAME).read_bytes() == before


def test_prices_may_be_given_later(tmp_path: Path) -> None:
    without = swept(tmp_path / "s")
    result = swept(tmp_path / "s", clusters={"ring": ring(2, price=3.6)})
    assert result.solved == 0
    assert [row.iteration_time_s for row in result.rows] == [
        row.iteration_time_s for row in without.rows
    ]
    row = result.rows[0]
    assert row.iteration_time_s == pytest.approx(24.0)
    assert row.cost_per_million_samples == pytest.approx(1e6 * 12.0 * 0.001)


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(PipeplanError, match="holds other files and no sweep"):
        swept(tmp_path)
    with pytest.raises(PipeplanError, match="is a file; a sweep needs a folder"):
        swept(tmp_path / "precious.txt")
    with pytest.raises(PipeplanError, match=r"there is no folder .*; create it"):
        swept(tmp_path / "no" / "such")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


Edit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda data: data["no_plan"].update({"../../x.json": "x"}), "no_plan"),
        (lambda data: data.update(format="pipeplan-sweep/8"), "is newer than 'pipeplan-sweep/7'"),
        (lambda data: data.update(format="pipeplan/1"), "give the index of a sweep"),
        (lambda data: data["inputs"].update({"clusters.ring": "md5:0"}), "clusters.ring"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, edit: Edit, reason: str) -> None:
    swept(tmp_path / "s", microbatches=[2], devices=[1])
    path = tmp_path / "s" / INDEX_NAME
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PipeplanError, match=reason):
        swept(tmp_path / "s")


def test_progress_tells_each_point_once(tmp_path: Path) -> None:
    told: list[tuple[int, int, SweepRow | None]] = []
    swept(tmp_path / "s", devices=[1])
    result = swept(tmp_path / "s", progress=lambda *each: told.append(each))
    assert [each[:2] for each in told] == [(2, 4), (3, 4), (4, 4)]
    assert told[0][2] is None
    solved = {row.point for _, _, row in told if row is not None}
    assert solved == {row.point for row in result.rows if row.point.devices == 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"time_limit_s": 0.0}, "time_limit_s: 0.0 is not a positive number"),
        ({"graphs": []}, "graphs: none given"),
        ({"graphs": [chain(), chain()]}, "graphs: two have microbatches of equal size"),
        ({"graphs": chain(1, precision="float16")}, "cluster ring: layer graph 'by-hand' was"),
    ],
)
def test_arguments_out_of_range_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PipeplanError, match=reason):
        swept(tmp_path / "s", **changes)
    assert not (tmp_path / "s").exists()
