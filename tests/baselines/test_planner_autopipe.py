"""AutoPipe's balance, simulated 1F1B and moves; PipeDream's two levels."""

from functools import cache
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
from builders import graph, layer, parameter
from hypothesis import given
from hypothesis import strategies as st
from planner_layers import layers_of
from tiny_problems import tiny_problem

from planner import Cluster, Job, Problem
from planner.baselines.autopipe import Balance, Timings, _Search, plan, simulate_1f1b
from planner.baselines.layers import Stage, equal_machines
from planner.baselines.pipedream import Program
from planner.baselines.pipedream import plan as pipedream
from planner.baselines.stage_costs import StageCosts, device_blocks
from planner.costs.placement import place
from planner.schedules.assignment import balanced_assignment
from planner.schedules.whole import one_forward_one_backward
from planner.simulation.simulator import simulate

# --- AutoPipe -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 4), st.data())
def test_balanced_cuts_have_the_least_bottleneck(times, stages: int, data: st.DataObject) -> None:
    prefix = np.concatenate([[0.0], np.cumsum(times)])
    balance = Balance(prefix[None, :] - prefix[:, None])
    length = len(times)
    stages = min(stages, length)

    def bottleneck(cuts) -> float:
        return max(prefix[j] - prefix[i] for i, j in pairwise(cuts))

    end = data.draw(st.integers(stages, length))
    begin = data.draw(st.integers(0, length - stages))
    for cuts, first, last in (
        (balance.front(end, stages), 0, end),
        (balance.back(begin, stages), begin, length),
    ):
        assert (cuts[0], cuts[-1], len(cuts)) == (first, last, stages + 1)
        assert list(cuts) == sorted(set(cuts))
        every = combinations(range(first + 1, last), stages - 1)
        assert bottleneck(cuts) == min(bottleneck([first, *inner, last]) for inner in every)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (3, 2), (4, 7), (4, 4)])
def test_simulated_1f1b_takes_as_long_as_in_the_simulator(seed, stages, microbatches) -> None:
    """Links are fast enough that no transfer waits for another."""
    problem = tiny_problem(
        seed,
        layers=stages,
        devices=stages,
        microbatches=microbatches,
        topology="chain",
        link_scale=100,
    )
    chain = layers_of(problem)
    partition = [Stage(n, n + 1, (f"d{n}",)) for n in range(stages)]
    placed = place(problem, chain.specs(partition))
    timeline = simulate(placed, one_forward_one_backward(placed, balanced_assignment(placed)))
    channels = [(n, f"d{n}", f"d{n + 1}") for n in range(stages - 1)]
    found = simulate_1f1b(
        Timings(
            np.array([placed.seconds(n, "F", f"d{n}") for n in range(stages)]),
            np.array([placed.seconds(n, "B", f"d{n}") for n in range(stages)]),
            np.array([placed.transfer(n, "F", u, v).seconds for n, u, v in channels]),
            np.array([placed.transfer(n + 1, "B", v, u).seconds for n, u, v in channels]),
        ),
        microbatches,
    )
    assert found[0] == pytest.approx(max(event.end_s for event in timeline.operations))


def test_the_slowest_stage_is_critical_and_many_microbatches_are_counted_by_it() -> None:
    for slow in range(4):
        seconds = np.where(np.arange(4) == slow, 5.0, 1.0)
        pipeline = Timings(seconds, 2 * seconds, np.zeros(3), np.zeros(3))
        short, long = (simulate_1f1b(pipeline, count) for count in (16, 1016))
        assert short[1] == long[1] == slow
        assert long[0] == pytest.approx(short[0] + 1000 * 15)


def test_moving_layers_away_from_the_critical_stage_beats_the_balanced_start() -> None:
    better = 0
    for seed in range(12):
        problem = tiny_problem(
            seed, layers=14, devices=4, microbatches=4, replication=False, link_scale=10
        )
        chain = layers_of(problem)
        costs = StageCosts(chain, device_blocks(chain))
        search = _Search(costs, Balance(costs.work_s(costs.blocks[:1])), 4)
        start_s = search.time_s
        search.improve()
        assert search.time_s <= start_s
        better += search.time_s < start_s
    assert better >= 3


def test_autopipe_gives_every_stage_equally_many_neighbours_in_file_order() -> None:
    partition = plan(
        layers_of(tiny_problem(2, layers=9, devices=6, microbatches=12, link_scale=0.1))
    )
    devices = [device for stage in partition for device in stage.devices]
    assert devices == [f"d{n}" for n in range(len(devices))]
    assert len({len(stage.devices) for stage in partition}) == 1


# --- PipeDream's levels ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_the_program_of_a_level_is_its_recursion(seed: int) -> None:
    random = np.random.default_rng(seed)
    length, units = 4, 4
    stages = [random.integers(1, 20, (length + 1,) * 2).astype(float) for _ in range(units)]
    for stage in stages:
        stage[np.tril_indices(length + 1)] = inf
    transfer = random.integers(0, 9, length + 1).astype(float)
    program = Program(stages, transfer, range(length))

    @cache
    def best(i: int, j: int, m: int) -> float:
        options = [stages[m - 1][i, j]]
        for s in range(i + 1, j):
            for last in range(1, m):
                options.append(max(best(i, s, m - last), transfer[s], stages[last - 1][s, j]))
        return min(options)

    for i, j in combinations(range(length + 1), 2):
        for m in range(1, units + 1):
            assert program.best[m - 1][i, j] == best(i, j, m)
            parts = program.parts(i, j, m)
            costs = [stages[part.units - 1][part.begin, part.end] for part in parts]
            costs += [transfer[part.begin] for part in parts[1:]]
            assert max(costs) == best(i, j, m)
            assert sum(part.units for part in parts) == m


def two_machines(gb_per_s: float) -> Cluster:
    link = {"bandwidth_gb_per_s": gb_per_s}
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "switches": ["net"],
            "device_types": {
                "unit": {
                    "memory_gib": 100,
                    "memory_bandwidth_gb_per_s": 1000,
                    "peak_tflop_per_s": {"float32": 1},
                    "efficiency": 1,
                }
            },
            "nodes": [
                {
                    "name": name,
                    "devices": 2,
                    "type": "unit",
                    "link": {"bandwidth_gb_per_s": gb_per_s},
                }
                for name in ("n0", "n1")
            ],
            "links": [{"between": [name, "net"], **link} for name in ("n0", "n1")],
        }
    )


@pytest.mark.parametrize(
    ("parameter_gb", "wanted"),
    [
        # One microbatch takes 3 s a layer. All in one stage: max(6 / 4, synchronisation).
        (0.25, [("a", "b", 4)]),
        # All in one stage would synchronise 4 GB in 4 s, two stages of one device take 3 s, and a
        # machine a stage max(3 / 2, 2 GB in 2 s, transfers of 2 GB in 2 s).
        (2, [("a", 2), ("b", 2)]),
    ],
)
def test_pipedream_over_equal_machines_by_hand(parameter_gb: float, wanted: list) -> None:
    cluster = two_machines(1)
    assert equal_machines(cluster) == (("n0/gpu0", "n0/gpu1"), ("n1/gpu0", "n1/gpu1"))
    elements = int(parameter_gb * 1e9 / 4)
    model = graph(
        [layer("a", parameters=["p"]), layer("b", parameters=["q"])],
        parameters=[parameter("p", elements), parameter("q", elements)],
    )
    problem = Problem(model, cluster, Job(microbatches=1, optimizer="sgd"))
    chain = layers_of(problem)
    found = [(*spec.layers, len(spec.devices)) for spec in chain.specs(pipedream(chain))]
    assert found == wanted
