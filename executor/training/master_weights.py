"""The weights that the optimizer trains, and the norm and clipping of their gradients.

Low-precision weights are trained with float32 masters (Micikevicius et al. 2018, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from executor.stage.gradient_types import LOW_PRECISION
from executor.training.optimizer import export_state, groups_of
from planner.errors import PipeplanError

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
        self._first_groups = groups_of(self.optimizer)

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
                gradient = gradient if scale == 1.0 else gradient / scale
            if self.masters[name] is not parameter:
                parameter.grad = None
            self.masters[name].grad = gradient

    def step(self) -> None:
        """Let the optimizer step, round the masters into the parameters, drop the gradients."""
        self.optimizer.step()
        self.copy_back()
        self.skip()

    def step_only(self, names: Iterable[str]) -> None:
        """Step on some parameters: torch's optimizers leave out those without gradients."""
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

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state by name; see :func:`executor.training.optimizer.export_state`."""
        return export_state(self.optimizer, self.masters, self._first_groups)

    @torch.no_grad()
    def copy_back(self, names: Iterable[str] | None = None) -> None:
        """Round the masters into the parameters of these names; None: all."""
        for name in self.parameters if names is None else names:
            parameter = self.parameters[name]
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """A float32 copy of a low-precision parameter; any other is its own master."""
    if parameter.dtype not in LOW_PRECISION:
        return parameter
    return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)


SumOverRanks = Callable[[Tensor], object]
"""Adds a tensor up over all ranks in place, as ``torch.distributed.all_reduce`` does."""
CPU = torch.device("cpu")
CHUNK = 4096
"""Elements whose norm float32 holds to its last digits."""


def norm_of(
    pieces: Iterable[tuple[Tensor, float]],
    sum_over_ranks: SumOverRanks,
    device: torch.device = CPU,
) -> Tensor:
    """The Euclidean norm of pieces of gradients on all ranks, a scalar that is the same on all.

    Norms of :data:`CHUNK` elements are taken in float32, their squares added in float64, on each
    device and then over the ranks; torch's own norm of a large float32 tensor loses digits on a
    CPU. Not finite if any piece is not.

    Args:
        pieces: of this rank, each with what it is to be multiplied by.
        sum_over_ranks: for a float64 tensor of one element, on the device.
        device: of the pieces, and of the result.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for piece, factor in pieces:
        total += _sum_of_squares(piece) * factor**2
    sum_over_ranks(total)
    return total.sqrt().squeeze(0)


def _sum_of_squares(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    flat = gradient.detach().reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    total: Tensor = norms.double().square().sum() + rest.double().square()
    return total


def require_finite(step: int, loss: float, norms: Iterable[float]) -> None:
    """Refuse to go on after a loss or a gradient of which nothing is left.

    Args:
        step: for the message.
        loss: of the step.
        norms: of gradients, on whatever ranks.

    Raises:
        PipeplanError: naming what is not finite and the remedies.
    """
    wrong = [f"the loss is {loss}"] * (not math.isfinite(loss))
    wrong += [f"the gradient's norm is {norm}" for norm in norms if not math.isfinite(norm)][:1]
    if wrong:
        raise PipeplanError(
            f"step {step}: {' and '.join(wrong)}: training diverges; lower the learning rate, warm "
            "it up longer, train in float32, or set skip_non_finite = true if single batches are "
            "at fault"
        )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients of that norm; it stays on its device.

    As ``torch.nn.utils.clip_grad_norm_`` on one process: max_norm / (norm + 1e-6), at most 1.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | None) -> None:
    """Multiply the gradients of parameters in place, unless there is no factor."""
    if factor is None:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
