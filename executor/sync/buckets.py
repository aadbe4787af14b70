"""Buckets: gradients that are reduced at once, in flat buffers that they are views of."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.lower import Reduce

MIB = 2**20


@dataclass(frozen=True)
class SharedGradients:
    """What one reduction sums on this rank.

    Attributes:
        reduce: the reduction.
        parameters: by name, in the order in which a backward completes their gradients.
    """

    reduce: Reduce
    parameters: Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Bucket:
    """Gradients of one type that the same ranks reduce at once.

    Attributes:
        parameters: by name, in the order in which a backward completes their gradients.
        reduces: the reductions that the parameters belong to, all of the same ranks.
    """

    parameters: Mapping[str, nn.Parameter]
    reduces: tuple[Reduce, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that reduce it."""
        return self.reduces[0].ranks

    @property
    def partners(self) -> str:
        """For a message about ranks that cannot be talked to."""
        stages = sorted({stage for reduce in self.reduces for stage in reduce.stages})
        told = (", ".join(map(str, row)) for row in (self.ranks, stages))
        return "ranks {}, which sum the gradients of stages {}".format(*told)


class Buffer:
    """The gradients of a bucket, one after the other in a flat tensor.

    Backwards add into views of it and reductions change it in place, without a copy. A rank
    without a microbatch adds zeros.

    Args:
        bucket: whose gradients it holds.
        multiple: the tensor is filled up with zeros to a multiple of so many elements.
    """

    def __init__(self, bucket: Bucket, multiple: int = 1) -> None:
        parameters = list(bucket.parameters.values())
        sizes = [parameter.numel() for parameter in parameters]
        length = math.ceil(sum(sizes) / multiple) * multiple
        like = parameters[0]
        self.flat = torch.zeros(length, dtype=like.dtype, device=like.device)
        parts = torch.split(self.flat, [*sizes, length - sum(sizes)])
        self.views: dict[str, Tensor] = {
            name: part.view(parameter.shape)
            for (name, parameter), part in zip(bucket.parameters.items(), parts, strict=False)
        }
        self._parameters = parameters

    def clear(self) -> None:
        """All gradients are zero."""
        self.flat.zero_()

    def attach(self) -> None:
        """The parameters' gradients are those in the buffer."""
        for parameter, view in zip(self._parameters, self.views.values(), strict=True):
            parameter.grad = view


def buckets_by_reduction(shared: Sequence[SharedGradients], mib: float) -> list[Bucket]:
    """Buckets of at most so many MiB, each of one reduction; in the order of :func:`_packed`."""
    return _packed(shared, mib, lambda reduce: reduce)


def buckets_by_ranks(shared: Sequence[SharedGradients], mib: float) -> list[Bucket]:
    """Buckets of at most so many MiB, over all reductions of the same ranks."""
    return _packed(shared, mib, lambda reduce: reduce.ranks)


@dataclass
class _Filling:
    """A bucket that is being filled, and the place of the last gradient in it."""

    rows: list[tuple[Reduce, str, nn.Parameter]]
    bytes: int = 0
    last: int = 0

    def closed(self) -> Bucket:
        reduces = tuple(dict.fromkeys(reduce for reduce, _, _ in self.rows))
        return Bucket({name: parameter for _, name, parameter in self.rows}, reduces)


def _packed(
    shared: Sequence[SharedGradients], mib: float, key: Callable[[Reduce], Hashable]
) -> list[Bucket]:
    """Gradients in their order, those with another key or of another type in other buckets.

    Buckets are in the order of their last gradients. All ranks have one order of reductions, so
    any two buckets are in one order on all ranks that have both.
    """
    filling: dict[Hashable, _Filling] = {}
    full: list[_Filling] = []
    for place, (reduce, name, parameter) in enumerate(_rows(shared)):
        kind = (key(reduce), parameter.dtype)
        bytes_ = parameter.numel() * parameter.element_size()
        bucket = filling.setdefault(kind, _Filling([]))
        if bucket.rows and bucket.bytes + bytes_ > mib * MIB:
            full.append(bucket)
            bucket = filling[kind] = _Filling([])
        bucket.rows.append((reduce, name, parameter))
        bucket.bytes += bytes_
        bucket.last = place
    ordered = sorted([*full, *filling.values()], key=lambda bucket: bucket.last)
    return [bucket.closed() for bucket in ordered]


def _rows(shared: Sequence[SharedGradients]) -> Iterator[tuple[Reduce, str, nn.Parameter]]:
    for row in shared:
        for name, parameter in row.parameters.items():
            yield row.reduce, name, parameter
