"""The data type in which gradients of 16-bit weights are summed, over microbatches and ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from planner.job import Job

LOW_PRECISION = (torch.float16, torch.bfloat16)


def set_gradient_types(parameters: Iterable[Tensor], job: Job) -> None:
    """Let autograd sum gradients of 16-bit parameters in float32 unless a job says otherwise.

    With a ``grad_dtype`` of float32 autograd would copy each gradient before it adds it. With any
    type allowed, the first is copied, and torch adds the others to that in place.
    """
    for parameter in parameters if job.gradient_precision != "weights" else ():
        if parameter.dtype in LOW_PRECISION and parameter.grad_dtype and parameter.requires_grad:
            parameter.grad_dtype = None
            parameter.register_post_accumulate_grad_hook(_widen)  # type: ignore[no-untyped-call]


def _widen(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype in LOW_PRECISION:
        parameter.grad = parameter.grad.float()


def gradient_type(parameter: Tensor) -> torch.dtype:
    """Return the type in which the gradients of a parameter are summed."""
    return torch.float32 if parameter.grad_dtype is None else parameter.dtype
