"""Models of Hugging Face transformers, cut anywhere, compute what they compute in plain torch."""

import functools
from pathlib import Path

import pytest
import torch
from executor_plans import DEVICES, pipeline_of, scheduled
from in_turn import cut_everywhere, run_stages, run_whole
from torch import Tensor
from transformer_sizes import TINY

from executor.launch.model import allowed_factory
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.factory import import_factory
from planner.tracing.trace import trace

pytest.importorskip("transformers")
pytestmark = pytest.mark.extensive

JOB = Job(samples_per_microbatch=2)


def assert_close(found: tuple[Tensor, dict], expected: tuple[Tensor, dict]) -> None:
    """Up to rounding: transformers chooses other kernels for experts when it is exported."""
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[1][name], gradient, msg=name)


@pytest.mark.parametrize("name", TINY)
def test_stages_in_turn_give_the_loss_and_gradients_of_the_model(name: str) -> None:
    factory = functools.partial(import_factory(f"hf:{name}"), **TINY[name])
    model, cut_model, layers = cut_everywhere(factory, JOB)
    torch.manual_seed(2)
    batch = model.example_batch(2)
    # Dropout draws the same lots in stages, one after the other, as in the model.
    torch.manual_seed(9)
    expected = run_whole(model, batch, "cross_entropy")
    assert all(gradient is not None for gradient in expected[1].values())
    middle = len(layers) // 2
    for stages in ([layers[:middle], layers[middle:]], [[layer] for layer in layers]):
        modules = cut_model(stages)
        assert_close(run_stages(model, modules, batch, seed=9), expected)


# --- what a plan may name -------------------------------------------------------------------------


@functools.cache
def plan_of(factory: str) -> Plan:
    graph = trace(factory, Job(samples_per_microbatch=2, model_arguments=TINY["GPT2LMHeadModel"]))
    return scheduled(pipeline_of(graph, factory, [(list(graph.layers), DEVICES[:1])]))


def test_a_plan_builds_no_model_of_transformers_by_itself() -> None:
    plan = plan_of("hf:GPT2LMHeadModel")
    with pytest.raises(PipeplanError, match="add --model hf:GPT2LMHeadModel"):
        allowed_factory(plan, None)
    model = allowed_factory(plan, "hf:GPT2LMHeadModel")(**TINY["GPT2LMHeadModel"])
    assert type(model).__name__ == "GPT2LMHeadModel"


def test_a_configuration_file_is_named_again_from_wherever_it_lies(tmp_path: Path) -> None:
    recorded = "hf:far/away/config.json"
    plan = plan_of("hf:GPT2LMHeadModel")
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"factory": recorded})})
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    with pytest.raises(PipeplanError, match=f"add --model {recorded}"):
        allowed_factory(plan, None)
    assert allowed_factory(plan, f"hf:{path}").__name__ == "GPT2LMHeadModel"
    with pytest.raises(PipeplanError, match="the plan was made for"):
        allowed_factory(plan, "hf:GPT2LMHeadModel")
