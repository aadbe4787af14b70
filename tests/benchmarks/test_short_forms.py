"""Short forms of the benchmarks: true subsets of the full ones; claims follow from rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_problem_files import PROFILE

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.executor import on_testbed as executor_testbed
from benchmarks.executor import short as executor
from benchmarks.executor.on_testbed import Row as BedRow
from benchmarks.partition import rows as partition_rows
from benchmarks.partition import short as partition
from benchmarks.prediction import __main__ as prediction
from benchmarks.prediction.__main__ import main as predict
from benchmarks.prediction.run import Row as PredictionRow
from benchmarks.replan import __main__ as replan
from benchmarks.replan import run as full_replan
from benchmarks.replan.cases import Training, trainings
from benchmarks.replan.run import Row as ReplanRow
from benchmarks.reporting.claims import Claim, Details, Entry, LeftOut, read_entries
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import pairs as rival_pairs
from benchmarks.rivals.pairs import Answer, Pair, PairRow, pairs, read_rows, row_name, rows_of
from benchmarks.roofline import __main__ as roofline
from benchmarks.roofline import run as full_roofline
from benchmarks.schedule import joint as schedule_joint
from benchmarks.schedule import rows as schedule_rows
from benchmarks.schedule import short as schedule
from benchmarks.schedule.joint import JointRow
from benchmarks.schedule.rows import Row as ScheduleRow
from benchmarks.soak import __main__ as soak
from benchmarks.soak import run as full_soak
from benchmarks.soak.world import Case as SoakCase
from benchmarks.sync import __main__ as full_sync
from benchmarks.sync import short as sync
from benchmarks.sync.claims import Claim as SyncClaim
from benchmarks.sync.claims import Outcome
from benchmarks.sync.figures import Spread
from benchmarks.testbed import short as testbed
from benchmarks.testbed.check import PairCheck
from planner import PipeplanError
from planner.search.budget import Settings
from planner.search.partition.baselines import BASELINES


def claims(entries: Iterator[Entry]) -> dict[str, Claim]:
    return {entry.claim: entry for entry in entries if isinstance(entry, Claim)}


def figures(entries: Iterator[Entry]) -> list[tuple[float | None, float | None, bool | None]]:
    return [(c.figure, c.bar, c.reached) for c in claims(entries).values()]


# --- partition ------------------------------------------------------------------------------------


def test_partition_in_short_runs_cases_of_the_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {case.name: case for case in partition_rows.matrix_cases()}
    given: list[partition_rows.Case] = []

    def solve(cases: list[partition_rows.Case], workers: int) -> list[list[object]]:
        given.extend(cases)
        bars = ["optimal" if case.bar == 0 else f"{case.bar:.1%}" for case in cases]
        names = [case.name for case in cases]
        rows = [
            [n, "1.0", "1.0", "0%", bar, "1", "reached"] for n, bar in zip(names, bars, strict=True)
        ]
        rows[-1][-1] = "NOT reached"
        return rows

    monkeypatch.setattr(partition_rows, "solve_matrices", solve)
    found = list(partition.entries(None, 2))
    assert len(given) == len(partition.MATRICES)
    assert all((every[c.name].limit_s, every[c.name].bar) == (c.limit_s, c.bar) for c in given)
    told = claims(iter(found))
    assert [claim.not_run for claim in told.values() if claim.not_run] == ["needs --data"]
    assert [c.reached for c in told.values() if not c.not_run] == [True, False]
    assert LeftOut(text="27 of 36 random clusters") in found


# --- rivals ---------------------------------------------------------------------------------------


def rival_row(pair: Pair, ours_s: float, **rivals_s: float | None) -> PairRow:
    def answer(time_s: float) -> Answer:
        return Answer(schedule="1f1b", stages=2, time_s=time_s, memory_share=0.5)

    profile, cluster = pair.name
    return PairRow(
        profile=profile,
        cluster=cluster,
        devices=4,
        time_limit_s=rivals.SHORT_LIMIT_S,
        ours=answer(ours_s),
        rivals={
            **dict.fromkeys(BASELINES),
            **{name: None if s is None else answer(s) for name, s in rivals_s.items()},
        },
    )


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    for folder, count in (("dapple", 5), ("pipedream", 5)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{folder}{number}.txt").touch()
    return tmp_path


def test_rivals_in_short_are_a_part_of_all_pairs_under_the_full_bars(
    monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    given: list[Pair] = []

    def rows_of(chosen: list[Pair], limit_s: float, kept: Path | None) -> Iterator[PairRow]:
        given.extend(chosen)
        first, second, *rest = chosen
        yield rival_row(second, 1.0, even=2.0, spp=None)
        yield rival_row(first, 1.0, even=1.0, spp=0.9)
        yield from (rival_row(pair, 2.0, even=2.4, spp=2.2) for pair in rest)

    monkeypatch.setattr(rivals, "rows_of", rows_of)
    entries = list(rivals.short_entries(profiles))
    told = claims(iter(entries))
    every, count = pairs(profiles), len(given)
    assert set(given) < set(every)
    assert count == len(every) // 11 + 1
    # Every kind of cluster comes by: samples as well as random ones.
    assert {isinstance(pair.cluster, int) for pair in given} == {True, False}
    assert [(c.bar, c.figure) for c in told.values()] == [
        (1.10, pytest.approx((2 * 0.9 * 1.1 ** (count - 2)) ** (1 / count))),
        (1.15, pytest.approx((2 * 1.2 ** (count - 2)) ** (1 / count))),
        (1.05, pytest.approx((0.9 * 1.1 ** (count - 2)) ** (1 / (count - 1)))),
        (count, count - 1),
    ]
    (shown,) = [entry for entry in entries if isinstance(entry, Details)]
    assert [row[:2] for row in shown.rows] == [pair.name for pair in given]
    assert shown.rows[0][5:] == ("spp", "1f1b", "900.0", "0.900")
    with pytest.raises(PipeplanError, match=r"no \*.txt in dapple, pipedream"):
        list(rivals.short_entries(profiles / "none"))
    without = claims(rivals.short_entries(None))
    assert list(without) == list(told)
    assert all(claim.not_run for claim in without.values())


def test_a_run_goes_on_from_the_rows_that_it_kept(
    monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    """Rows of another limit are measured again."""
    chosen, kept = pairs(profiles)[:4], profiles / "rows.jsonl"
    old = rival_row(chosen[2], 1.0, even=1.5).model_copy(update={"time_limit_s": 1.0})
    known = rival_row(chosen[1], 1.0, even=1.5)
    kept.write_text(f"{known.model_dump_json()}\n{old.model_dump_json()}\n")
    monkeypatch.setattr(rival_pairs, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(
        rival_pairs, "measure", lambda pair, limit_s: rival_row(pair, 1.0, even=1.25)
    )
    found = list(rows_of(chosen, rivals.SHORT_LIMIT_S, kept))
    assert found[0] == known
    assert {row_name(row) for row in found} == {pair.name for pair in chosen}
    assert [row.ratio for row in found] == [1.5, 1.25, 1.25, 1.25]
    assert len(read_rows(kept)) == 5
    again = rows_of(chosen, rivals.SHORT_LIMIT_S, kept)
    assert [row_name(row) for row in again] == [pair.name for pair in chosen]
    assert len(read_rows(kept)) == 5
    page = rivals.report(found, rivals.SHORT_LIMIT_S, 11)
    assert "Made by `python -m benchmarks.rivals --data FOLDER --time-limit 5` on" in page
    assert "- time of the best rival over ours, geometric mean: 1.308 (bar >= 1.1), reached" in page
    assert "| even | 1.308 | 4 | 0 |" in page
    kept.write_text("{}\n")
    with pytest.raises(PipeplanError, match=r"rows.jsonl:1: .*; delete the line"):
        read_rows(kept)


def test_a_pair_is_planned_by_all_planners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rival_pairs, "MICROBATCHES", 4)
    path = tmp_path / "graph.txt"
    path.write_text(PROFILE)
    row = rival_pairs.measure(Pair(path, SAMPLE_CLUSTERS / "single_node.toml"), 0.05)
    assert row_name(row) == ("graph", "single_node")
    assert set(row.rivals) == set(rival_pairs.RIVALS)
    assert row.ratio >= 1 - rivals.ROUNDING
    assert row.best_rival[1].time_s == min(a.time_s for a in row.rivals.values() if a is not None)


# --- schedule -------------------------------------------------------------------------------------


def test_schedule_in_short_has_the_bars_of_the_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def solve(instance: object, *, limit_s: float, reference: float | None = None, **more: object):
        limits.append(limit_s)
        name, value = instance.name, reference or 103.0
        bound = reference or 100.0
        count = instance.microbatches
        return ScheduleRow(name, 4, count, "", "makespan", value, bound, 106.09, reference, 0.1)

    joint = JointRow("resnet50", "irregular", 9, "2 stages", 108.0, 100.0, 1.0, 0.07)
    monkeypatch.setattr(schedule_rows, "solve", solve)
    monkeypatch.setattr(schedule_joint, "joint_rows", lambda *_, **__: iter([joint]))
    found = list(schedule.entries(None, Settings(0, 2)))
    told = claims(iter(found))
    assert [c.not_run for c in told.values() if c.not_run] == ["needs --data"] * 3
    assert figures(iter(found))[3:] == [
        (3, 3, True),  # known optima
        (pytest.approx(0.03), 0.04, True),  # worst gap of one stage a device
        (0, 3, False),  # proved with loose caps
        (1, 1, True),  # 5 % with two stages a device
        (0, 4, False),  # 1 % with many microbatches
        (pytest.approx(1.03), 1.08, False),  # over the best published
        (6, 6, True),  # none slower
        (0, 1, False),  # 7 % of whole plans
    ]
    assert set(limits) == {10.0, 15.0, 30.0, schedule_rows.LIMIT_S}


# --- executor -------------------------------------------------------------------------------------


def row(planner: str, predicted_s: float, measured_s: float, digest: str = "") -> BedRow:
    name = digest or planner
    return BedRow("ring", "gpt", planner, 4, name, predicted_s, measured_s, 0.01)


def test_speed_ups_on_the_testbed_are_those_of_the_full_table() -> None:
    rows = [row("pipeplan", 1.0, 1.04), row("even", 2.0, 2.08), row("spp", 1.0, 1.2, "pipeplan")]
    told = executor_testbed.speed_ups(rows)
    assert [(one.predicted, one.measured, one.same) for one in told] == [
        (2.0, pytest.approx(2.0), False),
        (1.0, 1.0, True),
    ]
    lines = executor_testbed.speed_up_rows(rows)
    assert lines[1] == ["ring", "gpt", "spp (same plan)", "1.000", "1.000", "+0.0%"]
    assert figures(executor._testbed_claims(rows, told)) == [
        (pytest.approx(0.04), 0.05, True),
        (pytest.approx(0.2), 0.1, False),
        (pytest.approx(0.0), 0.05, True),
        (1.0, 1.0, True),
    ]


def test_without_namespaces_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (executor, testbed):
        monkeypatch.setattr(module, "why_not", lambda: "the testbed needs root")
    skipped = [*executor._testbed(), *testbed.entries()]
    assert len(skipped) == 7
    assert all(entry.not_run == "the testbed needs root" for entry in skipped)


# --- testbed --------------------------------------------------------------------------------------


def test_messages_are_held_against_latency_and_bandwidth_as_measured() -> None:
    # 1 ms and 1 GB/s: a megabyte takes 2 ms by the rule.
    pair = PairCheck("a", "b", (1, 10**6, 10**7), (5e-4, 2.2e-3, 10.89e-3), 1e-3, 1.0, 0.1)
    assert testbed.rule_errors(pair) == [pytest.approx(0.1), pytest.approx(-0.01)]


# --- prediction, roofline, soak, sync -------------------------------------------------------------


def test_prediction_claims_are_its_bars() -> None:
    low = {"spread": 0.01, "lowest": -0.04}
    rows = [
        PredictionRow("gpt", "even", 2, 1.1, 1.0, predicted_bytes=98, measured_bytes=100, **low),
        PredictionRow("gpt", "ours", 2, 1.2, 1.0, predicted_bytes=96, measured_bytes=100, **low),
    ]
    found = list(prediction.entries(rows))
    assert figures(iter(found)) == [
        (pytest.approx(0.15), 0.04, False),
        (pytest.approx(0.2), 0.1, False),
        (pytest.approx(0.04), 0.05, True),
        (pytest.approx(0.04), 0.03, False),
    ]
    assert LeftOut(text="models llama, bert, t5, resnet50, unet") in found


def test_prediction_forgets_the_claims_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "claims.jsonl"
    path.write_text("old\n")
    assert predict(["--short", "--models", "nonsense", "--claims", str(path)]) == 1
    assert read_entries(path) == ()


def test_published_throughput_has_the_bars_that_the_readme_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (roofline, full_roofline):
        monkeypatch.setattr(module, "predicted_s", lambda row: 0.8 * row.seconds)
    assert figures(roofline._published()) == [
        (pytest.approx(0.2), 0.15, False),
        (pytest.approx(0.2), 0.15, False),
        (pytest.approx(1.25), 2.0, True),
    ]


def soak_row(**fields: object) -> full_soak.Row:
    given = {
        "case": SoakCase("ad_psgd", 4, 1, events=6, steps=420, seed=0),
        **{"kills": 3, "stops": 2, "coordinators": 1, "returns": 3, "hung": False, "strange": 0},
        **{"killed_late": 0, "shares": 1680, "faults": (), "failed": 0, "median_s": 0.05},
        **{"others_s": (0.1, 0.4), "members_s": (2.0,), "detection_s": (1.0, 1.3)},
        **{"rejoin_s": (0.5,), "start_s": (), "coordinator_s": (), "wall_s": 20.0},
        "long_gaps": (),
        **fields,
    }
    return full_soak.Row(**given)


def test_soak_claims_count_what_its_bars_count() -> None:
    assert figures(soak.entries([soak_row(), soak_row(faults=("lost",), rejoin_s=())])) == [
        (2, 2, True),
        (1, 2, False),
        (2, 4, False),  # 0.4 s is over max(3 x 0.05, 0.3)
        (2, 2, True),  # 2.0 s is within the group timeout and 0.3 s
        (1.3, 1.2, False),
        (0.5, 3.0, True),
    ]
    quiet = claims(soak.entries([soak_row(detection_s=(), others_s=())]))
    assert [claim.verdict for claim in quiet.values() if claim.not_run] == [
        "not run: no instance",
        "not run: it did not happen in so few events",
    ]
    assert any(isinstance(entry, Details) for entry in soak.entries([soak_row()]))


def test_claims_of_strategies_keep_bar_seeds_and_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    regime = "8 workers"
    outcome = Outcome(
        [
            SyncClaim("faster (Prague)", regime, True, 4.4, Spread((3.9, 4.1)), note="(drawn)"),
            SyncClaim("to the loss", regime, False, 2.0, None),
            SyncClaim("off", regime, False, 0.15, Spread((0.1,)), at_most=True),
        ]
    )
    made = full_sync.Section("Slow", "Nothing.", lambda: outcome)
    empty = full_sync.Section("Scale", "Nothing.", Outcome)
    monkeypatch.setattr(full_sync, "sections_of", lambda options: {"slow": made, "scale": empty})
    path = tmp_path / "claims.jsonl"
    assert full_sync.main(["--short", "--rows", "slow", "--claims", str(path)]) == 0
    found = read_entries(path)
    told = list(claims(iter(found)).values())
    assert [(c.figure, c.bar, c.reached) for c in told] == [
        (4.0, 4.4, False),
        (None, 2.0, False),
        (0.1, 0.15, True),
    ]
    assert told[0].note == "2 values, 3.9 to 4.1 (drawn)"
    assert told[0].regime == "real: 8 workers"
    assert told[0].source == sync.SOURCES["slow"]
    assert told[1].note == "no run got there"
    assert LeftOut(text="sections scale") in found


def test_every_section_of_strategies_names_a_source() -> None:
    options = full_sync.options_of(["--short"])
    assert set(full_sync.sections_of(options)) == set(sync.SOURCES)


def test_loopback_may_run_some_settings_only() -> None:
    words = ["--short", "--settings", "homogeneous", "one_4x_slow"]
    options = full_sync.options_of(words)
    only = full_sync.Loopback(1, 30, short=True, only=options.settings)
    assert set(only._settings) == {"homogeneous", "one_4x_slow"}


# --- replanning -----------------------------------------------------------------------------------


def test_replanning_in_short_judges_the_slowest_of_the_full_ones_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows_of(training: Training, folder: Path, fresh_s: float) -> Iterator[ReplanRow]:
        for number, event in enumerate(training.events):
            yield ReplanRow(
                training=training.name,
                event=event,
                wall_s=3.0 + number,
                cpu_s=3.0,
                before_s=1.0,
                new_s=1.2,
                bound_s=0.9,
                repaired_s=None,
                anew_s=1.0,
                moved_bytes=1,
                anew_moved_bytes=4,
            )

    monkeypatch.setattr(full_replan, "rows_of", rows_of)
    events = len(next(trainings()).events)
    assert figures(replan.entries(1.0)) == [
        (2.0 + events, 5.0, 2.0 + events <= 5.0),
        (0.25, None, None),
        (1.2, None, None),
    ]
