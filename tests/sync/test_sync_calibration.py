"""A world from a trace that was written by hand."""

from dataclasses import replace

import pytest
from builders import cluster, link
from small_worlds import BYTES, small_world

from benchmarks.sync.uniform import uniform_world
from planner.errors import PipeplanError
from planner.measured.sync_trace import SyncTrace
from planner.sync.simulation.calibration import calibrated
from planner.sync.simulation.links import WorkerLinks
from planner.sync.simulation.world import LinkCost, World

ROUND_TRIP_S, LATENCY_S, GB_PER_S = 2e-3, 1e-3, 0.5
GUESS = uniform_world(4, 0.03, 1000, LinkCost(1e-5, 100.0))


def ring_s(members: int) -> float:
    """Seconds of a ring of these members."""
    moved_s = BYTES / members / (1e9 * GB_PER_S)
    return 2 * (members - 1) * (LATENCY_S + moved_s)


def traced(
    sizes: tuple[int, ...] = (1, 2, 4),
    strategy: str = "partial_all_reduce",
    iterations: int = 12,
    late_s: float = 0.0,
    **options: object,
) -> dict[str, object]:
    """Four workers that compute for 0.1 s, the first for 0.2 s, then meet in groups of a size.

    Args:
        sizes: of the groups of iterations, in turn.
        strategy: of the run.
        iterations: of each worker.
        late_s: by how much each iteration of the second worker is ahead of the last on its clock.
        options: of the strategy.
    """
    workers: list[list[dict[str, object]]] = [[] for _ in range(4)]
    trip_s = 0.0 if strategy == "all_reduce" else ROUND_TRIP_S
    for n in range(1, iterations + 1):
        size = sizes[n % len(sizes)]
        for worker, rows in enumerate(workers):
            members = list(range(worker // size * size, (worker // size + 1) * size))
            compute_s = 0.1 if worker else 0.2
            last_s = 0.2 if 0 in members else 0.1
            taken_s = trip_s + (ring_s(size) if size > 1 else 0.0)
            clock_s = n * late_s if worker == 1 else 0.0
            rows.append(
                {
                    "iteration": n,
                    "start_s": n + clock_s,
                    "compute_s": compute_s,
                    "sync_wait_s": last_s - compute_s + taken_s,
                    "members": members,
                }
            )
    sync = {"strategy": strategy, "options": options}
    return {
        "format": "pipeplan-sync-trace/2",
        "sync": sync,
        "parameter_bytes": [BYTES],
        "workers": workers,
    }


def test_a_trace_has_the_times_of_computation() -> None:
    world = calibrated(GUESS, SyncTrace.parse(traced()))
    assert world.iteration_s == pytest.approx(0.1)
    assert world.slowdown == pytest.approx((2.0, 1.0, 1.0, 1.0))
    assert world.jitter_s == pytest.approx(0)
    assert world.ranks[0].parameter_bytes == BYTES
    assert world.scheduler_round_trip_s == pytest.approx(ROUND_TRIP_S)


@pytest.mark.parametrize("gb_per_s", [0.3, 3.0, 10.0])
def test_groups_of_two_sizes_separate_latency_from_bandwidth(gb_per_s: float) -> None:
    world = calibrated(replace(GUESS, between=LinkCost(1e-5, gb_per_s)), traced())
    assert world.between.latency_s == pytest.approx(LATENCY_S)
    assert world.between.bandwidth_gb_per_s == pytest.approx(GB_PER_S)
    # No group was on one node.
    assert world.within == GUESS.within


def test_groups_of_one_size_scale_both() -> None:
    world = calibrated(GUESS, traced((4,), "all_reduce", overlap=False))
    assert world.between.latency_s == pytest.approx(
        GUESS.between.latency_s * 100 / world.between.bandwidth_gb_per_s
    )
    flow = world.all_reduce((0, 1, 2, 3), BYTES)
    seconds = flow.fixed_s + flow.bytes / 1e9 / flow.most_gb_per_s
    assert seconds == pytest.approx(ring_s(4))


def test_members_of_a_group_may_continue_some_milliseconds_apart() -> None:
    data = traced(late_s=1e-4)
    assert calibrated(GUESS, data).between.bandwidth_gb_per_s == pytest.approx(GB_PER_S, rel=0.1)


@pytest.mark.parametrize("strategy", ["all_reduce", "cross_iteration", "parameter_server"])
def test_a_trace_of_overlapped_communication_is_refused(strategy: str) -> None:
    with pytest.raises(PipeplanError, match=f"trace of {strategy} does not show"):
        calibrated(GUESS, traced(strategy=strategy))


def _of_two_ranks() -> World:
    (rank,) = small_world().ranks
    return replace(GUESS, ranks=(rank, rank))


@pytest.mark.parametrize(
    ("world", "data", "named"),
    [
        (GUESS, traced(late_s=0.05), r"iteration \d+ of pipeline rank 0 among workers .*dri"),
        (_of_two_ranks(), traced(), "parameter_bytes: of 1 pipeline ranks"),
        (GUESS, traced(iterations=1), "two iterations"),
        (GUESS, traced(iterations=0), "two iterations"),
    ],
)
def test_an_unfit_trace_is_refused(world: World, data: dict[str, object], named: str) -> None:
    with pytest.raises(PipeplanError, match=named):
        calibrated(world, data)


def test_a_trace_of_another_number_of_pipelines_is_refused() -> None:
    linked = WorkerLinks(cluster(["a", "b", "c"], [link("a", "b")]), (("a", "b", "c"),))
    with pytest.raises(PipeplanError, match="workers: 4 in the trace, the plan has 3 pipelines"):
        calibrated(replace(GUESS, workers=3, links=linked), traced())


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
    data = traced()
    data["workers"][0][0][field] = value
    with pytest.raises(PipeplanError, match=named):
        SyncTrace.parse(data)
