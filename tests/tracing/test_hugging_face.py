"""Models of Hugging Face transformers: traced, structured and refused as the library has them."""

import json
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformer_sizes import BLOCKS, TINY

from executor.launch.model import structure_differences
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.tracing.export import export_step
from planner.tracing.factory import TrainingStep, example_batch, import_factory
from planner.tracing.layers import assign_layers
from planner.tracing.trace import trace

transformers = pytest.importorskip("transformers")

LAYERS = {
    "GPT2LMHeadModel": "transformer.wte transformer.wpe transformer.drop transformer.h.0 "
    "transformer.h.1 transformer.ln_f lm_head loss",
    "MixtralForCausalLM": "model.embed_tokens model.layers.0 model.layers.1 model.norm lm_head "
    "loss",
    "BertForMaskedLM": "bert.embeddings bert.encoder.layer.0 bert.encoder.layer.1 cls loss",
}
SOME = [pytest.param(n, marks=() if n in LAYERS else pytest.mark.extensive) for n in TINY]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model of transformers was about to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def job_of(name: str, **fields: Any) -> Job:
    return Job(samples_per_microbatch=2, model_arguments=TINY[name], **fields)


@cache
def traced(name: str, **fields: Any) -> LayerGraph:
    return trace(f"hf:{name}", job_of(name, **fields))


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return import_factory(f"hf:{name}")(**TINY[name])


@pytest.mark.parametrize("name", SOME)
def test_a_model_is_traced_with_all_its_work_counted(name: str) -> None:
    graph = traced(name)
    assert graph.name == name
    assert graph.record.flop_coverage == 1
    if name in LAYERS:
        assert list(graph) == LAYERS[name].split()


@pytest.mark.parametrize("name", TINY)
def test_parameters_have_the_names_of_the_librarys_own_model(name: str) -> None:
    fields = {k: v for k, v in TINY[name].items() if k != "sequence_length"}
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**fields))
    expected = {key: value.numel() for key, value in model.named_parameters()}
    ours = built(name)
    assert isinstance(ours, model_class)
    assert {key: value.numel() for key, value in ours.named_parameters()} == expected
    assert ours.state_dict().keys() == model.state_dict().keys()
    found = {row.name: row.elements for row in traced(name).record.parameters if row.trainable}
    assert found == expected


@pytest.mark.extensive
@pytest.mark.parametrize("name", TINY)
def test_the_model_on_the_cpu_is_the_planned_one(name: str) -> None:
    job = job_of(name)
    model = built(name)
    exported = export_step(model, example_batch(model, job), job)
    graph = traced(name)
    assert structure_differences(graph.record, exported, assign_layers(exported)) == []


@pytest.mark.parametrize("name", SOME)
def test_the_loss_is_that_of_the_librarys_logits(name: str) -> None:
    model = built(name).eval()
    batch = example_batch(model, job_of(name))
    target = batch["target"]
    inputs = {key: value for key, value in batch.items() if key != "target"}
    logits = getattr(transformers, name).forward(model, **inputs).logits
    expected = functional.cross_entropy(logits.flatten(0, -2), target.flatten())
    torch.testing.assert_close(TrainingStep(model, "cross_entropy")(**batch), expected)
    torch.testing.assert_close(TrainingStep(model, "output")(**batch), expected)


def test_a_mixtures_own_loss_has_the_routers_share() -> None:
    arguments = {**TINY["MixtralForCausalLM"], "output_router_logits": True}
    arguments["router_aux_loss_coef"] = 1.0
    job = Job(samples_per_microbatch=2, loss="output", model_arguments=arguments)
    assert trace("hf:MixtralForCausalLM", job).record.flop_coverage == 1
    torch.manual_seed(0)
    model = import_factory("hf:MixtralForCausalLM")(**arguments)
    batch = example_batch(model, job)
    whole, plain = (TrainingStep(model, loss)(**batch) for loss in ("output", "cross_entropy"))
    assert whole > plain + 1


def test_a_mixture_does_the_work_of_the_chosen_experts_alone() -> None:
    name = "MixtralForCausalLM"
    assert transformers.MixtralConfig().num_experts_per_tok == 2
    two, four = traced(name), trace(f"hf:{name}", job_of(name), num_experts_per_tok=4)
    layer = "model.layers.1"
    fields = ("forward_flops", "input_gradient_flops", "weight_gradient_flops")
    expert = 2 * (2 * 16) * 3 * 32 * 48  # Three products for each of 32 tokens.
    for field in fields:
        more = getattr(four.layers[layer], field) - getattr(two.layers[layer], field)
        assert more == 2 * expert, field


@pytest.mark.extensive
def test_published_sizes_need_no_memory() -> None:
    assert elements_of("GPT2LMHeadModel") == 124_439_808
    one, two = (elements_of("MixtralForCausalLM", num_hidden_layers=n) for n in (1, 2))
    assert one + 31 * (two - one) == 46_702_792_704  # Of 32 layers that are alike.


def elements_of(name: str, **arguments: int) -> int:
    job = Job(precision="bfloat16")
    graph = trace(f"hf:{name}", job, sequence_length=1024, **arguments)
    assert graph.record.flop_coverage == 1
    return sum(row.elements for row in graph.record.parameters if row.trainable)


def test_a_models_batch_is_as_long_as_its_positions() -> None:
    lengths = {"GPT2LMHeadModel": 1024, "LlamaForCausalLM": 2048, "T5ForConditionalGeneration": 512}
    for name, expected in lengths.items():
        arguments = {k: v for k, v in TINY[name].items() if k != "sequence_length"}
        with torch.device("meta"):
            batch = import_factory(f"hf:{name}")(**arguments).example_batch(1)
        assert batch["input_ids"].shape == (1, expected)


def test_positions_of_roberta_begin_after_paddings() -> None:
    arguments = {**BLOCKS, "vocab_size": 100, "max_position_embeddings": 20, "pad_token_id": 1}
    model = import_factory("hf:RobertaForMaskedLM")(**arguments)
    batch = model.example_batch(2)
    assert batch.pop("target").shape == (2, 18)
    assert model(**batch).shape == (2, 18, 100)
    with pytest.raises(PipeplanError, match=r"sequence_length = 19 .* 18 positions"):
        import_factory("hf:RobertaForMaskedLM")(**arguments, sequence_length=19)


# --- configuration files --------------------------------------------------------------------------


def saved(folder: Path, **fields: object) -> str:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    data = {**config.to_dict(), "architectures": ["GPT2LMHeadModel"], **fields}
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in data.items() if v != "remove"}))
    return f"hf:{path}"


def test_a_configuration_file_names_its_class_and_sizes(tmp_path: Path) -> None:
    graph = trace(saved(tmp_path), Job(), n_layer=2)
    assert graph.name == "GPT2LMHeadModel"
    assert [layer for layer in graph if ".h." in layer] == ["transformer.h.0", "transformer.h.1"]
    assert graph.parameters["transformer.wte.weight"].elements == 50 * 16
    (hidden,) = graph.crossing(list(graph)[:4])
    assert hidden.shape == (1, 8, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": "remove"}, "architectures in .* is missing, expected a list"),
        ({"architectures": ["A", "B"]}, "architectures in .*expected a list with the name of one"),
        ({"architectures": ["GPT2LMHead"]}, "no class 'GPT2LMHead'; choose .*GPT2LMHeadM"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map .* which Pipeplan does not run"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* remove it"),
        ({"model_type": "llama"}, "model_type is 'llama', .* is of 'gpt2'"),
    ],
)
def test_configurations_that_cannot_be_built_are_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(PipeplanError, match=message):
        import_factory(saved(tmp_path, **fields))


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(PipeplanError, match=r"there is no file .*config\.json; give the path"):
        import_factory(f"hf:{path}")
    path.write_text("{")
    with pytest.raises(PipeplanError, match="not valid JSON"):
        import_factory(f"hf:{path}")
    path.write_text("[]")
    with pytest.raises(PipeplanError, match=r"architectures in .* is missing"):
        import_factory(f"hf:{path}")


def test_a_folder_with_a_configuration_is_told_from_it(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(PipeplanError, match=rf"is a folder; name .*: hf:{tmp_path}/config\.json"):
        import_factory(f"hf:{tmp_path}")


# --- names and arguments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GPTLMHeadModel", "no class 'GPTLMHeadModel'; choose .*GPT2LMHeadModel"),
        ("os", "no class 'os'; choose one such as "),
        ("", "no class ''"),
        ("GPT2Model", "GPT2Model is none of the kinds .*causal language model.*module:factory"),
    ],
)
def test_names_without_a_supported_class_are_refused(name: str, message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        import_factory(f"hf:{name}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_layers": 2}, "n_layers in model_arguments is no field .* choose .*n_layer"),
        ({"sequence_length": 0}, "sequence_length = 0 .* expected a positive integer"),
        ({"sequence_length": 4096}, "sequence_length = 4096 .* has 1024 positions"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation .* chosen by Pipeplan"),
        ({"_attn_implementation": "someone/kernel"}, "_attn_implementation .* chosen by Pipeplan"),
        ({"n_head": 5}, "cannot be built.*correct model_arguments"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        trace("hf:GPT2LMHeadModel", Job(), **{"n_layer": 1, **arguments})


def test_inputs_that_the_model_does_not_take_are_refused() -> None:
    inputs = {
        name: {"shape": (8,), "dtype": "int64", "below": 50} for name in ("input_idx", "target")
    }
    job = Job(model_arguments=TINY["LlamaForCausalLM"], inputs=inputs)
    with pytest.raises(PipeplanError, match=r"takes no input_idx; .* it takes input_ids"):
        trace("hf:LlamaForCausalLM", job)


def test_an_attention_mask_may_be_among_the_inputs() -> None:
    inputs: dict[str, Any] = {
        name: {"shape": (16,), "dtype": "int64", "below": 100} for name in ("input_ids", "target")
    }
    inputs["attention_mask"] = {"shape": (16,), "dtype": "bool"}
    job = job_of("BertForMaskedLM", inputs=inputs)
    graph = trace("hf:BertForMaskedLM", job)
    assert "bool" in {tensor.dtype for tensor in graph.record.boundaries}


def test_without_transformers_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PipeplanError, match=r'pip install "pipeplan\[hf\]"'):
        import_factory("hf:GPT2LMHeadModel")
