"""Certificates that were tampered with, or are about something else, are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plans.oracle import tiny_problems
from planner import PipeplanError, solve
from planner.model.graph_record import graph_digest
from planner.plan.certificate import (
    LayerPrices,
    LikeDevices,
    MicrobatchPath,
    TypePrices,
    WorkPrices,
)
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.prediction import refresh
from planner.verification import verify
from planner.verification.proof import BoundCheck, prove


def _proved_optimal() -> Plan:
    """Return a plan on two types of devices, as fast as its certificate says is possible."""
    given = list(tiny_problems(3, seed=7))[-1]
    job = given.job.model_copy(update={"overlap_reduction": False})
    problem = Problem(given.graph, given.cluster, job)
    return solve(problem, time_limit_s=1, deterministic=True).plan


PLAN = _proved_optimal()
assert PLAN.proof is not None
assert PLAN.proof.certificate is not None
CERTIFICATE = PLAN.proof.certificate
TYPES = sorted({device.type for device in PLAN.cluster.devices})
NAMES = PLAN.cluster.device_names


def data() -> dict[str, Any]:
    return json.loads(PLAN.model_dump_json())


def with_certificate(**changes: Any) -> Plan:
    """Return the plan with changes of its certificate, and of the bound where that is changed."""
    changed = data()
    changed["proof"]["certificate"].update(changes)
    if "bound_s" in changes:
        changed["predicted"]["lower_bound_s"] = changes["bound_s"]
    return Plan.parse(changed)


def with_argument(**argument: Any) -> Plan:
    return with_certificate(argument=argument)


def refusal(plan: Plan) -> str:
    return "\n".join((*verify(plan), *prove(plan).problems))


def test_an_honest_certificate_is_confirmed() -> None:
    assert isinstance(CERTIFICATE.argument, LikeDevices)
    assert len(TYPES) == 2
    assert PLAN.predicted.iteration_time_s <= CERTIFICATE.bound_s * (1 + 1e-4)
    assert verify(PLAN) == []
    report = prove(PLAN)
    assert report.problems == ()
    assert report.data()["proved_s"] == CERTIFICATE.bound_s
    assert "no sequence of stages" in report.lines()[0]


@given(st.floats(1e-3, 1e3))
def test_a_higher_bound_is_refused(share: float) -> None:
    assert refusal(with_certificate(bound_s=CERTIFICATE.bound_s * (1 + share)))


@given(st.floats(1e-3, 1e3))
def test_a_higher_bound_of_a_slower_plan_is_refused(share: float) -> None:
    """Where the plan's own time does not give the lie away."""
    check = BoundCheck(PLAN.problem, CERTIFICATE.space)
    assert not check.proves(CERTIFICATE.argument, CERTIFICATE.bound_s * (1 + share))


def test_a_bound_above_that_of_the_proof_is_refused() -> None:
    changed = data()
    changed["proof"]["certificate"]["bound_s"] *= 0.9
    assert "but the plan's proof is of" in refusal(Plan.parse(changed))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replication", not CERTIFICATE.space.replication),
        ("recompute", True),
        ("backward", "whole" if CERTIFICATE.space.backward != "whole" else "any"),
        ("max_stages", 1),
        ("max_stages_per_device", 2),
    ],
)
def test_another_space_is_refused(field: str, value: Any) -> None:
    space = {**CERTIFICATE.space.model_dump(mode="json"), field: value}
    assert "proof.certificate.space" in refusal(with_certificate(space=space))


def test_a_wider_space_is_refused_even_if_all_fields_agree_on_it() -> None:
    """Classes of devices say nothing of several stages a device."""
    changed = data()
    space = {**changed["proof"]["certificate"]["space"], "max_stages_per_device": 2}
    changed["job"]["max_stages_per_device"] = 2
    changed["proof"]["certificate"]["space"] = space
    changed["provenance"]["bound_covers"]["space"] = space
    said = _with_digests(changed)
    assert "several stages a device" in refusal(said)


def _with_digests(changed: dict[str, Any]) -> Plan:
    """Return a plan whose digests are those of its content: what a careful forger would write."""
    plan = Plan.parse(changed)
    changed["model"]["graph_digest"] = graph_digest(plan.model.graph)
    said = Plan.parse(changed).problem.digest_in(CERTIFICATE.space)
    if plan.proof is not None and plan.proof.certificate is not None:
        said = plan.problem.digest_in(plan.proof.certificate.space)
    changed["proof"]["certificate"]["problem_digest"] = said
    changed["provenance"]["problem_digest"] = said
    return Plan.parse(changed)


def _times(changed: dict[str, Any]) -> list[dict[str, float]]:
    rows = changed["model"]["graph"]["layers"]
    return [times for row in rows for times in row["measured"].values()]


def test_a_changed_graph_is_refused() -> None:
    changed = data()
    for times in _times(changed):
        times["forward_s"] *= 0.99
    assert "another problem" in refusal(Plan.parse(changed))


def test_a_changed_graph_with_its_digests_is_refused() -> None:
    changed = data()
    for times in _times(changed):
        for name in times:
            times[name] = times[name] and 0.99 * times[name]
    forged = _with_digests(changed)
    assert "is not proved by its argument" in "\n".join(prove(forged).problems)


def test_other_microbatches_are_refused() -> None:
    changed = data()
    changed["job"]["microbatches"] = changed["microbatches"] = PLAN.microbatches - 1 or 2
    forged = _with_digests(changed)
    if PLAN.microbatches > 1:
        assert "is not proved by its argument" in "\n".join(prove(forged).problems)


def test_one_more_device_is_refused() -> None:
    changed = data()
    name = "another"
    device = {**changed["cluster"]["devices"][0], "name": name}
    changed["cluster"]["devices"].append(device)
    for other in NAMES:
        link = {"between": [name, other], "bandwidth_gb_per_s": 100.0}
        changed["cluster"]["links"].append(link)
    assert "not all devices" in refusal(_with_digests(changed))
    changed["proof"]["certificate"]["argument"]["classes"].append([name])
    assert "is not proved by its argument" in "\n".join(prove(_with_digests(changed)).problems)


CLASSES = [list(members) for members in CERTIFICATE.argument.classes]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        (CLASSES[:-1], "not all devices"),
        ([*CLASSES, CLASSES[0][:1]], "not all devices"),
        ([*CLASSES[:-1], ["nobody"]], "unknown device 'nobody'"),
        ([list(NAMES)], "in one class"),
    ],
)
def test_classes_that_are_not_those_of_the_cluster_are_refused(
    classes: list[list[str]], reason: str
) -> None:
    assert reason in refusal(with_argument(kind="classes", classes=classes))


@given(st.lists(st.floats(1e-30, 1e30), min_size=len(TYPES), max_size=len(TYPES)))
def test_no_prices_prove_more_than_the_best(prices: list[float]) -> None:
    check = BoundCheck(PLAN.problem, CERTIFICATE.space)
    argument = WorkPrices(prices=dict(zip(TYPES, prices, strict=True)))
    assert check.least_s(argument) <= PLAN.predicted.iteration_time_s
    for priced in (argument, TypePrices(prices=argument.prices)):
        assert not check.proves(priced, PLAN.predicted.iteration_time_s * 1.001)


@pytest.mark.parametrize("kind", ["work", "budget"])
def test_prices_that_are_all_nothing_are_refused(kind: str) -> None:
    nothing = with_argument(kind=kind, prices=dict.fromkeys(TYPES, 0.0))
    assert "proves nothing" in refusal(nothing)


def test_changed_prices_of_a_tight_work_bound_are_refused() -> None:
    check = BoundCheck(PLAN.problem, CERTIFICATE.space)
    even = WorkPrices(prices=dict.fromkeys(TYPES, 1.0))
    most = max(
        (WorkPrices(prices={TYPES[0]: 1.0, **dict.fromkeys(TYPES[1:], k / 20)}) for k in range(41)),
        key=check.least_s,
    )
    bound_s = check.least_s(most)
    assert check.proves(most, bound_s)
    assert bound_s > check.least_s(even)
    assert not check.proves(even, bound_s)


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0, 1e31, "1", None])
def test_a_price_that_is_no_price_is_refused_on_loading(price: Any) -> None:
    with pytest.raises(PipeplanError, match="argument"):
        with_argument(kind="work", prices={**dict.fromkeys(TYPES, 1.0), TYPES[0]: price})


@pytest.mark.parametrize("bound_s", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_a_bound_that_is_no_time_is_refused_on_loading(bound_s: float) -> None:
    with pytest.raises(PipeplanError, match="bound_s"):
        with_certificate(bound_s=bound_s)


@pytest.mark.parametrize("kind", ["work", "budget"])
@pytest.mark.parametrize("prices", [{"nothing": 1.0}, dict.fromkeys(TYPES[:-1], 1.0)])
def test_prices_of_other_types_are_refused(prices: dict[str, float], kind: str) -> None:
    assert "argument.prices" in refusal(with_argument(kind=kind, prices=prices))


def test_prices_of_layers_prove_no_more_than_the_best() -> None:
    """Of one stage a device as of several: every plan gives each layer all microbatches."""
    check = BoundCheck(PLAN.problem, CERTIFICATE.space)
    count = len(PLAN.model.graph.layers)
    for k in range(count):
        prices = tuple(1.0 if k in (0, n) else 0.5 for n in range(count))
        argument = LayerPrices(prices=prices)
        assert not check.proves(argument, PLAN.predicted.iteration_time_s * 1.001)
        assert check.proves(argument, 1e-6)


def test_a_missing_layer_is_refused() -> None:
    few = with_argument(kind="columns", prices=[1.0] * (len(PLAN.model.graph.layers) - 1))
    assert "argument.prices" in refusal(few)


def test_prices_of_layers_are_refused_for_three_stages_a_device() -> None:
    space = CERTIFICATE.space.model_copy(update={"max_stages_per_device": 3})
    argument = LayerPrices(prices=(1.0,) * len(PLAN.model.graph.layers))
    with pytest.raises(PipeplanError, match="up to 2 stages a device"):
        BoundCheck(PLAN.problem, space).proves(argument, 1.0)


def test_an_unknown_argument_is_refused_on_loading() -> None:
    with pytest.raises(PipeplanError, match="argument"):
        with_argument(kind="trust me")


def test_too_many_classes_are_refused_before_they_are_looked_at() -> None:
    """The work of a check is bounded, whatever the file says."""
    changed = data()
    first = changed["cluster"]["devices"][0]
    names = [f"more{n}" for n in range(40)]
    changed["cluster"]["devices"] += [{**first, "name": name} for name in names]
    changed["cluster"]["links"] += [
        {"between": [name, NAMES[0]], "bandwidth_gb_per_s": 1.0} for name in names
    ]
    changed["proof"]["certificate"]["argument"]["classes"] += [[name] for name in names]
    assert "too many to check" in "\n".join(prove(_with_digests(changed)).problems)


def test_a_plan_without_a_proof_proves_nothing() -> None:
    changed = data()
    changed["proof"] = None
    plan = Plan.parse(changed)
    assert verify(plan) == []
    assert "there is none" in refusal(plan)
    assert prove(plan).lines() == []


def test_the_solvers_word_is_named_and_counts_its_share_of_the_gap() -> None:
    changed = data()
    bound_s = CERTIFICATE.bound_s
    changed["proof"]["certificate"]["bound_s"] = 0.9 * bound_s
    changed["proof"]["unchecked"] = {
        "bound_s": bound_s,
        "source": "solver",
        "method": "partition model",
    }
    report = prove(Plan.parse(changed))
    assert report.problems == ()
    proved, unchecked = report.lines()
    assert proved.startswith("proved: ")
    assert unchecked.startswith("not proved: ")
    assert "CP-SAT's word (partition model)" in unchecked
    assert report.share_of_gap == pytest.approx(1.0, abs=2e-3)


def test_an_edited_problem_loses_its_proof_and_an_edited_plan_keeps_it() -> None:
    changed = data()
    for times in _times(changed):
        times["forward_s"] *= 0.99
    changed["model"]["graph_digest"] = graph_digest(Plan.parse(changed).model.graph)
    assert refresh(Plan.parse(changed)).proof is None
    assert refresh(PLAN).proof == PLAN.proof


def test_a_path_takes_no_longer_than_a_plan_of_one_microbatch() -> None:
    for problem in tiny_problems(6, seed=3):
        job = problem.job.model_copy(update={"microbatches": 1})
        alone = Problem(problem.graph, problem.cluster, job)
        found = solve(alone, time_limit_s=0.2, deterministic=True)
        check = BoundCheck(alone, alone.job.space)
        assert 0 < check.least_s(MicrobatchPath()) <= found.iteration_time_s


def test_a_plan_file_keeps_its_proof(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").proof == PLAN.proof
