"""Every wrong edit of a plan that held is found and named, whatever the plan."""

import random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import plans

from planner.artifacts.operations import Operation, format_order
from planner.artifacts.plan import Plan
from planner.assemble import refresh
from planner.simulator import owners, simulate_plan
from planner.verifier import verify

RNG = st.randoms(use_true_random=False)


def with_orders(plan: Plan, orders: dict[str, list[Operation]]) -> Plan:
    texts = {device: format_order(order) for device, order in orders.items()}
    return plan.model_copy(update={"orders": texts})


def lists(plan: Plan) -> dict[str, list[Operation]]:
    return {device: list(order) for device, order in plan.parsed_orders().items()}


def edited(plan: Plan, **changes: Any) -> Plan:
    return Plan.parse({**plan.model_dump(mode="json"), **changes})


@given(plans(), RNG)
def test_an_operation_left_out_is_named(plan: Plan, rng: random.Random) -> None:
    orders = lists(plan)
    device = rng.choice([device for device, order in orders.items() if order])
    gone = orders[device].pop(rng.randrange(len(orders[device])))
    problems = verify(with_orders(plan, orders))
    assert any(f"microbatch {gone.microbatch} of stage {gone.stage} has" in p for p in problems)


@given(plans(), RNG)
def test_an_operation_put_in_twice_is_named(plan: Plan, rng: random.Random) -> None:
    orders = lists(plan)
    device = rng.choice([device for device, order in orders.items() if order])
    twice = rng.choice(orders[device])
    orders[device].insert(rng.randint(0, len(orders[device])), twice)
    assert f"orders: operation {twice} stands 2 times; each runs once" in verify(
        with_orders(plan, orders)
    )


@given(plans(), RNG)
def test_an_operation_on_another_device_is_named(plan: Plan, rng: random.Random) -> None:
    """Another replica will not do either: it does not have what the forward kept."""
    assume(len(plan.cluster.devices) > 1)
    orders = lists(plan)
    device = rng.choice([device for device, order in orders.items() if order])
    moved = orders[device].pop(rng.randrange(len(orders[device])))
    other = rng.choice([name for name in plan.cluster.device_names if name != device])
    orders.setdefault(other, []).append(moved)
    problems = verify(with_orders(plan, orders))
    assert any(f"{moved}: device" in p or f"of stage {moved.stage} runs on" in p for p in problems)


@given(plans(), RNG)
def test_a_backward_before_its_forward_deadlocks(plan: Plan, rng: random.Random) -> None:
    orders = lists(plan)
    owner = owners(orders)
    (stage, microbatch), device = rng.choice(sorted(owner.items()))
    order = orders[device]
    forward = Operation(stage, "F", microbatch)
    kind = "I" if Operation(stage, "I", microbatch) in order else "B"
    backward = Operation(stage, kind, microbatch)
    i, j = order.index(forward), order.index(backward)
    order[i], order[j] = backward, forward
    (problem,) = verify(with_orders(plan, orders))
    assert problem.startswith("the orders deadlock: ")
    assert f"{device} waits at" in problem


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
    plans(),
    st.sampled_from(["iteration_time_s", "lower_bound_s", "bubble"]),
    st.floats(1e-5, 0.9),
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


@given(plans(), RNG)
def test_a_layer_moved_backwards_is_named(plan: Plan, rng: random.Random) -> None:
    """Of an edge between two stages, the producer goes behind its user."""
    stage_of = {layer: stage.index for stage in plan.stages for layer in stage.layers}
    edges = [
        (tensor.producer, user)
        for tensor in plan.model.graph.boundaries
        for user in tensor.users
        if stage_of[tensor.producer] < stage_of[user]
    ]
    assume(edges)
    producer, user = rng.choice(edges)
    stages = plan.model_dump(mode="json")["stages"]
    first, second = stages[stage_of[producer]], stages[stage_of[user]]
    first["layers"][first["layers"].index(producer)] = user
    second["layers"][second["layers"].index(user)] = producer
    for stage in (first, second):
        stage["recompute"] = []
    problems = verify(edited(plan, stages=stages))
    assert any(f"{producer!r}" in p and f"{user!r}" in p and "backwards" in p for p in problems)


@given(plans(), RNG)
def test_a_layer_without_a_stage_is_named(plan: Plan, rng: random.Random) -> None:
    stages = plan.model_dump(mode="json")["stages"]
    stage = rng.choice(stages)
    gone = stage["layers"].pop(rng.randrange(len(stage["layers"])))
    assume(stage["layers"])
    stage["recompute"] = []
    problems = verify(edited(plan, stages=stages))
    assert f"stages: layer {gone!r} is in no stage; every layer must be in exactly one" in problems
