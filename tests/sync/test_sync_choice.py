"""Which strategy is chosen, and what is said of it."""

import math
from dataclasses import replace
from math import prod

import pytest
from small_worlds import small_world

from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.choice import EXACT, HORIZON, InterruptedChoice, StrategyChoice, choose, spread_of
from planner.sync.simulation.comparison import OVERLAPPED, PLAIN, compare_syncs
from planner.sync.simulation.run import Scenario, SimulatedRun, simulate_sync
from planner.sync.simulation.slowness import SimulatedFault, Sleep, SlowWorker, Steady, Trace
from planner.sync.simulation.training import Learning
from planner.sync.simulation.world import World
from planner.sync.strategies import parse_sync, sync_name


def quick_network(**fields: object) -> World:
    place = replace(small_world().ranks[0], parameter_bytes=1000)
    world = small_world(**fields, ranks=(place,))
    return replace(world, between=replace(world.between, latency_s=1e-5), within=world.within)


def chosen(world: World, trace: Trace | None = None) -> StrategyChoice:
    """The choice after a quarter of the usual iterations, which show as much of these worlds."""
    return choose(Scenario(world, HORIZON // 4, trace or Steady()), seeds=3)


def test_steady_pipelines_on_a_quick_network_stay_exact() -> None:
    choice = chosen(quick_network())
    assert choice.sync in EXACT
    assert "pipelines are steady" in choice.reason
    assert "best approximate one" in choice.reason
    assert choice.reason.endswith(
        ". Candidates were all_reduce, fused, decoupled, cross_iteration, "
        "partial_all_reduce:schedule=static, partial_all_reduce, "
        "partial_all_reduce:group_size=2,overlap=true, ad_psgd and "
        "semi_decentralized:overlap=true, each at the best of 5 learning rates"
    )


@pytest.mark.parametrize(
    ("trace", "found"),
    [
        (SlowWorker(((3, 2.1),)), "pipeline 3 takes 2.10 times as long as the median one"),
        pytest.param(
            *(Sleep(0.2, 0.3), "one iteration in 20 takes 4.00 times as long as usual"),
            marks=pytest.mark.extensive,
        ),
    ],
)
def test_slow_workers_get_what_is_soonest_at_the_loss(trace: Trace, found: str) -> None:
    choice = chosen(quick_network(), trace)
    assert choice.sync not in EXACT
    assert choice.reason.startswith(found)
    assert "ad_psgd and semi_decentralized:overlap=true, each at" in choice.reason
    rows = choice.comparison.results
    best = min(rows, key=lambda row: row.target_s)
    assert best.sync == choice.sync
    assert best.target_speedup > 1.1
    exact = next(row for row in rows if row.sync == OVERLAPPED)
    rate = best.learning_rate / exact.learning_rate
    told = f"at {rate:g} times its learning rate: tune yours"
    assert (told if rate != 1 else "at the same learning rate") in choice.reason


SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)


def times_to_targets_s(own: SimulatedRun, all_reduce: SimulatedRun, iterations: int) -> list[float]:
    """When a run had the losses of all-reduce; what it did not reach counts twice."""
    found = []
    for share in SHARES:
        loss = all_reduce.loss_after(share * iterations)
        reached_s, rival_s = own.time_to_s(loss), all_reduce.time_to_s(loss)
        found.append(2 * max(own.time_s, rival_s) if reached_s is None else reached_s)
    return found


def test_every_strategy_has_the_learning_rate_that_is_soonest_at_the_losses() -> None:
    """Against runs one by one, with the seeds that follow; exact strategies share theirs."""
    scenario = Scenario(small_world(), 30, SlowWorker(((3, 2.0),)))
    rates, seeds = (0.01, 0.1, 1.0), (3, 4)
    syncs = [parse_sync(name) for name in ("fused", "all_reduce", "ad_psgd")]
    found = compare_syncs(scenario, syncs, seeds=3, rates=rates)

    def tried(rate: float, sync: Sync) -> list[SimulatedRun]:
        learnings = [Learning(learning_rate=rate, seed=seed) for seed in seeds]
        return [simulate_sync(replace(scenario, learning=one), sync) for one in learnings]

    all_reduce = {rate: tried(rate, OVERLAPPED) for rate in rates}
    losses = {
        rate: sum(run.loss_after(share * 8 * 30) for run in runs for share in SHARES)
        for rate, runs in all_reduce.items()
    }
    best = min(rates, key=lambda rate: losses[rate])
    assert [row.learning_rate for row in found.results[:2]] == [best, best]
    times_s = {
        rate: prod(
            time_s
            for own, rival in zip(tried(rate, syncs[2]), all_reduce[best], strict=True)
            for time_s in times_to_targets_s(own, rival, 8 * 30)
        )
        for rate in rates
    }
    assert found.results[2].learning_rate == min(rates, key=lambda rate: times_s[rate])
    own = replace(scenario, learning=Learning(learning_rate=found.results[2].learning_rate))
    (alone,) = compare_syncs(own, syncs[2:], seeds=3).results
    assert alone.final_loss == found.results[2].final_loss
    assert compare_syncs(scenario, syncs).results[0].learning_rate == Learning().learning_rate


@pytest.mark.extensive
def test_a_loose_strategy_must_gain_as_much_as_asked() -> None:
    scenario = Scenario(quick_network(), HORIZON // 4, SlowWorker(((3, 2.1),)))
    assert choose(scenario, seeds=2, least_gain=5).sync in EXACT


@pytest.mark.extensive
def test_a_slow_network_is_overlapped() -> None:
    place = replace(small_world().ranks[0], parameter_bytes=60_000_000)
    choice = chosen(small_world(ranks=(place,)))
    assert choice.sync not in (parse_sync("all_reduce"), parse_sync("fused"))
    # Loose ones have to gain a twentieth.
    rows = choice.comparison.results
    (own_s,) = [row.target_s for row in rows if row.sync == choice.sync]
    assert own_s <= 1.05 * min(row.target_s for row in rows)


def test_choices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PipeplanError, match="one pipeline has nobody"):
        choose(small_world(1))
    with pytest.raises(PipeplanError, match="least_gain: -1"):
        choose(small_world(), least_gain=-1)


@pytest.mark.extensive
def test_processes_change_nothing() -> None:
    scenario = Scenario(small_world(), 30, Sleep(0.1, 0.3))
    syncs = (parse_sync("semi_decentralized"), parse_sync("ad_psgd"))
    alone, together = (compare_syncs(scenario, syncs, seeds=2, jobs=jobs) for jobs in (1, 2))
    assert alone == together
    assert [row.sync for row in alone.results] == list(syncs)


def test_all_reduce_is_its_own_measure() -> None:
    found = compare_syncs(Scenario(small_world(), 30), (PLAIN, OVERLAPPED))
    assert found.results[0].throughput_ratio == 1
    assert found.results[1].overlapped_ratio == 1
    assert found.results[1].target_speedup == 1


def test_a_loss_that_is_not_reached_counts_twice_the_time_in_which_it_was_not() -> None:
    """Against runs one by one; the server steps on stale gradients with too large a rate."""
    server = parse_sync("eager_parameter_server")
    learning = Learning(learning_rate=1.0)
    scenario = Scenario(small_world(), 30, SlowWorker(((3, 4.0),)), learning=learning)
    (row,) = compare_syncs(scenario, (server,), seeds=2).results
    times_s: list[float] = []
    missed = 0
    for seed in (0, 1):
        own, rival = (
            simulate_sync(scenario.with_seed(seed), sync) for sync in (server, OVERLAPPED)
        )
        mine_s = times_to_targets_s(own, rival, 8 * 30)
        times_s += mine_s
        missed += sum(time_s >= 2 * own.time_s for time_s in mine_s)
    assert row.missed_targets == missed
    assert 0 < missed < len(times_s)
    assert row.target_s == pytest.approx(prod(times_s) ** (1 / len(times_s)))


def test_ctrl_c_keeps_what_is_done() -> None:
    def interrupt(sync: object, seeds: int) -> None:
        if sync == parse_sync("ad_psgd"):
            raise KeyboardInterrupt

    syncs = (OVERLAPPED, parse_sync("ad_psgd"), parse_sync("semi_decentralized"))
    found = compare_syncs(Scenario(small_world(), 10), syncs, progress=interrupt)
    assert found.interrupted
    assert [row.sync for row in found.results] == list(syncs[:2])


@pytest.mark.parametrize("field", ["seeds", "jobs"])
def test_a_comparison_names_what_is_out_of_range(field: str) -> None:
    with pytest.raises(PipeplanError, match=f"{field}: 0 is not"):
        compare_syncs(Scenario(small_world(), 10), **{field: 0})


def test_learning_rates_that_are_none_are_refused() -> None:
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PipeplanError, match=f"rates: {rate:g} is not a learning rate above 0"):
            choose(small_world(), rates=(0.1, rate))


def test_of_two_pipelines_the_slower_one_is_compared_with_the_other() -> None:
    scenario = Scenario(small_world(2), 10, SlowWorker(((0, 2.0),)))
    found = spread_of(scenario)
    assert (found.slowest, found.slowest_factor) == (0, 2.0)


def test_a_choice_among_pipelines_that_leave_says_what_a_job_does_then() -> None:
    fault = SimulatedFault(0, 1.0, math.inf)
    scenario = Scenario(quick_network(), 10, faults=(fault,))
    told = "as if a job without the pipelines that leave went on: it ends, and resumes from a"
    assert told in choose(scenario, seeds=1, rates=()).reason
    assert told not in choose(replace(scenario, faults=()), seeds=1, rates=()).reason


def test_ctrl_c_keeps_the_candidates_that_are_done() -> None:
    def interrupt(sync: object, seeds: int) -> None:
        if sync == parse_sync("ad_psgd"):
            raise KeyboardInterrupt

    with pytest.raises(InterruptedChoice, match="after 8 of 9 candidates; none is chosen") as found:
        choose(Scenario(small_world(), 10), seeds=1, rates=(), progress=interrupt)
    names = [sync_name(row.sync) for row in found.value.comparison.results]
    assert names[:3] == ["all_reduce", "fused", "decoupled"]
    assert len(names) == 8
