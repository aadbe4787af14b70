"""What people write is exported with eager torch's gradients, or refused by name."""

import inspect
import random
from typing import Any

import models_of_gradients
import models_of_state
import numpy as np
import pytest
import torch
from torch import nn

from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.export import export_step
from planner.tracing.factory import TrainingStep, build, example_batch
from planner.tracing.trace import TracedStep, trace_step

REFUSED = {
    "DrawingFunction": "autograd Function _Drawing .* draws random numbers",
    "FunctionOfAList": "autograd Function _Listed .* takes tensors inside a list",
    "AutocastOfAnotherDevice": "forward switches on torch.autocast",
    "CounterInAList": "forward keeps history from call to call",
    "ConvertedInForward": "converts the weights of Block .* when the model is built",
    "OwnPythonGenerator": "forward keeps coin from call to call.*draw with torch",
    "DirtyFunction": "autograd Function _Doubled .* writes into its argument",
    "GradientInside": "forward failed while torch.export traced it",
    "ModuleBackwardHook": "module 'blocks.1' .* has a backward hook.*a hook on a parameter",
    "ModuleBackwardPreHook": "module 'blocks.1' .* has a backward hook",
    "TensorHook": r"forward registers a hook on a tensor .*models_of_gradients\.py:",
    "Autocast": 'forward switches on torch.autocast .*precision = "bfloat16"',
    "AutocastDecorator": "forward switches on torch.autocast",
    "AutocastParts": "forward switches on torch.autocast",
    "Momentum": "forward writes into the parameter 'slow.weight'.*make it a buffer",
    "ClampedWeights": "forward writes into the parameter 'blocks.0.up.weight'.*parametrize",
    "ClampedData": "forward writes into the parameter 'blocks.0.up.weight'",
    "BoundedEmbedding": "forward writes into the parameter 'emb.weight'",
    "KeptTensor": "kept is a tensor in a plain attribute",
    "KeptList": "queue is a tensor in a plain attribute",
    "PythonCounter": "forward keeps calls from call to call.*register_buffer",
    "PlainTable": "table is a tensor in a plain attribute.*register_buffer",
    "PythonCoin": "forward draws with Python's random",
    "NumpyNoise": "forward draws with Python's numpy.random",
    "OwnGenerator": "forward draws with a torch.Generator of its own",
    "RoutedExperts": r"models_of_state\.py:.*the shape of a value depends on .*expert_operations",
    "BranchOnItem": "Python reads a value of a tensor there",
    "BranchOnData": r"models_of_state\.py:.*Python reads a value of a tensor there.*torch.where",
}
MODELS = {
    name: made
    for module in (models_of_gradients, models_of_state)
    for name, made in vars(module).items()
    if not name.startswith("_")
    and getattr(made, "__module__", None) == module.__name__
    and (inspect.isclass(made) or name.startswith("compiled"))
}


def job_of(name: str) -> Job:
    loss = getattr(MODELS[name], "loss", "cross_entropy")
    return Job(samples_per_microbatch=3, loss=loss)


def traced(name: str) -> TracedStep:
    return trace_step(MODELS[name], job_of(name))


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return build(MODELS[name], {}).train()


def trained(model: nn.Module, step: Any, batch: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    loss = step(**batch)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_the_exported_step_has_the_gradients_of_eager_torch(name: str) -> None:
    eager, model, job = built(name), built(name), job_of(name)
    batch = example_batch(model, job)
    expected = trained(eager, TrainingStep(eager, job.loss), batch)
    found = trained(model, export_step(model, batch, job).module, batch)
    for own, value in expected.items():
        torch.testing.assert_close(found[own], value, msg=own)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stage_would_lose_is_refused_by_name(name: str) -> None:
    with pytest.raises(PipeplanError, match=REFUSED[name]):
        traced(name)


@pytest.mark.parametrize("name", ["CompiledBlocks", "CompiledInPlace", "compiled_whole"])
def test_layers_of_a_compiled_model_have_its_own_names(name: str) -> None:
    assert not any("_orig_mod" in layer.name for layer in traced(name).graph.layers)


def test_checkpoints_in_the_model_are_named_in_a_note() -> None:
    for name in ("Checkpoints", "ReentrantCheckpoints"):
        assert "activation checkpoints" in traced(name).exported.notes[0]
    assert traced("Detached").exported.notes == ()


def test_a_trace_leaves_no_mark_on_the_model_or_on_torch() -> None:
    model, job = built("CachedNumber"), job_of("CachedNumber")
    before = set(vars(model)), torch.autograd.Function.apply, torch.autocast.__init__
    export_step(model, example_batch(model, job), job)
    assert (set(vars(model)), torch.autograd.Function.apply, torch.autocast.__init__) == before


@pytest.mark.parametrize("name", ["OneBlockManyTimes", "OneBlockInManyPlaces"])
def test_a_shared_block_is_a_layer_a_call_and_its_weights_are_counted_once(name: str) -> None:
    graph = traced(name).graph
    blocks = graph.layers[1:5]
    calls = ["blocks.0", "blocks.0#2", "blocks.0#3", "blocks.0#4"]
    places = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    found = [layer.name for layer in blocks]
    assert found == (calls if name == "OneBlockManyTimes" else places)
    shared = {own for layer in blocks for own in layer.parameters}
    assert shared == set(blocks[0].parameters)
    used = {own for layer in graph.layers for own in layer.parameters}
    assert len(graph.parameters) == len(used)
