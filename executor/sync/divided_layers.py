"""The weights of a layer of which each replica of its stage keeps a part (ZeRO-3, FSDP)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from executor.distributed.failure import talking_to
from executor.distributed.process_group import all_gather_single
from executor.stage.gradient_types import gradient_type
from executor.sync.gradients import Bucket
from executor.sync.halves import PartSums
from executor.training.state_shards import Slice, slices_of
from planner.errors import PipeplanError
from planner.plan.programs import Reduce

_REMEDY = "plan with shard_parameters = false"


class DividedLayer:
    """The weights of a layer, whole or in parts; one after the other in a flat tensor.

    The tensor's memory comes and goes: what autograd saves of a weight are views of it, which hold
    their values again once it is back. It is whole from the start, until the first
    :meth:`begin`.

    Args:
        name: of the layer.
        parameters: of the layer that train and that no other layer uses, by name.
        reduce: whose ranks divide them.
        rank: this one.

    Attributes:
        name: of the layer.
        bucket: the parameters and their ranks.
        slices: what this rank's optimizer trains, by the names of the parameters.
        gradient: the sum of the gradients of this rank's part.

    Raises:
        PipeplanError: if the parameters are of several types.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, nn.Parameter], reduce: Reduce, rank: int
    ) -> None:
        types = sorted({str(parameter.dtype) for parameter in parameters.values()})
        if len(types) > 1:
            raise PipeplanError(
                f"layer {name!r} has parameters of types {', '.join(types)}, which replicas do not "
                f"divide together; {_REMEDY}"
            )
        self.name = name
        self.bucket = Bucket(parameters, {reduce: tuple(parameters)})
        sizes = [parameter.numel() for parameter in parameters.values()]
        count, like = len(reduce.ranks), next(iter(parameters.values()))
        part = math.ceil(sum(sizes) / count)
        self._weights = torch.zeros(part * count, dtype=like.dtype, device=like.device)
        kind = gradient_type(like)
        self._gradients = torch.empty_like(self._weights, dtype=kind)
        place = reduce.ranks.index(rank)
        self._part = slice(place * part, (place + 1) * part)
        for name, view in self.bucket.views(self._weights).items():
            view.copy_(parameters[name].detach())
            parameters[name].data = view
        self._own = self._weights[self._part].clone()
        self.gradient = torch.zeros_like(self._own, dtype=kind)
        self.slices: dict[str, Slice] = slices_of(self.bucket, rank, self._own)
        self._is_whole = True
        self._group: Any = None
        self._sums: PartSums | None = None
        self._gradients.untyped_storage().resize_(0)

    def connect(self, group: Any, sums: PartSums) -> None:
        """Say how the ranks talk.

        Args:
            group: of the ranks.
            sums: of which each rank keeps a part.
        """
        self._group, self._sums = group, sums

    def begin(self) -> None:
        """An iteration begins: no gradients, and this rank's part of the weights alone."""
        self.gradient.zero_()
        if self._is_whole:
            # They may have been read from a checkpoint.
            self._own.copy_(self._weights[self._part])
            self.free()

    def gather(self) -> None:
        """Put the weights together, unless they are whole."""
        if self._is_whole:
            return
        self._weights.untyped_storage().resize_(self._weights.nbytes)
        with talking_to(self.bucket.partners):
            all_gather_single(self._weights, self._own, group=self._group)
        self._is_whole = True

    def free(self) -> None:
        """Keep this rank's part of the weights alone."""
        self._weights.untyped_storage().resize_(0)
        self._is_whole = False

    def begin_backward(self) -> None:
        """Put the weights together, with room for their gradients."""
        self.gather()
        self._gradients.untyped_storage().resize_(self._gradients.nbytes)
        self._gradients.zero_()
        for name, view in self.bucket.views(self._gradients).items():
            self.bucket.parameters[name].grad = view

    def end_backward(self) -> None:
        """Add the sum of this rank's part of the gradients to it, and keep parts alone."""
        for parameter in self.bucket.parameters.values():
            parameter.grad = None
        self.free()
        assert self._sums is not None
        with talking_to(self.bucket.partners):
            self._sums.start(self.bucket.ranks, self._gradients)()
        self.gradient += self._gradients[self._part]
        self._gradients.untyped_storage().resize_(0)

    def give_gradients(self) -> None:
        """Let the optimizer's slices have their gradients."""
        for own in self.slices.values():
            own.parameter.grad = self.gradient[own.part]


class DividedLayers:
    """The divided layers of a rank, connected.

    Args:
        layers: of this rank's stages.
        process_groups: of their ranks, for these alone.
    """

    def __init__(
        self, layers: Sequence[DividedLayer], process_groups: Mapping[tuple[int, ...], Any]
    ) -> None:
        self.layers = tuple(layers)
        buckets = [layer.bucket for layer in layers]
        self._sums = PartSums(buckets, process_groups, "job.shard_parameters: true", _REMEDY)
        for layer in layers:
            layer.connect(process_groups[layer.bucket.ranks], self._sums)

    def begin(self) -> None:
        """An iteration begins."""
        for layer in self.layers:
            layer.begin()

    def give_gradients(self) -> None:
        """Let the optimizer's slices have their gradients."""
        for layer in self.layers:
            layer.give_gradients()

    def settle(self) -> None:
        """Make all weights whole, until the next iteration begins."""
        for layer in self.layers:
            layer.gather()

    def close(self) -> None:
        """Let the rings go."""
        self._sums.close()
