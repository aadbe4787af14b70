"""Experts of Hugging Face ``transformers`` by the operations that Pipeplan divides over groups."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from planner.tracing.expert_operations import (
    combine_experts,
    dispatch_to_experts,
    expert_offsets,
    grouped_product,
)

_NAME = "pipeplan"


def send_tokens_to_experts(model: nn.Module) -> None:
    """Let the experts of a model compute the tokens that chose them, with static shapes.

    Experts with biases, or with a norm behind them, keep the library's own sorting of tokens.

    Args:
        model: of a class of transformers; one without experts stays as it is.
    """
    if not model._can_set_experts_implementation():  # type: ignore[operator]
        return
    library = importlib.import_module("transformers.integrations.moe")
    has_more = any(
        getattr(module, "has_bias", False) or getattr(module, "has_post_expert_norm", False)
        for module in model.modules()
    )
    if not has_more:
        library.ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    model.set_experts_implementation("grouped_mm" if has_more else _NAME)  # type: ignore[operator]


def _forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute a layer's experts, as the library calls it.

    Args:
        module: with the experts' matrices.
        hidden: tokens, [N, width].
        chosen: experts of each token, int64 [N, k].
        weights: of these, [N, k].
    """
    has_gate = getattr(module, "has_gate", True)
    first = module.gate_up_proj if has_gate else module.up_proj
    offsets = expert_offsets(chosen, module.num_experts)
    rows = dispatch_to_experts(hidden, chosen).to(first.dtype)
    made = grouped_product(rows, _inner_first(module, first), offsets)
    made = module._apply_gate(made) if has_gate else module.act_fn(made)
    down = grouped_product(made, _inner_first(module, module.down_proj), offsets)
    combined: Tensor = combine_experts(down, chosen, weights).to(hidden.dtype)
    return combined


def _inner_first(module: Any, matrices: Tensor) -> Tensor:
    """Return matrices as [experts, inner, columns]."""
    is_transposed = getattr(module, "is_transposed", False)
    return matrices if is_transposed else matrices.transpose(-2, -1)
