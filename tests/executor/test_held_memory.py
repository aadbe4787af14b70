"""What a stage holds between its operations, as torch's allocator counts it."""

from collections.abc import Sequence

import pytest
import torch
from held_bytes import allocated
from in_turn import MEAN_SQUARES, cut_everywhere
from torch import Tensor, nn
from traces import trace_once

from executor.stage.runner import StageRunner
from models import ZOO
from planner.job import Job
from planner.tracing.factory import TrainingStep, example_batch, import_factory

pytestmark = pytest.mark.extensive
SAMPLES, NARROW, WIDE = 32, 64, 256
FLOAT = 4
ROUND = 64
"""Bytes of scalars, such as the loss."""


class Wide(nn.Module):
    """Linear maps whose inputs their weight gradients need, and functions that only I needs."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            [
                nn.Linear(NARROW, WIDE),
                nn.GELU(),
                nn.Linear(WIDE, NARROW),
                nn.Tanh(),
                nn.Linear(NARROW, NARROW),
            ]
        )

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.h:
            rows = layer(rows)
        return rows

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"rows": torch.randn(samples, NARROW), "target": torch.randn(samples, NARROW)}


def made(split: Sequence[int] = ()) -> tuple[nn.Module, StageRunner, dict[str, Tensor], int]:
    """A model, a runner of all of it as one stage, a batch, and the bytes of its gradients."""
    job = MEAN_SQUARES.model_copy(update={"samples_per_microbatch": SAMPLES})
    model, cut_model, layers = cut_everywhere(Wide, job)
    (stage,) = cut_model([layers])
    gradients = FLOAT * sum(parameter.numel() for parameter in model.parameters())
    return model, StageRunner(stage, 2, split), model.example_batch(SAMPLES), gradients


@pytest.mark.parametrize("split", [(), (0, 1)])
def test_a_forward_holds_no_more_than_plain_torch(split: Sequence[int]) -> None:
    model, runner, batch, _ = made(split)
    with allocated() as plain:
        loss = TrainingStep(model, "mse")(**batch)
    with allocated() as ours:
        runner.forward(0, (), batch)
    assert 0 < ours.bytes <= plain.bytes
    assert ours.peak_bytes <= plain.peak_bytes
    del loss


def test_a_whole_backward_leaves_the_gradients_alone() -> None:
    _, runner, batch, gradients = made()
    with allocated() as change:
        runner.forward(0, (), batch)
        runner.backward(0, ())
    assert gradients <= change.bytes <= gradients + ROUND


def test_between_the_halves_lie_what_linear_maps_read_and_the_gradients_of_what_they_made() -> None:
    _, runner, batch, _ = made(split=[0])
    with allocated() as change:
        runner.forward(0, (), batch)
        runner.backward(0, ())
    read, made_by_them = WIDE + NARROW, WIDE + NARROW + NARROW  # The batch was there before.
    expected = FLOAT * SAMPLES * (read + made_by_them)
    assert expected <= change.bytes <= expected + ROUND
    runner.weight_gradients(0)


def test_both_halves_leave_the_gradients_alone() -> None:
    _, runner, batch, gradients = made(split=[0])
    with allocated() as change:
        runner.forward(0, (), batch)
        runner.backward(0, ())
        runner.weight_gradients(0)
    assert gradients <= change.bytes <= gradients + ROUND


def test_later_weight_gradients_add_up_without_a_second_tensor_of_their_size() -> None:
    _, runner, batch, _ = made(split=[0, 1])
    for microbatch in (0, 1):
        runner.forward(microbatch, (), batch)
        runner.backward(microbatch, ())
    runner.weight_gradients(0)
    with allocated() as change:
        runner.weight_gradients(1)
    assert change.peak_bytes <= FLOAT * WIDE + ROUND  # A bias's.


def test_attention_with_a_learned_bias_keeps_no_more_than_for_a_whole_backward() -> None:
    job = Job(samples_per_microbatch=4)
    factory = import_factory(ZOO["t5_tiny"])
    _, cut_model, layers = cut_everywhere(factory, job)
    (stage,) = cut_model([layers])
    biases = sum(
        b.bytes for b in trace_once(factory, job).record.boundaries if "bias" in b.producer
    )
    runner = StageRunner(stage, 2, split=(1,))
    batch = example_batch(factory(), job)
    with allocated() as whole:
        runner.forward(0, (), batch)
    with allocated() as split:
        runner.forward(1, (), batch)
    assert split.bytes <= whole.bytes + biases + ROUND


@pytest.mark.parametrize("name", ["gpt_tiny", "t5_tiny", "resnet_tiny", "unet_tiny"])
def test_the_trace_counts_what_waits_for_weight_gradients(name: str) -> None:
    job = Job(samples_per_microbatch=4)
    factory = import_factory(ZOO[name])
    _, cut_model, layers = cut_everywhere(factory, job)
    (stage,) = cut_model([layers])
    runner = StageRunner(stage, 1, split=(0,))
    batch = example_batch(factory(), job)
    with allocated() as change:
        runner.forward(0, (), batch)
        runner.backward(0, ())
    traced = sum(layer.weight_stash_bytes or 0 for layer in trace_once(factory, job).record.layers)
    # What a kernel keeps for itself, such as a convolution's workspace, the trace cannot know.
    entries = sum(entry.numel() * entry.element_size() for entry in batch.values())
    assert 0.95 * change.bytes <= traced <= 1.1 * change.bytes + entries
    runner.weight_gradients(0)
