"""Plans whose devices are tensor-parallel groups: figures by hand, and what is refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import GIGA, boundary, cluster, device_type, graph, layer, link, parameter, star
from group_problems import split

from planner import Job, Plan, Problem, verify
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.tensor_groups import TensorGroup
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place, place_plan
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.prediction import refresh
from planner.search.microbatches import in_proportion

PAIRS = TensorParallel(
    degree=2,
    groups=(
        TensorGroup(name="g0", devices=("d0", "d1")),
        TensorGroup(name="g1", devices=("d2", "d3")),
    ),
)


def two_layers(placement: str = "whole") -> LayerGraph:
    """A layer of 4 and 8 s, all of it shared by two; one of 2 and 4 s, half of it shared.

    The first all-reduces a GB in its forward, the second gathers 2 GB in its input gradient.
    """
    layers = [
        layer("a", 4, 8, parameters=["p", "q"]),
        layer("b", 2, 4, stash_bytes=1000, weight_stash_bytes=600),
    ]
    tensors = [boundary("a", "b")]
    collectives = {
        "a": [("forward", "all_reduce", GIGA)],
        "b": [("input_gradient", "all_gather", 2 * GIGA)],
    }
    row = split(
        layers,
        tensors,
        shares={"a": 1.0, "b": 0.5},
        collectives=collectives,
        placements={"a-to-b": placement},
        parameters=["p"],
        summed=["q"],
    )
    return graph(layers, tensors, [parameter("p", 10**6), parameter("q", GIGA // 4)], splits=[row])


def problem_of(the_graph: LayerGraph, the_cluster: Cluster | None = None) -> Problem:
    job = Job(microbatches=1, optimizer="sgd", tensor_parallel=2)
    return Problem(the_graph, the_cluster or star(4), job)


def plan_of(problem: Problem, parallel: TensorParallel = PAIRS) -> Plan:
    """The plan of one microbatch with a layer a group."""
    pipeline = place(
        grouped_problem(problem, parallel),
        [StageSpec((name,), (g.name,)) for name, g in zip("ab", parallel.groups, strict=True)],
    )
    orders = {
        g.name: (Operation(s, "F", 0), Operation(s, "B", 0)) for s, g in enumerate(parallel.groups)
    }
    return plan_by_hand(pipeline, orders).of_problem(problem, parallel)


@pytest.mark.parametrize(("placement", "message_s"), [("whole", 1.0), ("positions", 0.5)])
def test_an_iteration_by_hand(placement: str, message_s: float) -> None:
    """Two devices have 2 TFLOP/s and 2 GB/s; a GB is all-reduced, or 2 GB are gathered, in 1 s.

    What each device has whole, a GB, is sent twice; what they share once.
    """
    plan = plan_of(problem_of(two_layers(placement)))
    assert verify(plan) == []
    forwards_s = (2 + 1) + message_s + 3 / 2
    backwards_s = (3 / 2 + 1 + 3 / 2) + message_s + (2 + 2)
    # Each device adds up its gradients of a GB, then all weights are read and written.
    step_s = 1 + 3 * (2 * GIGA + 4 * 10**6) / 2e12
    expected_s = pytest.approx(forwards_s + backwards_s + step_s)
    assert plan.predicted.iteration_time_s == expected_s
    assert refresh(plan).predicted == plan.predicted


def test_tensors_sent_in_parts_by_hand() -> None:
    """Both devices send half of a GB at 1 GB/s each, and the receivers gather the GB in 0.5 s."""
    told = replace(problem_of(two_layers()), runtime=RuntimeRules(group_messages="parts"))
    plan, whole = plan_of(told), plan_of(problem_of(two_layers()))
    assert verify(plan) == []
    placed, other = place_plan(plan.on_groups), place_plan(whole.on_groups)
    for transfer in (placed.transfer(0, "F", "g0", "g1"), placed.transfer(1, "B", "g1", "g0")):
        assert (transfer.seconds, transfer.latency_s) == pytest.approx((1.0, 0.5))
    assert placed.transfers_s(0, forward=True) == pytest.approx(np.array([[1.0]]))
    assert [stage.sent_bytes for stage in placed.stages] == [GIGA, 0]
    assert [stage.stash_bytes for stage in placed.stages] == [
        stage.stash_bytes for stage in other.stages
    ]


@pytest.mark.parametrize(("degree", "rows_s"), [(2, 1.0), (4, 3.0)])
def test_rows_of_experts_travel_between_all_pairs_at_once(degree: int, rows_s: float) -> None:
    """A device sends a GB to each other one, all of it over its own link of 1 GB/s."""
    names = tuple(f"d{i}" for i in range(degree))
    parallel = TensorParallel(degree=degree, groups=(TensorGroup(name="g0", devices=names),))
    layers = [layer("a", 4, 8)]

    def time_s(*phases: str) -> float:
        rows = {"a": [(phase, "all_to_all", degree * GIGA) for phase in phases]}
        row = split(layers, [], degree=degree, collectives=rows)
        job = Job(microbatches=1, optimizer="sgd", tensor_parallel=degree)
        single = Problem(graph(layers, [], splits=[row]), star(degree), job)
        pipeline = place(grouped_problem(single, parallel), [StageSpec(("a",), ("g0",))])
        orders = {"g0": (Operation(0, "F", 0), Operation(0, "B", 0))}
        plan = plan_by_hand(pipeline, orders).of_problem(single, parallel)
        assert verify(plan) == []
        return plan.predicted.iteration_time_s

    twice = time_s("forward", "forward", "input_gradient", "input_gradient")
    assert twice - time_s() == pytest.approx(4 * rows_s)


def test_memory_by_hand() -> None:
    first, second = place(
        grouped_problem(problem_of(two_layers()), PAIRS),
        [StageSpec(("a",), ("g0",)), StageSpec(("b",), ("g1",))],
    ).stages
    # Weights and gradients: of q on both devices, of p once.
    assert first.static_bytes == 2 * (2 * GIGA + 4 * 10**6)
    # Half of its stash is on both devices, as is the tensor received.
    assert second.stash_bytes == 500 + 2 * 500 + 2 * GIGA
    assert second.weight_stash_bytes == 300 + 2 * 300 + 2 * GIGA


def test_collectives_are_in_proportion_to_the_samples_of_a_microbatch() -> None:
    single = problem_of(two_layers())
    found = in_proportion(grouped_problem(single, PAIRS).graph, 3)
    rows = [row for layer_ in found.record.layers for row in layer_.collectives]
    assert [row.bytes for row in rows] == [3 * GIGA, 6 * GIGA]
    # So are the shares of layers of which the groups are made.
    scaled = replace(
        single,
        graph=in_proportion(single.graph, 3),
        job=single.job.model_copy(update={"samples_per_microbatch": 3}),
    )
    assert grouped_problem(scaled, PAIRS).graph.digest == found.digest


def test_ranks_of_members_follow_each_other() -> None:
    plan = plan_of(problem_of(two_layers()))
    assert plan.ranks == ("g0", "g1")
    assert (plan.degree, plan.world_size) == (2, 4)
    assert plan.rank_devices == ("d0", "d1", "d2", "d3")
    assert list(plan.ranks_of("g1")) == [2, 3]
    assert plan.members("g1") == ("d2", "d3")
    single = plan.model_copy(update={"tensor_parallel": None, "ranks": ("d3", "d0")})
    assert (single.rank_devices, list(single.ranks_of("d0"))) == (("d3", "d0"), [1])


def test_a_plan_of_groups_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = plan_of(problem_of(two_layers()))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    # What it runs is not what single devices of those names would run.
    others = plan.model_copy(update={"tensor_parallel": None})
    assert (
        Plan.parse(plan.model_dump(mode="json")).execution_digest
        != Plan.parse(others.model_dump(mode="json")).execution_digest
    )


def test_a_graph_without_splits_keeps_the_digest_of_its_first_format() -> None:
    """Taken from the code that wrote ``pipeplan-graph/1``."""
    folder = Path(__file__).resolve().parents[1] / "data" / "formats"
    planned = json.loads((folder / "plan-8-whole.json").read_text())["model"]
    assert Plan.load(folder / "plan-8-whole.json").model.graph_digest == planned["graph_digest"]
    assert verify(Plan.load(folder / "plan-8-whole.json")) == []


def with_groups(*groups: tuple[str, ...], **fields: Any) -> Callable[[Plan], Plan]:
    rows = tuple(TensorGroup(name=f"g{i}", devices=row) for i, row in enumerate(groups))

    def changed(plan: Plan) -> Plan:
        assert plan.tensor_parallel is not None
        update = {"groups": rows or plan.tensor_parallel.groups, **fields}
        return plan.model_copy(
            update={"tensor_parallel": plan.tensor_parallel.model_copy(update=update)}
        )

    return changed


def with_job(**fields: Any) -> Callable[[Plan], Plan]:
    return lambda plan: plan.model_copy(update={"job": plan.job.model_copy(update=fields)})


def with_experts(kind: str = "columns", **fields: Any) -> Callable[[Plan], Plan]:
    """With a split whose region is of a kind, and that says something else of experts."""

    def changed(plan: Plan) -> Plan:
        (row,) = plan.model.graph.splits
        regions = tuple(region.model_copy(update={"kind": kind}) for region in row.regions)
        row = row.model_copy(update={"regions": regions, **fields})
        graph_ = plan.model.graph.model_copy(update={"splits": (row,)})
        return plan.model_copy(update={"model": plan.model.model_copy(update={"graph": graph_})})

    return changed


WRONG: Mapping[str, Callable[[Plan], Plan]] = {
    "'d1' is named twice": with_groups(("d0", "d1"), ("d1", "d2")),
    "the cluster has no device 'd9'": with_groups(("d0", "d9"), ("d2", "d3")),
    "2, but groups have 2 and 3": with_groups(("d0", "d1", "d2"), ("d2", "d3")),
    "unknown device 'g1'": with_groups(("d0", "d1")),
    "job.tensor_parallel is 4": with_job(tensor_parallel=4),
    "job.sequence_parallel is false": with_groups(sequence=True),
    "no split over groups of 3": with_groups(("d0", "d1", "d2"), degree=3),
    "expert_parallel = true: the layer graph's split over groups of 2": with_job(
        expert_parallel=True
    ),
    "expert_load = [1.0, 1.0]: the layer graph's split": with_job(expert_load=(1.0, 1.0)),
    "of 2 is for ((3.0,),)": with_experts(expert_load=((3.0,),)),
    "of degree 2, experts is true, but 0 regions": with_experts(experts=True),
    "2 lists of expert_load for 1 layers": with_experts("experts", expert_load=((1.0,), (1.0,))),
    "[2] experts of a, b do not fit 2 devices and 1 loads": with_experts(
        "experts", expert_load=((1.0,),)
    ),
    "a replica of a stage is 1 devices": lambda plan: plan.model_copy(
        update={"tensor_parallel": None}
    ),
}


@pytest.mark.parametrize("told", WRONG)
def test_groups_that_a_plan_cannot_have_are_found(told: str) -> None:
    plan = WRONG[told](plan_of(problem_of(two_layers())))
    assert told in " ".join(verify(plan))


def test_a_stage_that_ends_inside_a_region_is_found_and_never_planned() -> None:
    problem = problem_of(two_layers("region"))
    found = grouped_problem(problem, PAIRS)
    assert found.job.cuts == ()
    assert "'a-to-b' is inside a part of the model" in " ".join(verify(plan_of(problem)))


def test_a_graph_without_a_split_says_how_to_get_one() -> None:
    record = two_layers().record.model_copy(update={"splits": ()})
    problem = problem_of(LayerGraph.from_record(record))
    with pytest.raises(PipeplanError, match=r"no split over groups of 2; trace .* --split 2"):
        grouped_problem(problem, PAIRS)


def test_a_graph_whose_experts_are_divided_otherwise_says_how_to_get_one() -> None:
    problem = problem_of(two_layers())
    job = problem.job.model_copy(update={"expert_parallel": True})
    with pytest.raises(PipeplanError, match="expert_parallel = true: the layer graph's split over"):
        grouped_problem(replace(problem, job=job), PAIRS)
    job = problem.job.model_copy(update={"expert_load": (1.0, 3.0)})
    with pytest.raises(PipeplanError, match="is for equally many tokens; name the model"):
        grouped_problem(replace(problem, job=job), PAIRS)


def test_times_measured_on_whole_layers_are_refused() -> None:
    one = two_layers().record
    times = {"unit": {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}}
    rows = [row.model_dump() | {"measured": times} for row in one.layers]
    measured = LayerGraph.parse({**one.model_dump(mode="json"), "layers": rows})
    with pytest.raises(PipeplanError, match="layer 'a' was measured whole on unit"):
        grouped_problem(problem_of(measured), PAIRS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"stash_bytes": 2000}, "stash_bytes of layer 'b' is 2000, but the whole layer has 1000"),
        ({"name": "c"}, "they are not the layers of the graph"),
    ],
)
def test_a_split_of_another_graph_is_refused(change: dict[str, Any], told: str) -> None:
    data = two_layers().record.model_dump(mode="json")
    data["splits"][0]["layers"][1] |= change
    with pytest.raises(PipeplanError, match=told):
        LayerGraph.parse(data)


def test_layers_that_some_types_alone_run_keep_to_their_groups() -> None:
    one = two_layers().record
    rows = [row.model_copy(update={"device_types": ("unit",)}) for row in one.layers]
    the_graph = LayerGraph.from_record(one.model_copy(update={"layers": tuple(rows)}))
    found = grouped_problem(problem_of(the_graph), PAIRS)
    assert found.graph.layers["a"].device_types == ("unitx2",)
    others = [row.model_copy(update={"device_types": ("other",)}) for row in one.layers]
    other_graph = LayerGraph.from_record(one.model_copy(update={"layers": tuple(others)}))
    types = {"unit": device_type(), "other": device_type()}
    names = {f"d{i}": "unit" for i in range(4)} | {"e": "other"}
    both = cluster(names, [link(name, "hub") for name in names], ["hub"], types)
    with pytest.raises(PipeplanError, match="layer 'a' runs on device types other only"):
        grouped_problem(problem_of(other_graph, both), PAIRS)
