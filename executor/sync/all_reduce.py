"""Exact synchronisation: gradients are summed over all ranks that hold a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.failure import talking_to
from executor.lower import Reduce
from executor.recorder import Recorder

BUCKET_BYTES = 64 * 2**20


class GradientBuckets:
    """Flat buffers that the gradients of some parameters are views of.

    Backwards add into them and all-reduces sum them, without a copy. A rank without a microbatch
    adds zeros.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.buffers: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        for bucket in _buckets(parameters):
            size = sum(parameter.numel() for parameter in bucket)
            flat = torch.zeros(size, dtype=bucket[0].dtype, device=bucket[0].device)
            self.buffers.append(flat)
            sizes = [parameter.numel() for parameter in bucket]
            parts = torch.split(flat, sizes)
            for parameter, part in zip(bucket, parts, strict=True):
                self._views.append((parameter, part.view_as(parameter)))

    def begin(self) -> None:
        """Start an iteration: all gradients are zero."""
        for buffer in self.buffers:
            buffer.zero_()
        for parameter, view in self._views:
            parameter.grad = view


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype whose gradients fit in a bucket together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if bucket and (size + bytes_ > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += bytes_
    if bucket:
        yield bucket


class AllReduce:
    """Sums buffers behind the rest of the iteration.

    Each rank holds the mean over all microbatches of its own part of the work, so the sum over
    the group is the gradient a single process would have.

    Args:
        buffers: what each reduction sums on this rank.
        process_groups: by their ranks.
        recorder: told of all that runs.
    """

    def __init__(
        self,
        buffers: Mapping[Reduce, Sequence[Tensor]],
        process_groups: Mapping[tuple[int, ...], Any],
        recorder: Recorder,
    ) -> None:
        self._buffers = buffers
        self._process_groups = process_groups
        self._recorder = recorder
        self._under_way: list[tuple[Reduce, Any, list[Any]]] = []

    def start(self, reduce: Reduce) -> None:
        """Start one; all ranks start theirs in one order."""
        group = self._process_groups[reduce.ranks]
        start = self._recorder.mark()
        buffers = self._buffers[reduce]
        with talking_to(_partners(reduce)):
            works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
        self._under_way.append((reduce, start, works))

    def finish(self) -> None:
        """Wait for all that are under way."""
        for reduce, start, works in self._under_way:
            with talking_to(_partners(reduce)):
                for work in works:
                    work.wait()
            self._recorder.note("reductions", reduce, start)
        self._under_way.clear()


def _partners(reduce: Reduce) -> str:
    ranks, stages = (", ".join(map(str, row)) for row in (reduce.ranks, reduce.stages))
    return f"ranks {ranks}, which sum the gradients of stages {stages}"
