"""Sweeps: what is solved, what is kept, and what is refused."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from small_sweeps import JOB, QUICK, Counting, chain, ring

from planner import Plan, sweep, verify
from planner.analysis.sweep import InTurn, Processes, SweepResult, SweepRow
from planner.analysis.sweep.engines import Outcomes
from planner.analysis.sweep.work import Task, solve_task
from planner.errors import PipeplanError
from planner.plan.problem import Problem
from planner.plan.sweep_index import INDEX_NAME, Point, SweepIndex
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
        assert len(plan.ranks) == row.devices_used <= row.point.devices
        assert plan.cluster.device_names == row.chosen


def test_one_device_takes_every_layer_of_every_microbatch(tmp_path: Path) -> None:
    """Four layers of 3 s a sample; two devices share them, with a fill and a drain of 6 s."""
    rows = {row.point: row for row in swept(tmp_path / "s").rows}
    assert rows[Point("ring", 1, 1, 2)].iteration_time_s == pytest.approx(24.0)
    assert rows[Point("ring", 1, 1, 4)].time_per_sample_s == pytest.approx(12.0)
    assert rows[Point("ring", 2, 1, 4)].iteration_time_s == pytest.approx(30.0, rel=1e-6)


def test_what_was_solved_is_not_solved_again(tmp_path: Path) -> None:
    first, again, more = Counting(), Counting(), Counting()
    result = swept(tmp_path / "s", engine=first)
    assert len(first.asked) == 4
    same = swept(tmp_path / "s", engine=again)
    assert again.asked == []
    assert same.rows == result.rows
    assert same.solved == 0
    wider = swept(tmp_path / "s", engine=more, microbatches=[4, 8])
    assert more.asked == [Point("ring", 1, 1, 8), Point("ring", 2, 1, 8)]
    assert [row.point.microbatches for row in wider.rows] == [4, 8, 4, 8]
    # A plan whose file is gone is found again.
    (tmp_path / "s" / str(result.rows[1].plan)).unlink()
    lost = Counting()
    assert swept(tmp_path / "s", engine=lost).rows == result.rows
    assert lost.asked == [result.rows[1].point]


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    engine, rest = Counting(stop_after=2), Counting()
    result = swept(tmp_path / "s", engine=engine)
    assert engine.closed == 1
    assert [row.point for row in result.rows] == engine.asked
    assert result.solved == len(result.open) == 2
    assert len(SweepIndex.load(tmp_path / "s" / INDEX_NAME).points) == 2
    whole = swept(tmp_path / "s", engine=rest)
    assert tuple(rest.asked) == result.open
    assert whole.rows == swept(tmp_path / "other").rows


def test_a_search_that_was_cut_short_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*args: Any, **settings: Any) -> Any:
        return replace(solve(*args, **settings), ended="interrupted")

    monkeypatch.setattr("planner.analysis.sweep.work.solve", cut)
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
    engine = Counting()
    assert swept(tmp_path / "s", clusters=clusters, engine=engine).rows == result.rows
    assert engine.asked == []


def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    one = swept(tmp_path / "one", engine=InTurn())
    two = swept(tmp_path / "two", engine=Processes(2))
    assert two.rows == one.rows
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_killed_process_is_told_and_what_was_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.analysis.sweep.engines.solve_task", kills_the_third)
    with pytest.raises(PipeplanError, match="a process of the sweep was killed"):
        swept(tmp_path / "s", engine=Processes(1))
    assert 1 <= len(SweepIndex.load(tmp_path / "s" / INDEX_NAME).points) <= 2


def kills_the_third(task: Task) -> Any:
    if task.point == Point("ring", 2, 1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return solve_task(task)


def test_closing_early_ends_the_processes(tmp_path: Path) -> None:
    """Points of ten minutes each end with the sweep."""

    def stopping(done: int, total: int, row: SweepRow | None) -> None:
        if row is not None:
            raise KeyboardInterrupt

    result = swept(tmp_path / "s", engine=Slow(), progress=stopping)
    assert len(result.rows) == 1
    assert active_children() == []


class Slow:
    """All but the first of the tasks take ten minutes."""

    workers = 1

    def run(self, tasks: Sequence[Task]) -> Outcomes:
        slow = {"time_limit_s": 600.0, "deterministic": False, "gap_limit": 0.0}
        settings = tasks[0].settings.model_copy(update=slow)
        hard = Problem(chain(1, 30), ring(9), JOB.model_copy(update={"microbatches": 40}))
        rest = [replace(task, problem=hard, settings=settings) for task in tasks[1:]]
        yield from Processes(2).run([tasks[0], *rest])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"graphs": chain(1, 5)}, "graphs.1: 'sha256:"),
        (
            {"clusters": {"ring": ring(2, memory_gib=7)}},
            "clusters.ring: 'sha256:",
        ),
        ({"seed": 3}, "settings.seed: 0 there, 3 now; .* name another folder, or sweep as before"),
        ({"time_limit_s": 0.3}, "settings.time_limit_s: 0.2 there, 0.3 now"),
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
    without, engine = swept(tmp_path / "s"), Counting()
    result = swept(tmp_path / "s", clusters={"ring": ring(2, price=3.6)}, engine=engine)
    assert engine.asked == []
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


def test_two_sweeps_do_not_write_in_one_folder(tmp_path: Path) -> None:
    tried: list[str] = []

    def at_once(*_: object) -> None:
        if not tried:
            with pytest.raises(PipeplanError) as refused:
                swept(tmp_path / "s")
            tried.extend(refused.value.problems)

    assert swept(tmp_path / "s", progress=at_once).solved == 4
    assert "another sweep writes in this folder; wait for its end" in tried[0]
    assert swept(tmp_path / "s").solved == 0


Edit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda data: data["points"][0].update(plan="../../x.json"), r"points\[0\].plan"),
        (lambda data: data["points"][0].update(plan=None), "gives no reason; remove it"),
        (lambda data: data["points"][0].update(reason="x"), "has a plan and a reason"),
        (lambda data: data["points"].append(data["points"][0]), "is there 2 times; keep one"),
        (lambda data: data.update(format="pipeplan-sweep/7"), "is newer than 'pipeplan-sweep/6'"),
        (lambda data: data.update(format="pipeplan/1"), "give the index of a sweep"),
        (lambda data: data["clusters"].update(ring="md5:0"), "clusters.ring"),
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
        ({"bill": "racks"}, "bill: 'racks' is not known; choose from devices, machines"),
    ],
)
def test_arguments_out_of_range_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PipeplanError, match=reason):
        swept(tmp_path / "s", **changes)
    assert not (tmp_path / "s").exists()
