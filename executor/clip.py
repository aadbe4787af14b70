"""The norm of the whole model's gradient across stages, and clipping to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.errors import PipeplanError

SumOverRanks = Callable[[Tensor], object]
"""Adds a tensor up over all ranks in place, as ``torch.distributed.all_reduce`` does."""
CHUNK = 4096
"""Elements whose norm float32 holds to its last digits."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter that this rank holds.

    Attributes:
        parameter: with its gradient, the same on every rank that holds it.
        counted: whether this rank counts it; exactly one of the ranks that hold it does.
    """

    parameter: nn.Parameter
    counted: bool


def gradient_norm(held: Iterable[HeldParameter], sum_over_ranks: SumOverRanks) -> float:
    """The Euclidean norm of the whole model's gradient; all ranks return the same number.

    Norms of :data:`CHUNK` elements are taken in float32, their squares added in float64, on each
    device and then over the ranks; torch's own norm of a large float32 tensor loses digits on a
    CPU. Not finite if any rank's gradient is not.

    Args:
        held: this rank's parameters; those without a gradient add nothing.
        sum_over_ranks: for a float64 tensor of one element, on the gradients' device.
    """
    rows = list(held)
    gradients = [
        row.parameter.grad for row in rows if row.counted and row.parameter.grad is not None
    ]
    device = gradients[0].device if gradients else _device(rows)
    return norm_of(((gradient, 1.0) for gradient in gradients), device, sum_over_ranks)


def norm_of(
    pieces: Iterable[tuple[Tensor, float]], device: torch.device, sum_over_ranks: SumOverRanks
) -> float:
    """The Euclidean norm of pieces on all ranks; see :func:`gradient_norm`.

    Args:
        pieces: of this rank, each with what it is to be multiplied by.
        device: of the pieces.
        sum_over_ranks: as of :func:`gradient_norm`.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for piece, factor in pieces:
        total += _sum_of_squares(piece) * factor**2
    sum_over_ranks(total)
    return math.sqrt(total.item())


def _sum_of_squares(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    flat = gradient.detach().reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    total: Tensor = norms.double().square().sum() + rest.double().square()
    return total


def _device(held: Iterable[HeldParameter]) -> torch.device:
    return next((row.parameter.device for row in held), torch.device("cpu"))


def clip_gradients(
    held: Iterable[HeldParameter], max_norm: float, sum_over_ranks: SumOverRanks
) -> float:
    """Scale all gradients so that the whole model's norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` does on one process: gradients are multiplied by
    max_norm / (norm + 1e-6), at most 1.

    Args:
        held: this rank's parameters, counted or not.
        max_norm: above 0.
        sum_over_ranks: see :func:`gradient_norm`.

    Returns:
        The norm before clipping, the same on all ranks.

    Raises:
        PipeplanError: on all ranks, if the norm is not finite; the gradients stay as they are.
            With loss scaling ask :func:`gradient_norm` first and skip the step.
    """
    rows = list(held)
    norm = gradient_norm(rows, sum_over_ranks)
    require_finite(norm)
    scale_gradients(rows, clip_factor(norm, max_norm))
    return norm


def require_finite(norm: float) -> None:
    """Refuse to go on with a gradient of which nothing is left.

    Raises:
        PipeplanError: on all ranks, which have the same norm.
    """
    if not math.isfinite(norm):
        raise PipeplanError(
            f"the gradient's norm is {norm}: training diverges; lower the learning rate, warm it "
            "up longer, or train in float32"
        )


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of that norm are multiplied by."""
    return min(1.0, max_norm / (norm + 1e-6))


@torch.no_grad()
def scale_gradients(held: Iterable[HeldParameter], factor: float) -> None:
    """Multiply this rank's gradients in place, unless the factor is 1."""
    if factor == 1.0:
        return
    for row in held:
        if row.parameter.grad is not None:
            row.parameter.grad.mul_(factor)
