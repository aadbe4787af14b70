"""Operations that send tokens to experts and bring their rows back, for any model to use.

A token of N chooses k experts, so there are N k rows whatever it chooses: shapes never depend on
the data. Each operation is an operator of its own (``torch.ops.pipeplan``), which export keeps as
one: so the tracer sees where tokens leave for their experts and where they come back, and can give
the devices of a group whole experts (docs/experts.md).

:func:`dispatch_to_experts` copies tokens to rows sorted by expert, :func:`expert_offsets` says
where the rows of each expert end, :func:`grouped_product` multiplies them by the expert's matrix,
and :func:`combine_experts` adds the rows of each token up, weighted. No token is dropped.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _order(chosen: Tensor) -> Tensor:
    """Return which (token, choice) each row holds: by expert, then by token."""
    return chosen.flatten().argsort(stable=True)


def _rows(chosen: Tensor) -> Tensor:
    """Return the row of each (token, choice)."""
    order = _order(chosen)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    return rows


# --- tokens to rows -------------------------------------------------------------------------------


@torch.library.custom_op("pipeplan::dispatch_to_experts", mutates_args=())
def dispatch_to_experts(hidden: Tensor, chosen: Tensor) -> Tensor:
    """Copy each token to a row for each of its experts.

    Args:
        hidden: tokens, [..., width].
        chosen: experts of each, int64 [..., k].

    Returns:
        Rows sorted by expert, [N k, width].
    """
    return hidden.flatten(0, -2)[_order(chosen) // chosen.shape[-1]]


@dispatch_to_experts.register_fake
def _(hidden: Tensor, chosen: Tensor) -> Tensor:
    return hidden.new_empty((chosen.numel(), hidden.shape[-1]))


def _keep_chosen(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _dispatch_backward(ctx: Any, gradient: Tensor) -> Any:
    (chosen,) = ctx.saved_tensors
    return gradient[_rows(chosen)].view(*chosen.shape, gradient.shape[-1]).sum(-2), None


dispatch_to_experts.register_autograd(_dispatch_backward, setup_context=_keep_chosen)


@torch.library.custom_op("pipeplan::expert_offsets", mutates_args=())
def expert_offsets(chosen: Tensor, experts: int) -> Tensor:
    """Return where the rows of each expert end, int64 [experts].

    Args:
        chosen: experts of each token, int64 [..., k].
        experts: their number.
    """
    return torch.bincount(chosen.flatten(), minlength=experts).cumsum(0)


@expert_offsets.register_fake
def _(chosen: Tensor, experts: int) -> Tensor:
    return chosen.new_empty((experts,))


# --- products of rows -----------------------------------------------------------------------------


@torch.library.custom_op("pipeplan::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix.

    Args:
        rows: sorted by expert, [R, inner].
        matrices: of the experts, [experts, inner, columns].
        offsets: where the rows of each expert end, int64 [experts].

    Returns:
        Rows, [R, columns].
    """
    if has_kernel(rows, matrices):
        return functional.grouped_mm(rows, matrices, offs=offsets.int())
    found = rows.new_zeros((rows.shape[0], matrices.shape[2]))
    for matrix, own in zip(matrices, _slices(offsets), strict=True):
        torch.mm(rows[own], matrix, out=found[own])
    return found


def has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Return whether torch has one kernel for all experts, which waits for no number of rows.

    It takes bfloat16 on GPUs of compute capability 8.0 and higher, in pieces of 16 bytes.
    """
    return (
        rows.is_cuda
        and rows.dtype == matrices.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and len(rows) > 0
        and not (rows.shape[1] % 8 or matrices.shape[2] % 8)
    )


def _slices(offsets: Tensor) -> list[slice]:
    """Return the rows of each expert; waits for the device once."""
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


@grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], matrices.shape[2]))


def _keep_factors(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, gradient: Tensor) -> Any:
    rows, matrices, offsets = ctx.saved_tensors
    gradient = gradient.contiguous()
    of_rows = of_matrices = None
    if ctx.needs_input_grad[0]:
        of_rows = grouped_product(gradient, matrices.transpose(1, 2), offsets)
    if ctx.needs_input_grad[1] and has_kernel(rows, matrices):
        of_matrices = functional.grouped_mm(rows.t(), gradient, offs=offsets.int())
    elif ctx.needs_input_grad[1]:
        of_matrices = torch.stack([rows[own].t() @ gradient[own] for own in _slices(offsets)])
    return of_rows, of_matrices, None


grouped_product.register_autograd(_product_backward, setup_context=_keep_factors)


# --- rows to tokens -------------------------------------------------------------------------------


@torch.library.custom_op("pipeplan::combine_experts", mutates_args=())
def combine_experts(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows of each token by its weights.

    Args:
        rows: sorted by expert, [N k, width].
        chosen: experts of each token, int64 [..., k].
        weights: of these, [..., k].

    Returns:
        Tokens, [..., width].
    """
    return (rows[_rows(chosen)] * weights.reshape(-1, 1)).view(*chosen.shape, -1).sum(-2)


@combine_experts.register_fake
def _(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    dtype = torch.promote_types(rows.dtype, weights.dtype)
    return rows.new_empty((*chosen.shape[:-1], rows.shape[-1]), dtype=dtype)


def _combine_backward(ctx: Any, gradient: Tensor) -> Any:
    rows, chosen, weights = ctx.saved_tensors
    order = _order(chosen)
    of_rows = gradient.flatten(0, -2)[order // chosen.shape[-1]]
    of_weights = None
    if ctx.needs_input_grad[2]:
        sums = (of_rows * rows).sum(-1)[_rows(chosen)]
        of_weights = sums.view(weights.shape).to(weights.dtype)
    weighted = of_rows * weights.reshape(-1, 1)[order]
    return weighted.to(rows.dtype), None, of_weights


combine_experts.register_autograd(_combine_backward, setup_context=_keep_factors)
