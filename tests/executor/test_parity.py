"""Training by a plan on four processes gives what a single process gives."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from executor_plans import (
    DEVICES,
    by_counts,
    random_owners,
    scheduled,
    shuffled,
    traced,
    zoo_pipeline,
)
from launch import torchrun

from planner.artifacts.plan import Plan

WORKER = Path(__file__).with_name("parity_worker.py")
# Norm of the error over norm of the tensor. In plain torch, adding up the microbatches in reverse
# order moves gradients of these models by 1e-7 and, three steps later, parameters by 3e-6: a
# ResNet's batch norms magnify the rounding, and biases start from zero.
TOLERANCE = {"gradients": 1e-6, "parameters": 1e-5}


def chain_with_tied_ends() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [4, 5, 6], DEVICES, 6))


def uneven_replicas() -> Plan:
    pipeline = zoo_pipeline("gpt_tiny", [4], ["d0", "d1 d2 d3"], 7)
    first = dict.fromkeys(((0, m) for m in range(7)), "d0")
    return shuffled(pipeline, 1, {**first, **by_counts(1, {"d1": 4, "d2": 1, "d3": 2})})


def replicas_of_neighbours() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [5], ["d0 d1", "d2 d3"], 5))


def replicas_of_neighbours_crosswise() -> Plan:
    pipeline = zoo_pipeline("gpt_tiny", [5], ["d0 d1", "d2 d3"], 5)
    owners = {
        **by_counts(0, {"d0": 1, "d1": 4}),
        **by_counts(1, {"d3": 2, "d2": 3}),
    }
    return shuffled(pipeline, 2, owners)


def two_rounds_over_the_devices() -> Plan:
    cuts = [3, 4, 5, 6, 7, 8, 9]
    return scheduled(zoo_pipeline("gpt_tiny", cuts, [*DEVICES, *DEVICES], 5))


def neighbouring_stages_on_one_device() -> Plan:
    stages = ["d0", "d1", "d1", "d2", "d3", "d0"]
    return shuffled(zoo_pipeline("gpt_tiny", [3, 4, 5, 6, 7], stages, 5), 3)


def replicas_that_overlap() -> Plan:
    """Every device holds two stages, each stage two devices; some microbatches change devices."""
    stages = ["d0 d1", "d1 d2", "d2 d3", "d3 d0"]
    return shuffled(zoo_pipeline("gpt_tiny", [3, 5, 7], stages, 6), 4)


def all_in_one_stage() -> Plan:
    return scheduled(zoo_pipeline("vgg_tiny", [], ["d0 d1 d2 d3"], 6))


def more_replicas_than_microbatches() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [], ["d0 d1 d2 d3"], 3))


def replicas_without_a_microbatch_in_the_middle() -> Plan:
    pipeline = zoo_pipeline("llama_tiny", [3], ["d0", "d1 d2 d3"], 3)
    return shuffled(
        pipeline,
        5,
        dict.fromkeys(((s, m) for s in (0, 1) for m in range(3)), "d0")
        | dict.fromkeys(((1, m) for m in range(3)), "d2"),
    )


def llama_with_adamw() -> Plan:
    pipeline = zoo_pipeline("llama_tiny", [2, 4, 5], DEVICES, 6, optimizer="adamw")
    return scheduled(pipeline)


def skips_over_three_stages() -> Plan:
    return scheduled(zoo_pipeline("unet_tiny", [1, 3, 5], DEVICES, 5))


def skips_between_replicas() -> Plan:
    return shuffled(zoo_pipeline("unet_tiny", [1, 2, 4], ["d0 d1", "d2", "d3 d0", "d1"], 5), 6)


def in_place_operations_in_a_chain() -> Plan:
    return scheduled(zoo_pipeline("resnet_tiny", [1, 3, 4], DEVICES, 5))


def in_place_operations_of_replicas() -> Plan:
    pipeline = zoo_pipeline("resnet_tiny", [1, 3], ["d0 d1", "d1 d2", "d3"], 5, optimizer="sgd")
    return shuffled(pipeline, 7)


def images_through_two_stages_a_device() -> Plan:
    stages = ["d0", "d1", "d2", "d3", "d0", "d1", "d2"]
    return shuffled(zoo_pipeline("vgg_tiny", [1, 2, 3, 4, 5, 6], stages, 5), 8)


def random_plan(seed: int) -> Plan:
    """Any cut of any tiny model over four devices, at most two stages on each."""
    rng = random.Random(seed)
    name = rng.choice(["gpt_tiny", "llama_tiny", "unet_tiny", "vgg_tiny"])
    layers = len(traced(name).layers)
    count = rng.randint(2, 6)
    places = [set() for _ in range(count)]
    for device in rng.sample([*DEVICES, *DEVICES], 8):
        rng.choice(places).add(device)
    used = [" ".join(sorted(place)) for place in places if place]
    cuts = sorted(rng.sample(range(1, layers), len(used) - 1))
    pipeline = zoo_pipeline(name, cuts, used, rng.randint(1, 7), max_stages_per_device=2)
    return shuffled(pipeline, seed, random_owners(pipeline, rng))


PLANS: dict[str, Callable[[], Plan]] = {
    plan.__name__: plan
    for plan in (
        chain_with_tied_ends,
        uneven_replicas,
        replicas_of_neighbours,
        replicas_of_neighbours_crosswise,
        two_rounds_over_the_devices,
        neighbouring_stages_on_one_device,
        replicas_that_overlap,
        all_in_one_stage,
        more_replicas_than_microbatches,
        replicas_without_a_microbatch_in_the_middle,
        llama_with_adamw,
        skips_over_three_stages,
        skips_between_replicas,
        in_place_operations_in_a_chain,
        in_place_operations_of_replicas,
        images_through_two_stages_a_device,
    )
} | {f"random_plan_{seed}": lambda seed=seed: random_plan(seed) for seed in range(4)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("plans")
    for name, build in PLANS.items():
        plan = build()
        assert plan.ranks == DEVICES
        plan.save(folder / f"{name}.json")
    run = torchrun(4, str(WORKER), str(folder))
    assert run.returncode == 0, run.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in (folder / "report").iterdir()}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_a_single_process_does(reports: dict[str, dict], name: str) -> None:
    report = reports[name]
    assert report["losses"] == pytest.approx(report["losses_alone"], rel=1e-6)
    assert report["losses_agree"]
    for kind in ("gradients", "parameters"):
        found = report[kind]
        assert not found["missing"]
        assert not found["unknown"]
        assert not found["unequal_replicas"]
        assert max(found["errors"].values()) <= TOLERANCE[kind], (kind, found["errors"])


def test_the_plans_share_parameters_as_their_names_say(reports: dict[str, dict]) -> None:
    def replicas(name: str, parameter: str) -> int:
        return reports[name]["gradients"]["replicas"][parameter]

    assert replicas("chain_with_tied_ends", "wte.weight") == 2
    assert replicas("chain_with_tied_ends", "h.1.ln_1.weight") == 1
    assert replicas("neighbouring_stages_on_one_device", "wte.weight") == 1
    assert replicas("replicas_that_overlap", "wte.weight") == 3
    assert replicas("uneven_replicas", "wte.weight") == 4
    assert replicas("all_in_one_stage", "features.0.conv.weight") == 4


def test_a_rank_keeps_the_weights_of_its_own_stages_only(reports: dict[str, dict]) -> None:
    for name, report in reports.items():
        assert report["model_elements"] == report["held_elements"], name
    width, vocabulary, positions = 64, 256, 64
    block = 12 * width**2 + 13 * width
    embedding = vocabulary * width
    assert reports["chain_with_tied_ends"]["held_elements"] == [
        embedding + positions * width + block,
        block,
        block,
        block + 2 * width + embedding,
    ]


def test_ranks_draw_different_random_numbers_in_training(reports: dict[str, dict]) -> None:
    for report in reports.values():
        assert len({tuple(draw) for draw in report["draw"]}) == 4
