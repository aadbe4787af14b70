"""Exact synchronisation: gradients are summed over all ranks that hold a parameter."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.sync.groups import ParameterGroup

BUCKET_BYTES = 64 * 2**20


class AllReduce:
    """Sums gradients in flat buckets.

    Each rank holds the mean over all microbatches of its own part of the work, so the sum over
    the group is the gradient a single process would have. A rank without a microbatch adds zeros.
    """

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self._groups = groups

    def reduce(self) -> None:
        """All-reduce every bucket of every group; all ranks go through the groups in one order."""
        for group in self._groups:
            for bucket in _buckets(group.parameters):
                _reduce_bucket(bucket, group)


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


def _reduce_bucket(bucket: list[nn.Parameter], group: ParameterGroup) -> None:
    gradients = [_gradient(parameter) for parameter in bucket]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group.process_group)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros if no microbatch gave one here; groups hold only what the loss reaches elsewhere."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
