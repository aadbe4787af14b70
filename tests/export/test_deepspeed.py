"""Exports to DeepSpeed: its engine runs them where it is installed."""

import ast
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from builders import ROOT, boundary, graph, layer
from documents import snippets
from export_plans import NAMES, in_order, on_pipelines, placed, titan_graph, torchrun
from hypothesis import given
from hypothesis import strategies as st
from peers import import_from_peers, peer_environment, require_peer

from planner.assembly import plan_by_hand
from planner.costs.placement import place_plan
from planner.interop.deepspeed import module_text
from planner.interop.exported import export_plan
from planner.plan.operations import parse_order
from planner.plan.plan import Plan
from planner.schedules.whole import one_forward_one_backward
from planner.simulation.simulator import simulate

HERE = Path(__file__).parent
DOCS = ROOT / "docs" / "export.md"
LAYERS = list(NAMES[:-1])


def files_of(plan: Plan) -> dict[str, str]:
    return dict(export_plan(plan, "deepspeed").files)


class FakePipelineModule:
    """What DeepSpeed 0.19 documents and does with a partition, for one rank of one pipeline."""

    rank = 0

    def __init__(self, layers: list, num_stages: int, **options: object) -> None:
        self.num_stages, self.options, self.global_rank = num_stages, options, self.rank
        self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
        self._layer_specs = list(layers)
        self._partition_layers(method="parameters")
        self.forward_funcs = self._layer_specs[self._local_start : self._local_stop]

    def _set_bounds(self, start: int, stop: int) -> None:
        self._local_start, self._local_stop = start, stop


@pytest.fixture
def fake_deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pipe = ModuleType("deepspeed.pipe")
    pipe.PipelineModule = FakePipelineModule
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)
    return


def run_text(text: str) -> dict:
    found: dict = {}
    exec(compile(text, "pipeline_module.py", "exec"), found)  # noqa: S102 - our own text
    return found


def write(plan: Plan, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in files_of(plan).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.extensive
@pytest.mark.parametrize(
    ("pipelines", "job"),
    [(1, {}), (2, {"shard_optimizer": True, "optimizer": "sgd_momentum"})],
)
def test_deepspeed_trains_by_the_export_as_one_process_does(
    pipelines: int, job: dict[str, object], tmp_path: Path
) -> None:
    """Uneven stages, three layers recomputed, one and two pipelines; ZeRO-1 of SGD."""
    require_peer("deepspeed")
    again = {0: ["tok_embeddings"], 1: ["layers.3", "norm"]}
    alone = in_order(placed(titan_graph(), [3], ("d0", "d1"), again))
    folder = write(on_pipelines(alone, pipelines, **job), tmp_path / "export")
    program = HERE / "deepspeed_worker.py"
    out = torchrun(2 * pipelines, program, folder, **peer_environment(HERE))
    assert "DeepSpeed agrees with a single process" in out


@pytest.mark.extensive
@pytest.mark.parametrize(("stages", "microbatches"), [(3, 5), (4, 2)])
def test_our_1f1b_is_the_order_of_deepspeeds_own_schedule(
    stages: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_from_peers(monkeypatch, "deepspeed")
    from deepspeed.runtime.pipe import schedule

    devices = tuple(f"d{index}" for index in range(stages))
    cuts = [2, 4, 6][: stages - 1]
    pipeline = place_plan(in_order(placed(titan_graph(), cuts, devices, microbatches=microbatches)))
    owner = {(s, m): f"d{s}" for s in range(stages) for m in range(microbatches)}
    ours = one_forward_one_backward(pipeline, owner)
    kinds = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}
    for stage, device in enumerate(devices):
        steps = schedule.TrainSchedule(microbatches, stages, stage).steps()
        found = [kinds[type(row)] for step in steps for row in step if type(row) in kinds]
        assert found == [row.kind for row in ours[device]]


@pytest.mark.usefixtures("fake_deepspeed")
@given(st.data())
def test_every_rank_builds_the_layers_of_its_stage(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, 7), max_size=4)))
    devices = [f"d{index}" for index in range(len(cuts) + 1)]
    rerun = data.draw(st.sets(st.sampled_from(LAYERS)))
    bounds = [0, *cuts, 9]
    recompute = {
        s: [name for name in NAMES[a:b] if name in rerun]
        for s, (a, b) in enumerate(pairwise(bounds))
    }
    plan = in_order(placed(titan_graph(), cuts, devices, recompute))
    module = run_text(files_of(plan)["pipeline_module.py"])
    specs = [object() for _ in LAYERS]
    for stage in plan.stages:
        FakePipelineModule.rank = stage.index
        built = module["PlannedPipelineModule"](specs)
        held = [name for name in stage.layers if name != "loss"]
        assert built.forward_funcs == [specs[LAYERS.index(name)] for name in held]
        assert [built._is_checkpointable([func]) for func in built.forward_funcs] == [
            name in rerun for name in held
        ]


@pytest.mark.usefixtures("fake_deepspeed")
def test_another_number_of_layers_is_refused_by_the_module() -> None:
    plan = in_order(placed(titan_graph(), [4], ("d0", "d1")))
    module = run_text(files_of(plan)["pipeline_module.py"])
    with pytest.raises(ValueError, match=r"has 8 layers .* got 7; give one entry for each"):
        module["PlannedPipelineModule"](range(7))


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True), st.text())
def test_names_in_the_module_are_data_whatever_they_are(names: list[str], model: str) -> None:
    text = module_text(model, names, [0, len(names)], [])
    tree = ast.parse(text)
    values = {row.targets[0].id: row.value for row in tree.body if isinstance(row, ast.Assign)}
    assert ast.literal_eval(values["LAYERS"]) == names
    assert ast.literal_eval(values["MODEL"]) == model
    assert text.isascii()
    plain = ast.parse(module_text("m", ["l"] * len(names), [0, len(names)], []))
    assert [type(row) for row in tree.body] == [type(row) for row in plain.body]


def test_the_configuration_says_what_the_job_says() -> None:
    job = {"samples_per_microbatch": 1, "optimizer": "adamw", "learning_rate": 0.01}
    plan = in_order(placed(titan_graph(), [4], ("d0", "d1"), microbatches=6, **job))
    assert json.loads(files_of(plan)["ds_config.json"]) == {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }


def test_pipelines_share_the_microbatches() -> None:
    plan = on_pipelines(in_order(placed(titan_graph(), [4], ("d0", "d1"))), 2)
    config = json.loads(files_of(plan)["ds_config.json"])
    assert config["train_batch_size"] == 8
    assert config["gradient_accumulation_steps"] == 4
    assert json.loads(files_of(plan)["stages.json"])["ranks"] == ["d0", "d1", "d2", "d3"]


def test_the_cost_of_1f1b_is_that_of_a_simulation_by_hand() -> None:
    """Two stages of 4 and 5 layers, one microbatch at a time: 108 s and a little for the links.

    In 1F1B the second, slower stage is busy throughout: 4 x 15 s, and the first one's 4 s before
    and 8 s after.
    """
    plan = in_order(placed(titan_graph(), [4], ("d0", "d1")))
    (note, *_) = export_plan(plan, "deepspeed").notes
    assert note == (
        "DeepSpeed runs 1F1B instead of the planned order: 72 s predicted instead of 108 s (-33.3%)"
    )
    pipeline = place_plan(plan)
    owner = {(s, m): f"d{s}" for s in range(2) for m in range(4)}
    timeline = simulate(pipeline, one_forward_one_backward(pipeline, owner))
    assert timeline.iteration_time_s == pytest.approx(72, abs=0.05)


def notes_of(plan: Plan) -> str:
    return "\n".join(export_plan(plan, "deepspeed").notes)


def test_an_order_that_changes_no_figure_is_not_noted() -> None:
    """Two microbatches of one stage: whether 1F1B or all forwards first, 2 x 27 s."""
    pipeline = placed(titan_graph(), [], ("d0",), microbatches=2)
    plan = plan_by_hand(pipeline, {"d0": parse_order("0F0 0F1 0B0 0B1", "d0")})
    assert "1F1B" not in notes_of(plan)


def test_tensors_that_skip_layers_inside_a_stage_are_noted_with_the_layers() -> None:
    the_graph = titan_graph(NAMES, ("layers.0", "layers.2"))
    notes = notes_of(in_order(placed(the_graph, [4], ("d0", "d1"))))
    assert "'layers.2' takes what 'layers.0' made, together with the output of 'layers.1'" in notes
    assert "return tuples" in notes
    chain = notes_of(in_order(placed(titan_graph(), [4], ("d0", "d1"))))
    assert "takes what" not in chain


def test_a_layer_that_takes_nothing_of_the_one_before_is_noted() -> None:
    """Two embeddings, which the first block adds."""
    names = ("wte", "wpe", "layers.0", "layers.1", "loss")
    rows = [layer(name) for name in names]
    edges = [boundary(a, b) for a, b in (("wte", "layers.0"), *pairwise(names[1:]))]
    notes = notes_of(in_order(placed(graph(rows, edges), [3], ("d0", "d1"))))
    assert "'wpe' takes nothing of 'wte' before it; 'layers.0' takes what 'wte' made" in notes


def test_a_list_with_the_pages_entry_for_positions_is_the_model() -> None:
    from models.gpt import gpt_tiny

    (entry,) = [text for text in snippets(DOCS, "python") if "AddPositions" in text]
    model = gpt_tiny().eval()
    add = run_text(entry)["AddPositions"](*model.wpe.weight.shape)
    add.load_state_dict(model.wpe.state_dict())
    layers = [model.wte, add, model.drop, *model.h, model.ln_f, model.lm_head]
    ids = model.example_batch(2)["ids"][:, :7]
    assert torch.equal(torch.nn.Sequential(*layers)(ids), model(ids))


def test_layers_come_in_executable_order_however_a_plan_lists_them() -> None:
    plan = in_order(placed(titan_graph(), [4], ("d0", "d1")))
    data = plan.model_dump(mode="json")
    for stage in data["stages"]:
        stage["layers"].reverse()
    mixed = Plan.parse(data, "mixed")
    assert files_of(mixed)["pipeline_module.py"] == files_of(plan)["pipeline_module.py"]


def test_tied_layers_are_noted() -> None:
    plan = in_order(placed(titan_graph(tied=True), [4], ("d0", "d1")))
    assert "TiedLayerSpec" in "\n".join(export_plan(plan, "deepspeed").notes)
