"""A stage that really computes, with the batches of the iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from executor.random_state import microbatch_seed, state_bytes
from executor.stage.runner import StageRunner
from executor.worker import TensorSpec

BatchOf = Callable[[int, int], Mapping[str, Tensor]]


class TrainingWorker:
    """Runs the microbatches of one iteration after the other through a stage.

    Args:
        runner: of the stage.
        batch_of: the batch of a step and microbatch.
        seed: of what training draws.
        device: of tensors.
    """

    def __init__(
        self, runner: StageRunner, batch_of: BatchOf, seed: int, device: torch.device
    ) -> None:
        stage = runner.stage
        self.runner = runner
        self.batch_of = batch_of
        self.seed = seed
        self.device = device
        self.step = 0
        self.is_last = stage.is_last
        self.incoming = [TensorSpec(t.sent_shape, t.dtype) for t in stage.receives]
        if stage.receives_random_state:
            self.incoming.append(TensorSpec((state_bytes(device),), torch.uint8))
        self.returning = [TensorSpec(t.shape, t.dtype) for t in stage.gradients_in]

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors for the next stage, or the loss."""
        batch: Mapping[str, Tensor] = {}
        if self.runner.stage.model_inputs:
            whole = self.batch_of(self.step, microbatch)
            batch = {name: whole[name].to(self.device) for name in self.runner.stage.model_inputs}
        seed = microbatch_seed(self.seed, self.step, microbatch)
        return self.runner.forward(microbatch, received, batch, seed)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients for the stage before."""
        return self.runner.backward(microbatch, gradients)

    def weight_gradients(self, microbatch: int) -> None:
        """The second half of a split backward."""
        self.runner.weight_gradients(microbatch)

    def require_empty(self) -> None:
        """Every microbatch of the iteration is through."""
        self.runner.require_empty()
