"""Dividing layers among devices: found where there is a way, a proof where there is none."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from brute_force import all_partitions
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems
from tiny_problems import tiny_problem

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.plan.problem import Problem
from planner.search.partition.chain import Chain, Partition, StageChoice, without_recompute
from planner.search.partition.memory.division import TOLERANCE, Division, TightDivision
from planner.search.partition.memory.interval_memory import IntervalMemory
from planner.search.partition.memory.recompute import Holding, RecomputeChooser
from planner.search.partition.memory.recompute_variants import (
    RecomputeVariants,
    one_forward_one_backward,
)


def with_recompute(chain: Chain, partition: Partition) -> Partition | None:
    """For 1F1B's microbatches in flight, or as many as fit."""
    plain = without_recompute(partition)
    pipeline = place(chain.problem, chain.specs(plain))
    variants = RecomputeVariants(chain)
    found = variants.with_in_flight(plain, pipeline, one_forward_one_backward(pipeline))
    return found or variants.leanest(plain, pipeline)


def needs_bytes(pipeline: PlacedPipeline, stage: int) -> int:
    """With one microbatch in flight."""
    placed = pipeline.stages[stage]
    gradients = placed.input_gradient_bytes + placed.output_gradient_bytes
    held = placed.static_bytes + placed.workspace_bytes + placed.stash_bytes
    return held + max(placed.output_bytes, gradients)


def some_partition_fits(problem: Problem) -> bool:
    """By trying all; what is recomputed is chosen stage by stage."""
    chain = Chain(problem)
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        variants = RecomputeVariants(chain)
        cuts = [0]
        for spec in specs:
            cuts.append(cuts[-1] + len(spec.layers))
        partition = tuple(
            StageChoice(cuts[j], cuts[j + 1], spec.devices) for j, spec in enumerate(specs)
        )
        if variants.leanest(partition, pipeline) is not None:
            return True
    return False


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory_mib", [60, 90, 130])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("types", [1, 2])
def test_a_division_is_found_exactly_where_some_partition_fits(
    seed: int, memory_mib: float, recompute: bool, types: int
) -> None:
    problem = tiny_problem(
        seed,
        layers=5,
        devices=3,
        microbatches=2,
        types=types,
        replication=False,
        memory_mib=memory_mib,
        recompute=recompute,
    )
    division = Division(Chain(problem))
    assert division.is_exact
    assert (division.divide() is not None) == some_partition_fits(problem)
    assert (division.least_slack_bytes() == 0) == (division.divide() is not None)


@given(problems())
def test_a_stage_needs_what_the_table_says(problem: Problem) -> None:
    job = problem.job.model_copy(update={"recompute": False})
    problem = Problem(problem.graph, problem.cluster, job)
    chain = Chain(problem)
    division, memory = Division(chain), IntervalMemory(chain)
    names, device = chain.names, problem.cluster.device_names[0]
    for cut in range(1, len(names)):
        specs = [StageSpec(names[:cut], (device,)), StageSpec(names[cut:], (device,))]
        pipeline = place(problem, specs)
        for stage, (begin, end) in enumerate([(0, cut), (cut, len(names))]):
            # Not less either: tied parameters count, once a stage.
            assert division.need_bytes[begin, end] == needs_bytes(pipeline, stage)
            assert memory.stash_bytes[begin, end] == pipeline.stages[stage].stash_bytes


@given(problems())
@settings(max_examples=30)
def test_no_recomputation_needs_less_than_the_table_says(problem: Problem) -> None:
    """Nor than it says where it was raised."""
    job = problem.job.model_copy(update={"recompute": True})
    chain = Chain(replace(problem, job=job))
    raised = TightDivision(chain)
    raised.divide()
    device = problem.cluster.device_names[0]
    for begin, end in combinations(range(chain.length + 1), 2):
        cuts = sorted({0, begin, end, chain.length})
        found = []
        for again in powerset(chain.names[begin:end]):
            specs = [StageSpec(chain.names[u:v], (device,), again) for u, v in pairwise(cuts)]
            found.append(needs_bytes(place(chain.problem, specs), cuts.index(begin)))
        assert Division(chain).need_bytes[begin, end] <= min(found)
        assert raised.division.need_bytes[begin, end] <= min(found) * (1 + TOLERANCE)


def powerset(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from combinations(names, count)


@given(problems(), st.integers(1, 4), st.floats(0, 1))
def test_the_table_of_extra_times_is_never_above_the_exact_choice(
    problem: Problem, in_flight: int, share: float
) -> None:
    chain = Chain(problem)
    memory, chooser = IntervalMemory(chain), RecomputeChooser(chain)
    kind = chain.types[0]
    capacity = float((memory.held_bytes + in_flight * memory.stash_bytes).max()) * share
    table = memory.extra_s(kind, in_flight, capacity)
    for begin in range(chain.length):
        for end in range(begin + 1, chain.length + 1):
            room = int(capacity - memory.held_bytes[begin, end])
            found = chooser.choose([Holding(begin, end, (kind,), in_flight)], room)
            if found is not None:
                assert table[begin, end] <= found.extra_s * (1 + 1e-6) + 1e-12


def test_a_partition_gets_the_recomputation_that_one_forward_one_backward_needs() -> None:
    """Of equal stages the first holds most microbatches and recomputes most layers."""
    problem = tiny_problem(
        2, layers=9, devices=3, microbatches=6, replication=False, memory_mib=150, recompute=True
    )
    chain = Chain(problem)
    plain = Division(chain).partition()
    assert plain is not None
    chosen = with_recompute(chain, plain)
    assert chosen is not None
    assert any(stage.recompute for stage in chosen)
    pipeline = place(problem, chain.specs(chosen))
    for j, stage in enumerate(pipeline.stages):
        assert pipeline.stash_limit(j, stage.spec.devices[0]) >= 1
    unchanged = [(stage.begin, stage.end, stage.devices) for stage in chosen]
    assert unchanged == [(stage.begin, stage.end, stage.devices) for stage in plain]


def test_no_recomputation_makes_a_layer_fit_whose_weights_alone_are_too_large() -> None:
    problem = tiny_problem(
        2, layers=9, devices=3, microbatches=6, replication=False, memory_mib=150, recompute=True
    )
    chain = Chain(problem)
    plain = Division(chain).partition()
    small = tiny_problem(
        2, layers=9, devices=3, microbatches=6, replication=False, memory_mib=20, recompute=True
    )
    assert plain is not None
    assert with_recompute(Chain(small), plain) is None
    placed = place(small, chain.specs(plain))
    assert RecomputeVariants(Chain(small)).fits_never(plain, placed)
