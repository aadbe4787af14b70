"""Edits of stages and orders, against an oracle of what no plan may be; a soak tries many more."""

import random
import re
from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from plan_oracle import least_peaks, reasons_to_refuse
from strategies import plans

from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.prediction import refresh
from planner.simulation.simulator import simulate_plan
from planner.verification import verify

RNG = st.integers(0, 2**32 - 1).map(random.Random)
TIMES = 10
"""So often each plan is edited: making one takes longer than to edit and verify it."""


def without_spare_memory(plan: Plan) -> dict[str, Any]:
    """The plan as data, on device types that have what their fullest device needs."""
    data = plan.model_dump(mode="json")
    peaks = simulate_plan(plan).peak_memory_bytes
    for name, kind in data["cluster"]["device_types"].items():
        most = max((p for d, p in peaks.items() if plan.cluster.type_of(d) == name), default=0)
        kind.update(memory_gib=max(most, 2**11) / 2**30, reserved_gib=0)
    return data


def permute(data: dict[str, Any], rng: random.Random) -> None:
    for stage in data["stages"]:
        for field in ("layers", "recompute"):
            stage[field].reverse() if rng.random() < 0.5 else rng.shuffle(stage[field])


def move(data: dict[str, Any], rng: random.Random) -> None:
    source, target = rng.choice(data["stages"]), rng.choice(data["stages"])
    if len(source["layers"]) > 1:
        name = source["layers"].pop(rng.choice([0, -1, rng.randrange(len(source["layers"]))]))
        target["layers"].insert(rng.randint(0, len(target["layers"])), name)
        if name in source["recompute"] and rng.random() < 0.8:
            source["recompute"].remove(name)
            target["recompute"].append(name)


def copy(data: dict[str, Any], rng: random.Random) -> None:
    rng.choice(data["stages"])["layers"].append(rng.choice(rng.choice(data["stages"])["layers"]))


def leave_out(data: dict[str, Any], rng: random.Random) -> None:
    layers = rng.choice(data["stages"])["layers"]
    if len(layers) > 1:
        layers.pop(rng.randrange(len(layers)))


def recompute(data: dict[str, Any], rng: random.Random) -> None:
    stage = rng.choice(data["stages"])
    stage["recompute"] = rng.sample(stage["layers"], rng.randint(0, len(stage["layers"])))
    data["job"]["recompute"] = rng.choice([True, False])


def keep(data: dict[str, Any], rng: random.Random) -> None:
    for stage in data["stages"]:
        stage["recompute"] = rng.sample(
            stage["recompute"], rng.randint(0, len(stage["recompute"]) // 2)
        )


def exchange_operations(data: dict[str, Any], rng: random.Random) -> None:
    busy = sorted(name for name, words in data["orders"].items() if words)
    if not busy:  # Another edit dropped all operations.
        return
    device = rng.choice(busy)
    words = data["orders"][device].split()
    first, second = rng.randrange(len(words)), rng.randrange(len(words))
    words[first], words[second] = words[second], words[first]
    data["orders"][device] = " ".join(words)


def hand_over(data: dict[str, Any], rng: random.Random) -> None:
    """Give an operation, or all of a microbatch, to another device; or drop it, or repeat it."""
    orders = {device: words.split() for device, words in data["orders"].items()}
    busy = sorted(device for device, words in orders.items() if words)
    if not busy:
        return
    source, target = rng.choice(busy), rng.choice(sorted(orders))
    word = rng.choice(orders[source])
    stage, number = re.split("[FBIW]", word)
    alike = [w for w in orders[source] if re.split("[FBIW]", w) == [stage, number]]
    moved = alike if rng.random() < 0.5 else [word]
    if rng.random() < 0.8:
        orders[source] = [w for w in orders[source] if w not in moved]
    if rng.random() < 0.8:
        at = rng.randint(0, len(orders[target]))
        orders[target][at:at] = moved
    data["orders"] = {device: " ".join(words) for device, words in orders.items() if words}


def change_devices(data: dict[str, Any], rng: random.Random) -> None:
    stage = rng.choice(data["stages"])
    device = rng.choice(data["cluster"]["devices"])["name"]
    if rng.random() < 0.5:
        stage["devices"].append(device)
    else:
        stage["devices"][rng.randrange(len(stage["devices"]))] = device


EDITS = [
    *(permute, move, move, copy, leave_out, recompute, recompute, keep),
    *(exchange_operations, exchange_operations, hand_over, hand_over, change_devices),
]


@given(plans(), RNG)
def test_layers_count_in_one_order_however_a_plan_lists_them(
    plan: Plan, rng: random.Random
) -> None:
    tight = refresh(Plan.parse(without_spare_memory(plan), "tight")).model_dump(mode="json")
    place = list(plan.layers).index
    for _ in range(TIMES):
        data = deepcopy(tight)
        permute(data, rng)
        permuted = Plan.parse(data, "permuted")
        assert verify(permuted) == []
        assert permuted.execution_digest == plan.execution_digest
        for stage in permuted.stages:
            assert list(stage.layers) == sorted(stage.layers, key=place)
            assert list(stage.recompute) == sorted(stage.recompute, key=place)


@given(plans(), RNG)
def test_no_edit_is_accepted_that_the_oracle_refuses(plan: Plan, rng: random.Random) -> None:
    tight = without_spare_memory(plan)
    for _ in range(TIMES):
        data = deepcopy(tight)
        for edit in rng.sample(EDITS, rng.randint(1, 3)):
            edit(data, rng)
        check(data)


def check(data: dict[str, Any]) -> None:
    """Parse an edited plan, predict it anew, and hold verdict and peaks against the oracle's."""
    edited = Plan.parse(data, "edited")
    try:
        edited = refresh(edited)  # As `pipeplan simulate PLAN -o PLAN` does after an edit.
    except PipeplanError:
        assert verify(edited)
        return
    reasons = list(reasons_to_refuse(data))
    problems = verify(edited)
    assert problems or not reasons
    if not problems:
        stage_of = {name: k for k, stage in enumerate(data["stages"]) for name in stage["layers"]}
        for device, least in least_peaks(data, stage_of).items():
            if device in edited.predicted.devices:
                assert edited.predicted.devices[device].peak_memory_bytes >= least
