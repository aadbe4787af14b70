"""Programs of random plans: the same times as the event loop over objects, to the last bit."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from agreement import require_agreement
from builders import orders, star
from chains import chain
from group_problems import tiny_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from offloading import offloading
from strategies import Scheduled, behaviours, divided, orders_for, partitions, scheduled
from unequal_graphs import SHARES, TOKENS, unequal

from planner import Job, Problem
from planner.cluster.group_packing import packed_in_turn
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.plan.runtime_rules import RuntimeBehaviour, RuntimeRules
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.program.lower.lower import lower_orders
from planner.program.replay import replay
from planner.simulation.lengths import placed_by_length


def own_runtime(case: Scheduled) -> None:
    assert require_agreement(case.pipeline, case.orders)


def divided_weights(case: Scheduled) -> None:
    assert require_agreement(case.pipeline, case.orders)


def any_runtime(case: Scheduled, behaviour: RuntimeBehaviour, tied: str) -> None:
    rules = RuntimeRules(name="random", behaviour=behaviour, tied=tied)
    problem = replace(case.pipeline.problem, runtime=rules)
    specs = [stage.spec for stage in case.pipeline.stages]
    require_agreement(place(problem, specs, case.pipeline.sync), case.orders)


def offload(case: Scheduled, seed: int, share: float) -> None:
    placed = offloading(case.pipeline, random.Random(seed), share)
    assert require_agreement(placed, case.orders)


def lengths(data: st.DataObject, seconds: list, message_gb: list, microbatches: int) -> None:
    job = Job(
        optimizer="sgd",
        microbatches=microbatches,
        lengths={"tokens": TOKENS, "shares": SHARES},
    )
    problem = Problem(unequal(seconds, message_gb), star(5, latency_us=1000), job)
    placed = place(problem, data.draw(partitions(problem, recompute=False)))
    rows = data.draw(st.lists(st.integers(0, 2), min_size=microbatches, max_size=microbatches))
    found = data.draw(orders_for(placed))
    assert require_agreement(placed, found, placed_by_length(placed), rows)


def tensor_parallel_groups(data: st.DataObject, seed: int, messages: str) -> None:
    problem = tiny_problem(seed, layers=4, devices=6, microbatches=3, tensor_parallel=2)
    rules = RuntimeRules(name="random", group_messages=messages)
    groups = packed_in_turn(problem.cluster, [2], problem.cluster.device_names)
    found = grouped_problem(replace(problem, runtime=rules), TensorParallel(groups=tuple(groups)))
    placed = place(found, data.draw(partitions(found, recompute=False)))
    assert require_agreement(placed, data.draw(orders_for(placed)))


TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0])
LAYER = st.lists(st.tuples(TIMES, TIMES), min_size=3, max_size=3)
MESSAGES = st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0]), min_size=3, max_size=3).map(sorted)
SEEDS = st.integers(0, 10**6)
SCHEDULED = scheduled(slowed=True)
PROPERTIES = {
    own_runtime: (scheduled(slowed=True, shards=True),),
    any_runtime: (SCHEDULED, behaviours(), st.sampled_from(["at_once", "in_turn"])),
    divided_weights: (divided(),),
    offload: (SCHEDULED, SEEDS, st.sampled_from([0.3, 1.0])),
    lengths: (st.data(), st.lists(LAYER, min_size=2, max_size=4), MESSAGES, st.integers(1, 5)),
    tensor_parallel_groups: (st.data(), SEEDS, st.sampled_from(["whole", "parts"])),
}


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_as_the_replay_of_objects(check: Callable[..., None]) -> None:
    settings(max_examples=35)(given(*PROPERTIES[check])(check))()


@pytest.mark.extensive
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_ten_thousand(check: Callable[..., None]) -> None:
    settings(max_examples=1_700)(given(*PROPERTIES[check])(check))()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1B1", "d1 waits at 1B1"),
        ("0F0 0F1 0B0 0B1 0F0", "1F0 1B0 1F1 1B1", "d0 waits at 0F0"),
        ("0F0 0F1 0B0 0B1", "1F0 0F2 1B0 1F1 1B1", "d1 runs 0F2, but it has no stage 0"),
        ("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1", "d0 waits at 0B0, d1 waits at 1F0"),
    ],
)
def test_orders_that_never_end(first: str, second: str, message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        replay(lower_orders(chain((1, 2), (1, 2)), orders(d0=first, d1=second)).program)
