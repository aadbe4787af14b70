"""One layer as the executor runs it: forwards, whole backwards and split ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, device

from executor.cutting.stage_module import StageModule
from executor.stage.runner import StageRunner

WHOLE, SPLIT = 0, 1
"""Two microbatches: the backward of the one is whole, of the other in two halves."""
OPERATIONS = 5
FORWARD, BACKWARD, SPLIT_FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(OPERATIONS)
"""The operations of a round, in order; a forward whose backward is split does a little more."""


class LayerRun:
    """Runs a layer's operations on the same inputs, again and again.

    Args:
        stage: the layer, its parameters filled.
        received: what it reads of layers before.
        batch: what it reads of the batch.
        gradients: that come back for what it makes.
        on: the device of all of them.
    """

    def __init__(
        self,
        stage: StageModule,
        received: Sequence[Tensor],
        batch: Mapping[str, Tensor],
        gradients: Sequence[Tensor],
        on: device,
    ) -> None:
        self._runner = StageRunner(stage, microbatches=2, split=(SPLIT,), device=on)
        self._received = received
        self._batch = batch
        self._gradients = gradients

    def run(self, operation: int) -> None:
        """Run one of the operations; all that come before it have run."""
        runner = self._runner
        if operation in (FORWARD, SPLIT_FORWARD):
            microbatch = WHOLE if operation == FORWARD else SPLIT
            runner.forward(microbatch, self._received, self._batch)
        elif operation in (BACKWARD, INPUT_GRADIENT):
            microbatch = WHOLE if operation == BACKWARD else SPLIT
            runner.backward(microbatch, self._gradients)
        else:
            runner.weight_gradients(SPLIT)

    def round(self) -> None:
        """All of them once."""
        for operation in range(OPERATIONS):
            self.run(operation)
