"""Plans of tensor-parallel groups, and of shared state, as options of other tools, and back."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from builders import boundary, graph, layer, parameter
from export_plans import torchrun
from group_problems import split
from hypothesis import given
from hypothesis import strategies as st
from transformers_by_hand import machines, problem, transformer

from planner import PipeplanError, Plan, Problem, adopt, export_plan, solve, verify
from planner.interop.layout import RuntimeLayout
from planner.interop.megatron import read_megatron_arguments
from planner.interop.torchtitan import read_torchtitan_config
from planner.model.layer_graph import LayerGraph
from planner.plan.runtimes import for_runtime
from planner.space import WITH_SHARDED_PARAMETERS

FILES = {
    "megatron": (("megatron.sh", read_megatron_arguments),),
    "torchtitan": (("torchtitan.json", read_torchtitan_config),),
}


def sharing(degree: int, replicas: int) -> list[dict[str, Any]]:
    """How replicas may share what they hold."""
    found: list[dict[str, Any]] = [{}]
    if replicas > 1:
        found.append({"shard_optimizer": True})
        if degree == 1:
            found.append({"shard_parameters": True, **WITH_SHARDED_PARAMETERS})
    return found


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A layout of groups on some devices in some order."""
    degree, size = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 3))
    replicas, chunks = draw(st.integers(1, 2)), draw(st.integers(1, 2)) if size > 1 else 1
    rows = [draw(st.integers(1, 2)) for _ in range(size * chunks)]
    if draw(st.booleans()):
        rows = [rows[0]] * len(rows)
    parts = ["t" * row for row in rows]
    parts[0] = f"E{parts[0]}"
    parts[-1] = f"{parts[-1]}L"
    layout = "|".join(parts)
    devices = draw(st.permutations(range(degree * size * replicas)))
    cluster = machines(draw(st.integers(12, 13)), 2)
    job = {
        "microbatches": size * replicas * draw(st.integers(1, 2)),
        "tensor_parallel": degree,
        "sequence_parallel": degree > 1 and draw(st.booleans()),
        "overlap_reduction": draw(st.booleans()),
        **draw(st.sampled_from(sharing(degree, replicas))),
        "inputs": {"tokens": {"shape": (32,), "dtype": "int64"}} if draw(st.booleans()) else {},
    }
    told = problem(transformer(sum(rows), degrees=(2, 4)), cluster, **job)
    names = [cluster.device_names[number] for number in devices]
    again = draw(st.booleans())
    return adopt(
        told, layout, pipeline_size=size, replicas=replicas, devices=names, recompute=again
    )


def adopted_again(plan: Plan, layout: RuntimeLayout, devices: list[str], **fields: Any) -> Plan:
    """The plan of a layout on the same devices, for a job that leaves its figures open."""
    layout = layout.on(len(devices), len(plan.stages[0].devices))
    job = plan.job.model_copy(
        update={"tensor_parallel": 1, "sequence_parallel": False, "microbatches": 1, **fields}
    )
    told = Problem(
        LayerGraph.from_record(plan.model.graph),
        plan.cluster,
        job.model_copy(update=layout.job_fields(job)),
        runtime=plan.runtime,
    )
    return layout.adopted(told, devices).plan


def ranks_in(script: str) -> list[str]:
    """The devices that the comments of a script name, by rank."""
    lines = (line for line in script.splitlines() if line.startswith("#   rank "))
    return [line.partition(": ")[2] for line in lines]


def ways_back(plan: Plan, target: str, folder: Path) -> list[Plan]:
    """The plans that the files of an export are adopted as."""
    exported = export_plan(plan, target)
    for name, text in exported.files.items():
        (folder / name).write_text(text)
    if target.startswith("megatron"):
        devices = ranks_in(exported.files[FILES[target][0][0]])
    else:
        devices = json.loads(exported.files["stages.json"])["ranks"]
    return [adopted_again(plan, read(folder / name), devices) for name, read in FILES[target]]


@given(plans())
@pytest.mark.parametrize("target", list(FILES))
def test_an_export_is_adopted_with_the_same_predicted_time(
    target: str, tmp_path_factory: pytest.TempPathFactory, plan: Plan
) -> None:
    if target == "torchtitan" and any(stage.recompute for stage in plan.stages):
        return  # Its options leave recomputation to the user.
    if plan.job.shard_parameters and (target != "torchtitan" or len(plan.stages) > 1):
        with pytest.raises(PipeplanError, match="shard_parameters"):
            export_plan(plan, target)
        return
    if target == "torchtitan" and len(plan.stages) == 1 and not plan.job.shard_parameters:
        with pytest.raises(PipeplanError, match="so there is nothing to pipeline"):
            export_plan(plan, target)
        return
    for back in ways_back(plan, target, tmp_path_factory.mktemp("export")):
        assert verify(back) == []
        assert back.predicted.iteration_time_s == plan.predicted.iteration_time_s
        assert [stage.layers for stage in back.stages] == [stage.layers for stage in plan.stages]
        for ours, theirs in zip(plan.stages, back.stages, strict=True):
            assert set(map(back.members, theirs.devices)) == set(map(plan.members, ours.devices))
            assert ours.recompute == theirs.recompute
        assert back.job.sequence_parallel == plan.job.sequence_parallel
        assert back.job.shard_optimizer == plan.job.shard_optimizer
        assert back.job.shard_parameters == plan.job.shard_parameters


def test_ranks_of_a_group_follow_each_other() -> None:
    """Rank = tensor + 2 * (data + 2 * pipeline), in Megatron-LM's order and in torch's mesh."""
    told = problem(transformer(2, degrees=(2,)), machines(8), tensor_parallel=2)
    plan = adopt(told, "Et|tL", replicas=2)
    script = export_plan(plan, "megatron").files["megatron.sh"]
    assert ranks_in(script) == [f"n{number}/gpu0" for number in range(8)]
    assert "    --tensor-model-parallel-size 2\n" in script
    assert "--sequence-parallel" not in script
    table = json.loads(export_plan(plan, "torchtitan").files["stages.json"])
    assert table["ranks"] == [f"n{number}/gpu0" for number in range(8)]
    assert [stage["ranks"] for stage in table["stages"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert table["tensor_parallel"] == 2


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_plans_of_groups_for_a_runtime_are_what_it_can_run(runtime: str, tmp_path: Path) -> None:
    told = problem(transformer(4, degrees=(2,)), machines(4, 2), tensor_parallel=2, microbatches=4)
    result = solve(for_runtime(told, runtime), time_limit_s=0.5, deterministic=True)
    assert result.plan.degree == 2
    for back in ways_back(result.plan, runtime, tmp_path):
        assert back.predicted.iteration_time_s == pytest.approx(
            result.plan.predicted.iteration_time_s, rel=1e-9
        )


def test_deepspeed_runs_groups_that_are_planned_for_it() -> None:
    freedoms = {"tensor_parallel": 2, "microbatches": 4, "min_stages": 2}
    told = problem(transformer(4, degrees=(2,)), machines(4, 2), **freedoms)
    result = solve(for_runtime(told, "deepspeed"), time_limit_s=0.5, deterministic=True)
    assert result.plan.degree == 2
    notes = export_plan(result.plan, "deepspeed").notes
    assert any("DeepSpeed runs the plan's own order, 1F1B" in note for note in notes)


def with_reason(name: str, reason: str) -> LayerGraph:
    """A transformer of which a weight of a layer is not split over two."""
    data = transformer(2, degrees=(2,)).record.model_dump(mode="json")
    for of_degree in data["splits"]:
        for row in of_degree["layers"]:
            if row["name"] == name:
                row["unsplit"] = {f"{name}.weight": reason}
    return LayerGraph.parse(data)


@pytest.mark.parametrize("target", list(FILES))
def test_heads_that_the_degree_does_not_divide_are_the_reason(target: str) -> None:
    told = problem(
        with_reason("h.1", "dimension 0: size 3 is not divisible by 2"),
        machines(4),
        tensor_parallel=2,
    )
    with pytest.raises(PipeplanError, match=r"holds 'h.1.weight' whole .*size 3 is not divisible"):
        export_plan(adopt(told, "Et|tL"), target)


@pytest.mark.parametrize(
    ("reason", "is_noted"),
    [("dimension 0: size 255 is not divisible by 2", True), ("aten.layer_norm needs it", False)],
)
def test_a_vocabulary_that_is_whole_is_noted(reason: str, is_noted: bool) -> None:
    told = problem(with_reason("lm_head", reason), machines(4), tensor_parallel=2)
    notes = export_plan(adopt(told, "Et|tL"), "megatron").notes
    assert any("'lm_head.weight' whole on every device" in note for note in notes) == is_noted


def test_deepspeed_has_groups_innermost() -> None:
    """Rank = model + 2 * (data + 2 * pipe), as PipeModelDataParallelTopology numbers them."""
    told = problem(
        transformer(2, degrees=(2,)),
        machines(8),
        tensor_parallel=2,
        sequence_parallel=True,
        shard_optimizer=True,
    )
    exported = export_plan(adopt(told, "Et|tL", replicas=2), "deepspeed")
    assert json.loads(exported.files["stages.json"])["ranks"] == [f"n{n}/gpu0" for n in range(8)]
    config = json.loads(exported.files["ds_config.json"])
    assert config["zero_optimization"] == {"stage": 1}
    assert config["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
    assert any("splits no layers over the 2 ranks" in note for note in exported.notes)


class FakeTopology:
    """DeepSpeed 0.19's ``PipeModelDataParallelTopology``: axes pipe, data and model, row-major."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        self.sizes = num_pp, num_dp, num_mp

    def get_coord(self, rank: int) -> SimpleNamespace:
        _, data, model = self.sizes
        return SimpleNamespace(pipe=rank // (data * model))


class FakePipelineModule:
    """What DeepSpeed's does with a topology, on one rank."""

    rank = 0

    def __init__(self, layers: list[Any], topology: FakeTopology, **options: Any) -> None:
        self._topo, self.global_rank = topology, self.rank
        self._partition_layers()

    def _set_bounds(self, start: int, stop: int) -> None:
        self.bounds = start, stop


def test_a_rank_of_a_group_builds_the_layers_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    told = problem(transformer(4, degrees=(2,)), machines(8), tensor_parallel=2)
    plan = adopt(told, "Ettt|tL", replicas=2)
    files = export_plan(plan, "deepspeed").files
    for name, content in (
        ("deepspeed", {}),
        ("deepspeed.pipe", {"PipelineModule": FakePipelineModule}),
        ("deepspeed.runtime.pipe.topology", {"PipeModelDataParallelTopology": FakeTopology}),
    ):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    found: dict[str, Any] = {}
    exec(compile(files["pipeline_module.py"], "pipeline_module.py", "exec"), found)  # noqa: S102
    for stage in json.loads(files["stages.json"])["stages"]:
        for rank in stage["ranks"]:
            monkeypatch.setattr(FakePipelineModule, "rank", rank)
            made = found["PlannedPipelineModule"]([None] * len(found["LAYERS"]))
            assert made._topo.sizes == (2, 2, 2)
            held = found["LAYERS"][slice(*made.bounds)]
            assert held == [name for name in stage["layers"] if name != "loss"]


CHAIN = ("tok_embeddings", *(f"layers.{i}" for i in range(5)), "lm_head", "loss")


def chain_plan(way: tuple[int, ...], order: str) -> Plan:
    """A chain on two groups of two devices, by the numbers of the stages' groups."""
    rows = [layer(name, 1, 2, parameters=[f"{name}.weight"]) for name in CHAIN[:-1]]
    rows.append(layer("loss", 1, 2))
    tensors = [boundary(*pair, bytes_=1000) for pair in pairwise(CHAIN)]
    weights = [f"{name}.weight" for name in CHAIN[:-1]]
    graph_ = graph(
        rows, tensors, [*map(parameter, weights)], splits=[split(rows, tensors, parameters=weights)]
    )
    told = problem(graph_, machines(2, 2), tensor_parallel=2)
    size = len(CHAIN) // len(way)
    stages = [list(CHAIN[size * s : size * (s + 1)]) for s in range(len(way))]
    return adopt(told, stages, schedule=order, pipeline_size=2)


@pytest.mark.extensive
def test_torch_runs_groups_and_gets_the_gradients_of_one_process(tmp_path: Path) -> None:
    """One stage a group, interleaved ones and a V; whole and split backwards."""
    cases = [
        ((0, 1), "1f1b"),
        ((0, 1), "zb-h1"),
        ((0, 1, 0, 1), "interleaved-1f1b"),
        ((0, 1, 1, 0), "zb-v"),
    ]
    for number, (way, order) in enumerate(cases):
        plan = chain_plan(way, order)
        assert [plan.ranks.index(stage.devices[0]) for stage in plan.stages] == list(way)
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for name, text in export_plan(plan, "torch-csv").files.items():
            (folder / name).write_text(text)
    worker = Path(__file__).parent / "torch_worker.py"
    assert "4 schedules agree with a single process" in torchrun(4, worker, tmp_path)


def test_a_row_of_the_schedule_is_a_group_and_ranks_are_devices() -> None:
    plan = chain_plan((0, 1, 1, 0), "zb-v")
    exported = export_plan(plan, "torch-csv")
    assert len(exported.files["schedule.csv"].splitlines()) == len(plan.ranks) == 2
    table = json.loads(exported.files["stages.json"])
    assert table["ranks"] == list(plan.rank_devices)
    assert [stage["ranks"] for stage in table["stages"]] == [[0, 1], [2, 3], [2, 3], [0, 1]]
    assert any("for ranks 2r to 2r + 1" in line for line in exported.use)
