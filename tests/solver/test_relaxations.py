"""Bounds over relaxed clusters against every partition of small problems."""

import math
from typing import Any

import numpy as np
import pytest
from brute_force import all_partitions
from builders import GIGA, boundary, cluster, device_type, graph, layer, link
from hypothesis import given
from hypothesis import strategies as st
from tiny_problems import tiny_problem

from benchmarks.plans.oracle import optimum_below
from planner import Cluster, Job, Problem
from planner.costs.placement import is_connected, place
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.chain import Chain
from planner.search.partition.intervals import coarse_cuts
from planner.search.partition.relaxations import relaxed_intervals, type_figures
from planner.search.partition.relaxations.surrogate_relaxation import SurrogateRelaxation
from planner.search.partition.relaxations.type_relaxation import TypeRelaxation
from planner.search.partition.spans import MemoryLevel, ReplicaSpan, SpanTable, spans_in_memory
from planner.space import Backward

ROUNDING = 1 + 1e-9
CASES = [
    {"layers": 5, "devices": 3, "types": types, "replication": replication, "topology": topology}
    for types in (1, 2, 3)
    for replication in (False, True)
    for topology in ("mesh", "chain", "switches")
]


def least_bound_s(problem: Problem) -> float:
    placed = (place(problem, specs) for specs in all_partitions(problem))
    split = problem.job.splits
    bounds = (schedule_bound_s(p, split=split) for p in placed if is_connected(p))
    return min(bounds, default=math.inf)


def bounds_s(problem: Problem, known_s: float) -> tuple[float, float]:
    chain, links = Chain(problem), problem.cluster.link_table
    relaxed = TypeRelaxation(chain, links).bound_s(known_s)
    return relaxed, SurrogateRelaxation(chain, links).bound_s(known_s)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("seed", "backward"), [(0, "whole"), (1, "any"), (2, "split")])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_partition_beats_a_relaxation(
    case: dict[str, Any], seed: int, backward: Backward, overlap: bool
) -> None:
    problem = tiny_problem(
        seed,
        microbatches=5,
        backward=backward,
        overlap=overlap,
        largest_mib=60,
        memory_mib=10_000,
        **case,
    )
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert work_bound_s(Chain(problem)) <= bound_s * ROUNDING
        assert bound_s <= best_s * ROUNDING


@given(st.data())
def test_no_partition_of_any_small_problem_beats_a_relaxation(data: st.DataObject) -> None:
    devices = data.draw(st.integers(2, 4))
    problem = tiny_problem(
        data.draw(st.integers(0, 999)),
        layers=data.draw(st.integers(2, 4)),
        devices=devices,
        microbatches=data.draw(st.integers(1, 7)),
        types=data.draw(st.integers(1, 3)),
        replication=data.draw(st.booleans()),
        tied=data.draw(st.booleans()),
        topology=data.draw(st.sampled_from(["mesh", "chain", "switches"])),
        cut_mib=data.draw(st.sampled_from([1.0, 7.5, 30.0, 100.0])),
        link_scale=data.draw(st.sampled_from([0.2, 1.0, 5.0])),
        backward=data.draw(st.sampled_from(["whole", "any"])),
        overlap=data.draw(st.booleans()),
        largest_mib=data.draw(st.sampled_from([8, 60])),
        memory_mib=10_000,
    )
    node = data.draw(st.sampled_from([None, 1, 2, 3]))
    if node is not None:
        inside, outside = data.draw(st.sampled_from([(10, 0.2), (2, 0.5), (1, 1), (0.5, 5)]))
        problem = with_links(problem, inside=inside, outside=outside, node=node)
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert bound_s <= best_s * ROUNDING


@pytest.mark.parametrize("seed", range(4))
def test_on_like_devices_and_links_the_relaxation_is_exact(seed: int) -> None:
    """With whole backwards: two programs may each keep a limit that no partition keeps."""
    problem = tiny_problem(seed, layers=6, devices=3, microbatches=6, replication=False)
    uniform = with_links(problem, inside=0.5, outside=0.5, node=3)
    best_s = least_bound_s(uniform)
    assert bounds_s(uniform, 2 * best_s)[0] == pytest.approx(best_s, rel=3e-4)


@pytest.mark.extensive
@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_crossings_of_a_network_are_counted_for_no_more_than_there_are(
    seed: int, replication: bool
) -> None:
    problem = tiny_problem(seed, layers=5, devices=4, microbatches=4, replication=replication)
    nodes = with_links(problem, inside=10.0, outside=0.2, node=2)
    assert nodes.cluster.link_table.groups is not None
    best_s = least_bound_s(nodes)
    for bound_s in bounds_s(nodes, 2 * best_s):
        assert bound_s <= best_s * ROUNDING


@pytest.mark.extensive
@pytest.mark.parametrize("seed", [9, 16, 49])
def test_states_that_become_one_keep_the_lesser_time(seed: int) -> None:
    problem = tiny_problem(seed, layers=4, devices=5, microbatches=4, types=2)
    nodes = with_links(problem, inside=10.0, outside=0.2, node=2)
    best_s = least_bound_s(nodes)
    assert bounds_s(nodes, 2 * best_s)[0] <= best_s * ROUNDING


@pytest.mark.parametrize(("seed", "link_scale"), [(30, 1.0), (108, 1.0), (30, 0.2)])
def test_a_slower_replica_may_have_the_wider_link(seed: int, link_scale: float) -> None:
    problem = tiny_problem(
        seed, layers=3, devices=3, microbatches=2, types=3, cut_mib=30, link_scale=link_scale
    )
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert bound_s <= best_s * ROUNDING


def test_crossings_of_a_network_raise_the_bound() -> None:
    problem = tiny_problem(1, layers=6, devices=4, microbatches=2, replication=False)
    raised, plain = (
        bounds_s(with_links(problem, inside=10.0, outside=outside, node=2), 1e3)[0]
        for outside in (0.2, 10.0)
    )
    assert raised > plain * 1.01


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("types", [1, 2])
def test_relaxations_of_coarsened_chains_hold(
    seed: int, types: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaxed_intervals, "coarse_cuts", lambda chain: coarse_cuts(chain, 3))
    problem = tiny_problem(seed, layers=7, devices=3, microbatches=4, types=types)
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert 0 < bound_s <= best_s * ROUNDING


def test_layers_bound_to_a_type_raise_the_bound() -> None:
    problem = tiny_problem(3, layers=4, devices=2, microbatches=4, types=2, replication=False)
    times = {t: float(Chain(problem).forward_s(t).sum()) for t in Chain(problem).types}
    slow = max(times, key=times.__getitem__)
    record = problem.graph.record
    rows = tuple(row.model_copy(update={"device_types": (slow,)}) for row in record.layers)
    bound = Problem(
        type(problem.graph).from_record(record.model_copy(update={"layers": rows})),
        problem.cluster,
        problem.job,
    )
    assert bounds_s(bound, 1e3)[0] > bounds_s(problem, 1e3)[0] * 1.01


def with_links(problem: Problem, *, inside: float, outside: float, node: int) -> Problem:
    """The same devices in nodes of ``node``, on one network; without latency."""
    names = problem.cluster.device_names
    count = -(-len(names) // node)
    data = problem.cluster.model_dump(mode="json")
    data["switches"] = ["network", *(f"node{i}" for i in range(count))]
    data["links"] = [
        {"between": [name, f"node{i // node}"], "bandwidth_gb_per_s": inside}
        for i, name in enumerate(names)
    ]
    data["links"] += [
        {"between": [f"node{i}", "network"], "bandwidth_gb_per_s": outside} for i in range(count)
    ]
    job: Job = problem.job
    return Problem(problem.graph, Cluster.from_data(data), job)


@pytest.mark.extensive
@pytest.mark.parametrize("states", [1, 7, 14, 10**6])
@pytest.mark.parametrize("seed", range(3))
def test_a_stage_may_lie_in_more_groups_than_crossings_are_told_apart(
    seed: int, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type_figures, "MANY_STATES", states)
    problem = tiny_problem(seed, layers=3, devices=6, microbatches=6)
    nodes = with_links(problem, inside=10.0, outside=5.0, node=2)
    best_s = least_bound_s(nodes)
    assert bounds_s(nodes, 2 * best_s)[0] <= best_s * ROUNDING


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_of_a_problem_short_of_memory_beats_a_relaxation(seed: int) -> None:
    """Exhaustive optimum: every partition with every choice of recomputed layers."""
    problem = tiny_problem(
        seed,
        layers=3 + seed % 2,
        devices=2,
        microbatches=2 + seed % 3,
        types=1 + seed % 2,
        replication=seed % 4 == 3,
        backward=("whole", "any", "split")[seed % 3],
        memory_mib=(50.0, 70.0, 90.0)[seed % 3],
        recompute=seed % 4 != 2,
    )
    optimum = optimum_below(problem, 3.0)
    if optimum.best is not None:
        for bound_s in bounds_s(problem, 2 * optimum.time_s):
            assert bound_s <= optimum.time_s * ROUNDING + 2e-7  # The oracle rounds down to ticks.


def test_short_memory_raises_the_bound_by_recomputation() -> None:
    """Nothing fits without recomputation: then the bound is the largest time of interest."""
    roomy, short, again = (
        bounds_s(
            tiny_problem(
                0,
                layers=3,
                devices=2,
                microbatches=4,
                replication=False,
                memory_mib=memory_mib,
                recompute=recompute,
            ),
            10.0,
        )
        for memory_mib, recompute in ((1000.0, False), (70.0, False), (70.0, True))
    )
    for ample_s, never_s, recomputing_s in zip(roomy, short, again, strict=True):
        assert ample_s * 1.1 < recomputing_s < never_s == 10.0


def test_few_microbatches_in_memory_wait_for_their_round_trips() -> None:
    """Two equal layers on two devices, with room for one stash: 4 round trips of 6 s, not 4 s."""
    rows = [layer(name, stash_bytes=GIGA) for name in "ab"]
    joined = [link("d0", "d1", gb_per_s=1000)]
    unbounded, tight = (
        Problem(
            graph(rows, [boundary("a", "b", bytes_=0)]),
            cluster(["d0", "d1"], joined, types={"unit": device_type(memory_gib=memory_gib)}),
            Job(microbatches=4, replication=False, recompute=False, backward="whole"),
        )
        for memory_gib in (64.0, 1.5)
    )
    trip_s = float(Chain(tight).least_path_s.sum())
    assert bounds_s(unbounded, 1e3)[0] < 3.5 * trip_s
    assert bounds_s(tight, 1e3)[0] == pytest.approx(4 * trip_s, rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_spans_in_memory_are_those_of_the_best_number_in_flight(count: int) -> None:
    rng = np.random.default_rng(count)
    forward, backward, beyond = rng.uniform(0.1, 2.0, (3, 4, 5))
    levels = [MemoryLevel(k, rng.uniform(0.0, 1.0, (4, 5)).round() * k / 4) for k in (1, 2, count)]
    trip = forward + backward + beyond
    spans = spans_in_memory(SpanTable(forward, backward, beyond), trip, levels, count)
    limit_s = rng.uniform(0.5, 40.0, (4, 5))
    for cell in np.ndindex(4, 5):
        by_number = [
            min(
                max(
                    ReplicaSpan(forward[cell], backward[cell] + x, beyond[cell]).seconds(number),
                    -(-number // level.in_flight) * (trip[cell] + x),
                )
                for level in levels
                for x in (float(level.extra_s[cell]),)
            )
            for number in range(1, count + 1)
        ]
        found = [spans.seconds(number)[cell] for number in range(1, count + 1)]
        assert found == pytest.approx(by_number)
        most = sum(seconds <= limit_s[cell] for seconds in by_number)
        assert spans.most(limit_s, count)[cell] == most


def test_many_microbatches_in_memory_count_as_a_few_less() -> None:
    one = np.full((2, 3), 1.0)
    levels = [MemoryLevel(4, 0 * one), MemoryLevel(2000, 0.1 * one)]
    few, many = (
        spans_in_memory(SpanTable(one, one, 9 * one), 11 * one, levels, n) for n in (60, 2000)
    )
    assert (many.seconds(60) <= few.seconds(60) + 1e-9).all()
    assert (many.seconds(60) >= few.seconds(54)).all()
    limit_s = np.array(150.0)
    assert (many.most(limit_s, 60) >= few.most(limit_s, 60)).all()
