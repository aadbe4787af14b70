"""A world from a trace: simulate, write, read, calibrate, and simulate again."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_worlds import small_world

from benchmarks.sync.uniform import uniform_world
from planner.errors import PipeplanError
from planner.measured.sync_trace import SyncTrace
from planner.sync.simulation.calibration import calibrated
from planner.sync.simulation.meetings import durations, lateness_s, meetings_of
from planner.sync.simulation.run import Scenario, simulate_sync, trace_sync
from planner.sync.simulation.slowness import parse_slowness
from planner.sync.simulation.world import LinkCost, World
from planner.sync.strategies import parse_sync

GUESS = uniform_world(8, 0.03, 1000, LinkCost(1e-6, 100.0))
TELLING = [
    "all_reduce:overlap=false",
    "ad_psgd:pairs=matching",
    "partial_all_reduce",
    "partial_all_reduce:schedule=static",
    "semi_decentralized",
]


def real_world() -> World:
    return replace(small_world(), collective_overhead_s=1e-3, scheduler_round_trip_s=1e-3)


def traced(strategy: str, slowness: str = "steady") -> SyncTrace:
    trace, _ = parse_slowness(slowness)
    return trace_sync(Scenario(real_world(), 60, trace), parse_sync(strategy))[1]


@pytest.mark.parametrize("strategy", TELLING)
@pytest.mark.parametrize("slowness", ["steady", "slow:0x2"])
def test_a_calibrated_world_runs_as_the_measured_one(
    strategy: str, slowness: str, tmp_path: Path
) -> None:
    sync, (trace, _) = parse_sync(strategy), parse_slowness(slowness)
    real, measured = trace_sync(Scenario(real_world(), 60, trace), sync)
    measured.save(tmp_path / "trace.json")
    world = calibrated(GUESS, SyncTrace.load(tmp_path / "trace.json"))
    again = simulate_sync(Scenario(world, 60), sync)
    assert again.iterations_per_s == pytest.approx(real.iterations_per_s, rel=0.03)


def test_recording_changes_nothing() -> None:
    scenario, sync = Scenario(real_world(), 40), parse_sync("partial_all_reduce")
    assert trace_sync(scenario, sync)[0] == simulate_sync(scenario, sync)


def test_a_trace_tells_computation_and_slow_workers() -> None:
    world = calibrated(GUESS, traced("partial_all_reduce", "slow:0x2"))
    assert world.iteration_s == pytest.approx(0.1, rel=0.01)
    assert world.slowdown == pytest.approx((2.0, *[1.0] * 7), rel=0.01)
    assert world.ranks[0].parameter_bytes == 10_000_000


@pytest.mark.parametrize("gb_per_s", [0.3, 3.0, 10.0])
def test_groups_of_two_sizes_tell_latency_from_bandwidth(gb_per_s: float) -> None:
    """Both are a millisecond and 1 GB/s, whatever the file says within a factor of ten."""
    trace = traced("partial_all_reduce:schedule=static")
    guess = uniform_world(8, 0.03, 1000, LinkCost(1e-4, gb_per_s))
    world = calibrated(replace(guess, collective_overhead_s=1e-3), trace)
    assert world.between.bandwidth_gb_per_s == pytest.approx(1.0, rel=0.15)
    assert world.between.latency_s == pytest.approx(1e-3, rel=0.15)
    assert world.scheduler_round_trip_s == pytest.approx(1e-3, rel=0.01)


def test_what_a_host_adds_to_messages_is_not_taken_from_the_bandwidth() -> None:
    """On loopback a message takes four times as long as planned before its first byte."""
    planned = uniform_world(8, 0.1, 340_000, LinkCost(1e-4, 1.0))
    real = planned.at_links(planned.within, LinkCost(4e-4, 1.0))
    real = replace(real, scheduler_round_trip_s=4e-3)
    trace = trace_sync(Scenario(real, 60), parse_sync("partial_all_reduce:schedule=static"))[1]
    world = calibrated(planned, trace)
    assert world.between.bandwidth_gb_per_s == pytest.approx(1.0, rel=0.01)
    assert world.between.latency_s == pytest.approx(4e-4, rel=0.05)
    sync = parse_sync("parameter_server:mode=async")
    rates = [simulate_sync(Scenario(w, 60), sync).iterations_per_s for w in (real, world)]
    assert rates[1] == pytest.approx(rates[0], rel=0.01)


@pytest.mark.parametrize("strategy", ["partial_all_reduce:schedule=static", "semi_decentralized"])
def test_a_trace_tells_how_late_members_notice_their_average(strategy: str) -> None:
    """They go on up to 15 ms apart; the links are the same as without."""
    real, sync = replace(real_world(), lateness_s=5e-3), parse_sync(strategy)
    run, trace = trace_sync(Scenario(real, 120), sync)
    world = calibrated(real_world(), trace)
    assert world.lateness_s == pytest.approx(5e-3, rel=0.15)
    assert simulate_sync(Scenario(world, 120), sync).iterations_per_s == pytest.approx(
        run.iterations_per_s, rel=0.05
    )


def test_members_that_go_on_apart_are_still_one_meeting() -> None:
    """Workers 0 and 1 meet three times, and go on 8 ms apart; 2 goes on by itself."""
    row = {"compute_s": 0.1, "sync_wait_s": 0.01, "pipeline_rank": 0}
    starts_s = (0.0, 0.2, 0.4, 0.6)
    data = traced("partial_all_reduce").model_dump(mode="json")
    data["workers"] = [
        [
            {**row, "iteration": n, "start_s": start_s + late_s, "members": members}
            for n, start_s in enumerate(starts_s, 1)
        ]
        for members, late_s in (([0, 1], 0.0), ([0, 1], 0.008), ([2], 0.0))
    ]
    world = replace(real_world(), workers=3)
    meetings = meetings_of(SyncTrace.parse(data))
    assert [m.members for m in meetings] == [(0, 1)] * 3 + [(2,)] * 3
    assert all(meeting.is_whole for meeting in meetings)
    assert lateness_s(world, meetings) == pytest.approx(0.008 / 0.661, rel=1e-3)
    # The last of them asks 8 ms late; both go on in the middle, 14 ms after the first one asked.
    (pair_s, *_), (alone_s, *_) = durations(world, meetings).values()
    assert pair_s == pytest.approx(0.006)
    assert alone_s == pytest.approx(0.01)


@pytest.mark.parametrize("strategy", ["all_reduce", "cross_iteration", "parameter_server"])
def test_a_trace_that_tells_nothing_is_refused(strategy: str) -> None:
    with pytest.raises(PipeplanError, match=f"trace of {strategy} does not show"):
        calibrated(GUESS, traced(strategy))


@pytest.mark.parametrize("strategy", ["all_reduce:overlap=false", "partial_all_reduce"])
def test_clocks_that_drift_are_refused(strategy: str) -> None:
    """The clocks of half of the workers are ahead by half an iteration, and go fast."""
    data = traced(strategy).model_dump(mode="json")
    for rows in data["workers"][::2]:
        for row in rows:
            row["start_s"] = 0.05 + 1.001 * row["start_s"]
    with pytest.raises(
        PipeplanError, match=r"iteration \d+ of pipeline rank 0 among workers .*dri"
    ):
        calibrated(GUESS, data)


def test_a_trace_of_other_pipelines_is_refused() -> None:
    data = traced("partial_all_reduce").model_dump(mode="json")
    with pytest.raises(PipeplanError, match="parameter_bytes: of 2 pipeline ranks"):
        calibrated(GUESS, {**data, "parameter_bytes": [1, 2]})


@pytest.mark.parametrize("iterations", [0, 1])
def test_a_trace_of_the_first_iteration_alone_is_refused(iterations: int) -> None:
    """Two rows for each worker, one of each of its ranks."""
    (rank,) = real_world().ranks
    world = replace(real_world(), ranks=(rank, rank))
    trace = trace_sync(Scenario(world, 3), parse_sync("partial_all_reduce"))[1]
    data = trace.model_dump(mode="json")
    workers = [[row for row in rows if row["iteration"] <= iterations] for rows in data["workers"]]
    with pytest.raises(PipeplanError, match="two iterations"):
        calibrated(world, {**data, "workers": workers})


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("members", [1, 0], "do not ascend"),
        ("members", [1], "worker 0 itself is missing"),
        ("members", [0, 9], "there is no worker 9"),
        ("pipeline_rank", 3, r"workers\[0\]\[0\].pipeline_rank: 3"),
        ("compute_s", -1, "compute_s: expected at least 0"),
    ],
)
def test_a_wrong_row_is_named(field: str, value: object, named: str) -> None:
    data = traced("partial_all_reduce").model_dump(mode="json")
    data["workers"][0][0][field] = value
    with pytest.raises(PipeplanError, match=named):
        SyncTrace.parse(data)
