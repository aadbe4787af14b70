"""What verify finds of plans that held: figures, memory and bounds; for stages and orders see
tests/cli/test_hand_edits.py and, against an oracle, test_edited_plans.py.
"""

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from builders import boundary, cluster, graph, layer, link, orders, parameter, pipeline, star
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import plans

from planner.assembly import plan_by_hand
from planner.errors import MOST_PROBLEMS
from planner.model.graph_record import GraphRecord, graph_digest
from planner.plan.operations import Operation, format_order
from planner.plan.plan import BUCKET_MIB, Plan, Sync
from planner.prediction import refresh
from planner.simulation.simulator import simulate_plan
from planner.space import BoundCovers
from planner.verification import verify

RNG = st.randoms(use_true_random=False)


def with_orders(plan: Plan, orders: dict[str, list[Operation]]) -> Plan:
    texts = {device: format_order(order) for device, order in orders.items()}
    return plan.model_copy(update={"orders": texts})


def lists(plan: Plan) -> dict[str, list[Operation]]:
    return {device: list(order) for device, order in plan.parsed_orders().items()}


def edited(plan: Plan, **changes: Any) -> Plan:
    return Plan.parse({**plan.model_dump(mode="json"), **changes})


def test_replicas_around_a_ring_of_direct_links_hold() -> None:
    """Devices do not forward: a ring of all has its paths, a tree, which is faster, has not."""
    names = [f"d{place}" for place in range(5)]
    wires = [link(first, second, latency_us=1e6) for first, second in pairwise([*names, "d0"])]
    layers = [layer("a", 1, 1, parameters=["w"])]
    one = graph(layers, parameters=[parameter("w", 8)])
    placed = pipeline(one, cluster(names, wires), [(("a",), names)], microbatches=5)
    plan = plan_by_hand(placed, orders(**{name: f"0F{n} 0B{n}" for n, name in enumerate(names)}))
    assert verify(plan) == []
    assert plan.predicted.iteration_time_s > 8  # Steps of a ring; a tree would take 6.
    broken = plan.cluster.model_copy(update={"links": plan.cluster.links[:-1]})
    assert verify(plan.model_copy(update={"cluster": broken})) == [
        "stages: two devices that must exchange data have no path of links"
    ]


@given(plans(), RNG)
def test_memory_is_enough_to_the_byte(plan: Plan, rng: random.Random) -> None:
    """One device type has exactly what its fullest device needs, or a byte too little."""
    peaks = simulate_plan(plan).peak_memory_bytes
    device = rng.choice(sorted(peaks))
    kind = plan.cluster.type_of(device)
    most = max(peak for d, peak in peaks.items() if plan.cluster.type_of(d) == kind)
    assume(most > 2)

    def with_capacity(bytes_: int) -> Plan:
        data = plan.model_dump(mode="json")
        # Bytes over 2**30 are exact in floating point.
        data["cluster"]["device_types"][kind].update(memory_gib=bytes_ / 2**30, reserved_gib=0)
        return Plan.parse(data)

    assert verify(with_capacity(most)) == []
    problems = verify(with_capacity(most - 1))
    assert problems
    assert all(problem.startswith("memory of ") for problem in problems)
    fullest = [d for d, p in peaks.items() if p == most and plan.cluster.type_of(d) == kind]
    assert any(f"memory of {name!r}" in problem for name in fullest for problem in problems)


@given(
    plans(), st.sampled_from(["iteration_time_s", "lower_bound_s", "bubble"]), st.floats(1e-5, 0.9)
)
def test_a_prediction_that_is_not_the_simulations_is_named(
    plan: Plan, field: str, change: float
) -> None:
    data = plan.model_dump(mode="json")
    before = data["predicted"][field]
    if field == "bubble":
        wrong = min(1.0, before + change)
    else:  # A bound is wrong if it is above the time.
        wrong = data["predicted"]["iteration_time_s"] * (1 + change) + 1e-6
    assume(abs(wrong - before) > 1e-5 * max(wrong, before))
    data["predicted"][field] = wrong
    problems = verify(Plan.parse(data))
    assert any(problem.startswith(f"predicted.{field}: ") for problem in problems)
    assert verify(refresh(Plan.parse(data))) == []


# --- what a bound was proved for ------------------------------------------------------------------


def may_have_bound(plan: Plan) -> bool:
    """Whether it takes any time, and reduces in buckets of the size that bounds are about."""
    return plan.predicted.iteration_time_s > 0 and plan.bucket_bytes in (None, BUCKET_MIB * 2**20)


def with_bound(plan: Plan) -> Plan:
    """The plan with a bound half its time, as if it had been proved."""
    bound_s = plan.predicted.iteration_time_s / 2
    predicted = plan.predicted.model_copy(update={"lower_bound_s": bound_s, "gap": 1.0})
    covered = BoundCovers(space=plan.job.space)
    provenance = plan.provenance.model_copy(update={"bound_covers": covered})
    return plan.model_copy(update={"predicted": predicted, "provenance": provenance})


def change_the_cluster(data: dict, rng: random.Random) -> None:
    cluster = data["cluster"]
    rows = [*cluster["device_types"].values(), *cluster["links"]]
    row = rng.choice(rows)
    figure = rng.choice([key for key, value in row.items() if isinstance(value, float) and value])
    row[figure] *= 0.75


def change_the_job(data: dict, rng: random.Random) -> None:
    data["job"]["optimizer"] = {"adamw": "sgd"}.get(data["job"]["optimizer"], "adamw")


def change_the_graph(data: dict, rng: random.Random) -> None:
    row = rng.choice(data["model"]["graph"]["layers"])
    row[rng.choice([key for key, value in row.items() if isinstance(value, int)])] += 1
    data["model"]["graph_digest"] = graph_digest(GraphRecord.parse(data["model"]["graph"], "graph"))


@given(plans(), st.sampled_from([change_the_cluster, change_the_job, change_the_graph]), RNG)
def test_a_bound_holds_for_its_own_problem_only(
    plan: Plan, change: Callable[[dict, random.Random], None], rng: random.Random
) -> None:
    assume(may_have_bound(plan))
    plan = with_bound(plan)
    assert verify(plan) == []
    assert refresh(plan) == plan
    data = plan.model_dump(mode="json")
    change(data, rng)
    other = Plan.parse(data)
    problems = verify(other)
    assume(not any(problem.startswith("memory of ") for problem in problems))
    assert any(
        problem.startswith("provenance.problem_digest: ") and "pipeplan simulate" in problem
        for problem in problems
    )
    again = refresh(other)
    assert verify(again) == []
    assert (again.predicted.lower_bound_s, again.predicted.gap) == (0, None)
    assert str(again.provenance.bound_covers).startswith("nothing: ")
    assert again.provenance.problem_digest == other.problem.digest
    # The way back is a new search: what was dropped is not there any more.
    assert refresh(again) == again


@given(plans())
def test_a_bound_keeps_its_space_if_the_job_allows_more(plan: Plan) -> None:
    assume(may_have_bound(plan))
    plan = with_bound(plan)
    job = {"max_stages_per_device": 16, "backward": "any"}
    wider = plan.model_copy(update={"job": plan.job.model_copy(update=job)})
    assert verify(wider) == []
    assert refresh(wider).provenance == plan.provenance


def test_buckets_of_another_size_are_not_covered_by_a_bound() -> None:
    held = [parameter("p", 20 * 2**20)]
    rows = [layer("a", 1.0, parameters=["p"])]
    stages, by_device = [(["a"], ["d0", "d1"])], orders(d0="0F0 0B0", d1="0F1 0B1")
    placed = pipeline(graph(rows, [], held), star(2), stages, overlap_reduction=True)
    plan = with_bound(plan_by_hand(placed, by_device))
    assert verify(plan) == []
    other = plan.model_copy(update={"sync": Sync(options={"bucket_mib": 5})})
    told = "sync.options: buckets of 5 MiB; the bound does not cover this plan"
    assert any(told in problem for problem in verify(other))
    assert refresh(other).predicted.lower_bound_s == 0


def test_a_plan_outside_the_space_of_its_bound_is_refused_and_loses_it() -> None:
    rows = [layer("a", 1.0), layer("b", 1.0)]
    placed = pipeline(graph(rows, [boundary("a", "b")]), star(1), [(["a", "b"], ["d0"])])
    plan = with_bound(plan_by_hand(placed, orders(d0="0F0 0I0 0W0 0F1 0I1 0W1")))
    assert verify(plan) == []
    whole = plan.job.space.model_copy(update={"backward": "whole"})
    other = plan.model_copy(
        update={
            "provenance": plan.provenance.model_copy(
                update={
                    "bound_covers": BoundCovers(space=whole),
                    "problem_digest": plan.problem.digest_in(whole),
                }
            )
        }
    )
    (problem,) = verify(other)
    assert problem.startswith('provenance.bound_covers: backward is "whole", but orders')
    again = refresh(other)
    assert verify(again) == []
    assert again.predicted.lower_bound_s == 0
    assert "outside the space" in str(again.provenance.bound_covers)


@given(plans(), RNG)
def test_a_bound_outlives_an_edit_of_the_orders_that_does_not_beat_it(
    plan: Plan, rng: random.Random
) -> None:
    assume(may_have_bound(plan))
    plan = with_bound(plan)
    orders = lists(plan)
    order = orders[rng.choice([device for device, order in orders.items() if len(order) > 1])]
    place = rng.randrange(len(order) - 1)
    order[place : place + 2] = reversed(order[place : place + 2])
    other = with_orders(plan, orders)
    assume(not any("deadlock" in problem for problem in verify(other)))
    again = refresh(other)
    assert verify(again) == []
    bound_s, time_s = plan.predicted.lower_bound_s, again.predicted.iteration_time_s
    if time_s < bound_s * (1 - 1e-9):  # Not optimal by edict: it was no bound of this plan.
        assert again.predicted.lower_bound_s == 0
        assert str(again.provenance.bound_covers).startswith("nothing: ")
    else:
        assert again.provenance == plan.provenance
        assert again.predicted.lower_bound_s == min(bound_s, time_s)


# --- many problems, little work -------------------------------------------------------------------


@given(plans())
def test_microbatches_that_lack_the_same_share_a_line(plan: Plan) -> None:
    microbatches = 65536
    more = edited(
        plan,
        job={**plan.model_dump(mode="json")["job"], "microbatches": microbatches},
        microbatches=microbatches,
    )
    before = plan.microbatches
    which = (
        f"microbatch {before}"
        if before == microbatches - 1
        else f"each of microbatches {before} to {microbatches - 1}"
    )
    assert verify(more) == [
        f"orders: {which} of stage {stage.index} has no operation; "
        "it needs F and then B, or F, I and W"
        for stage in plan.stages
    ]


def calls_of(work: Callable[[], object]) -> int:
    """Python calls and resumed generators: a measure of work that no clock enters."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def test_the_work_for_stages_grows_as_their_number() -> None:
    placed = pipeline(
        graph([layer("a"), layer("b")], [boundary("a", "b")]),
        cluster(["d0", "d1"], [link("d0", "d1")]),
        [(["a"], ["d0"]), (["b"], ["d1"])],
    )
    plan = plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))
    one = plan.stages[0].model_dump()

    def listed(count: int) -> Plan:
        stages = [{**one, "index": index, "devices": ["d0", "d1"]} for index in range(count)]
        return edited(plan, stages=stages)

    few, many = listed(100), listed(400)
    assert calls_of(lambda: verify(many)) < 5 * calls_of(lambda: verify(few))
    assert len(verify(many)) == MOST_PROBLEMS + 1
