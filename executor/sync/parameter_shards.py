"""A parameter server's part of the weights, and a worker's view of all of them as an optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.exchange.tensor_calls import Header
from executor.master_weights import MakeOptimizer
from planner.errors import PipeplanError


class Shard:
    """The parameters one server keeps, with their optimizer.

    Args:
        parameters: by name; copied.
        make_optimizer: of them.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer
    ) -> None:
        self._parameters = {
            name: nn.Parameter(parameter.detach().cpu().clone())
            for name, parameter in parameters.items()
        }
        self._optimizer = make_optimizer(self._parameters)
        self._changed = threading.Condition()
        self._collected: dict[int, list[tuple[list[Tensor], Header]]] = {}
        self.version = 0

    def apply(self, header: Header, gradients: Sequence[Tensor]) -> None:
        """Step on one worker's gradients at once."""
        with self._changed:
            self._step([gradients], header)

    def collect(self, header: Header, gradients: list[Tensor], timeout_s: float) -> None:
        """Step on the mean of a group's gradients, once all of them are here.

        A member that does not come in time is left out.

        Args:
            header: ``group`` and ``count`` of its members, and the learning rates.
            gradients: of one member.
            timeout_s: how long to wait for the others.
        """
        group, count = int(header["group"]), int(header["count"])
        with self._changed:
            arrived = self._collected.setdefault(group, [])
            arrived.append((gradients, header))
            if len(arrived) < count:
                here = self._changed.wait_for(lambda: group not in self._collected, timeout_s)
                if here:
                    return
            del self._collected[group]
            self._step([row for row, _ in arrived], header)
            self._changed.notify_all()

    def weights(self) -> tuple[int, list[Tensor]]:
        """The version, and copies of all weights as they are now."""
        with self._changed:
            return self.version, [p.detach().clone() for p in self._parameters.values()]

    @torch.no_grad()
    def _step(self, rows: Sequence[Sequence[Tensor]], header: Header) -> None:
        for group, rate in zip(self._optimizer.param_groups, header["rates"], strict=True):
            group["lr"] = float(rate)
        shapes = [parameter.shape for parameter in self._parameters.values()]
        if any([gradient.shape for gradient in row] != shapes for row in rows):
            raise PipeplanError("gradients of other shapes; start all pipelines with one plan")
        for index, parameter in enumerate(self._parameters.values()):
            parameter.grad = torch.stack([row[index] for row in rows]).mean(0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1


def shards_of(parameters: Mapping[str, nn.Parameter], servers: int) -> list[list[str]]:
    """Names of parameters in as many parts of about the same size, in order."""
    total = sum(parameter.numel() for parameter in parameters.values())
    parts: list[list[str]] = [[] for _ in range(servers)]
    before = 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        parts[min(servers - 1, int(servers * middle / max(total, 1)))].append(name)
        before += parameter.numel()
    return parts


class ServedOptimizer:
    """What a worker's optimizer step is where the optimizer lives on servers.

    It has the learning rates of the optimizer it stands for, which are sent along, and no state.

    Args:
        stands_for: the worker's own optimizer, which never steps.

    Attributes:
        exchange: what takes the place of a step.
    """

    def __init__(self, stands_for: torch.optim.Optimizer) -> None:
        self.param_groups = stands_for.param_groups
        self.defaults = stands_for.defaults
        self.state: dict[Any, Any] = {}
        self.exchange: Callable[[], None] = lambda: None

    @property
    def rates(self) -> list[float]:
        """Of the parameter groups."""
        return [float(group["lr"]) for group in self.param_groups]

    def step(self) -> None:
        """Send the gradients and fetch the weights, as the strategy does."""
        self.exchange()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients belong to the parameters."""
