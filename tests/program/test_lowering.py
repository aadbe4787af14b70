"""Programs of random plans: the same times as the event loop over objects, to the last bit."""

import random
from dataclasses import replace

from agreement import require_agreement
from builders import star
from group_problems import tiny_problem
from hypothesis import given
from hypothesis import strategies as st
from offloading import offloading
from strategies import Scheduled, behaviours, divided, orders_for, partitions, scheduled
from unequal_graphs import SHARES, TOKENS, unequal

from planner import Job, Problem
from planner.cluster.group_packing import packed_in_turn
from planner.costs.placement import place
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.simulation.lengths import placed_by_length


@given(scheduled(slowed=True, links="fair", shards=True))
def test_own_runtime(case: Scheduled) -> None:
    assert require_agreement(case.pipeline, case.orders)


@given(scheduled(slowed=True, links="fair"), behaviours(), st.sampled_from(["at_once", "in_turn"]))
def test_any_runtime(case: Scheduled, behaviour: object, tied: str) -> None:
    rules = RuntimeRules(name="random", behaviour=behaviour, tied=tied)
    problem = replace(case.pipeline.problem, runtime=rules)
    specs = [stage.spec for stage in case.pipeline.stages]
    require_agreement(place(problem, specs, case.pipeline.sync), case.orders)


@given(divided().filter(lambda case: case.pipeline.problem.runtime.links == "fair"))
def test_divided_weights(case: Scheduled) -> None:
    assert require_agreement(case.pipeline, case.orders)


@given(scheduled(slowed=True, links="fair"), st.integers(0, 10**6), st.sampled_from([0.3, 1.0]))
def test_offload(case: Scheduled, seed: int, share: float) -> None:
    rng = random.Random(seed)
    placed = offloading(case.pipeline, rng, share)
    assert require_agreement(placed, case.orders)


_TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0])


@given(
    st.data(),
    st.lists(st.lists(st.tuples(_TIMES, _TIMES), min_size=3, max_size=3), min_size=2, max_size=4),
    st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0]), min_size=3, max_size=3).map(sorted),
    st.integers(1, 5),
)
def test_lengths(data: st.DataObject, seconds: list, message_gb: list, microbatches: int) -> None:
    lengths = {"tokens": TOKENS, "shares": SHARES}
    job = Job(optimizer="sgd", microbatches=microbatches, lengths=lengths)
    problem = Problem(unequal(seconds, message_gb), star(5, latency_us=1000), job)
    placed = place(problem, data.draw(partitions(problem, recompute=False)))
    rows = data.draw(st.lists(st.integers(0, 2), min_size=microbatches, max_size=microbatches))
    orders = data.draw(orders_for(placed))
    assert require_agreement(placed, orders, placed_by_length(placed), rows)


@given(st.data(), st.integers(0, 10**6), st.sampled_from(["whole", "parts"]))
def test_tensor_parallel_groups(data: st.DataObject, seed: int, messages: str) -> None:
    problem = tiny_problem(seed, layers=4, devices=6, microbatches=3, tensor_parallel=2)
    rules = RuntimeRules(name="random", group_messages=messages)
    groups = packed_in_turn(problem.cluster, [2], problem.cluster.device_names)
    found = grouped_problem(replace(problem, runtime=rules), TensorParallel(groups=tuple(groups)))
    placed = place(found, data.draw(partitions(found, recompute=False)))
    assert require_agreement(placed, data.draw(orders_for(placed)))
