"""A model exported at microbatch sizes, on the meta device: nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from executor.profiling.kinds import signatures_of
from executor.split.model_split import cut_layers
from executor.split.piece_graph import Filled
from executor.split.stage_module import StageModule
from executor.stage.gradient_types import set_gradient_types
from planner.job import Job
from planner.model.graph_record import GraphRecord
from planner.model.measured_costs import Size
from planner.tracing.export import ExportedStep
from planner.tracing.factory import batch_at, example_batch, import_loss
from planner.tracing.layers import LayerAssignment
from planner.tracing.trace import trace_step, traced_at


@dataclass(frozen=True)
class SizedModel:
    """The training step of one microbatch of so many samples.

    Attributes:
        job: with this size.
        exported: the step.
        layers: of its operations.
        graph: what the trace counts.
        batch: one microbatch, on the CPU.
        tokens: its length, of a job with several; None: that of the model's own batch.
    """

    job: Job
    exported: ExportedStep
    layers: LayerAssignment
    graph: GraphRecord
    batch: Mapping[str, Tensor]
    tokens: int | None = None

    @property
    def size(self) -> Size:
        """Samples and tokens of the microbatch."""
        return self.job.samples_per_microbatch, self.tokens

    @cached_property
    def takes_gradient(self) -> frozenset[str]:
        """Names of the tensors between layers that take one."""
        return frozenset(t.name for t in self.graph.boundaries if t.requires_grad)

    @cached_property
    def flops(self) -> Mapping[str, int]:
        """FLOPs of each layer's forward, by name."""
        return {layer.name: layer.forward_flops for layer in self.graph.layers}

    @cached_property
    def signatures(self) -> dict[str, str]:
        """Signatures of each layer's work, by name."""
        return signatures_of(self.exported, self.layers, self.takes_gradient)

    def cut(self, names: Sequence[str], filled: Filled, device: torch.device) -> StageModule:
        """Layers as a stage of their own, with parameters that ``filled`` gives."""
        step = self.exported, self.layers, names
        stage = cut_layers(*step, self.takes_gradient, filled, device)
        set_gradient_types(stage.parameters.values(), self.job)
        return stage


def sized_models(model: str, job: Job, samples: int) -> list[SizedModel]:
    """Build a model, and export it at a microbatch size and each of the job's lengths.

    Args:
        model: ``module:factory``, which is imported.
        job: of the training.
        samples: of a microbatch.

    Raises:
        PipeplanError: if it cannot be found, built or exported.
    """
    lengths = job.lengths
    job = job.model_copy(update={"samples_per_microbatch": samples, "lengths": None})
    step = trace_step(model, job)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = example_batch(step.module, job)
    if lengths is None:
        return [SizedModel(job, step.exported, step.layers, step.graph, batch)]
    own_loss, found = import_loss(job), []
    for place, tokens in enumerate(lengths.tokens):
        cut = batch_at(batch, lengths, place)
        on_meta = {name: value.to("meta") for name, value in cut.items()}
        step = traced_at(step.module, on_meta, job, own_loss, step.graph.name)
        found.append(SizedModel(job, step.exported, step.layers, step.graph, cut, tokens))
    return found
