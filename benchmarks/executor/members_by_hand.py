"""One member of a tensor-parallel group in plain torch, with collectives written by hand.

The layers of Shoeybi et al. 2019, "Megatron-LM", section 3: two all-reduces a block and direction,
a vocabulary-parallel embedding and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from models.rope import apply_rope, rope_tables


class _Sum(torch.autograd.Function):
    """Sums partial results over the members, in place; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Copy(torch.autograd.Function):
    """Passes a value to a split part; sums the gradients over the members, in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Loss(torch.autograd.Function):
    """Mean cross entropy of logits of which each member has some classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        logits = logits - highest[:, None]
        own = target - dist.get_rank() * logits.shape[1]
        is_elsewhere = (own < 0) | (own >= logits.shape[1])
        own = own.masked_fill(is_elsewhere, 0)
        predicted = logits.gather(1, own[:, None])[:, 0].masked_fill(is_elsewhere, 0)
        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(1), predicted])
        dist.all_reduce(sums)
        exponentials.div_(sums[0][:, None])
        ctx.save_for_backward(exponentials, own, is_elsewhere)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found, own, is_elsewhere = ctx.saved_tensors
        found[torch.arange(len(own)), own] -= is_elsewhere.logical_not().to(found.dtype)
        return found.mul_(gradient / len(own)), None


def _looked_up(ids: Tensor, weight: Tensor) -> Tensor:
    own = ids - dist.get_rank() * weight.shape[0]
    is_elsewhere = (own < 0) | (own >= weight.shape[0])
    rows = functional.embedding(own.masked_fill(is_elsewhere, 0), weight)
    return _Sum.apply(rows.masked_fill(is_elsewhere[..., None], 0))


def _heads(features: Tensor, size: int) -> Tensor:
    return torch.unflatten(features, -1, (-1, size)).transpose(1, 2)


Parameters = Mapping[str, nn.Parameter]


def gpt_loss(own: Parameters, batch: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    """Return the loss of a GPT's microbatch, the same on all members.

    Args:
        own: this member's shares of parameters, by the model's own names.
        batch: ids and target.
        sizes: arguments of the model's factory.
    """
    width, size = (sizes["width"],), sizes["width"] // sizes["heads"]
    hidden = _looked_up(batch["ids"], own["wte.weight"])
    hidden = hidden + own["wpe.weight"][: hidden.shape[1]]
    for block in range(sizes["layers"]):
        at = {
            k.removeprefix(f"h.{block}."): p for k, p in own.items() if k.startswith(f"h.{block}.")
        }

        def linear(name: str, value: Tensor, at: Parameters = at) -> Tensor:
            return functional.linear(value, at[f"{name}.weight"], at[f"{name}.bias"])

        def summed(name: str, value: Tensor, at: Parameters = at) -> Tensor:
            partial = functional.linear(value, at[f"{name}.weight"])
            return _Sum.apply(partial) + at[f"{name}.bias"]

        normed = functional.layer_norm(hidden, width, at["ln_1.weight"], at["ln_1.bias"])
        query, key, value = (
            _heads(part, size) for part in linear("attn.c_attn", _Copy.apply(normed)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + summed("attn.c_proj", mixed.transpose(1, 2).flatten(2))
        normed = functional.layer_norm(hidden, width, at["ln_2.weight"], at["ln_2.bias"])
        inner = functional.gelu(linear("mlp.c_fc", _Copy.apply(normed)), approximate="tanh")
        hidden = hidden + summed("mlp.c_proj", inner)
    hidden = functional.layer_norm(hidden, width, own["ln_f.weight"], own["ln_f.bias"])
    logits = functional.linear(_Copy.apply(hidden), own["wte.weight"])
    return _Loss.apply(logits.flatten(0, 1), batch["target"].flatten())


def llama_loss(own: Parameters, batch: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    """Return the loss of a Llama's microbatch; arguments as of :func:`gpt_loss`."""
    width, size = (sizes["width"],), sizes["width"] // sizes["heads"]
    groups = sizes["heads"] // sizes["kv_heads"]
    hidden = _looked_up(batch["ids"], own["embed_tokens.weight"])
    cos, sin = rope_tables(hidden.shape[1], size, 10000.0, hidden.device)

    def expanded(heads: Tensor) -> Tensor:
        return heads[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)

    for layer in range(sizes["layers"]):
        head = f"layers.{layer}."

        def linear(name: str, value: Tensor, head: str = head) -> Tensor:
            return functional.linear(value, own[f"{head}{name}.weight"])

        weight = own[f"{head}input_layernorm.weight"]
        normed = _Copy.apply(functional.rms_norm(hidden, width, weight, 1e-5))
        query = apply_rope(_heads(linear("self_attn.q_proj", normed), size), cos, sin)
        key = apply_rope(_heads(linear("self_attn.k_proj", normed), size), cos, sin)
        value = _heads(linear("self_attn.v_proj", normed), size)
        mixed = functional.scaled_dot_product_attention(
            query, expanded(key), expanded(value), is_causal=True
        )
        hidden = hidden + _Sum.apply(linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(2)))
        weight = own[f"{head}post_attention_layernorm.weight"]
        normed = _Copy.apply(functional.rms_norm(hidden, width, weight, 1e-5))
        inner = functional.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
        hidden = hidden + _Sum.apply(linear("mlp.down_proj", inner))
    hidden = functional.rms_norm(hidden, width, own["norm.weight"], 1e-5)
    logits = functional.linear(_Copy.apply(hidden), own["lm_head.weight"])
    return _Loss.apply(logits.flatten(0, 1), batch["target"].flatten())


LOSSES: Mapping[str, Callable[[Parameters, Mapping[str, Tensor], Mapping[str, int]], Tensor]] = {
    "gpt": gpt_loss,
    "llama": llama_loss,
}
