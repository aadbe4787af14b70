"""Numbers for a layer that was cut out of a model on the meta device, and its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from executor.cutting.piece_graph import Filled
from executor.cutting.stage_module import BoundaryTensor, StageModule

_SPREAD = 0.02
"""Of weights, as models are initialised: what comes out is neither huge nor denormal, which some
processors compute much more slowly."""


def held(device: torch.device, generator: torch.Generator) -> Filled:
    """Makes a parameter or buffer of the same form as the model's, with numbers of its own."""

    def filled(tensor: Tensor) -> Tensor:
        value = _numbers(tensor.shape, tensor.dtype, device, generator, _SPREAD)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, requires_grad=tensor.requires_grad)
        return value

    return filled


def received(
    stage: StageModule, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Tensors like those that the stage receives."""
    return tuple(_like(b, b.sent_shape, device, generator) for b in stage.receives)


def gradients(
    stage: StageModule, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Gradients like those that come back to the stage."""
    return tuple(_like(b, b.shape, device, generator) for b in stage.gradients_in)


def entries(
    stage: StageModule, batch: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """The entries of a batch that the stage reads."""
    return {name: batch[name].to(device) for name in stage.model_inputs}


def _like(
    boundary: BoundaryTensor,
    shape: Sequence[int],
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    return _numbers(shape, boundary.dtype, device, generator, 1.0)


def _numbers(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    spread: float,
) -> Tensor:
    """Normal numbers around zero, around one for vectors; integers are zero, which indexes all."""
    if dtype.is_complex or not dtype.is_floating_point:
        value = torch.ones if dtype == torch.bool or dtype.is_complex else torch.zeros
        return value(shape, dtype=dtype, device=device)
    tensor = torch.empty(shape, dtype=torch.float32).normal_(0.0, spread, generator=generator)
    if len(shape) == 1:
        tensor += 1.0
    return tensor.to(device, dtype)
