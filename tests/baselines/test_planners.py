"""What every classic planner promises, and the even ones."""

import itertools

import pytest
from builders import graph, layer, parameter, star
from hypothesis import given
from hypothesis import strategies as st
from planner_layers import layers_of
from strategies import clusters, jobs, layer_graphs
from tiny_problems import tiny_problem

from planner import InfeasibleError, Job, Problem
from planner.baselines import BASELINES, stage_costs
from planner.baselines.layers import Stages
from planner.baselines.stage_costs import cut_places, device_blocks


def problem_of(layers: list[dict], devices: int, **job: object) -> Problem:
    names = [p for row in layers for p in row.get("parameters", [])]
    the_graph = graph(layers, parameters=[parameter(name, 10**9) for name in names])
    return Problem(the_graph, star(devices), Job.model_validate({"optimizer": "sgd", **job}))


def require_well_formed(problem: Problem, partition: Stages) -> None:
    edges = [stage.begin for stage in partition] + [partition[-1].end]
    assert edges == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, len(problem.graph.layers))
    devices = [device for stage in partition for device in stage.devices]
    assert len(devices) == len(set(devices))
    assert set(devices) <= set(problem.cluster.device_names)
    assert all(stage.devices for stage in partition)
    if not problem.job.replication:
        assert all(len(stage.devices) == 1 for stage in partition)
    assert len(partition) <= (problem.job.max_stages or len(partition))


@given(st.data())
def test_every_planner_answers_with_a_well_formed_partition_or_says_why_not(
    data: st.DataObject,
) -> None:
    job = data.draw(jobs()).model_copy(
        update={
            "replication": data.draw(st.booleans()),
            "max_stages": data.draw(st.none() | st.integers(1, 4)),
        }
    )
    cluster = data.draw(clusters(connected=False))
    problem = Problem(data.draw(layer_graphs()), cluster, job)
    for planner in BASELINES.values():
        partition, reason = None, ""
        try:
            partition = planner.plan(layers_of(problem))
        except InfeasibleError as error:
            reason = str(error)
        if partition is not None:
            require_well_formed(problem, partition)
        else:
            assert reason.startswith(planner.name)


@pytest.mark.parametrize("planner", BASELINES.values(), ids=BASELINES)
def test_each_planner_names_its_source(planner) -> None:
    assert BASELINES[planner.name] is planner
    assert "20" in planner.source


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "even"])
def test_a_layer_too_large_for_any_device_is_infeasible(name: str) -> None:
    rows = [layer("a"), layer("b", parameters=["p"])]
    the_graph = graph(rows, parameters=[parameter("p", 10**12)])
    problem = Problem(the_graph, star(2), Job(microbatches=2))
    with pytest.raises(InfeasibleError, match=rf"{name}: .*memory"):
        BASELINES[name].plan(layers_of(problem))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("replication", [True, False])
def test_many_layers_and_devices_are_planned_in_groups(name, replication, monkeypatch) -> None:
    monkeypatch.setattr(stage_costs, "MAX_BLOCKS", 4)
    monkeypatch.setattr(stage_costs, "MAX_CUTS", 8)
    problem = tiny_problem(
        3, layers=30, devices=9, microbatches=4, memory_mib=1e6, replication=replication
    )
    require_well_formed(problem, BASELINES[name].plan(layers_of(problem)))


def test_blocks_hold_neighbours_and_every_device_once(monkeypatch) -> None:
    monkeypatch.setattr(stage_costs, "MAX_BLOCKS", 4)
    chain = layers_of(tiny_problem(0, layers=3, devices=10, microbatches=1))
    blocks = device_blocks(chain)
    assert [len(block) for block in blocks] == [3, 3, 3, 1]
    assert [d for block in blocks for d in block] == list(chain.problem.cluster.device_names)


def test_the_cuts_of_a_long_chain_are_spread_over_its_work(monkeypatch) -> None:
    monkeypatch.setattr(stage_costs, "MAX_CUTS", 10)
    chain = layers_of(tiny_problem(0, layers=100, devices=2, microbatches=1))
    cuts = cut_places(chain)
    assert (cuts[0], cuts[-1]) == (0, 100)
    assert 8 <= len(cuts) <= 11
    assert max(b - a for a, b in itertools.pairwise(cuts)) <= 30
    monkeypatch.setattr(stage_costs, "MAX_CUTS", 101)
    assert list(cut_places(chain)) == list(range(101))


# --- even splits ----------------------------------------------------------------------------------


def shape(partition: Stages) -> list[tuple[int, int, int]]:
    return [(stage.begin, stage.end, len(stage.devices)) for stage in partition]


def test_even_split_gives_every_device_a_stage_in_file_order() -> None:
    problem = problem_of([layer(f"l{n}", n + 1) for n in range(7)], 3)
    partition = BASELINES["even"].plan(layers_of(problem))
    assert shape(partition) == [(0, 3, 1), (3, 5, 1), (5, 7, 1)]
    assert [stage.devices for stage in partition] == [("d0",), ("d1",), ("d2",)]


def test_even_split_has_no_more_stages_than_layers() -> None:
    problem = problem_of([layer("a"), layer("b")], 4)
    assert shape(BASELINES["even"].plan(layers_of(problem))) == [(0, 1, 1), (1, 2, 1)]


def test_replicated_even_split_takes_as_few_stages_as_fit() -> None:
    """Weights and gradients of a layer are 8 GB, with two stages of 512 GiB each 64 layers fit."""
    ample = problem_of([layer(f"l{n}", parameters=[f"p{n}"]) for n in range(100)], 4)
    assert shape(BASELINES["even-replicated"].plan(layers_of(ample))) == [(0, 100, 4)]
    tight = problem_of([layer(f"l{n}", parameters=[f"p{n}"]) for n in range(200)], 4)
    assert shape(BASELINES["even-replicated"].plan(layers_of(tight))) == [
        (0, 100, 2),
        (100, 200, 2),
    ]
    tighter = problem_of([layer(f"l{n}", parameters=[f"p{n}"]) for n in range(600)], 4)
    with pytest.raises(InfeasibleError, match="even-replicated"):
        BASELINES["even-replicated"].plan(layers_of(tighter))
