"""Optimizer state that the ranks which hold a parameter share: each has that of a part (ZeRO-1).

A bucket's gradients lie in one flat buffer, of which every rank gets the sum of an equal part. It
steps on just those elements, so its optimizer trains slices of parameters; an optimizer that treats
each element by itself makes of them what it makes of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from executor.stage.gradient_types import gradient_type

STEP_COUNTERS = ("step", "mu_product")
"""Numbers of torch's optimizers that stand in the state of each parameter as tensors."""


class SharedBucket(Protocol):
    """Gradients that the same ranks reduce at once, as :class:`executor.sync.gradients.Bucket`."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return them by name, in the order in which their gradients lie in the bucket."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that reduce it."""

    @property
    def device(self) -> torch.device:
        """Return the device of the gradients."""

    @property
    def partners(self) -> str:
        """Return the partners' name in messages about lost ranks."""

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the place of each parameter in a flat tensor of them all, or more."""


@dataclass(frozen=True)
class Slice:
    """The elements of a parameter, flat, whose optimizer state a rank has.

    Attributes:
        begin, end: of the elements.
        place: of the first in the rank's part of the bucket.
        parameter: these elements of the parameter itself, in one dimension.
    """

    begin: int
    end: int
    place: int
    parameter: nn.Parameter

    @property
    def part(self) -> slice:
        """Its place in the rank's part of the bucket."""
        return slice(self.place, self.place + self.end - self.begin)

    def of(self, whole: Tensor) -> Tensor:
        """Return the same elements of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.begin : self.end]


def slices_of(bucket: SharedBucket, rank: int, own: Tensor | None = None) -> dict[str, Slice]:
    """Return the slices of a rank by the names of the parameters; none of some of them.

    Each rank has an equal part of the bucket, in the order of its ranks, as
    :class:`executor.sync.halves.Halves` does.

    Args:
        bucket: of the parameters.
        rank: this one.
        own: the rank's part of the bucket's weights, whose memory slices are of; None: they are of
            the parameters'.
    """
    count = len(bucket.ranks)
    total = sum(parameter.numel() for parameter in bucket.parameters.values())
    size = math.ceil(total / count)
    first, offset = bucket.ranks.index(rank) * size, 0
    found = {}
    for name, parameter in bucket.parameters.items():
        begin = min(max(first - offset, 0), parameter.numel())
        end = min(max(first + size - offset, 0), parameter.numel())
        if begin < end:
            place = offset + begin - first
            part = _flat(parameter)[begin:end] if own is None else own[place : place + end - begin]
            found[name] = Slice(begin, end, place, nn.Parameter(part))
            found[name].parameter.grad_dtype = gradient_type(parameter)
        offset += parameter.numel()
    return found


def _flat(parameter: nn.Parameter) -> Tensor:
    """Return all elements in one dimension, in the parameter's own memory."""
    if not parameter.is_contiguous():
        # Its elements have to lie in the order in which those of its gradient do.
        parameter.data = parameter.data.contiguous()
    return parameter.detach().view(-1)


class DividedWeights(Protocol):
    """Weights of which this rank has a part, such as those of a layer."""

    @property
    def bucket(self) -> SharedBucket:
        """Return the parameters and their ranks."""

    @property
    def slices(self) -> Mapping[str, Slice]:
        """Return the slices of this rank, by the names of the parameters."""


class StateShards:
    """The slices that a rank trains of the parameters that it shares with others.

    Args:
        buckets: of the parameters that all of them have whole, in the order that all ranks have.
        rank: this one.
        divided: the others, in the order that all ranks have.

    Attributes:
        divided_weights: as they were given.
        buckets: of all these parameters.
        slices: of this rank, by the names of the parameters.
        shared: names of all parameters of the buckets.
    """

    def __init__(
        self,
        buckets: Sequence[SharedBucket],
        rank: int,
        divided: Sequence[DividedWeights] = (),
    ) -> None:
        self.divided_weights = tuple(divided)
        self.buckets = (*buckets, *(row.bucket for row in divided))
        self.slices = {n: row for bucket in buckets for n, row in slices_of(bucket, rank).items()}
        for weights in divided:
            self.slices.update(weights.slices)
        self.shared = frozenset(name for bucket in self.buckets for name in bucket.parameters)

    def divided(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return what this rank's optimizer trains: slices of shared parameters, others whole."""
        return {
            name: self.slices[name].parameter if name in self.slices else parameter
            for name, parameter in parameters.items()
            if name in self.slices or name not in self.shared
        }

    def of(self, name: str, key: str, whole: Tensor) -> Tensor:
        """Return this rank's slice of a tensor like a parameter; a counter stays whole.

        Args:
            name: of the parameter.
            key: of the state, such as ``exp_avg``.
            whole: of the parameter's shape.
        """
        if name not in self.slices or key in STEP_COUNTERS:
            return whole
        return self.slices[name].of(whole)
