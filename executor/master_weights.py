"""Training low-precision weights with float32 masters (Micikevicius et al. 2018, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from planner.errors import PipeplanError

LOW_PRECISION = (torch.float16, torch.bfloat16)
MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


class MasterWeights:
    """Float32 copies of low-precision parameters, which the optimizer trains in their place.

    An iteration is :meth:`unscale` after the last backward, then clipping of :attr:`masters` if
    wanted, then :meth:`step`, or :meth:`skip` after an overflow.

    Args:
        parameters: by the model's own names (FQNs). Those of 32 bits or more are their own masters.
        make_optimizer: makes the optimizer of the masters, which it gets by the same names.

    Attributes:
        masters: what the optimizer trains, by name.
        optimizer: made by ``make_optimizer``.
        make_optimizer: as it was given.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer
    ) -> None:
        self.parameters = dict(parameters)
        self.make_optimizer = make_optimizer
        self.masters = {name: _master(parameter) for name, parameter in parameters.items()}
        self.optimizer = make_optimizer(self.masters)

    def unscale(self, scale: float = 1.0, names: Iterable[str] | None = None) -> None:
        """Move the gradients to the masters, in their type and divided by the loss scale.

        Args:
            scale: of the loss.
            names: of the parameters; None: all.
        """
        for name in self.parameters if names is None else names:
            parameter = self.parameters[name]
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to(self.masters[name].dtype)
            if gradient is not None and scale != 1.0:
                gradient = gradient / scale
            if self.masters[name] is not parameter:
                parameter.grad = None
            self.masters[name].grad = gradient

    def step(self) -> None:
        """Let the optimizer step, round the masters into the parameters, drop the gradients."""
        self.optimizer.step()
        self.copy_back()
        self.skip()

    def step_only(self, names: Iterable[str]) -> None:
        """As :meth:`step`, of some parameters: torch's optimizers leave those without gradients."""
        mine = set(names)
        with self._hidden([master for name, master in self.masters.items() if name not in mine]):
            self.optimizer.step()
        self.copy_back(mine)
        for name in mine:
            self.masters[name].grad = self.parameters[name].grad = None

    @contextmanager
    def _hidden(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def skip(self) -> None:
        """Drop the gradients and leave the weights as they are."""
        for parameter in (*self.masters.values(), *self.parameters.values()):
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """The masters that are copies, by name, for a checkpoint; the others are parameters."""
        return {
            name: master.detach()
            for name, master in self.masters.items()
            if master is not self.parameters[name]
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the masters from a checkpoint, and round the parameters from them.

        Raises:
            PipeplanError: listing the masters that are missing or of another form.
        """
        own = self.state()
        wrong = [name for name, master in own.items() if not _is_like(state.get(name), master)]
        if wrong:
            raise PipeplanError(
                f"master weights missing or of another shape: {', '.join(wrong[:10])}; resume from "
                "a checkpoint of the same model and precision"
            )
        for name, master in own.items():
            master.copy_(state[name])
        self.copy_back()

    @torch.no_grad()
    def copy_back(self, names: Iterable[str] | None = None) -> None:
        """Round the masters into the parameters of these names; None: all."""
        for name in self.parameters if names is None else names:
            parameter = self.parameters[name]
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def _is_like(found: Tensor | None, master: Tensor) -> bool:
    return found is not None and found.shape == master.shape and found.dtype == master.dtype


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """A float32 copy of a low-precision parameter; any other is its own master."""
    if parameter.dtype not in LOW_PRECISION:
        return parameter
    return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
