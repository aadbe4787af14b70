"""Exports to torchtitan, run by its own pipeline code where it is installed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from export_plans import (
    in_order,
    on_pipelines,
    placed,
    shuffled,
    titan_graph,
    torchrun,
)
from hypothesis import given
from hypothesis import strategies as st
from peers import import_from_peers, peer_environment

from planner.assembly import plan_by_hand
from planner.interop.exported import export_plan
from planner.interop.torchtitan import read_torchtitan_config, style_of
from planner.job import InputSpec, Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import parse_order
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate

HERE = Path(__file__).parent
LOOP, V = ("d0", "d1", "d0", "d1"), ("d0", "d1", "d1", "d0")


def keys_of(plan: Plan) -> dict:
    return json.loads(export_plan(plan, "torchtitan").files["torchtitan.json"])


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> LayerGraph:
    """The layers of torchtitan's own Llama."""
    import_from_peers(monkeypatch, "torchtitan")
    from planner.tracing.trace import trace

    tokens = {
        name: InputSpec(shape=(16,), dtype="int64", below=2048) for name in ("tokens", "target")
    }
    return trace("titan_model:build", Job(inputs=tokens))


WAYS = {"one": ([3], ("d0", "d1")), "loop": ([2, 4, 6], LOOP), "v": ([2, 4, 6], V)}


def write(graph: LayerGraph, way: str, pipelines: int, folder: Path, *, split: bool) -> Path:
    alone = shuffled(placed(graph, *WAYS[way]), list(WAYS).index(way), split=split)
    folder.mkdir(parents=True)
    for name, text in export_plan(on_pipelines(alone, pipelines), "torchtitan").files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.extensive
@pytest.mark.parametrize("pipelines", [1, 2])
def test_torchtitan_trains_its_llama_by_exports_with_the_gradients_of_one_process(
    llama: LayerGraph, tmp_path: Path, pipelines: int
) -> None:
    """One stage a rank, a loop and a V, backwards whole and split."""
    for way in WAYS:
        for split in (False, True):
            write(llama, way, pipelines, tmp_path / f"{way}-{split}", split=split)
    out = torchrun(2 * pipelines, HERE / "titan_worker.py", tmp_path, **peer_environment(HERE))
    assert "6 exports agree with a single process" in out


@pytest.mark.extensive
@pytest.mark.parametrize(("way", "pipelines"), [("one", 2), ("v", 1)])
def test_torchtitans_train_entry_runs_an_export_and_saves_what_adopt_reads_as_the_same(
    llama: LayerGraph, tmp_path: Path, way: str, pipelines: int
) -> None:
    """Its own parser, trainer and optimizer, two steps on the CPU."""
    folder = write(llama, way, pipelines, tmp_path / "export", split=True)
    dump = f"--dump_folder {tmp_path} --debug.save_config_file saved.json".split()
    out = torchrun(
        2 * pipelines,
        HERE / "titan_train.py",
        *("--module titan_config --config planned".split()),
        *dump,
        **peer_environment(HERE),
        EXPORTED=str(folder),
    )
    losses = re.findall(r"step: .*?loss: .*?([0-9]+[.][0-9]+)", out)
    assert len(losses) == 4 * pipelines
    assert out.count("Training completed") == 2 * pipelines
    told, saved = (
        read_torchtitan_config(path).on(2 * pipelines)
        for path in (folder / "torchtitan.json", tmp_path / "saved.json")
    )
    assert saved.job_fields(Job()) == told.job_fields(Job())
    assert saved.divide(llama) == told.divide(llama)
    assert saved.schedule == replace(told.schedule, source=str(folder / "schedule.csv"))
    assert saved.notes == ()


def test_the_modules_of_each_part_are_its_layers_without_the_loss() -> None:
    plan = in_order(placed(titan_graph(), [2, 6], ("d0", "d1", "d2"), samples_per_microbatch=1))
    keys = keys_of(plan)
    assert keys["parallelism"]["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "layers.3", "layers.4"],
        ["norm", "lm_head"],
    ]
    assert keys["training"]["local_batch_size"] == 4


@pytest.mark.parametrize(
    ("devices", "schedule"),
    [
        (("d0", "d1", "d2"), "PipelineScheduleMulti"),
        (LOOP, "PipelineScheduleMulti"),
        (V, "ZBVZeroBubble"),
    ],
)
def test_the_schedule_names_the_placement(devices: tuple[str, ...], schedule: str) -> None:
    plan = in_order(placed(titan_graph(), [2, 4, 6][: len(devices) - 1], devices))
    parallelism = keys_of(plan)["parallelism"]
    assert parallelism["pipeline_parallel_schedule"] == schedule
    assert parallelism["pipeline_parallel_degree"] == len(set(devices))


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=8).map(tuple))
def test_a_placement_is_told_as_torchtitan_maps_stages(way: tuple[str, ...]) -> None:
    """torchtitan 0.3, ``_get_pp_rank_to_stage_indices_mapping``, written out."""
    devices = list(dict.fromkeys(way))
    degree = len(devices)

    def maps(pairs: list[tuple[int, ...]]) -> bool:
        return all(
            stage < len(way) and way[stage] == devices[rank]
            for rank, stages in enumerate(pairs)
            for stage in stages
        )

    rounds = len(way) // degree
    loop = [tuple(rank + s * degree for s in range(rounds)) for rank in range(degree)]
    v = list(zip(range(degree), range(2 * degree - 1, degree - 1, -1), strict=True))
    if len(way) == degree * rounds and maps(loop):
        assert style_of(way) == "loop"
    elif len(way) == 2 * degree and maps(v):
        assert style_of(way) == "v"
    else:
        assert style_of(way) is None


def test_ranks_count_the_place_in_the_pipeline_first() -> None:
    """As torchtitan's mesh does: pp outermost, dp_replicate next."""
    plan = on_pipelines(in_order(placed(titan_graph(), [4], ("d0", "d1"))), 2)
    files = export_plan(plan, "torchtitan").files
    assert json.loads(files["stages.json"])["ranks"] == ["d0", "d1", "d2", "d3"]
    assert [stage.devices for stage in plan.stages] == [("d0", "d1"), ("d2", "d3")]
    keys = json.loads(files["torchtitan.json"])
    assert keys["parallelism"]["data_parallel_replicate_degree"] == 2
    assert keys["training"]["local_batch_size"] == 4
    assert keys["training"]["global_batch_size"] == 8
    assert files["schedule.csv"].splitlines()[0] == "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3"


def test_pipelines_of_different_orders_get_the_one_that_is_fastest_for_all() -> None:
    """Pipeline 0 runs one microbatch after the other, pipeline 1 overlaps two."""
    pipeline = placed(titan_graph(), [4], ("d0 d1", "d2 d3"), microbatches=4)
    texts = {
        "d0": "0F0 0B0 0F1 0B1",
        "d2": "1F0 1B0 1F1 1B1",
        "d1": "0F2 0F3 0B2 0B3",
        "d3": "1F2 1B2 1F3 1B3",
    }
    plan = plan_by_hand(pipeline, {d: parse_order(t, d) for d, t in texts.items()})
    both = {
        **{d: parse_order(t, d) for d, t in texts.items() if d in ("d1", "d3")},
        "d0": parse_order("0F0 0F1 0B0 0B1", "d0"),
        "d2": parse_order("1F0 1B0 1F1 1B1", "d2"),
    }
    assert simulate(pipeline, both).iteration_time_s < plan.predicted.iteration_time_s
    exported = export_plan(plan, "torchtitan")
    assert exported.files["schedule.csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert "the order of pipeline 1 in all pipelines" in exported.notes[0]


def test_tied_weights_in_one_stage_are_not() -> None:
    graph = titan_graph(("layers.0", "layers.1", "tok_embeddings", "lm_head", "loss"), tied=True)
    assert keys_of(in_order(placed(graph, [1], ("d0", "d1"))))


def test_what_is_not_carried_is_noted() -> None:
    pipeline = placed(titan_graph(), [4], ("d0", "d1"), {0: ["layers.0"]})
    notes = "\n".join(export_plan(in_order(pipeline), "torchtitan").notes)
    assert "recompute: 1 of 9 layers" in notes
    assert "FullAC" in notes
    assert "'layers' is assumed to be a ModuleList or ModuleDict" in notes
    plain = in_order(placed(titan_graph(), [4], ("d0", "d1")))
    assert "activation_checkpoint = None" in "\n".join(export_plan(plain, "torchtitan").notes)
