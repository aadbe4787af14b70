"""Programs of random plans: the same times as the event loop over objects, to the last bit."""

import random
from dataclasses import replace

from agreement import require_agreement
from hypothesis import given
from hypothesis import strategies as st
from offloading import offloading
from strategies import Scheduled, behaviours, divided, scheduled

from planner.costs.placement import place
from planner.plan.runtime_rules import RuntimeRules


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
