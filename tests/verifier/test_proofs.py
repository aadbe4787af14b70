"""Certificates that were tampered with, or are about something else, are refused."""

import json
import math
from collections.abc import Callable
from functools import partial
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
LAYERS = len(PLAN.model.graph.layers)


def data() -> dict[str, Any]:
    return json.loads(PLAN.model_dump_json())


def with_certificate(**changes: Any) -> Plan:
    """Return the plan with changes of its certificate, and of the bound where that is changed."""
    changed = data()
    changed["proof"]["certificate"].update(changes)
    if "bound_s" in changes:
        changed["predicted"]["lower_bound_s"] = changes["bound_s"]
    return Plan.parse(changed)


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


def faster(changed: dict[str, Any]) -> None:
    for times in _times(changed):
        for name in times:
            times[name] = times[name] and 0.99 * times[name]


def fewer_microbatches(changed: dict[str, Any]) -> None:
    changed["job"]["microbatches"] = changed["microbatches"] = PLAN.microbatches - 1


def one_more_device(changed: dict[str, Any], *, in_a_class: bool = True) -> None:
    device = {**changed["cluster"]["devices"][0], "name": "another"}
    changed["cluster"]["devices"].append(device)
    changed["cluster"]["links"] += [
        {"between": ["another", other], "bandwidth_gb_per_s": 100.0} for other in NAMES
    ]
    if in_a_class:
        changed["proof"]["certificate"]["argument"]["classes"].append(["another"])


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (faster, "is not proved by its argument"),
        (fewer_microbatches, "is not proved by its argument"),
        (one_more_device, "is not proved by its argument"),
        (partial(one_more_device, in_a_class=False), "not all devices"),
    ],
)
def test_another_problem_is_refused_with_its_digests_too(
    forge: Callable[[dict[str, Any]], None], reason: str
) -> None:
    changed = data()
    forge(changed)
    assert "another problem" in refusal(Plan.parse(changed))
    assert reason in "\n".join(prove(_with_digests(changed)).problems)


CLASSES = [list(members) for members in CERTIFICATE.argument.classes]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "numbers", "reason"),
    [
        ("classes", CLASSES[:-1], "not all devices"),
        ("classes", [*CLASSES, CLASSES[0][:1]], "not all devices"),
        ("classes", [*CLASSES[:-1], ["nobody"]], "unknown device 'nobody'"),
        ("classes", [list(NAMES)], "in one class"),
        ("columns", [1.0] * (LAYERS - 1), "argument.prices"),
        *(
            (kind, prices, reason)
            for kind in ("work", "budget")
            for prices, reason in (
                (dict.fromkeys(TYPES, 0.0), "proves nothing"),
                ({"nothing": 1.0}, "argument.prices"),
                (dict.fromkeys(TYPES[:-1], 1.0), "argument.prices"),
            )
        ),
    ],
)
def test_an_argument_about_other_devices_or_layers_is_refused(
    kind: str, numbers: Any, reason: str
) -> None:
    field = "classes" if kind == "classes" else "prices"
    assert reason in refusal(with_certificate(argument={"kind": kind, field: numbers}))


@given(st.lists(st.floats(1e-30, 1e30), min_size=len(TYPES), max_size=len(TYPES)))
def test_no_prices_prove_more_than_the_best(prices: list[float]) -> None:
    check = BoundCheck(PLAN.problem, CERTIFICATE.space)
    argument = WorkPrices(prices=dict(zip(TYPES, prices, strict=True)))
    assert check.least_s(argument) <= PLAN.predicted.iteration_time_s
    for priced in (argument, TypePrices(prices=argument.prices)):
        assert not check.proves(priced, PLAN.predicted.iteration_time_s * 1.001)


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


def test_prices_of_layers_prove_no_more_than_the_best() -> None:
    """Of one stage a device as of several: every plan gives each layer all microbatches."""
    check = BoundCheck(PLAN.problem, CERTIFICATE.space)
    for k in range(LAYERS):
        prices = tuple(1.0 if k in (0, n) else 0.5 for n in range(LAYERS))
        argument = LayerPrices(prices=prices)
        assert not check.proves(argument, PLAN.predicted.iteration_time_s * 1.001)
        assert check.proves(argument, 1e-6)


def test_prices_of_layers_are_refused_for_three_stages_a_device() -> None:
    space = CERTIFICATE.space.model_copy(update={"max_stages_per_device": 3})
    argument = LayerPrices(prices=(1.0,) * LAYERS)
    with pytest.raises(PipeplanError, match="up to 2 stages a device"):
        BoundCheck(PLAN.problem, space).proves(argument, 1.0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"argument": {"kind": "trust me"}}, "argument"),
        *(
            ({"argument": {"kind": "work", "prices": {TYPES[0]: price}}}, "argument")
            for price in (math.nan, math.inf, -1.0, 1e31, "1", None)
        ),
        *(({"bound_s": bound_s}, "bound_s") for bound_s in (math.nan, math.inf, -1.0, 0.0, 1e300)),
    ],
)
def test_figures_that_are_none_are_refused_on_loading(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PipeplanError, match=field):
        with_certificate(**changes)


@given(st.data())
def test_a_truncated_certificate_is_refused(draw: st.DataObject) -> None:
    """Without any one of its fields or numbers, however deep."""
    changed = data()
    place: Any = changed["proof"]["certificate"]
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = draw.draw(st.sampled_from([*keys]))
        if not isinstance(place[key], dict | list) or not place[key] or draw.draw(st.booleans()):
            break
        place = place[key]
    removed = place.pop(key)
    try:
        plan = Plan.parse(changed)
    except PipeplanError:
        return
    # A field of the space that is left out has its default, which may be what it was.
    assert refusal(plan) or plan.proof == PLAN.proof, f"without {key}: {removed}"


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
