"""Bounds of runtimes whose messages block: against every plan of tiny problems, and by hand."""

import random
from dataclasses import replace

import pytest
from builders import GIGA, boundary, graph, layer, star
from solver.runtime_brute_force import best_in_space_s
from tiny_problems import renamed, seeds, tiny_problem

from planner import Job, Problem
from planner.bounds import ProvedBound, prove
from planner.plan.runtime_rules import RuntimeBehaviour, RuntimeRules
from planner.plan.runtimes import for_runtime
from planner.verification.proof import BoundCheck

BOTH = {"send": "blocking", "receive": "blocking"}
QUICK = 24
"""Problems that are quick to enumerate; others have three microbatches."""
RULES: list[dict[str, object]] = [
    {"send": "blocking"},
    {"receive": "blocking", "streams": "one"},
    BOTH,
    {**BOTH, "exchange": "neighbour"},
    {**BOTH, "exchange": "neighbour", "streams": "one"},
    {**BOTH, "exchange": "together"},
    {**BOTH, "exchange": "together", "streams": "one", "message_us": 3e3},
    {**BOTH, "exchange": "pairs"},
]


def runtime(rules: dict[str, object]) -> RuntimeRules:
    """A runtime that can run what torch can: any order of equal pipelines."""
    return RuntimeRules(expresses="torch", behaviour=RuntimeBehaviour.model_validate(rules))


def last(problem: Problem) -> ProvedBound:
    """Return the highest bound, which the checker has to confirm."""
    *_, found = prove(problem)
    assert BoundCheck(problem, problem.job.space).proves(found.argument, found.bound_s)
    return found


@pytest.mark.parametrize("seed", seeds(QUICK, 160))
def test_no_plan_is_faster_than_a_bound_that_counts_messages(seed: int) -> None:
    rng, devices = random.Random(seed), 2 + seed % 5 // 4
    problem = tiny_problem(
        seed,
        layers=3,
        devices=devices,
        microbatches=3 if devices == 2 and seed >= QUICK else 2,
        types=rng.randint(1, 2),
        replication=rng.random() < 0.5,
        topology=rng.choice(["mesh", "switches"]),
        cut_mib=rng.choice([7.5, 30.0, 100.0]),
        link_scale=rng.choice([0.2, 1.0, 5.0]),
    )
    named = renamed(problem, ("layers.0.attention", "layers.0.mlp", "loss"))
    blocking = for_runtime(named, runtime(RULES[seed % len(RULES)]))
    assert last(blocking).bound_s <= best_in_space_s(blocking) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rules", "busy_s"),
    [
        ({}, 3.0),
        ({"send": "blocking"}, 3.25),
        ({"receive": "blocking"}, 3.25),
        (BOTH, 3.5),
        ({**BOTH, "exchange": "neighbour"}, 3.25),
        ({**BOTH, "exchange": "neighbour", "streams": "one"}, 3.5),
        ({**BOTH, "exchange": "together"}, 3.25),
        ({**BOTH, "exchange": "pairs"}, 3.125),
    ],
)
def test_a_device_is_busy_with_messages_that_block(rules: dict[str, object], busy_s: float) -> None:
    """Two layers of 1 and 2 s on two devices, 0.25 s a message: 16 microbatches there and back."""
    cuts = [boundary("layers.0", "layers.1", bytes_=GIGA // 4)]
    job = Job(microbatches=16, optimizer="sgd", backward="whole", replication=False)
    chain = graph([layer("layers.0"), layer("layers.1")], cuts)
    problem = replace(Problem(chain, star(2), job), runtime=runtime(rules))
    # Besides the busy device's own: a forward and its message before, the way back behind.
    assert 16 * busy_s <= last(problem).bound_s <= 16 * busy_s + 4
