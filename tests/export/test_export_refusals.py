"""Plans that a tool cannot run are refused with every reason; Megatron-LM's are in a file apart."""

from collections.abc import Callable

import pytest
from builders import boundary, layer
from export_plans import NAMES, in_order, on_pipelines, placed, titan_graph

from planner import PipeplanError
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline
from planner.interop.exported import export_plan
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import parse_order
from planner.plan.plan import Plan
from planner.plan.runtimes import for_runtime


def of(names: str, cuts: list[int], *devices: str) -> Plan:
    """A chain of layers with other names."""
    return in_order(placed(titan_graph(names.split()), cuts, devices))


def chain(cuts: list[int], *devices: str, **job: object) -> Plan:
    return in_order(placed(titan_graph(), cuts, devices, **job))


def out_of_order() -> Plan:
    pipeline = placed(titan_graph(), [4], ("d0", "d1"), microbatches=2)
    texts = {"d0": "0F0 0F1 0B1 0B0", "d1": "1F1 1B1 1F0 1B0"}
    return plan_by_hand(pipeline, {d: parse_order(text, d) for d, text in texts.items()})


def meeting() -> Plan:
    """Replicas of two stages of which each hands on to both."""
    pipeline: PlacedPipeline = placed(titan_graph(), [4], ("d0 d1", "d2 d3"), microbatches=4)
    owner = {(0, m): f"d{m % 2}" for m in range(4)} | {(1, m): f"d{2 + m // 2}" for m in range(4)}
    return in_order(pipeline, owner)


def in_float64() -> Plan:
    data = titan_graph().record.model_dump(mode="json") | {
        "precision": "float64",
        "layers": [layer("a"), layer("b")],
        "boundaries": [boundary("a", "b")],
    }
    return in_order(placed(LayerGraph.parse(data), [1], ("d0", "d1"), precision="float64"))


def skipping(
    *skip: str, cuts: tuple[int, ...] = (4,), on: str = "d0 d1", tied: bool = False
) -> Plan:
    graph = titan_graph(NAMES, skip, tied=tied) if skip else titan_graph(tied=tied)
    return in_order(placed(graph, list(cuts), on.split()))


ALONE = "model.embed model.part0 model.part1 model.part2 model.part3 lm_head loss"
REFUSED: list[tuple[str, Callable[[], Plan], tuple[str, ...]]] = [
    (
        "torch-csv",
        lambda: chain([4, 8], "d0 d1", "d2", "d3"),
        ("stages[0].devices: 2 replicas (d0, d1), but torch", "stages[2].layers: the last stage"),
    ),
    ("torch-csv", out_of_order, ("orders['d1']: 1F0 comes after 1F1",)),
    (
        "torchtitan",
        lambda: of(ALONE, [3], "d0", "d1"),
        ("the module 'model' (layers 'model.embed', 'model.part0'", "lies in stages 0 and 1"),
    ),
    (
        "torchtitan",
        lambda: of("wte norm layers.0 norm#2 loss", [2], "d0", "d1"),
        ("the module 'norm' (layers 'norm', 'norm#2') lies in stages 0 and 1",),
    ),
    (
        "torchtitan",
        lambda: skipping("tok_embeddings", "norm"),
        ("2 tensors cross the cut after stage 0",),
    ),
    (
        "torchtitan",
        lambda: skipping(tied=True),
        ("the parameter 'tok_embeddings.weight' is used by stages 0 and 1",),
    ),
    (
        "torchtitan",
        lambda: chain([2, 4, 6], "d0", "d0", "d1", "d1"),
        ("stages: are on devices d0, d0, d1, d1,",),
    ),
    (
        "torchtitan",
        lambda: chain([4], "d0", "d0"),
        ("stages: 2 stages on one device ('d0'), so there is nothing", "plan for more devices, or"),
    ),
    (
        "torchtitan",
        lambda: on_pipelines(chain([4], "d0", "d0"), 2),
        ("2 stages on each of 2 devices (d0, d1)", "set replication = false in the job"),
    ),
    (
        "torchtitan",
        lambda: chain([], "d0"),
        ("stages: 1 stage on one device ('d0'), so there is nothing",),
    ),
    *(
        (
            "torchtitan",
            lambda count=count: chain([], "d0 d1 d2", microbatches=count),
            ("1 stage on each of 3 devices (d0, d1, d2), so", "plan again, or adopt a layout"),
        )
        for count in (6, 4)  # Whether or not the replicas share them equally.
    ),
    (
        "torchtitan",
        lambda: chain([4], "d0 d1", "d2"),
        ("different numbers of replicas (0: 2, 1: 1)",),
    ),
    ("torchtitan", meeting, ("separate or meet",)),
    (
        "torchtitan",
        lambda: skipping("tok_embeddings", "norm", cuts=(2, 4, 8), on="d0 d0 d1 d1", tied=True),
        ("tensors cross", "is used by stages", "supports only a loop", "only the layer 'loss'"),
    ),
    (
        "deepspeed",
        lambda: chain([4], "d0", "d1", memory_gib=5),  # Two stashes of 4 GB at once.
        ("runs 1F1B, and then d0 needs 7.",),
    ),
    (
        "deepspeed",
        lambda: chain([2, 4, 6], "d0", "d1", "d0", "d1"),
        ("'d0' holds the stages 0, 2 (and 1 device more), but DeepSpeed has one",),
    ),
    (
        "deepspeed",
        lambda: chain([4], "d0 d1", "d2"),
        ("different numbers of replicas (0: 2, 1: 1)",),
    ),
    (
        "deepspeed",
        lambda: chain([4], "d0 d1", "d2 d3", microbatches=5),
        ("microbatches: 5 cannot be divided equally among 2 pipelines",),
    ),
    (
        "deepspeed",
        lambda: skipping("layers.0", "layers.4"),
        ("tensor 'layers.0-to-layers.4' goes from layer 'layers.0' to 'layers.4'",),
    ),
    ("deepspeed", in_float64, ("job.precision: 'float64', but DeepSpeed trains in",)),
    ("deepspeed", lambda: chain([8], "d0", "d1"), ("holds only the layer 'loss'",)),
]


@pytest.mark.parametrize(("target", "make", "reasons"), REFUSED)
def test_a_plan_that_a_tool_cannot_run_is_refused_for_every_reason(
    target: str, make: Callable[[], Plan], reasons: tuple[str, ...]
) -> None:
    with pytest.raises(PipeplanError) as refused:
        export_plan(make(), target)
    for reason in reasons:
        assert reason in str(refused.value)


@pytest.mark.parametrize("cut", [3, 5])
def test_a_hugging_face_model_is_refused_at_once(cut: int) -> None:
    """By the export, wherever it is cut, and by a search before it begins."""
    blocks = " ".join(f"model.layers.{i}" for i in range(4))
    plan = of(f"model.embed {blocks} lm_head loss", [cut], "d0", "d1")
    with pytest.raises(PipeplanError, match="blocks inside 'model', as in Hugging Face's models"):
        export_plan(plan, "torchtitan")
    with pytest.raises(PipeplanError, match="plan torchtitan's own model"):
        for_runtime(plan.problem, "torchtitan")
