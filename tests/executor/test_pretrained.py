"""Pretrained weights of a local file reach every stage; names that do not match are listed."""

from pathlib import Path

import pytest
import torch
from executor_plans import cut_pipeline, scheduled
from safetensors.torch import save_file

from examples.models.pretrained import my_gpt
from executor.launch.prepare import prepare
from executor.launch.run import PlanRank
from models.gpt import gpt_tiny
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.trace import trace


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    torch.manual_seed(77)
    state = gpt_tiny(width=32, layers=2).state_dict()
    if "lm_head.weight" in state:  # Tied: files hold one of them.
        del state["lm_head.weight"]
    save_file(state, tmp_path / "gpt.safetensors")
    torch.save(state, tmp_path / "gpt.pt")
    return {"safetensors": tmp_path / "gpt.safetensors", "pt": tmp_path / "gpt.pt"}


def plan_of(factory: str, arguments: dict, precision: str = "float32") -> Plan:
    job = Job(samples_per_microbatch=2, model_arguments=arguments, precision=precision)
    graph = trace(factory, job)
    half = len(graph.layers) // 2
    fields = {"model_arguments": arguments, "precision": precision, "microbatches": 4}
    return scheduled(cut_pipeline(graph, factory, [half], ["d0", "d1 d2"], **fields))


def assert_loaded(plan: Plan, expected: dict[str, torch.Tensor]) -> None:
    held = set()
    for rank in range(3):
        prepared = prepare(plan, plan.model.factory, seed=5, place=PlanRank(rank, 3))
        for name, parameter in prepared.parameters.items():
            assert parameter.equal(expected[name].to(parameter.dtype)), (rank, name)
            held.add(name)
    assert held == {name for name, _ in prepared.model.named_parameters()}


@pytest.mark.parametrize(("kind", "precision"), [("safetensors", "float32"), ("pt", "bfloat16")])
def test_every_rank_gets_the_weights_of_its_stages(
    saved: dict[str, Path], kind: str, precision: str
) -> None:
    arguments = {"file": str(saved[kind]), "width": 32, "layers": 2}
    torch.manual_seed(77)
    expected = dict(gpt_tiny(width=32, layers=2).named_parameters())
    plan = plan_of("examples.models.pretrained:my_gpt", arguments, precision)
    assert_loaded(plan, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_and_shapes_that_do_not_match_are_listed(saved: dict[str, Path], device: str) -> None:
    with torch.device(device), pytest.raises(PipeplanError) as caught:
        my_gpt(str(saved["safetensors"]), width=64, layers=3)
    text = str(caught.value)
    assert "names that only the model has: h.2." in text
    assert "other shapes: " in text
    assert "h.0.ln_1.bias (32,), not (64,)" in text
    with torch.device(device), pytest.raises(PipeplanError, match=r"only the file has: h\.1\."):
        my_gpt(str(saved["safetensors"]), width=32, layers=1)


@pytest.mark.extensive
def test_every_rank_gets_the_weights_of_a_folder_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "tiny", max_shard_size="30KB")
    assert len(list((tmp_path / "tiny").glob("*.safetensors"))) > 1
    arguments = {"folder": str(tmp_path / "tiny")}
    plan = plan_of("examples.models.pretrained:hugging_face", arguments)
    expected = dict(model.named_parameters())
    assert_loaded(plan, expected)
