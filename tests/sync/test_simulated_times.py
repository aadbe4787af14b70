"""Virtual times of simple cases, worked out by hand."""

from dataclasses import replace

import pytest
from small_worlds import BYTES, COMPUTE_S, pipeline_world, run_of, small_world

from planner.errors import PipeplanError
from planner.sync.simulation.run import Scenario
from planner.sync.simulation.slowness import BLOCK, Slowdowns, Steady, parse_slowness
from planner.sync.simulation.world import LinkCost, World

MOVING_S = BYTES / 1e9
RING_S = 14 * 1e-3 + 14 / 8 * MOVING_S
"""All-reduce of 8 workers: 2 * 7 steps of an eighth of the bytes."""
TELLING_S = 7 * 1e-3
"""Ranks in step tell each other their losses at the end: a ring of 7 small messages."""
NEARLY = 6e-3
"""The last iteration's losses are not told, nor parameters pulled, in the time of the run."""
LARGE = "bucket_mib=1000"


def throughput(strategy: str, slowness: str = "steady", **fields: object) -> float:
    return run_of(strategy, slowness=slowness, **fields).iterations_per_s


def test_all_reduce_takes_computation_and_ring() -> None:
    found = throughput(f"all_reduce:overlap=false,{LARGE}")
    assert found == pytest.approx(8 / (COMPUTE_S + RING_S + TELLING_S), rel=NEARLY)


def test_overlapped_buckets_leave_the_last_one_over() -> None:
    # Two buckets: the first is ready 25 ms before the backward ends, and takes 22.75 ms.
    found = throughput("all_reduce:bucket_mib=5")
    assert found == pytest.approx(
        8 / (COMPUTE_S + 14e-3 + 14 / 8 * MOVING_S / 2 + TELLING_S), rel=NEARLY
    )


def test_cross_iteration_hides_an_all_reduce_shorter_than_an_iteration() -> None:
    assert throughput("cross_iteration") == pytest.approx(8 / COMPUTE_S)


def test_decoupled_gathers_behind_the_forward() -> None:
    # One bucket: a half of the ring after the backward, a half before the forward.
    whole = throughput("decoupled:bucket_mib=1000")
    # The losses are told while it gathers.
    assert 8 / whole + TELLING_S == pytest.approx(8 / throughput(f"all_reduce:{LARGE}"), rel=NEARLY)
    # Many: all but the ends hide.
    assert throughput("decoupled:bucket_mib=2") > throughput("all_reduce:bucket_mib=2")


def test_a_synchronous_server_takes_all_gradients_in_and_hands_parameters_out() -> None:
    run = run_of("parameter_server", iterations=200)
    # The first worker is the server; the messages of seven share its card each way.
    round_s = COMPUTE_S + 2 * (7 * MOVING_S + 1e-3)
    assert run.iterations_per_s == pytest.approx(8 / round_s, rel=NEARLY)
    assert run.sent_bytes == 2 * 8 * 200 * BYTES


def test_an_asynchronous_server_is_as_fast_as_its_card() -> None:
    world = replace(small_world(), ranks=(replace(small_world().ranks[0], parameter_bytes=10**8),))
    run = run_of("parameter_server:mode=async", world, iterations=100)
    # The seven others stay in step, and share 100 ms each way over its card; its own worker goes
    # on beside them.
    assert sum(run.done[1:]) / run.time_s == pytest.approx(7 / (COMPUTE_S + 1.4), rel=0.05)
    assert run.done[0] / run.time_s == pytest.approx(1 / COMPUTE_S, rel=0.05)


def test_a_worker_twice_as_slow_halves_all_reduce_and_no_asynchronous_strategy() -> None:
    world = small_world(ranks=(replace(small_world().ranks[0], parameter_bytes=8),))
    exact = run_of("all_reduce", world).iterations_per_s
    assert run_of("all_reduce", world, "slow:0x2").iterations_per_s / exact == pytest.approx(
        0.5, rel=0.1
    )
    for strategy in ("parameter_server:mode=async", "eager_parameter_server", "ad_psgd"):
        steady = run_of(strategy, world, iterations=200).iterations_per_s
        slow = run_of(strategy, world, "slow:0x2", iterations=200).iterations_per_s
        assert slow / steady == pytest.approx((7 + 0.5) / 8, rel=0.01)


@pytest.mark.parametrize("strategy", ["ad_psgd", "parameter_server:mode=async", "all_reduce"])
def test_a_pipeline_s_places_synchronise_by_themselves(strategy: str) -> None:
    world = pipeline_world()
    run = run_of(strategy, world)
    assert sum(run.done) >= 200
    # The second place moves 30 ms of bytes, of which 20 ms hide behind the first one's backward.
    assert 4 / (0.1 + 0.25) < run.iterations_per_s <= 4 / world.iteration_s * (1 + 1e-9)


def test_pipelines_of_a_node_share_its_card() -> None:
    fast = LinkCost(1e-3, 1000.0)
    found = run_of("parameter_server", small_world(pipelines_per_node=4, within=fast))
    # Four are on the other node; the three beside the server do not use the card.
    round_s = COMPUTE_S + 2 * (4 * MOVING_S + 1e-3)
    assert found.iterations_per_s == pytest.approx(8 / round_s, rel=NEARLY)


def test_a_node_by_itself_uses_no_card() -> None:
    world = small_world(pipelines_per_node=8, between=LinkCost(1.0, 1e-3))
    found = run_of(f"all_reduce:overlap=false,{LARGE}", world).iterations_per_s
    assert found == pytest.approx(8 / (COMPUTE_S + RING_S + TELLING_S), rel=NEARLY)
    assert not world.all_reduce((0,), BYTES).sent_bytes


def test_a_scheduler_s_answer_takes_its_round_trip() -> None:
    world = small_world(2, ranks=(replace(small_world().ranks[0], parameter_bytes=0),))
    quick = run_of("partial_all_reduce", world)
    slow = run_of("partial_all_reduce", replace(world, scheduler_round_trip_s=0.05))
    per_iteration_s = 2 / slow.iterations_per_s - 2 / quick.iterations_per_s
    assert per_iteration_s == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("strategy", ["all_reduce", "partial_all_reduce", "semi_decentralized"])
def test_a_worker_that_leaves_keeps_nobody_waiting(strategy: str) -> None:
    run = run_of(strategy, slowness="fault:3:1", iterations=100)
    assert run.done[3] <= 10
    assert min(done for worker, done in enumerate(run.done) if worker != 3) > 80
    back = run_of(strategy, slowness="fault:3:1:5", iterations=100)
    assert 40 < back.done[3] < 80


def test_an_average_behind_the_computation_keeps_nobody_waiting() -> None:
    """Up to as long as an iteration; then only what is longer is waited for."""
    alone_per_s = 8 / COMPUTE_S
    for slowness in ("steady", "sleep:0.1:0.3"):
        hidden = run_of("semi_decentralized:overlap=true", slowness=slowness, iterations=200)
        assert hidden.idle_share < 0.02
    for grouped in ("semi_decentralized", "partial_all_reduce"):
        assert run_of(grouped).idle_share > 0.1
        assert run_of(f"{grouped}:overlap=true").idle_share < 0.02
    long = small_world(ranks=(replace(small_world().ranks[0], parameter_bytes=20 * BYTES),))
    hidden = run_of("semi_decentralized:overlap=true", long, iterations=200)
    assert 0.25 * alone_per_s < hidden.iterations_per_s < 0.6 * alone_per_s


@pytest.mark.parametrize("strategy", ["ad_psgd", "parameter_server:mode=async"])
def test_an_asynchronous_strategy_goes_on_without_a_worker(strategy: str) -> None:
    run = run_of(strategy, slowness="fault:1:1:5", iterations=100)
    assert run.done[1] < min(done for worker, done in enumerate(run.done) if worker != 1)
    assert run.done[1] > 40


def test_slowness_depends_on_seed_worker_and_iteration_alone() -> None:
    trace, _ = parse_slowness("drift:0.2+sleep:0.1:0.3+slow:1x3")
    first, again = (Slowdowns(small_world(), trace, 5) for _ in range(2))
    late = [again.at(worker, 3 * BLOCK) for worker in range(8)]
    assert late == first.of_all(3 * BLOCK).tolist()
    assert [first.at(2, i) for i in range(1, 9)] == [again.at(2, i) for i in range(1, 9)]
    assert Slowdowns(small_world(), trace, 6).at(0, 1) != first.at(0, 1)


def test_sleeps_are_as_long_and_as_frequent_as_they_say() -> None:
    trace, _ = parse_slowness("sleep:0.1:0.3")
    slowdowns = Slowdowns(small_world(slots=10), trace, 0)
    rows = [slowdowns.of_all(i).mean() for i in range(1, 1001)]
    # 10 slots of which each sleeps 0.03 s on average, on top of 0.1 s.
    assert sum(rows) / len(rows) == pytest.approx(1 + 10 * 0.03 / COMPUTE_S, rel=0.05)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "slowness: '' cannot be read; expected steady, slow:WORKERxFACTOR,…, sleep:"),
        ("fast:1", "slowness: 'fast:1' cannot be read; expected steady"),
        ("slow:0x2+", "slowness: the empty part of 'slow:0x2+' cannot be read; expected steady"),
        ("slow", "slowness: 'slow' has 0 values; write it as slow:WORKERxFACTOR,…"),
        ("slow:0", "slowness: '0' in 'slow:0' is not WORKERxFACTOR; write it as slow:0x2"),
        ("slow:ax2", "slowness: worker 'a' of 'slow:ax2' is not a whole number from 0"),
        ("slow:-1x2", "slowness: worker '-1' of 'slow:-1x2' is not a whole number from 0"),
        ("slow:0x0", "slowness: factor '0' of 'slow:0x0' is not a number from 0.01 to 1000"),
        ("sleep:0.1", "slowness: 'sleep:0.1' has 1 values; write it as sleep:PROBABILITY:SEC"),
        ("sleep:2:1", "slowness: probability '2' of 'sleep:2:1' is not a number from 0 to 1"),
        ("sleep:0.1:1e30", "slowness: seconds '1e30' of 'sleep:0.1:1e30' is not a number from 0"),
        ("sleep:0.1:nan", "slowness: seconds 'nan' of 'sleep:0.1:nan' is not a number from 0"),
        ("drift:-1", "slowness: spread '-1' of 'drift:-1' is not a number from 0 to 1"),
        ("drift:10", "slowness: spread '10' of 'drift:10' is not a number from 0 to 1"),
        ("fault:0.5:1", "slowness: worker '0.5' of 'fault:0.5:1' is not a whole number from 0"),
        ("fault:0:-1", "slowness: leaves_s '-1' of 'fault:0:-1' is not a number from 0 to 1e+06"),
        ("fault:0:1:x", "slowness: returns_s 'x' of 'fault:0:1:x' is not a number from 0"),
        (
            "fault:0:0.1:0.05",
            "slowness: returns_s 0.05 of 'fault:0:0.1:0.05' is not after leaves_s 0.1; give",
        ),
        ("slow:0x2,0x3", "slowness: slow: worker 0 is given twice, 2 and 3 times as slow; give"),
        ("slow:0x2+slow:1x2,0x3", "slowness: slow: worker 0 is given twice, 2 and 3 times as"),
    ],
)
def test_slowness_that_cannot_be_read_names_the_value_and_its_range(text: str, told: str) -> None:
    with pytest.raises(PipeplanError) as raised:
        parse_slowness(text)
    assert str(raised.value).startswith(told)


def test_what_is_optional_may_be_left_out() -> None:
    assert parse_slowness("drift") == parse_slowness("drift:0.1")
    assert parse_slowness("fault:1:2") == parse_slowness("fault:1:2:inf")


def test_a_scenario_names_what_is_wrong() -> None:
    _, faults = parse_slowness("fault:8:1")
    with pytest.raises(PipeplanError, match="fault: there is no worker 8") as raised:
        Scenario(small_world(), 0, Steady(), faults)
    assert "iterations: 0" in str(raised.value)
    with pytest.raises(PipeplanError, match="slow: worker 8"):
        run_of("all_reduce", slowness="slow:8x2")


def test_a_world_names_what_is_wrong() -> None:
    world = small_world()
    with pytest.raises(PipeplanError, match="workers: 0"):
        World(0, world.ranks, world.within, world.between)
    with pytest.raises(PipeplanError, match="slowdown: 2 factors for 8 workers"):
        replace(world, slowdown=(1.0, 2.0))
