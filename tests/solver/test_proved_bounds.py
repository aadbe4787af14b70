"""Bounds of planner.bounds against every plan of tiny problems, and against the checker."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import group_problems
import pytest
from brute_force import brute_force
from builders import boundary, device_type, graph, layer, link
from builders import cluster as cluster_of
from offloading import with_host_links
from tiny_problems import seeds, tiny_problem
from unequal_graphs import SHARES, TOKENS, unequal

from benchmarks.plans.oracle import faster_plan, optimum_below
from planner import Cluster, Job, Problem
from planner.bounds import ProvedBound, list_partitions, prove
from planner.bounds.partitions import TOLERANCE
from planner.bounds.proving import classes_of
from planner.cluster.cluster import Host
from planner.cluster.tensor_groups import TensorGroup
from planner.plan.runtime_rules import PIPEPLAN
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.variants.problems import with_job
from planner.verification.proof import BoundCheck

ROUNDING = 1 - 2e-6
"""The oracle counts in ticks of a nanosecond, of problems of milliseconds."""
PHASES = ("forward_s", "input_gradient_s", "weight_gradient_s")
FEATURES = ("plain", "memory", "lengths", "offload", "groups", "runtime", "hosts", "several")


def drawn(seed: int) -> Problem:
    """Return a random tiny problem; every eighth has the same feature."""
    rng, feature = random.Random(seed), FEATURES[seed % len(FEATURES)]
    if feature == "lengths":
        seconds = [sorted((rng.uniform(1, 3), rng.uniform(1, 6)) for _ in TOKENS) for _ in "abc"]
        chain = unequal(seconds, sorted(rng.uniform(0.01, 2) for _ in TOKENS))
        sizes = {"tokens": TOKENS, "shares": SHARES}
        other = tiny_problem(seed, layers=2, devices=rng.randint(2, 3), microbatches=2)
        job = Job.parse(
            {"format": "pipeplan-job/1", "microbatches": rng.randint(1, 3), "lengths": sizes}, "job"
        )
        return Problem(chain, other.cluster, job)
    if feature == "groups":
        made = group_problems.tiny_problem(seed, microbatches=2, tensor_parallel=2)
        pairs = ("d0", "d1"), ("d2", "d3")
        groups = tuple(TensorGroup(name=f"g{n}", devices=pair) for n, pair in enumerate(pairs))
        return grouped_problem(made, TensorParallel(degree=2, groups=groups))
    problem = tiny_problem(
        seed,
        layers=rng.randint(2, 4),
        devices=2 if feature in ("hosts", "several") else rng.randint(2, 3),
        microbatches=rng.randint(1, 2 if feature == "several" else 4),
        types=rng.randint(1, 2),
        replication=rng.random() < 0.6,
        max_stages_per_device=2 if feature == "several" else 1,
        tied=rng.random() < 0.4,
        topology=rng.choice(["mesh", "switches"]),
        memory_mib=rng.choice([50.0, 70.0, 90.0]) if feature == "memory" else 1e5,
        cut_mib=rng.choice([1.0, 7.5, 30.0, 100.0]),
        link_scale=rng.choice([0.2, 1.0, 5.0]),
        recompute=feature == "memory",
        backward="whole" if feature == "hosts" else rng.choice(["whole", "any", "split"]),
        overlap=rng.random() < 0.6,
        largest_mib=rng.choice([8, 60]),
    )
    if feature == "offload":
        return with_host_links(with_job(problem, backward="any"), rng)
    if feature == "runtime":
        behaviour = PIPEPLAN.behaviour.model_copy(update={"computation_us": 1e3, "message_us": 500})
        runtime = PIPEPLAN.model_copy(update={"behaviour": behaviour})
        return replace(problem, runtime=runtime)
    if feature == "hosts":
        host = Host(devices=problem.cluster.device_names, slowdown=(1, rng.uniform(1, 2)))
        small = with_job(problem, microbatches=2)
        return replace(small, cluster=problem.cluster.model_copy(update={"hosts": (host,)}))
    return problem


def last(found: Iterator[ProvedBound]) -> ProvedBound:
    """Return the highest bound, and require that bounds never fall."""
    rows = list(found)
    assert [row.bound_s for row in rows] == sorted(row.bound_s for row in rows)
    return rows[-1]


def best_s(problem: Problem, known_s: float) -> float:
    """Return the time of the fastest plan below a time, by trying every plan."""
    if problem.cluster.hosts:  # The oracle knows no devices that slow each other.
        return brute_force(problem).time_s
    return optimum_below(problem, known_s).time_s


@pytest.mark.parametrize("seed", seeds(24, 72))
def test_no_plan_is_faster_than_a_bound_and_the_checker_confirms_it(seed: int) -> None:
    problem = drawn(seed)
    found = last(prove(problem))
    assert best_s(problem, found.bound_s) >= found.bound_s * ROUNDING
    assert BoundCheck(problem, problem.job.space).proves(found.argument, found.bound_s)


def two_pairs(seed: int) -> Problem:
    """Return a random problem on two pairs of devices that a narrow link joins."""
    rng = random.Random(seed)
    problem = tiny_problem(
        seed,
        layers=3,
        devices=4,
        microbatches=rng.randint(2, 3),
        types=rng.randint(1, 2),
        cut_mib=rng.choice([2.0, 7.5, 30.0]),
        backward=rng.choice(["whole", "any"]),
        overlap=rng.random() < 0.5,
    )
    width = rng.choice([0.3, 1.0, 3.0])
    links = [link(f"d{n}", f"s{n % 2}", 30) for n in range(4)]
    narrow = link("s0", "s1", width, latency_us=rng.choice([0, 200]))
    data = problem.cluster.model_dump(mode="json")
    data |= {"switches": ["s0", "s1"], "links": [*links, narrow]}
    return replace(problem, cluster=Cluster.from_data(data))


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_bounds_hold_where_a_narrow_link_joins_two_pairs(seed: int) -> None:
    problem = two_pairs(seed)
    found = last(prove(problem))
    assert BoundCheck(problem, problem.job.space).proves(found.argument, found.bound_s)
    assert faster_plan(problem, found.bound_s * ROUNDING).time_s is None
    listed = list_partitions(problem, 1.2 * found.bound_s)
    assert listed.partitions[0].bound_s >= found.bound_s * (1 - TOLERANCE)


def test_microbatches_change_the_node_once_though_a_stage_is_on_both() -> None:
    """Before and behind that stage each message may stay in a node, but not both of them."""
    layers = [
        layer(
            name, measured={kind: dict.fromkeys(PHASES, 1e-3) for kind in kinds}, device_types=kinds
        )
        for name, kinds in {"a": ["one"], "b": ["one", "two"], "c": ["two"]}.items()
    ]
    boundaries = [boundary(*pair, bytes_=10**8) for pair in ("ab", "bc")]
    names = {f"{kind}{n}": kind for kind in ("one", "two") for n in range(2)}
    links = [link(name, f"switch-{kind}", 1000) for name, kind in names.items()]
    switches = ["switch-one", "switch-two"]
    types = {"one": device_type(), "two": device_type()}
    cluster = cluster_of(names, [*links, link(*switches, 1)], switches, types)
    problem = Problem(graph(layers, boundaries), cluster, Job(optimizer="sgd", microbatches=4))
    found = last(prove(problem))
    assert found.bound_s > 0.5  # Four messages of 0.1 s, and the last one's gradient.
    assert BoundCheck(problem, problem.job.space).proves(found.argument, found.bound_s)
    assert faster_plan(problem, found.bound_s * ROUNDING).time_s is None


def test_bounds_of_tiny_problems_are_close_to_the_best_plan() -> None:
    """They would all be sound if they proved nothing."""
    shares = []
    for seed in range(0, 80, 8):
        problem = drawn(seed)
        bound_s = last(prove(problem)).bound_s
        shares.append(bound_s / optimum_below(problem, 3 * bound_s).time_s)
    assert sorted(shares)[len(shares) // 2] > 0.93


def test_a_plan_that_is_as_fast_as_the_bound_ends_the_search_for_larger_ones() -> None:
    problem = drawn(0)
    bound_s = last(prove(problem)).bound_s
    rows = list(prove(problem, bound_s))
    assert len(rows) < 12
    assert rows[-1].bound_s >= bound_s * (1 - 1e-3)


def of_classes(problem: Problem, devices: Sequence[str]) -> tuple[int, ...]:
    """Return how many devices of each class of alike ones are among some."""
    return tuple(len({*devices} & {*names}) for names in next(classes_of(problem.cluster)))


@pytest.mark.parametrize("seed", seeds(8, 24))
def test_the_fastest_plan_has_a_partition_that_is_listed(seed: int) -> None:
    problem = drawn(8 * seed + seed % 2)
    bound_s = last(prove(problem)).bound_s
    optimum = optimum_below(problem, 2 * bound_s)
    if optimum.best is None:
        return
    listed = list_partitions(problem, optimum.time_s * (1 + 1e-3))
    assert listed.is_complete
    assert listed.partitions[0].bound_s >= bound_s * (1 - TOLERANCE)
    ends = [
        (sum(len(spec.layers) for spec in optimum.best[: n + 1]), of_classes(problem, spec.devices))
        for n, spec in enumerate(optimum.best)
    ]
    found = {
        tuple((stage.end, of_classes(problem, stage.devices)) for stage in row.stages): row.bound_s
        for row in listed.partitions
    }
    assert found[tuple(ends)] <= optimum.time_s * (1 + 2e-6)


def test_a_listing_that_is_cut_short_says_so() -> None:
    problem = drawn(0)
    below_s = 3 * last(prove(problem)).bound_s
    everything = list_partitions(problem, below_s)
    assert everything.is_complete
    assert len(everything.partitions) > 2
    assert not list_partitions(problem, below_s, most=2).is_complete
    assert not list_partitions(problem, below_s, most_nodes=1).is_complete
    assert all(row.bound_s < below_s for row in everything.partitions)


def test_a_slow_plan_leads_to_no_pass_far_above_the_bound() -> None:
    """Such a pass looks at so many stages that it took all of a search's time."""
    problem = tiny_problem(3, layers=24, devices=6, microbatches=8, types=2, recompute=False)
    alone = last(prove(problem))
    beside_a_slow_plan = last(prove(problem, 10 * alone.bound_s))
    assert beside_a_slow_plan.bound_s >= alone.bound_s * 0.999
    assert beside_a_slow_plan.looked_at <= 2 * alone.looked_at
