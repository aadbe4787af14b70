"""A parameter server's part of the weights, and a worker's view of all of them as an optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from executor.elastic.tensor_calls import Header
from executor.training.master_weights import MakeOptimizer
from planner.errors import PipeplanError


class Shard(Protocol):
    """The parameters one server keeps."""

    def push(
        self, header: Header, pushed: list[Tensor], patience_s: float
    ) -> tuple[Header, list[Tensor]]:
        """Take what a worker pushes; return what it is told, with the weights if it wants them."""

    def pull(self, header: Header) -> tuple[Header, list[Tensor]]:
        """Return the weights and what they include."""


ShardOf = Callable[[Mapping[str, nn.Parameter]], Shard]
"""Makes a shard of parameters, which it copies."""


class GradientShard:
    """The parameters one server keeps, with their optimizer, which steps on pushed gradients.

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

    def push(
        self, header: Header, pushed: list[Tensor], patience_s: float
    ) -> tuple[Header, list[Tensor]]:
        """Step on gradients: at once or, of a group, on their mean.

        Args:
            header: of the call; ``group`` if the gradients are of one, ``pull`` is false if the
                worker does not want the weights.
            pushed: gradients of one worker.
            patience_s: how long to wait for others of the group.
        """
        if "group" in header:
            self.collect(header, pushed, patience_s)
        else:
            self.apply(header, pushed)
        if not header.get("pull", True):
            return {"version": self.version}, []
        return self.pull(header)

    def pull(self, header: Header) -> tuple[Header, list[Tensor]]:
        """Return the version and the weights."""
        version, weights = self.weights()
        return {"version": version}, weights

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
    """A worker's optimizer where the optimizer that steps lives on servers.

    It has the learning rates of the optimizer that it stands for, which are sent along, and no
    state. A step keeps the gradients, for the strategy to send.

    Args:
        original: the worker's own optimizer, which never steps.
        parameters: its parameters, by name.

    Attributes:
        stands_for: name of the original's class.
        gradients: of the last step, by name of the parameter.
    """

    def __init__(
        self, original: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.param_groups = original.param_groups
        self.defaults = original.defaults
        self.stands_for = type(original).__name__
        self.gradients: dict[str, Tensor] = {}
        self._parameters = parameters

    @property
    def state(self) -> dict[Any, Any]:
        """Nothing, and what is added is not kept: moments are the servers'."""
        return {}

    @property
    def rates(self) -> list[float]:
        """Learning rates of the parameter groups."""
        return [float(group["lr"]) for group in self.param_groups]

    def step(self) -> None:
        """Keep the gradients, which are dropped from the parameters after a step."""
        found = ((name, p.grad) for name, p in self._parameters.items())
        self.gradients = {name: gradient for name, gradient in found if gradient is not None}

    def forget(self) -> None:
        """Drop the gradients, which have been sent."""
        self.gradients = {}
