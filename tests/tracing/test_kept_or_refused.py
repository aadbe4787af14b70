"""What export drops is kept, with eager torch's gradients, or refused before planning."""

import pytest
import torch
from feature_models import KEPT, REFUSED

from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.export import export_step
from planner.tracing.factory import TrainingStep, build, example_batch
from planner.tracing.trace import trace_step

JOB = Job(samples_per_microbatch=3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stage_would_lose_is_refused_by_name(name: str) -> None:
    factory, expected = REFUSED[name]
    with pytest.raises(PipeplanError) as raised:
        trace_step(factory, JOB)
    for words in expected:
        assert words in str(raised.value)


@pytest.mark.parametrize("name", KEPT)
def test_the_exported_step_has_the_gradients_of_eager_torch(name: str) -> None:
    torch.manual_seed(0)
    model = build(KEPT[name], {}).train()
    batch = example_batch(model, JOB)
    expected = TrainingStep(model, JOB.loss)(**batch)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    exported = export_step(model, batch, JOB)
    loss = exported.module(**batch)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for own, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[own], msg=own)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_has_its_layers_under_plain_names(name: str) -> None:
    step = trace_step(KEPT[name], JOB)
    names = [layer.name for layer in step.graph.layers if "lstm" not in layer.name]
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    if name == "shared block":
        blocks = ["blocks.0", "blocks.0#2", "blocks.0#3"]
    assert set(blocks) <= set(names)
    assert not any("_orig_mod" in layer for layer in names)


def test_checkpoints_in_the_model_are_named_in_a_note() -> None:
    for name in ("checkpointed", "reentrant"):
        assert "activation checkpoints" in trace_step(KEPT[name], JOB).exported.notes[0]
    assert trace_step(KEPT["plain"], JOB).exported.notes == ()


def test_a_trace_leaves_no_mark_on_the_model_or_on_torch() -> None:
    model = KEPT["cached constant"]()
    before = set(vars(model)), torch.autograd.Function.apply, torch.autocast.__init__
    export_step(model, example_batch(model, JOB), JOB)
    assert (set(vars(model)), torch.autograd.Function.apply, torch.autocast.__init__) == before


def test_weights_of_a_shared_block_are_counted_once() -> None:
    for name in ("shared block", "block in three places"):
        graph = trace_step(KEPT[name], JOB).graph
        shared = {name for layer in graph.layers[1:4] for name in layer.parameters}
        assert shared == set(graph.layers[1].parameters)
        assert len(graph.parameters) == len(shared) + 4
