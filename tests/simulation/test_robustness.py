"""Iteration times under noise: the simulator's without noise, a longest path with it."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from builders import GIGA, boundary, graph, layer, orders, parameter, pipeline, star
from chains import PAIR, chain
from hypothesis import given
from hypothesis import strategies as st
from replay_oracle import inputs_of, seconds
from strategies import Scheduled, scheduled

from planner.cluster.link_table import FloatArray
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.reductions import GradientReduction
from planner.costs.roofline import OperationTimes
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.program.replay import operation as operation_of
from planner.simulation.noise import Noise, OrderedTimes, sample_times_s, times_under_noise
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

SAMPLES = 3
Factors = defaultdict[object, FloatArray]
CALM = Noise(jitter=0, samples=20)


Key = object
"""What a task is: an operation, ("transfer", its maker), a reduction or a device."""


def keys_of(times: OrderedTimes) -> dict[int, Key]:
    """What each task of which the duration varies is."""
    timeline, program = times.timeline, times.program
    first = int(program.numbers["first_late"])
    rows: dict[int, Key] = {}
    for n in times.drawn.tolist():
        found = operation_of(program, n)
        if times.is_operation[n]:
            rows[n] = found
        elif times.is_message[n]:
            stage, kind, microbatch = found
            maker = Operation(stage + (-1 if kind == "F" else 1), kind, microbatch)
            rows[n] = ("transfer", maker)
        elif times.is_step[n]:
            rows[n] = timeline.pipeline.devices[program.tasks["resource"][n]]
        elif n < first + len(timeline.synchronisations):
            rows[n] = timeline.pipeline.synchronisations[n - first]
    return rows


def times_s(timeline: Timeline, factor_of: Callable[[Key], float | FloatArray]) -> FloatArray:
    """Iteration times where each task takes some factors as long."""
    times = OrderedTimes(timeline)
    rows = {n: np.atleast_1d(factor_of(key)) for n, key in keys_of(times).items()}
    found = np.ones((max(map(len, rows.values())), len(times.program.tasks)))
    for n, row in rows.items():
        found[:, n] = row
    return times.times_s(found)


def given_times_s(timeline: Timeline, **factors: float) -> FloatArray:
    """The same where named operations and transfers take a factor as long."""
    named = {name.removeprefix("_"): factor for name, factor in factors.items()}

    def factor_of(key: Key) -> float:
        match key:
            case ("transfer", maker):
                return named.get(f"move_{maker}", 1.0)
            case GradientReduction(stages):
                return named.get("reduce_" + "_".join(map(str, stages)), 1.0)
        return named.get(str(key), 1.0)

    return times_s(timeline, factor_of)


# --- against other replays ------------------------------------------------------------------------


@given(scheduled())
def test_without_noise_every_sample_takes_the_simulated_time(case: Scheduled) -> None:
    timeline = simulate(case.pipeline, case.orders)
    expected = pytest.approx(timeline.iteration_time_s, rel=1e-9)
    assert sample_times_s(timeline, CALM) == expected


@given(scheduled(), st.integers(0, 2**31))
def test_times_are_the_longest_paths_over_what_waits_for_what(case: Scheduled, seed: int) -> None:
    random = np.random.default_rng(seed)
    factors: Factors = defaultdict(lambda: random.uniform(0.3, 3, SAMPLES))
    found = times_s(simulate(case.pipeline, case.orders), factors.__getitem__)
    for sample in range(SAMPLES):
        assert found[sample] == pytest.approx(longest_path_s(case, factors, sample), rel=1e-9)


@given(scheduled(shared=True), st.sampled_from([1.0, 1.5, 4.0]))
def test_slow_devices_take_the_time_of_a_simulation_with_slower_devices(
    case: Scheduled, factor: float
) -> None:
    """Where no transfer waits for a link, and no all-reduce for another, orders fix all."""
    noise = replace(CALM, slow_probability=1, slow_factor=factor)
    calm = replace(case.pipeline, synchronisations=())
    found = sample_times_s(simulate(calm, case.orders), noise)
    slow = simulate(slowed(calm, factor), case.orders)
    assert found == pytest.approx(slow.iteration_time_s, rel=1e-9)


def slowed(placed: PlacedPipeline, factor: float) -> PlacedPipeline:
    stages = tuple(
        replace(
            stage,
            times={
                device: OperationTimes(*(factor * time for time in times))
                for device, times in stage.times.items()
            },
        )
        for stage in placed.stages
    )
    steps = {device: factor * time for device, time in placed.optimizer_s.items()}
    return replace(placed, stages=stages, optimizer_s=steps)


def longest_path_s(case: Scheduled, factors: Factors, sample: int) -> float:
    """Nodes are what factors are drawn for; an edge weighs what its first end takes until then."""
    dag = nx.DiGraph()
    timeline = simulate(case.pipeline, case.orders)
    add_operations(dag, case)
    add_transfers(dag, timeline)
    add_tails(dag, case, timeline)
    for node, later in dag.edges:
        edge, length = dag.edges[node, later], dag.nodes[node]["length"]
        edge["weight"] = max(0.0, length - edge.get("ahead", 0.0)) * factors[node][sample]
    return float(nx.dag_longest_path_length(dag))


def add_operations(dag: nx.DiGraph, case: Scheduled) -> None:
    for device, order in case.orders.items():
        for operation in order:
            dag.add_node(operation, length=seconds(case.pipeline, operation, device))
            producers = (found for found, _ in inputs_of(case.pipeline, case.orders, operation))
            dag.add_edges_from((producer, operation) for producer in producers)
        dag.add_edges_from(pairwise(order))


def add_transfers(dag: nx.DiGraph, timeline: Timeline) -> None:
    """Between producer and consumer, in order of start on every link."""
    on_link = defaultdict(list)
    for move in timeline.transfers:
        stage, kind, microbatch = move.operation
        forward = kind == "F"
        node = ("transfer", move.operation)
        for end in (stage, stage + (1 if forward else -1)):
            for operation in (Operation(end, letter, microbatch) for letter in "FBI"):
                if operation in dag and (operation.kind == "F") == forward:
                    dag.add_edge(*((operation, node) if end == stage else (node, operation)))
        # What it takes is for others to test: it may share its links.
        dag.nodes[node]["length"] = move.end_s - move.start_s
        for link in move.occupied:
            on_link[link].append(node)
    for nodes in on_link.values():
        dag.add_edges_from(pairwise(nodes))


def add_tails(dag: nx.DiGraph, case: Scheduled, timeline: Timeline) -> None:
    """All-reduces, in order of start on every device, then optimizer steps."""
    tails = {device: list(order[-1:]) for device, order in case.orders.items()}
    for event in timeline.synchronisations:
        sync = event.synchronisation
        dag.add_node(sync, length=event.end_s - event.start_s)
        for device in sync.devices:
            for stage in sync.stages:
                gradients = [o for o in case.orders[device] if o.kind in "BW" and o.stage == stage]
                for last in gradients[-1:]:
                    dag.add_edge(last, sync, ahead=sync.ahead_s(last.kind, last.stage, device))
            tails[device].append(sync)
    for device, tail in tails.items():
        dag.add_node(device, length=case.pipeline.optimizer_s[device])
        syncs = [node for node in tail if isinstance(node, GradientReduction)]
        dag.add_edges_from([*pairwise(syncs), *((node, device) for node in tail), (device, "end")])


# --- by hand --------------------------------------------------------------------------------------


def two_stages(bytes_: int = GIGA // 2) -> PlacedPipeline:
    """Forward 1 s, backward 2 s, transfer 0.5 s: 10 s an iteration, see test_by_hand.py."""
    return chain((1, 2), (1, 2), bytes_=bytes_)


@pytest.mark.parametrize(
    ("factors", "time_s"),
    [
        ({}, 10),
        ({"_1B1": 2.0}, 12),  # On the longest path: 1F0 1B0 1F1 1B1 0B1.
        ({"_0B0": 1.25}, 10),  # 0B0 may end at 8, when the gradient of 0B1 arrives:
        ({"_0B0": 2.0}, 11),  # it ends at 9.
        ({"move_1B1": 3.0}, 11),
        ({"d1": 5.0}, 10),  # No parameters: the optimizer step takes no time.
    ],
)
def test_factors_lengthen_what_they_are_for(factors: dict[str, float], time_s: float) -> None:
    timeline = simulate(two_stages(), PAIR)
    assert timeline.iteration_time_s == 10
    assert given_times_s(timeline, **factors) == pytest.approx(time_s)


def test_messages_that_share_a_link_take_as_long_as_they_do_then() -> None:
    """Replicas d0 and d1 send to d2 over its one link, both messages at 1-5 s.

    Both forwards of d2 end at 7, both gradients at 11.
    With 0F0 of 4 s its message still takes 4 s, to 8; then two forwards and 4 s for the gradients.
    """
    the_graph = graph([layer("a", 1, 0), layer("b", 1, 0)], [boundary("a", "b", bytes_=2 * GIGA)])
    placed = pipeline(the_graph, star(3), [(["a"], ["d0", "d1"]), (["b"], ["d2"])])
    the_orders = orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1F1 1B0 1B1")
    timeline = simulate(placed, the_orders)
    assert timeline.iteration_time_s == 11
    assert given_times_s(timeline, _0F0=4.0) == pytest.approx(8 + 2 + 4)


def test_all_reduces_and_optimizer_steps_vary_too() -> None:
    """Replicas end their backwards at 6 s and 3 s, reduce for 4 s and step for 0.012 s."""
    the_graph = graph(
        [layer("a", parameters=["w"])], parameters=[parameter("w", elements=GIGA)], boundaries=[]
    )
    placed = pipeline(the_graph, star(2), [(["a"], ["d0", "d1"])], microbatches=3)
    timeline = simulate(placed, orders(d0="0F0 0B0 0F1 0B1", d1="0F2 0B2"))
    assert given_times_s(timeline) == pytest.approx(10.012)
    assert given_times_s(timeline, reduce_0=1.5, d1=2.0) == pytest.approx(12.024)


def test_all_reduces_of_a_device_keep_their_order() -> None:
    """c-d and d-e share device d3; d-e is first, from 9 s to 409 s, c-d takes 4 s."""
    tied = {"a": [], "b": [], "c": ["cd"], "d": ["cd", "de"], "e": ["de"]}
    the_graph = graph(
        [layer(name, parameters=names) for name, names in tied.items()],
        [boundary(u, v, bytes_=0) for u, v in pairwise(tied)],
        [parameter("cd", GIGA), parameter("de", 100 * GIGA)],
    )
    stages = [([name], [f"d{index}"]) for index, name in enumerate(tied)]
    placed = pipeline(the_graph, star(5), stages, microbatches=1)
    timeline = simulate(placed, orders(**{f"d{i}": f"{i}F0 {i}B0" for i in range(5)}))
    step_s = 0.012 * 101
    assert given_times_s(timeline) == pytest.approx(409 + 4 + step_s)
    assert given_times_s(timeline, reduce_3_4=2.0) == pytest.approx(809 + 4 + step_s)


# --- the noise ------------------------------------------------------------------------------------


def one_operation_s(noise: Noise) -> FloatArray:
    """Times of a forward of 1 s, alone on its device."""
    placed = pipeline(graph([layer("a", 1, 0)]), star(1), [(["a"], ["d0"])], microbatches=1)
    return sample_times_s(simulate(placed, orders(d0="0F0 0B0")), noise)


@pytest.mark.parametrize("jitter", [0.05, 0.5])
def test_jitter_is_the_relative_deviation_and_leaves_the_mean(jitter: float) -> None:
    """Within five standard errors."""
    count = 20_000
    times_s = one_operation_s(Noise(jitter=jitter, samples=count))
    assert times_s.mean() == pytest.approx(1, abs=5 * jitter / math.sqrt(count))
    assert times_s.std() == pytest.approx(jitter, rel=0.1)
    log_deviation = math.sqrt(math.log(1 + jitter**2))
    assert np.log(times_s).std() == pytest.approx(log_deviation, rel=5 / math.sqrt(2 * count))
    assert times_s.min() > 0


def test_a_device_is_slow_as_often_as_asked_and_for_the_whole_iteration() -> None:
    count, probability = 20_000, 0.1
    noise = Noise(0, slow_probability=probability, slow_factor=3, samples=count)
    the_graph = graph([layer("a", 1, 0), layer("b", 1, 0)], [boundary("a", "b", bytes_=0)])
    placed = pipeline(the_graph, star(2), [(["a"], ["d0"]), (["b"], ["d1"])], microbatches=1)
    times_s = sample_times_s(simulate(placed, orders(d0="0F0 0B0", d1="1F0 1B0")), noise)
    seconds_, counts = np.unique(times_s, return_counts=True)
    assert seconds_ == pytest.approx([1 + 1, 1 + 3, 3 + 3])
    shares = [(1 - probability) ** 2, 2 * probability * (1 - probability), probability**2]
    for found, share in zip(counts / count, shares, strict=True):
        assert found == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / count))


def test_transfers_have_a_jitter_of_their_own() -> None:
    timeline = simulate(two_stages(), PAIR)
    assert np.ptp(sample_times_s(timeline, replace(CALM, transfer_jitter=0.1))) > 0
    empty = simulate(two_stages(bytes_=0), PAIR)
    assert np.ptp(sample_times_s(empty, replace(CALM, transfer_jitter=0.1))) == 0


def test_figures_are_those_of_the_samples() -> None:
    timeline, noise = simulate(two_stages(), PAIR), Noise(samples=101)
    figures, times_s = times_under_noise(timeline, noise), sorted(sample_times_s(timeline, noise))
    assert figures.predicted_s == 10
    assert figures.expected_s == pytest.approx(sum(times_s) / 101)
    assert figures.median_s == times_s[50]
    assert figures.percentile_95_s == pytest.approx(times_s[95])
    assert figures.worst_s == times_s[100]
    assert figures.samples == 101


def test_a_seed_gives_the_same_figures_and_another_seed_others() -> None:
    timeline = simulate(two_stages(), PAIR)
    once, again = (times_under_noise(timeline, Noise(seed=3)) for _ in range(2))
    assert once == again
    assert times_under_noise(timeline, Noise(seed=4)) != once


def test_more_samples_go_on_where_fewer_end() -> None:
    timeline = simulate(two_stages(), PAIR)
    few, many = (sample_times_s(timeline, Noise(samples=count)) for count in (1000, 2500))
    assert len(many) == 2500
    assert np.array_equal(many[:1000], few)


@pytest.mark.parametrize(
    "field",
    [
        {"jitter": -0.1},
        {"jitter": math.nan},
        {"transfer_jitter": 5},
        {"slow_probability": 1.5},
        {"slow_factor": 0.5},
        {"slow_factor": math.inf},
        {"samples": 1},
        {"samples": 10**9},
        {"seed": -1},
    ],
)
def test_a_noise_out_of_range_is_refused_by_name(field: dict[str, float]) -> None:
    ((name, value),) = field.items()
    with pytest.raises(PipeplanError, match=f"^{name}: {value} is not a "):
        Noise(**field)
