"""Rules of a job: plans keep them, wrong ones are refused, those in conflict are named."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders import GIGA, boundary, cluster, device_type, graph, layer, link

from planner import InfeasibleError, Job, PipeplanError, Problem, solve, verify
from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.plan.kept_rules import broken
from planner.report.summary import space_lines
from planner.rules import Rules
from planner.search.cp_sat.conflicts import MEMORY, conflict
from planner.search.cp_sat.decisions import rule_constraints
from planner.search.cp_sat.plan_model import Effort, PlanModels

LAYERS = tuple("abcdefgh")
NAMES = ["n0/gpu0", "n0/gpu1", "n1/gpu0", "n1/gpu1", "old"]
WORK = Effort(1.0, deterministic=True)


def problem(rules: dict[str, Any], seed: int = 0, memory_gib: float = 4, **job: Any) -> Problem:
    """Eight layers on two nodes of two devices and a slow device."""
    rng = random.Random(seed)
    rows = [layer(name, rng.uniform(0.5, 2), rng.uniform(1, 4)) for name in LAYERS]
    tensors = [boundary(*pair, bytes_=GIGA // 10) for pair in pairwise(LAYERS)]
    types = {
        "fast": device_type(memory_gib=memory_gib, price_per_hour=2),
        "slow": device_type(
            memory_gib=memory_gib, peak_tflop_per_s={"float32": 0.4}, price_per_hour=0.5
        ),
    }
    kinds = {name: "slow" if name == "old" else "fast" for name in NAMES}
    machines = cluster(kinds, [link(name, "hub") for name in NAMES], ["hub"], types)
    fields = {"format": "pipeplan-job/1", "microbatches": 4, "rules": rules, **job}
    return Problem(graph(rows, tensors), machines, Job.parse(fields, "job"))


RULES: list[dict[str, Any]] = [
    {"most_nodes": 1},
    {"most_price_per_hour": 4.5},
    {"together": [["a", "d"], ["f", "g"]]},
    {"apart": [["n0/gpu0", "n0/gpu1"], ["n1/gpu0", "n1/gpu1"]]},
    {"place": {"a": ["old"], "h": ["n1"]}},
    {"most_nodes": 2, "most_price_per_hour": 5, "place": {"c": ["n0/gpu1", "old"]}},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_every_solution_of_the_plan_model_keeps_the_rules(rules: dict[str, Any]) -> None:
    given = problem(rules)
    table, network = StageTable(given), NetworkTable.of(given.cluster)
    constrain = tuple(rule_constraints(given.job.rules, given.cluster).values())
    models, found = PlanModels(table, network, constrain), 0
    for rows in models.starts(WORK, (1, 2, 3)):
        for stages in rows:
            named = [
                (LAYERS[b:e], [network.devices[d] for d in devices]) for b, e, devices in stages
            ]
            assert not [*broken(given.job.rules, named, given.cluster)]
            assert [name for layers, _ in named for name in layers] == list(LAYERS)
            found += 1
        if rows:
            assert models.keeps(rows[-1], WORK)
            near = models.near(rows[-1], range(1), WORK)
            assert all(stages[1:] == rows[-1][1:] for stages in near)
    assert found


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_solved_plans_keep_them_and_others_are_refused(rules: dict[str, Any]) -> None:
    given = problem(rules)
    plan = solve(given, time_limit_s=0.3, deterministic=True).plan
    assert verify(plan) == []
    free = problem({})
    other = solve(free, time_limit_s=0.3, deterministic=True).plan
    named = [(stage.layers, stage.devices) for stage in other.stages]
    wrong = [*broken(given.job.rules, named, given.cluster)]
    job = other.job.model_copy(update={"rules": given.job.rules})
    told = [row for row in verify(other.model_copy(update={"job": job})) if "job.rules" in row]
    assert [row.split(": ", 1)[1].removesuffix("; plan again") for row in told] == wrong
    assert plan.predicted.iteration_time_s >= other.predicted.iteration_time_s * (1 - 1e-9)
    assert space_lines(plan)[1].endswith("also for those that the job's rules leave out")
    assert "rules" not in space_lines(other)[1]


REFUSED = [
    ({"together": [["a", "x"]]}, r"job\.rules\.together\[0\]: there is no layer 'x'; choose one"),
    ({"apart": [["n0/gpu0", "n0/gpu9"]]}, r"rules\.apart\[0\]: there is no node or device"),
    ({"place": {"z": ["old"]}}, r"rules\.place: there is no layer 'z'"),
    ({"place": {"a": ["n7"]}}, r"rules\.place\.a: there is no node or device 'n7'"),
    ({"most_nodes": 0}, r"rules\.most_nodes"),
    ({"at_most_hosts": 2}, r"rules\.at_most_hosts"),
]


@pytest.mark.parametrize(("rules", "message"), REFUSED, ids=str)
def test_wrong_rules_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        problem(rules).require_known_devices()


def test_a_limit_on_the_price_needs_prices() -> None:
    given = problem({})
    types = {
        name: kind.model_copy(update={"price_per_hour": None})
        for name, kind in given.cluster.device_types.items()
    }
    job = given.job.model_copy(update={"rules": Rules(most_price_per_hour=3)})
    machines = given.cluster.model_copy(update={"device_types": types})
    with pytest.raises(PipeplanError, match="most_price_per_hour: device 'n0/gpu0' has no price"):
        replace(given, job=job, cluster=machines)


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    (
        {"most_nodes": 1, "place": {"a": ["n0"], "h": ["n1"]}},
        {},
        {"most_nodes", "place.a", "place.h"},
    ),
    ({"most_price_per_hour": 1, "place": {"b": ["n0"]}}, {}, {"most_price_per_hour", "place.b"}),
    ({"most_price_per_hour": 0.4}, {}, {"most_price_per_hour"}),
    (
        {"together": [["a", "h"]], "place": {"c": ["n0"], "f": ["old"]}},
        {},
        {"together[0]", "place.c", "place.f"},
    ),
    (
        {"together": [["a", "d"], ["d", "h"]], "place": {"b": ["n0"], "g": ["n1"]}},
        {},
        {"together[0]", "together[1]", "place.b", "place.g"},
    ),
    (
        {"most_nodes": 1, "place": {"a": ["old"]}},
        {"parameters": 400},
        {"most_nodes", "place.a", MEMORY},
    ),
]


@pytest.mark.parametrize(("rules", "more", "names"), CONFLICTS)
def test_rules_in_conflict_are_named(
    rules: dict[str, Any], more: dict[str, Any], names: set[str]
) -> None:
    given = problem(rules)
    if more:
        given = _heavy(given, more["parameters"])
    found = conflict(
        StageTable(given), NetworkTable.of(given.cluster), Effort(5, deterministic=True)
    )
    assert set(found) == names
    if not more:
        with pytest.raises(InfeasibleError) as caught:
            solve(given, time_limit_s=0.2, deterministic=True)
        assert caught.value.is_proved
        assert all(name in str(caught.value) for name in names)


def _heavy(given: Problem, mib: int) -> Problem:
    """The same problem where each layer has so many MiB of weights, and as much of gradients."""
    record = given.graph.record
    rows = [
        {"name": f"w{n}", "elements": mib << 18, "bytes": mib << 20} for n in range(len(LAYERS))
    ]
    layers = [
        {**row.model_dump(mode="json"), "parameters": [f"w{n}"]}
        for n, row in enumerate(record.layers)
    ]
    tensors = [row.model_dump(mode="json") for row in record.boundaries]
    job = given.job.model_copy(update={"optimizer": "sgd"})
    return replace(given, graph=graph(layers, tensors, rows), job=job)


def test_rules_that_can_be_kept_are_in_no_conflict() -> None:
    for rules in RULES:
        given = problem(rules)
        assert conflict(StageTable(given), NetworkTable.of(given.cluster), WORK) == ()
