"""The tensors that pipelines average: the optimizer's weights, and running statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from executor.training.optimisation import Optimisation
from executor.training.optimizer import import_state
from planner.errors import PipeplanError


class Weights:
    """A rank's weights as one flat tensor a type, and all of its training's state by name.

    The optimizer's weights (the float32 masters of low-precision ones) and the floating-point
    buffers become views of flat tensors, so that averaging needs no copies of single tensors.
    The optimizer's state is no part of an average; a pipeline that comes back takes it over.

    Args:
        optimisation: whose weights these are.
        buffers: of the rank's stages, by FQN.

    Attributes:
        flat: the tensors that are averaged; changed in place, then :meth:`put_back`.
    """

    def __init__(self, optimisation: Optimisation, buffers: Mapping[str, Tensor]) -> None:
        self._optimisation = optimisation
        self._buffers = dict(buffers)
        masters = optimisation.weights.masters
        averaged = [
            *masters.values(),
            *(b for b in buffers.values() if b.is_floating_point() and b.numel()),
        ]
        self.flat = _flatten(averaged)

    @torch.no_grad()
    def put_back(self) -> None:
        """The flat tensors have changed: round low-precision parameters from them."""
        self._optimisation.weights.copy_back()

    def state(self) -> dict[str, Tensor]:
        """Copies of all that another rank needs to go on from here."""
        weights = self._optimisation.weights
        found = {
            **{f"master/{name}": m for name, m in weights.masters.items()},
            **{f"buffer/{name}": buffer for name, buffer in self._buffers.items()},
            **{f"optimizer/{name}": t for name, t in weights.optimizer_state().items()},
        }
        scale = self._optimisation.loss_scale
        if scale is not None:
            numbers = [scale.scale, float(scale.good_steps)]
            found["scale"] = torch.tensor(numbers, dtype=torch.float64)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another rank's :meth:`state`.

        Raises:
            PipeplanError: if it is of another model.
        """
        weights = self._optimisation.weights
        targets = {
            **{f"master/{name}": m for name, m in weights.masters.items()},
            **{f"buffer/{name}": buffer for name, buffer in self._buffers.items()},
        }
        wrong = [n for n, t in targets.items() if n not in state or state[n].shape != t.shape]
        if wrong:
            raise PipeplanError(
                f"the donor has no {', '.join(wrong[:10])} of this shape; start all pipelines "
                "with the same plan"
            )
        for name, target in targets.items():
            target.copy_(state[name])
        optimizer_state = {
            name.removeprefix("optimizer/"): tensor
            for name, tensor in state.items()
            if name.startswith("optimizer/")
        }
        import_state(weights.optimizer, weights.masters, optimizer_state)
        if self._optimisation.loss_scale is not None and "scale" in state:
            scale, good_steps = state["scale"].tolist()
            moved = replace(self._optimisation.loss_scale, scale=scale, good_steps=int(good_steps))
            self._optimisation.resume_scale(moved)
        self.put_back()


@torch.no_grad()
def _flatten(tensors: list[Tensor]) -> list[Tensor]:
    """Move tensors into one flat tensor a type and device, and leave views of it in their place."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    flats = []
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        parts = torch.split(flat, [tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.data = part.view(tensor.shape)
        flats.append(flat)
    return flats
