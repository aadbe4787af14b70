"""SPP's execution scheduler: what its lists are, how long they take, and its bound."""

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from builders import GIGA, boundary, graph, layer, link, parameter, pipeline, star
from builders import cluster as make_cluster
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import partitions, problems

from planner.costs.placement import place
from planner.plan.operations import format_order
from planner.plan.problem import Problem
from planner.schedules import pe
from planner.schedules.assignment import balanced_assignment
from planner.schedules.pe import (
    Blocks,
    blocks_of,
    bound_s,
    execution_order,
    makespan_s,
    spp_execution,
)
from planner.schedules.placements import DoesNotApplyError
from planner.simulation.simulator import simulate

pytestmark = pytest.mark.extensive

ROUNDING = 1 + 1e-9
seconds = st.integers(0, 9).map(float) | st.floats(0, 10)


@st.composite
def some_blocks(draw: st.DrawFn) -> Blocks:
    count = draw(st.integers(1, 6))
    lengths = (count, count, count - 1, count - 1, count)
    return Blocks(
        *(np.array(draw(st.lists(seconds, min_size=n, max_size=n)), dtype=float) for n in lengths)
    )


def longest_path_s(blocks: Blocks, microbatches: int) -> float:
    """The lists as a graph: of each microbatch, and of each stage and channel."""
    count = blocks.stages
    row: list[tuple[tuple[str, int], float]] = []
    for stage in range(count - 1):
        row.append((("stage", stage), blocks.forward_s[stage]))
        row.append((("channel", stage), blocks.send_s[stage]))
    row.append((("stage", count - 1), blocks.forward_s[-1] + blocks.backward_s[-1]))
    for stage in reversed(range(count - 1)):
        row.append((("channel", stage), blocks.send_back_s[stage]))
        row.append((("stage", stage), blocks.backward_s[stage]))
    lists: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    dag = nx.DiGraph()
    for microbatch in range(microbatches):
        for place_, (resource, _) in enumerate(row):
            # A microbatch enters a round; backward blocks of a round go first.
            lists.setdefault(resource, []).append((microbatch + place_, -place_, microbatch))
            if place_:
                dag.add_edge((place_ - 1, microbatch), (place_, microbatch))
            dag.add_node((place_, microbatch))
    for entries in lists.values():
        for (_, before, first), (_, after, second) in pairwise(sorted(entries)):
            dag.add_edge((-before, first), (-after, second))
    end: dict[tuple[int, int], float] = {}
    for node in nx.topological_sort(dag):
        start = max((end[before] for before in dag.predecessors(node)), default=0.0)
        end[node] = start + row[node[0]][1]
    last = {("stage", stage): len(row) - 1 - 2 * stage for stage in range(count)}
    return max(
        end[last["stage", stage], microbatches - 1] + blocks.all_reduce_s[stage]
        for stage in range(count)
    )


@given(some_blocks(), st.integers(1, 12))
def test_makespan_is_the_longest_path_through_the_lists(blocks: Blocks, microbatches: int) -> None:
    wanted = longest_path_s(blocks, microbatches)
    assert makespan_s(blocks, microbatches) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@given(some_blocks(), st.integers(1, 40))
def test_makespan_keeps_the_published_bound(blocks: Blocks, microbatches: int) -> None:
    count = blocks.stages
    stages = blocks.forward_s + blocks.backward_s
    slowest = max([*stages, *(blocks.send_s + blocks.send_back_s)])
    stated = (1 + (4 * count - 4) / microbatches) * microbatches * slowest
    stated += max(blocks.all_reduce_s)
    assert bound_s(blocks, microbatches) == pytest.approx(stated)
    assert makespan_s(blocks, microbatches) <= stated * ROUNDING


def test_the_published_bound_is_reached() -> None:
    """Equal blocks, one direction of each channel all of its time: no round has slack."""
    one, none = np.ones(3), np.zeros(3)
    blocks = Blocks(one, none, one[:2], none[:2], none)
    assert makespan_s(blocks, 4) == 4 + 4  # Forward blocks only: 5 in a row.
    single = Blocks(one[:1], one[:1], one[:0], one[:0], one[:1])
    assert makespan_s(single, 4) == bound_s(single, 4) == 9


@given(some_blocks(), st.integers(1, 30))
def test_many_microbatches_are_counted_by_the_slowest_block(blocks: Blocks, more: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pe, "MAX_MICROBATCHES", 200)
        short = makespan_s(blocks, 200 + more)
    assert makespan_s(blocks, 200 + more) <= short * ROUNDING
    assert short <= bound_s(blocks, 200 + more) * ROUNDING


def test_a_stage_runs_four_forwards_ahead_of_every_later_stage() -> None:
    assert format_order(execution_order(3, 2, 3)) == "2F0 2B0 2F1 2B1 2F2 2B2"
    wanted = "1F0 1F1 1F2 1F3 1B0 1F4 1B1 1F5 1B2 1B3 1B4 1B5"
    assert format_order(execution_order(3, 1, 6)) == wanted
    assert format_order(execution_order(3, 0, 2)) == "0F0 0F1 0B0 0B1"


@given(st.data())
def test_a_simulated_plan_keeps_the_bound_on_single_devices_with_links_of_their_own(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 5))
    microbatches = data.draw(st.integers(1, 12))
    times = st.integers(0, 9)
    names = [f"l{n}" for n in range(count)]
    layers = [
        layer(name, data.draw(times), 2 * data.draw(times), parameters=[f"p{n}"])
        for n, name in enumerate(names)
    ]
    boundaries = [boundary(u, v, bytes_=data.draw(times) * GIGA) for u, v in pairwise(names)]
    devices = [f"d{n}" for n in range(count)]
    links = [
        link(u, v, latency_us=data.draw(st.sampled_from([0, 10**6]))) for u, v in pairwise(devices)
    ]
    placed = pipeline(
        graph(layers, boundaries, [parameter(f"p{n}") for n in range(count)]),
        make_cluster(devices, links),
        [((name,), (device,)) for name, device in zip(names, devices, strict=True)],
        microbatches=microbatches,
    )
    timeline = simulate(placed, spp_execution(placed, balanced_assignment(placed)))
    optimizer_s = max(placed.optimizer_s.values())
    limit_s = bound_s(blocks_of(placed), microbatches) + optimizer_s
    assert timeline.iteration_time_s <= limit_s * ROUNDING
    wanted_s = makespan_s(blocks_of(placed), microbatches)
    assert timeline.iteration_time_s <= (wanted_s + optimizer_s) * ROUNDING


def test_a_replica_that_runs_whole_microbatches_is_outside_the_bound() -> None:
    """SPP splits each microbatch over the replicas; here each runs on one of them."""
    placed = pipeline(graph([layer("a", 1, 2)]), star(2), [(["a"], ["d0", "d1"])], microbatches=1)
    assert bound_s(blocks_of(placed), 1) == 1.5
    timeline = simulate(placed, spp_execution(placed, balanced_assignment(placed)))
    assert timeline.iteration_time_s == 3


@given(st.data())
def test_orders_hold_every_operation_once_and_never_deadlock(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems())
    placed = place(problem, data.draw(partitions(problem, recompute=False)))
    assume(all(len(stages) == 1 for stages in placed.stages_on.values()))
    timeline = simulate(placed, spp_execution(placed, balanced_assignment(placed)))
    ran = [event.operation for event in timeline.operations]
    assert len(ran) == len(set(ran)) == 2 * placed.microbatches * len(placed.stages)


def test_several_stages_on_a_device_are_refused() -> None:
    placed = pipeline(graph([layer("a"), layer("b")]), star(1), [(["a"], ["d0"]), (["b"], ["d0"])])
    with pytest.raises(DoesNotApplyError, match="a device holds several stages"):
        spp_execution(placed, balanced_assignment(placed))
