"""Layers cut out one by one and run alone, as the profiler does, are the model."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from in_turn import assert_same, run_whole, take_gradients
from torch import Tensor, nn

from executor.split.model_split import cut_layers
from executor.stage.runner import StageRunner
from models import ZOO
from planner.job import Job
from planner.tracing.export import ExportedStep, export_step
from planner.tracing.factory import example_batch, import_factory
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment, assign_layers

pytestmark = pytest.mark.extensive
JOB = Job(samples_per_microbatch=2)


def runners_of(exported: ExportedStep, layers: LayerAssignment) -> list[StageRunner]:
    takes_gradient = {node.name for node in nodes_with_gradient(exported)}
    return [
        StageRunner(
            cut_layers(exported, layers, (name,), takes_gradient, lambda tensor: tensor),
            microbatches=1,
        )
        for name in layers.names
    ]


def run_alone(
    model: nn.Module, runners: list[StageRunner], batch: dict[str, Tensor]
) -> tuple[Tensor, dict]:
    """Values by name from layer to layer, and the sums of their gradients back."""
    model.zero_grad(set_to_none=True)
    values: dict[str, Tensor] = {}
    for runner in runners:
        received = [values[t.name].permute(t.order) for t in runner.stage.receives]
        made = runner.forward(0, received, {name: entry.clone() for name, entry in batch.items()})
        for boundary, tensor in zip(runner.stage.outputs, made, strict=True):
            values[boundary.name] = tensor.permute(boundary.received_order)
    back: dict[str, Tensor | float] = defaultdict(float)
    for runner in reversed(runners):
        given = [back[t.name] + torch.zeros(t.shape) for t in runner.stage.gradients_in]
        wanted = [t for t in runner.stage.receives if t.requires_grad]
        for boundary, tensor in zip(wanted, runner.backward(0, given), strict=True):
            back[boundary.name] = back[boundary.name] + tensor
    return made[0], take_gradients(model)


@pytest.mark.parametrize("name", ["t5_tiny", "resnet_tiny", "unet_tiny", "mixtral_tiny"])
def test_layers_that_run_alone_are_the_whole_model(name: str) -> None:
    torch.manual_seed(3)
    model = import_factory(ZOO[name])().train()
    batch = example_batch(model, JOB)
    exported = export_step(model, batch, JOB)
    loss, gradients = run_alone(model, runners_of(exported, assign_layers(exported)), batch)
    whole_loss, whole_gradients = run_whole(model, batch, JOB.loss)
    # A gradient from several layers adds up in another order.
    assert_same((loss, gradients), (whole_loss, whole_gradients), rounded=gradients)
