"""Plans whose stages are on tensor-parallel groups of several sizes: figures by hand, refusals."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from builders import GIGA, boundary, graph, layer, parameter, star
from group_problems import split

from planner import Job, Plan, Problem, verify
from planner.assembly import plan_by_hand
from planner.cluster.tensor_groups import TensorGroup
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation
from planner.plan.programs import pairs_of_members
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.prediction import refresh

Sizes = Sequence[int]


def two_layers(*, tied: bool = False) -> LayerGraph:
    """A layer of 4 and 8 s, all of it shared; one of 2 and 4 s, half of it shared.

    Over two devices the first all-reduces a GB in its forward, the second gathers 2 GB in its input
    gradient; over four, twice as much.
    """
    layers = [
        layer("a", 4, 8, parameters=["p", "q"]),
        layer(
            "b", 2, 4, stash_bytes=1000, weight_stash_bytes=600, parameters=["q"] if tied else []
        ),
    ]
    tensors = [boundary("a", "b")]
    splits = [
        split(
            layers,
            tensors,
            degree=degree,
            sequence=sequence,
            shares={"a": 1.0, "b": 0.5},
            collectives={
                "a": [("forward", "all_reduce", degree // 2 * GIGA)],
                "b": [("input_gradient", "all_gather", degree * GIGA)],
            },
            parameters=["p"],
            summed=["q"],
        )
        for degree in (2, 4)
        for sequence in (False, True)
    ]
    return graph(layers, tensors, [parameter("p", 10**6), parameter("q", GIGA // 4)], splits=splits)


def groups_of(sizes: Sizes) -> TensorParallel:
    """Groups ``g0``, ``g1``, … of the devices in order."""
    names, first = [f"d{i}" for i in range(sum(sizes))], 0
    groups = []
    for number, size in enumerate(sizes):
        devices = tuple(names[first : first + size])
        groups.append(TensorGroup(name=f"g{number}", devices=devices))
        first += size
    return TensorParallel(groups=tuple(groups))


def problem_of(sizes: Sizes, **graph_fields: bool) -> Problem:
    job = Job(microbatches=1, optimizer="sgd", tensor_parallel="any")
    return Problem(two_layers(**graph_fields), star(sum(sizes)), job)


def placed(sizes: Sizes, devices: Sequence[tuple[str, ...]] = (("g0",), ("g1",))) -> PlacedPipeline:
    problem = grouped_problem(problem_of(sizes), groups_of(sizes))
    return place(
        problem, [StageSpec((name,), held) for name, held in zip("ab", devices, strict=True)]
    )


def plan_of(sizes: Sizes, **graph_fields: bool) -> Plan:
    """The plan of one microbatch with a layer a group."""
    problem, parallel = problem_of(sizes, **graph_fields), groups_of(sizes)
    pipeline = place(
        grouped_problem(problem, parallel),
        [StageSpec((name,), (f"g{number}",)) for number, name in enumerate("ab")],
    )
    orders = {f"g{s}": (Operation(s, "F", 0), Operation(s, "B", 0)) for s in range(2)}
    return plan_by_hand(pipeline, orders).of_problem(problem, parallel)


@pytest.mark.parametrize(
    ("sizes", "forwards_s", "backwards_s", "step_s"),
    [
        # On two devices layer a takes 2 s and 1 s for its collective, then 4 s back. Layer b by
        # itself takes 2 and 4 s. It receives the tensor once; both devices receive its gradient,
        # 2 GB over the one link of the sender. The group sums a GB, each device reads and writes.
        ((2, 1), [2 + 1, 1, 2], [4, 2, 4], 1 + 3 * (2 * GIGA + 4 * 10**6) / 2e12),
        # The other way round the sender's link is the narrow one in the forward.
        ((1, 2), [4, 2, 3 / 2], [3 / 2 + 1 + 3 / 2, 1, 8], 3 * (GIGA + 4 * 10**6) / 1e12),
        # Four receive from two: 4 GB over links of 2 GB/s together. b does 1 + 4 * 1 TFLOP in its
        # forward on 4 TFLOP/s, gathers 4 GB in rings of 3/4 of it each; 2 GB go back.
        (
            (2, 4),
            [2 + 1, 2, 5 / 4],
            [5 / 4 + 3 + 5 / 4, 1, 4],
            1 + 3 * (2 * GIGA + 4 * 10**6) / 2e12,
        ),
    ],
)
def test_an_iteration_by_hand(
    sizes: Sizes, forwards_s: Sequence[float], backwards_s: Sequence[float], step_s: float
) -> None:
    plan = plan_of(sizes)
    assert verify(plan) == []
    expected_s = sum(forwards_s) + sum(backwards_s) + step_s
    assert plan.predicted.iteration_time_s == pytest.approx(expected_s)
    assert refresh(plan).predicted == plan.predicted


def test_memory_by_hand() -> None:
    first, second = placed((2, 1)).stages
    # Weights and gradients: of q on both devices, of p once.
    assert first.static_bytes == 2 * (2 * GIGA + 4 * 10**6)
    assert (first.output_bytes, second.input_bytes) == (2 * GIGA, GIGA)
    assert second.stash_bytes == 1000 + GIGA
    assert second.weight_stash_bytes == 600 + GIGA
    first, second = placed((1, 2)).stages
    assert first.static_bytes == 2 * (GIGA + 4 * 10**6)
    assert second.stash_bytes == 500 + 2 * 500 + 2 * GIGA


def test_figures_without_a_type_are_the_least_of_all() -> None:
    found = grouped_problem(problem_of((2, 4, 1)), groups_of((2, 4, 1))).graph
    of_size = {kind: found.on(kind) for kind in ("unitx2", "unitx4", "unit")}
    assert [row.layers["b"].stash_bytes for row in of_size.values()] == [1500, 2500, 1000]
    assert found.layers["b"].stash_bytes == 1000
    assert found.parameters["q"].bytes == of_size["unit"].parameters["q"].bytes
    assert all(found.peak_bytes["b"] <= row.peak_bytes["b"] for row in of_size.values())


def test_ranks_of_each_group_follow_each_other(tmp_path: Path) -> None:
    plan = plan_of((2, 1))
    assert (plan.degrees, plan.world_size) == ((1, 2), 3)
    assert plan.rank_devices == ("d0", "d1", "d2")
    assert [tuple(plan.place_of(rank)) for rank in range(3)] == [
        ("g0", 0, 2),
        ("g0", 1, 2),
        ("g1", 0, 1),
    ]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(PipeplanError, match="they have 1 and 2 devices, and this takes groups of"):
        _ = plan.degree


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1), (4, 2), (2, 4), (2, 3)])
def test_every_member_receives_from_one_and_senders_share_the_work(sizes: Sizes) -> None:
    plan = plan_of((2, 2)).model_copy(update={"tensor_parallel": groups_of(sizes)})
    ours, theirs = plan.ranks_of("g0"), plan.ranks_of("g1")
    sent = pairs_of_members(plan, "g0", "g1")
    assert [target for _, target in sent] == list(theirs)
    counts = [[source for source, _ in sent].count(rank) for rank in ours]
    assert sum(counts) == len(theirs)
    assert max(counts) - min(counts) <= 1


def on_stages(*devices: tuple[str, ...]) -> Callable[[Plan], Plan]:
    def changed(plan: Plan) -> Plan:
        stages = tuple(
            stage.model_copy(update={"devices": held})
            for stage, held in zip(plan.stages, devices, strict=True)
        )
        return plan.model_copy(update={"stages": stages})

    return changed


def with_groups(**fields: object) -> Callable[[Plan], Plan]:
    def changed(plan: Plan) -> Plan:
        assert plan.tensor_parallel is not None
        parallel = plan.tensor_parallel.model_copy(update=fields)
        return plan.model_copy(update={"tensor_parallel": parallel})

    return changed


def with_job(**fields: object) -> Callable[[Plan], Plan]:
    return lambda plan: plan.model_copy(update={"job": plan.job.model_copy(update=fields)})


WRONG: Mapping[str, Callable[[Plan], Plan]] = {
    "groups of 1 and 2 devices, which have different shares": on_stages(("g0", "g1"), ("g1",)),
    "tensor_parallel.degree: 2, but groups have 1 and 2": with_groups(degree=2),
    "a replica of a stage is 1 and 2 devices, but job.tensor_parallel is 2": with_job(
        tensor_parallel=2
    ),
    "each has one device": with_groups(groups=groups_of((1, 1)).groups),
}


@pytest.mark.parametrize("told", WRONG)
def test_groups_that_a_plan_cannot_have_are_found(told: str) -> None:
    plan = WRONG[told](plan_of((2, 1)))
    assert told in " ".join(verify(plan))


def test_stages_that_share_a_parameter_have_groups_of_one_size() -> None:
    found = " ".join(verify(plan_of((2, 1), tied=True)))
    assert "stages: 0 and 1 share parameter 'q' on groups of 1 and 2 devices" in found
    assert verify(plan_of((2, 2), tied=True)) == []


def test_a_graph_with_figures_by_type_is_no_file() -> None:
    record = grouped_problem(problem_of((2, 1)), groups_of((2, 1))).graph.record
    data = record.model_dump(mode="json")
    with pytest.raises(PipeplanError, match="a file has the figures of single devices"):
        LayerGraph.parse(data)
    plan = plan_of((2, 1))
    model = plan.model.model_copy(update={"graph": record})
    wrong = plan.model_copy(update={"model": model})
    assert "model.graph.on_types: a plan has the figures of" in " ".join(verify(wrong))


def test_times_measured_on_single_devices_serve_groups_of_one_alone() -> None:
    record = two_layers().record
    times = {"unit": {"forward_s": 1.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0}}
    rows = [row.model_dump() | {"measured": times} for row in record.layers]
    measured = LayerGraph.parse({**record.model_dump(mode="json"), "layers": rows})
    problem = Problem(measured, star(3), Job(microbatches=1, tensor_parallel="any"))
    with pytest.raises(PipeplanError, match="tensor_parallel = 2: layer 'a' was measured whole on"):
        grouped_problem(problem, groups_of((2, 1)))
