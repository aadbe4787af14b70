"""Training by a plan on four processes gives what a single process gives."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from executor_plans import (
    DEVICES,
    by_counts,
    cut_pipeline,
    on_groups,
    pipeline_of,
    scheduled,
    shuffled,
    traced,
    zoo_pipeline,
)
from launch import forked

from benchmarks.executor.parity import WITHIN
from benchmarks.executor.plans import random_training
from benchmarks.executor.single_process import TOLERANCE
from executor.launch.prepare import Prepared, prepare
from executor.launch.run import PlanRank
from models import ZOO
from planner.costs.placed_pipeline import PlacedPipeline
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.trace import trace

pytestmark = pytest.mark.usefixtures("shared_exports")
WORKER = "benchmarks.executor.parity_worker"


def chain_with_tied_ends() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [4, 5, 6], DEVICES, 6))


def uneven_replicas() -> Plan:
    pipeline = zoo_pipeline("gpt_tiny", [4], ["d0", "d1 d2 d3"], 7)
    first = dict.fromkeys(((0, m) for m in range(7)), "d0")
    return shuffled(pipeline, 1, {**first, **by_counts(1, {"d1": 4, "d2": 1, "d3": 2})})


def replicas_of_neighbours_crosswise() -> Plan:
    pipeline = zoo_pipeline("gpt_tiny", [5], ["d0 d1", "d2 d3"], 5)
    owners = {
        **by_counts(0, {"d0": 1, "d1": 4}),
        **by_counts(1, {"d3": 2, "d2": 3}),
    }
    return shuffled(pipeline, 2, owners)


def neighbouring_stages_on_one_device() -> Plan:
    stages = ["d0", "d1", "d1", "d2", "d3", "d0"]
    return shuffled(zoo_pipeline("gpt_tiny", [3, 4, 5, 6, 7], stages, 5), 3)


def replicas_that_overlap() -> Plan:
    """Every device holds two stages, each stage two devices; some microbatches change devices."""
    stages = ["d0 d1", "d1 d2", "d2 d3", "d3 d0"]
    return shuffled(zoo_pipeline("gpt_tiny", [3, 5, 7], stages, 6), 4)


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


def skips_between_replicas() -> Plan:
    return shuffled(zoo_pipeline("unet_tiny", [1, 2, 4], ["d0 d1", "d2", "d3 d0", "d1"], 5), 6)


def in_place_operations_of_replicas() -> Plan:
    pipeline = zoo_pipeline("resnet_tiny", [1, 3], ["d0 d1", "d1 d2", "d3"], 5, optimizer="sgd")
    return shuffled(pipeline, 7)


def some_backwards_split_between_replicas() -> Plan:
    stages = ["d0 d1", "d1 d2 d3", "d3 d0"]
    return shuffled(zoo_pipeline("unet_tiny", [2, 4], stages, 6), 10, split=0.5)


def statistics_of_replicas_out_of_order() -> Plan:
    pipeline = zoo_pipeline("resnet_tiny", [1, 4], ["d0 d1", "d2 d3", "d1 d0 d2"], 7)
    return shuffled(pipeline, 11)


def recomputed_with_dropout() -> Plan:
    """Every second layer, in replicas, with split backwards."""
    arguments = {"dropout": 0.2}
    job = Job(samples_per_microbatch=2, precision="float64", model_arguments=arguments)
    graph = trace(ZOO["bert_tiny"], job)
    names = list(graph.layers)
    rows = [(names[:2], ["d0", "d1"]), (names[2:4], ["d2"]), (names[4:], ["d3", "d0"])]
    stages = [(part, on, [name for name in part if name in names[::2]]) for part, on in rows]
    fields = {"precision": "float64", "microbatches": 5, "model_arguments": arguments}
    pipeline = pipeline_of(graph, ZOO["bert_tiny"], stages, **fields)
    return shuffled(pipeline, 12, split=0.5)


def offloaded_beside_recomputed() -> Plan:
    """Stashes of most layers travel, with more than one in flight; host links of 1 GB/s."""
    graph = traced("gpt_tiny")
    names = list(graph.layers)
    parts = [(names[:3], ["d0"]), (names[3:5], ["d1"]), (names[5:6], ["d2"]), (names[6:], ["d3"])]
    stages = [(part, on, part[1:2], part[:1] + part[2:]) for part, on in parts]
    fields = {"microbatches": 6, "backward": "whole", "offload": True}
    return scheduled(pipeline_of(graph, ZOO["gpt_tiny"], stages, **fields))


def a_bias_handed_on_by_split_stages() -> Plan:
    """T5 computes the bias of its decoder's attention from a table, for all its blocks."""
    return shuffled(zoo_pipeline("t5_tiny", [4, 9, 12, 13], [*DEVICES, "d0"], 4), 13, split=1.0)


def halves(seed: int, split: float = 0.0) -> Callable[[PlacedPipeline], Plan]:
    """Random orders, with a share of split backwards."""
    return lambda pipeline: shuffled(pipeline, seed, split=split)


def example_pipeline(
    name: str, cuts: Sequence[int], devices: Sequence[str], again: Sequence[int] = (), **job: object
) -> PlacedPipeline:
    """A model of examples/, as :func:`zoo_pipeline`; ``again`` are indices of recomputed layers."""
    factory = f"examples.models.{name}"
    checked = Job.model_validate({"samples_per_microbatch": 2, **job})
    return cut_pipeline(trace(factory, checked), factory, cuts, devices, again, **job)


def a_frozen_encoder_of_replicas_beside_the_decoder() -> Plan:
    name, stages = "vision_language:VisionLanguage", ["d0 d1", "d1 d2 d3", "d3 d0"]
    pipeline = example_pipeline(name, [4, 11], stages, [1, 3, 9, 11], microbatches=6)
    return shuffled(pipeline, 18, split=0.5)


def frozen_layers_between_trained_ones() -> Plan:
    name, stages = "vision_language:VisionLanguage", ["d0", "d1 d2", "d3", "d0 d1"]
    arguments = {"frozen": ["encoder", "decoder"]}
    pipeline = example_pipeline(
        name, [5, 9, 11], stages, [10], microbatches=5, model_arguments=arguments
    )
    return shuffled(pipeline, 19, split=0.5)


def heads_of_replicas() -> Plan:
    name, stages = "several_heads:SeveralHeads", ["d0 d1", "d2 d3", "d1 d2", "d3 d0"]
    pipeline = example_pipeline(name, [3, 6, 7], stages, [4, 6], microbatches=5, loss="output")
    return shuffled(pipeline, 20, split=0.5)


def a_group_of_four() -> Plan:
    return on_groups("llama_tiny", [], ["g0"], scheduled, 4, microbatches=2, **EIGHT_HEADS)


def groups_that_are_replicas() -> Plan:
    return on_groups("gpt_tiny", [], ["g0 g1"], scheduled, microbatches=5, **DOUBLE)


def groups_that_share_positions_and_split_backwards() -> Plan:
    groups, order = ["g0", "g1", "g0"], halves(14, split=0.6)
    return on_groups("gpt_tiny", [3, 7], groups, order, sequence=True, microbatches=4, **DOUBLE)


def groups_that_recompute_layers_and_share_positions() -> Plan:
    groups, again = ["g0", "g0 g1", "g1"], [1, 2, 4, 6]
    return on_groups(
        "llama_tiny",
        [2, 5],
        groups,
        halves(15, split=0.5),
        sequence=True,
        recompute=again,
        microbatches=4,
        optimizer="adamw",
        **EIGHT_HEADS,
    )


def groups_with_dropout() -> Plan:
    arguments = {"model_arguments": {"dropout": 0.2}, "precision": "float64"}
    groups = ["g0", "g1"]
    return on_groups(
        "bert_tiny",
        [3],
        groups,
        halves(16),
        sequence=True,
        recompute=[1],
        microbatches=3,
        **arguments,
    )


def groups_with_whole_experts() -> Plan:
    order = halves(18, 0.5)
    return on_groups("mixtral_tiny", [2], ["g0", "g1"], order, microbatches=3, expert_parallel=True)


def four_members_with_whole_experts_that_share_positions() -> Plan:
    return on_groups(
        "mixtral_tiny",
        [],
        ["g0"],
        halves(19, 0.5),
        4,
        sequence=True,
        recompute=[2],
        microbatches=3,
        optimizer="adamw",
        expert_parallel=True,
        **EIGHT_HEADS,
    )


def groups_that_recompute_attention() -> Plan:
    """Its dropout draws the masks of a single process again; a layer is recomputed whole too."""
    again = {"recompute_attention": True, "model_arguments": {"dropout": 0.2}, **DOUBLE}
    groups, order = ["g0", "g0 g1"], halves(21, split=0.5)
    return on_groups("bert_tiny", [3], groups, order, recompute=[2], microbatches=3, **again)


EIGHT_HEADS = {"model_arguments": {"kv_heads": 4}}
DOUBLE = {"precision": "float64"}
PLANS: dict[str, Callable[[], Plan]] = {
    plan.__name__: plan
    for plan in (
        chain_with_tied_ends,
        uneven_replicas,
        replicas_of_neighbours_crosswise,
        neighbouring_stages_on_one_device,
        replicas_that_overlap,
        more_replicas_than_microbatches,
        replicas_without_a_microbatch_in_the_middle,
        skips_between_replicas,
        in_place_operations_of_replicas,
        some_backwards_split_between_replicas,
        statistics_of_replicas_out_of_order,
        recomputed_with_dropout,
        offloaded_beside_recomputed,
        a_bias_handed_on_by_split_stages,
        a_frozen_encoder_of_replicas_beside_the_decoder,
        frozen_layers_between_trained_ones,
        heads_of_replicas,
        a_group_of_four,
        groups_that_are_replicas,
        groups_that_share_positions_and_split_backwards,
        groups_that_recompute_layers_and_share_positions,
        groups_with_dropout,
        groups_with_whole_experts,
        four_members_with_whole_experts_that_share_positions,
        groups_that_recompute_attention,
    )
} | {
    f"random_plan_{seed}": lambda seed=seed: random_training(
        random.Random(seed), len(DEVICES), "float64"
    )[0]
    for seed in range(2)
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("plans")
    for name, build in PLANS.items():
        plan = build()
        assert plan.rank_devices == DEVICES
        plan.save(folder / f"{name}.json")
    run = forked(4, "-m", WORKER, str(folder))
    assert run.returncode == 0, run.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in (folder / "report").iterdir()}


@pytest.mark.extensive
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_a_single_process_does(reports: dict[str, dict], name: str) -> None:
    report = reports[name]
    assert report["problems"] == []
    assert report["excess"] <= 1, report
    for error in WITHIN:
        assert report[error] <= TOLERANCE[report["precision"]], (error, report)


def prepared(plan: Plan) -> list[Prepared]:
    return [prepare(plan, place=PlanRank(rank, len(plan.ranks))) for rank in range(len(plan.ranks))]


def test_plans_share_parameters_as_their_names_say() -> None:
    def holders(plan: Plan) -> Counter[str]:
        return Counter(name for rank in prepared(plan) for name in rank.parameters)

    tied = holders(chain_with_tied_ends())
    assert (tied["wte.weight"], tied["h.1.ln_1.weight"]) == (2, 1)
    assert holders(neighbouring_stages_on_one_device())["wte.weight"] == 1
    assert holders(replicas_that_overlap())["wte.weight"] == 3
    assert holders(uneven_replicas())["wte.weight"] == 4


def test_a_rank_keeps_the_weights_of_its_own_stages_only() -> None:
    ranks = prepared(chain_with_tied_ends())
    held = [sum(p.numel() for p in rank.parameters.values()) for rank in ranks]
    assert held == [sum(p.numel() for p in rank.model.parameters()) for rank in ranks]
    width, vocabulary, positions = 64, 256, 64
    block = 12 * width**2 + 13 * width
    embedding = vocabulary * width
    assert held == [
        embedding + positions * width + block,
        block,
        block,
        block + 2 * width + embedding,
    ]
