"""Properties of single operators: FLOP formulas, products, and operators that cost only traffic."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor, fx

from planner.tracing.gradients import is_deferrable, trained_weights
from planner.tracing.torch_private import tree_leaves

# Operators that do arithmetic torch's FLOP counter has no formula for, but so little of it per
# byte that their time is their traffic: normalisations, reductions, lookups, pooling.
TRAFFIC_BOUND = frozenset(
    (
        "_softmax _log_softmax native_layer_norm native_batch_norm native_group_norm "
        "_fused_rms_norm rms_norm cudnn_batch_norm _native_batch_norm_legit batch_norm "
        "_batch_norm_with_update embedding nll_loss_forward nll_loss2d_forward mse_loss "
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d mean sum amax amin max min "
        "argmax var var_mean cumsum cat stack index index_select gather scatter scatter_add "
        "index_put index_add copy_ clone _to_copy arange zeros ones full new_zeros "
        "new_ones zeros_like ones_like full_like rand randn rand_like "
        "randn_like linspace logspace eye bernoulli native_dropout fill_ zero_ tril triu "
        "constant_pad_nd repeat roll flip topk sort one_hot upsample_nearest2d upsample_bilinear2d "
        "any all norm linalg_vector_norm scalar_tensor lift_fresh_copy slice_scatter "
        "select_scatter split_with_sizes_copy _local_scalar_dense masked_fill where "
        "floor_divide histc dispatch_to_experts expert_offsets combine_experts"
    ).split()
)
FREE = frozenset(
    # Some are views that torch does not mark as such: an LSTM divides its gates by unsafe_chunk, a
    # product without bias gives back its rows by _unsafe_view. The last ones only allocate.
    (
        "detach _assert_tensor_metadata lift_fresh unsafe_split unsafe_chunk _unsafe_view empty "
        "empty_like new_empty empty_strided"
    ).split()
)
LOOKUPS = frozenset(["embedding"])  # They read the rows they look up, not the table.
MATRIX_PRODUCTS = frozenset(
    (
        "linear matmul mm bmm addmm baddbmm einsum dot mv conv1d conv2d conv3d convolution "
        "conv_transpose2d _grouped_mm grouped_mm_fallback grouped_product"
    ).split()
)


def _grouped_product_flops(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of rows sorted by group, each multiplied by the matrix of its group."""
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


FLOPS: Mapping[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_product_flops,
    "grouped_mm_fallback": _grouped_product_flops,
    "grouped_product": _grouped_product_flops,
}
"""Formulas for products without one in torch's FLOP counter, by the operator's name."""


class WeightStash:
    """Records what deferred weight gradients keep: saved tensors, and output gradients.

    Args:
        module: the training step.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        weights = trained_weights(module)
        self._waiting = {node for node in module.graph.nodes if is_deferrable(node, weights)}
        self._saved: dict[int, tuple[fx.Node, int]] = {}
        self._gradients: dict[fx.Node, int] = {}

    def saved(self, node: fx.Node, storage: int, bytes_: int) -> None:
        """Record a tensor that an operation keeps for its backward."""
        if node in self._waiting:
            self._saved.setdefault(storage, (node, bytes_))

    def made(self, node: fx.Node, value: Any) -> None:
        """Record the value of an operation, whose gradient it will receive."""
        if node in self._waiting:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            self._gradients[node] = sum(
                tensor.numel() * tensor.element_size() for tensor in tensors if tensor.requires_grad
            )

    def kept(self, layers: Container[fx.Node]) -> tuple[tuple[fx.Node, int | None, int], ...]:
        """Return operations of layers, the storage they keep (None: a gradient), and its bytes.

        A tensor that several operations keep is there once.
        """
        saved = ((node, storage, bytes_) for storage, (node, bytes_) in self._saved.items())
        gradients = ((node, None, bytes_) for node, bytes_ in self._gradients.items())
        return tuple(row for row in (*saved, *gradients) if row[0] in layers)
