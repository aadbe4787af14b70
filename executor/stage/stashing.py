"""Weight stashing: each microbatch in flight keeps the weights that its forward ran on.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.3: a backward uses the weights of its forward, and the optimizer steps after each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from executor.runtime.worker import TensorSpec
from executor.stage.runner import StageRunner
from executor.training.data import DeviceBatches, microbatch_seed

Versions = Mapping[str, nn.Parameter]
"""A stage's trained parameters as some microbatches see them, by name."""


class StashingWorker:
    """Runs a stage of a pipeline that does not flush; microbatches are numbered through.

    A version of the weights shares the parameters' memory until the optimizer steps while it is
    still in use: the parameters move to new memory then. So a stage has one version a microbatch
    in flight, the parameters' own among them.

    Args:
        runner: runs the stage, with each microbatch's own gradient (``microbatches`` of 1).
        batches: what the stage reads, by the numbers of microbatches.
        seed: the seed of the training's random numbers.
        microbatches: of a step.
        update: lets the optimizer step on the parameters' gradients.
    """

    def __init__(
        self,
        runner: StageRunner,
        batches: DeviceBatches,
        seed: int,
        microbatches: int,
        update: Callable[[], None],
    ) -> None:
        stage = runner.stage
        self.is_last = stage.is_last
        self._incoming, self._returning = runner.incoming(), runner.returning()
        self.end = runner.require_empty
        self._runner = runner
        self._batches = batches
        self._seed = seed
        self._microbatches = microbatches
        self._update = update
        self._trained = {n: p for n, p in stage.parameters.items() if p.requires_grad}
        names = {id(parameter): name for name, parameter in self._trained.items()}
        self._slots = [
            (module._parameters, slot, names[id(parameter)])
            for graph in runner.graphs
            for module in graph.modules()
            for slot, parameter in module._parameters.items()
            if id(parameter) in names
        ]
        self._newest: Versions | None = None
        self._in_use: dict[int, Versions] = {}

    @property
    def versions(self) -> int:
        """Copies of the weights that there are now, the parameters' own among them."""
        kept = {id(version) for version in self._in_use.values() if version is not self._newest}
        return len(kept) + 1

    def incoming(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return what the stage before sends; microbatches have one length."""
        return self._incoming

    def returning(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return what the stage after sends back."""
        return self._returning

    def begin(self, step: int, loss_scale: float) -> None:
        """Do nothing: microbatches of a step begin in the one before."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run a forward on the newest weights."""
        if self._newest is None:
            # Tensors of their own: what autograd saves of them is not that of the parameters.
            self._newest = {n: nn.Parameter(p.data) for n, p in self._trained.items()}
        self._in_use[microbatch] = self._newest
        self._install(self._newest)
        step, number = divmod(microbatch, self._microbatches)
        seed = microbatch_seed(self._seed, step + 1, number)
        batch = self._batches.take(microbatch)
        return self._runner.forward(microbatch, received, batch, seed)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run a backward on the weights of its forward, and step on its gradient."""
        version = self._in_use.pop(microbatch)
        self._install(version)
        found = self._runner.backward(microbatch, gradients)
        for name, parameter in self._trained.items():
            parameter.grad, version[name].grad = version[name].grad, None
        if any(other is self._newest for other in self._in_use.values()):
            for parameter in self._trained.values():
                parameter.data = parameter.data.clone()
        self._newest = None
        self._update()
        return found

    def weight_gradients(self, microbatch: int) -> None:
        """Never called: backwards are whole."""
        raise AssertionError("a split backward in a pipeline that does not flush")

    def _install(self, version: Versions) -> None:
        for parameters, slot, name in self._slots:
            parameters[slot] = version[name]
