"""Weights that are trained, and what is computed on in their place for one iteration."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from executor.master_weights import MasterWeights


class TrueWeights:
    """Copies of the weights while the parameters hold an approximation of later ones.

    Args:
        weights: of this rank; of low-precision parameters the float32 masters are copied.
    """

    def __init__(self, weights: MasterWeights) -> None:
        self._weights = weights
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the parameters hold."""
        for name, master in self._weights.masters.items():
            if name in self._copies:
                self._copies[name].copy_(master)
            else:
                self._copies[name] = master.detach().clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Let the parameters hold the copies."""
        for name, copy in self._copies.items():
            self._weights.masters[name].copy_(copy)
        self._weights.copy_back()

    @torch.no_grad()
    def repeat_change(self, names: Collection[str]) -> None:
        """Keep the weights, and let some parameters change as much as they have since before."""
        for name, master in self._weights.masters.items():
            now = master.detach().clone() if name in names else master
            if name in names:
                master.mul_(2).sub_(self._copies[name])
            self._copies[name].copy_(now)
        self._weights.copy_back()


@contextmanager
def state_kept(weights: MasterWeights, names: Collection[str]) -> Iterator[None]:
    """Forget what the optimizer notes of some parameters inside, such as momenta and counters.

    It is copied meanwhile.
    """
    optimizer = weights.optimizer
    parameters = [weights.masters[name] for name in names]
    kept = {p: _copied(optimizer.state[p]) for p in parameters if p in optimizer.state}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    yield
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
    for parameter, state in kept.items():
        optimizer.state[parameter] = state
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else deepcopy(v) for k, v in state.items()}
