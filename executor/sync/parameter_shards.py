"""A parameter server's part of the weights, and a worker's view of all of them as an optimizer."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class _Gathering:
    """The gradients of a group, while a server waits for them.

    Attributes:
        members: incarnations of the pipelines that are waited for, by number.
        rows: gradients that have come, by pipeline.
        is_over: whether the server has stepped on them.
    """

    members: dict[int, int]
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    is_over: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the gradients of all members have come."""
        return self.members.keys() <= self.rows.keys()

    def keep(self, there: Mapping[int, int]) -> None:
        """Wait for nobody but these, by number and incarnation."""
        self.members = {n: i for n, i in self.members.items() if there.get(n) == i}


class GradientShard:
    """The parameters one server keeps, with their optimizer, which steps on pushed gradients.

    Args:
        parameters: by name; copied.
        make_optimizer: of them.
        after_group: the last group whose gradients are in the parameters already; -1: none.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        make_optimizer: MakeOptimizer,
        after_group: int = -1,
    ) -> None:
        self._parameters = {
            name: nn.Parameter(parameter.detach().cpu().clone())
            for name, parameter in parameters.items()
        }
        self._optimizer = make_optimizer(self._parameters)
        self._changed = threading.Condition()
        self._gathered: dict[int, _Gathering] = {}
        self._last_group = after_group
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
        told: Header = {}
        with self._changed:
            if "group" in header:
                told = self._collect(header, pushed, patience_s)
            else:
                self._step([pushed], header)
            answer, weights = self.pull(header) if header.get("pull", True) else ({}, [])
            return {"version": self.version, **told, **answer}, weights

    def pull(self, header: Header) -> tuple[Header, list[Tensor]]:
        """Return the version and the weights, copies of them as they are now."""
        with self._changed:
            weights = [p.detach().clone() for p in self._parameters.values()]
            return {"version": self.version}, weights

    def _collect(self, header: Header, gradients: list[Tensor], timeout_s: float) -> Header:
        """Step on the mean of a group's gradients, once all of them are here.

        A member that does not come in time, or that is given up, is left out. If it comes later,
        its gradients are dropped: a step on them alone would be as large as one on all others'.

        Args:
            header: ``group``, its ``members`` as pairs of pipeline and incarnation, the
                ``pipeline`` whose gradients these are, and the learning rates.
            gradients: of one member.
            timeout_s: how long to wait for the others, without the lock.

        Returns:
            ``left_out`` if these gradients came too late.
        """
        group, pipeline = int(header["group"]), int(header["pipeline"])
        if group <= self._last_group:
            return {"left_out": True}
        members = {int(number): int(incarnation) for number, incarnation in header["members"]}
        gathering = self._gathered.setdefault(group, _Gathering(members))
        # Whoever turns here from a server that was lost knows better who is left.
        gathering.keep(members)
        gathering.rows[pipeline] = gradients
        self._changed.wait_for(lambda: gathering.is_over or gathering.is_whole, timeout_s)
        if not gathering.is_over:
            gathering.is_over, self._last_group = True, group
            del self._gathered[group]
            self._changed.notify_all()
            self._step([row for _, row in sorted(gathering.rows.items())], header)
        return {}

    def __bool__(self) -> bool:
        """Return whether gradients of others are waited for."""
        return bool(self._gathered)

    def end_all_but(self, there: Mapping[int, int]) -> None:
        """Wait no more for gradients of pipelines that are not there.

        Args:
            there: incarnations of those that are, by number.
        """
        # Who steps holds the lock, and the caller has more to do; it comes again.
        if self._changed.acquire(blocking=False):
            try:
                for gathering in self._gathered.values():
                    gathering.keep(there)
                self._changed.notify_all()
            finally:
                self._changed.release()

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
