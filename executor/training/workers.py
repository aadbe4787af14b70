"""The stages of a rank as the step loop runs them: in training, and in validation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from executor.runtime.worker import TensorSpec, Worker
from executor.stage.random_numbers import microbatch_seed
from executor.stage.runner import StageRunner
from executor.stage.token_mean import TokenMean, tokens_of, weighted
from executor.training.batches import BatchOf
from planner.errors import PipeplanError


class DeviceBatches:
    """The entries of microbatches that a stage reads, on its device.

    For a GPU all microbatches of a step are loaded before its first operation and lie in pinned
    memory, from which the GPU copies them while the host goes on. A CPU loads each as it is needed.

    Args:
        batch_of: returns the batch of a step and microbatch.
        names: of the entries that the stage reads.
        microbatches: of each step, that the stage runs here, in order.
        device: of the stage.
        ahead: whether all microbatches of a step are loaded before its first operation; None: for
            a GPU.

    Attributes:
        waited_s: for which the host loaded the batches of this step.
    """

    def __init__(
        self,
        batch_of: BatchOf,
        names: Sequence[str],
        microbatches: Sequence[int],
        device: torch.device,
        *,
        ahead: bool | None = None,
    ) -> None:
        self._batch_of = batch_of
        self._names = tuple(names)
        self._microbatches = tuple(microbatches)
        self._device = device
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self.waited_s = 0.0
        self._step = 0
        self._loaded: dict[int, Mapping[str, Tensor]] = {}

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step, self.waited_s = step, 0.0
        self._loaded = {}
        if self._ahead and self._names:
            self.load_all()

    def load_all(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Load all microbatches of the step now, unless they are, and return them."""
        self._loaded = self._loaded or {m: self._load(m) for m in self._microbatches}
        return dict(self._loaded)

    def take(self, microbatch: int) -> Mapping[str, Tensor]:
        """Return the entries of a microbatch, by name."""
        if not self._names:
            return {}
        batch = self._loaded.pop(microbatch, None) or self._load(microbatch)
        return {name: x.to(self._device, non_blocking=True) for name, x in batch.items()}

    def _load(self, microbatch: int) -> Mapping[str, Tensor]:
        begin_s = time.perf_counter()
        whole = self._batch_of(self._step, microbatch)
        pins = self._ahead and self._device.type == "cuda"
        found = {name: whole[name].pin_memory() if pins else whole[name] for name in self._names}
        self.waited_s += time.perf_counter() - begin_s
        return found


class TrainingWorker(Worker):
    """Runs the microbatches of one iteration after the other through a stage.

    Args:
        runners: run the stage, one for each length of microbatches, ascending.
        batches: the entries of microbatches that the stage reads.
        seed: the seed of the training's random numbers.
        lengths_of: returns the place among the lengths of each microbatch of a step; None: there
            is one length.
        mean: of the losses over tokens; None: over microbatches.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        batches: DeviceBatches,
        seed: int,
        lengths_of: Callable[[int], Sequence[int]] | None = None,
        mean: TokenMean | None = None,
    ) -> None:
        stage = runners[0].stage
        self.statistics = runners[0].statistics
        self.is_last = stage.is_last
        self._incoming = [runner.incoming() for runner in runners]
        self._returning = [runner.returning() for runner in runners]
        self._runners = tuple(runners)
        self._batches = batches
        self._seed = seed
        self._step = 0
        self._lengths_of = lengths_of
        self._lengths: Sequence[int] = ()
        self._mean = mean if stage.is_last else None
        self._weights: Mapping[int, Tensor] = {}

    @property
    def batch_wait_s(self) -> float:
        """Seconds for which this iteration waited until its batches were loaded."""
        return self._batches.waited_s

    def _place(self, microbatch: int) -> int:
        return self._lengths[microbatch] if self._lengths else 0

    def _runner(self, microbatch: int) -> StageRunner:
        return self._runners[self._place(microbatch)]

    def incoming(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the tensors that the previous stage sends for a microbatch."""
        return self._incoming[self._place(microbatch)]

    def returning(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the gradients that the next stage sends back for a microbatch."""
        return self._returning[self._place(microbatch)]

    def begin(self, step: int, loss_scale: float) -> None:
        """Begin an iteration, whose loss is multiplied by ``loss_scale``."""
        self._step = step
        self._batches.begin(step)
        if self._lengths_of is not None:
            self._lengths = self._lengths_of(step)
        if self._mean is not None:
            self._weights = self._mean.weights(self._batches.load_all())
        for runner in self._runners:
            runner.begin(loss_scale, self._weights)

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage, or the loss."""
        batch, runner = self._batches.take(microbatch), self._runner(microbatch)
        seed = microbatch_seed(self._seed, self._step, microbatch)
        made = runner.forward(microbatch, received, batch, seed)
        if microbatch not in self._weights:
            return made
        return (weighted(made[0], self._weights[microbatch]) * runner.microbatches,)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients for the previous stage."""
        return self._runner(microbatch).backward(microbatch, gradients)

    def bring_back(self, microbatch: int) -> None:
        """Begin to bring the stash of a microbatch back from the host, if it is there."""
        self._runner(microbatch).bring_back(microbatch)

    def weight_gradients(self, microbatch: int) -> None:
        """Run the weight gradients of a split backward."""
        self._runner(microbatch).weight_gradients(microbatch)

    def end(self) -> None:
        """Check that every forward of the iteration has had its whole backward."""
        for runner in self._runners:
            runner.require_empty()


class ForwardWorker(Worker):
    """Runs forwards of a stage in evaluation mode.

    Args:
        runner: of the stage.
        batches: the entries of microbatches that the stage reads.
        seed: of random numbers that it draws in evaluation mode too.
        over_tokens: whether a microbatch counts by its tokens.

    Attributes:
        is_last: whether the stage makes the loss.
        total: sum of the losses times their weights, and of the weights, so far.

    Raises:
        PipeplanError: if the stage writes buffers in evaluation mode, which training reads.
    """

    def __init__(
        self, runner: StageRunner, batches: DeviceBatches, seed: int, *, over_tokens: bool
    ) -> None:
        stage = runner.stage
        written = {name for piece in stage.pieces for name in piece.written_buffers}
        if written or runner.statistics is not None:
            raise PipeplanError(
                f"validation: stage {stage.index} writes {', '.join(sorted(written)) or 'buffers'} "
                "in evaluation mode too, which would change the training; write them only if "
                "self.training, or train without [validation]"
            )
        self.is_last = stage.is_last
        self.total = torch.zeros(2, dtype=torch.float64, device=runner.device)
        self._runner = runner
        self._batches = batches
        self._seed = seed
        self._step = 0
        self._over_tokens = over_tokens

    def incoming(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the tensors that the previous stage sends for a microbatch."""
        return self._runner.incoming()

    def begin(self, step: int, loss_scale: float) -> None:
        """Begin a validation."""
        self._step = step
        self.total.zero_()
        self._batches.begin(step)

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage, or the loss."""
        batch = self._batches.take(microbatch)
        seed = microbatch_seed(self._seed, self._step, microbatch)
        made = self._runner.forward(microbatch, received, batch, seed)
        self._runner.forget(microbatch)
        weight = (tokens_of(batch) if self._over_tokens else 1) if self.is_last else 0
        if weight:
            loss = made[0].double()
            self.total += torch.stack([loss * weight, torch.full_like(loss, weight)])
        return made
