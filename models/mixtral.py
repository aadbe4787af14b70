"""Mixtral language models: a mixture of experts in every layer.

Jiang et al., 2024, "Mixtral of Experts".

Every token is sent to its two experts. With ``dispatch=False`` every expert
computes all tokens instead and the tokens' weights, zero for all but the two chosen ones, sum them
up: plain operations alone, at ``experts / 2`` times the arithmetic.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.llama import MLP, LlamaConfig, RMSNorm, SelfAttention
from models.rope import rope_tables
from planner.tracing.expert_operations import (
    combine_experts,
    dispatch_to_experts,
    expert_offsets,
    grouped_product,
)


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Sizes of a Mixtral: a Llama whose every token takes ``experts_a_token`` of ``experts``.

    With ``dispatch``, experts compute the tokens that take them alone.
    """

    experts: int = 8
    experts_a_token: int = 2
    dispatch: bool = True

    def __post_init__(self) -> None:
        """Check what a Llama's sizes must fulfil, and that there are enough experts."""
        super().__post_init__()
        if not 1 <= self.experts_a_token <= self.experts:
            raise ValueError(
                f"experts_a_token {self.experts_a_token} must be from 1 to experts {self.experts}"
            )


class Experts(nn.Module):
    """SwiGLU feed-forward networks of which every token takes some, [..., width] to the same.

    Args:
        count: number of networks.
        width: of a token.
        ffn: features inside each.
    """

    def __init__(self, count: int, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(count, ffn, width))
        self.up_proj = nn.Parameter(torch.empty(count, ffn, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, ffn))
        for weight in self.parameters():
            bound = 1 / sqrt(weight.shape[2])  # As torch's linear layers draw theirs.
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Send each token to its experts, int64 [..., k], and sum by its weights, [..., k]."""
        rows = dispatch_to_experts(hidden, chosen)
        offsets = expert_offsets(chosen, self.gate_proj.shape[0])
        gate = grouped_product(rows, self.gate_proj.transpose(1, 2), offsets)
        up = grouped_product(rows, self.up_proj.transpose(1, 2), offsets)
        made = functional.silu(gate) * up
        down = grouped_product(made, self.down_proj.transpose(1, 2), offsets)
        return combine_experts(down, chosen, weights)


class MixtureOfExperts(nn.Module):
    """Feed-forward networks of which every token takes two, [samples, T, width] to the same."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.experts_a_token = config.experts_a_token
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.ffn)

    def forward(self, hidden: Tensor) -> Tensor:
        """Sum the outputs of each token's experts, by a softmax of their scores (section 2.1)."""
        highest, chosen = self.gate(hidden).topk(self.experts_a_token, dim=-1)
        return self.experts(hidden, chosen, highest.softmax(-1))


class DenseMixture(nn.Module):
    """The same, with every expert computing all tokens."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.experts_a_token = config.experts_a_token
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(config.experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """Sum the experts' outputs by each token's weights."""
        weights = self._weights(hidden)
        parts = [
            weights[..., index, None] * expert(hidden) for index, expert in enumerate(self.experts)
        ]
        return torch.stack(parts).sum(0)

    def _weights(self, hidden: Tensor) -> Tensor:
        """Softmax over the highest scores, zero elsewhere: [samples, T, experts]."""
        scores = self.gate(hidden)
        highest, chosen = scores.topk(self.experts_a_token, dim=-1)
        return torch.zeros_like(scores).scatter(-1, chosen, highest.softmax(-1))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer, [samples, T, width] to the same shape."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        mixture = MixtureOfExperts if config.dispatch else DenseMixture
        self.block_sparse_moe = mixture(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the attention, then the experts, to the residual stream."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.block_sparse_moe(self.post_attention_layernorm(hidden))


class Mixtral(nn.Module):
    """Mixtral with an untied head; its weights start as torch's layers draw them."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the next token: int64 ids [samples, T] to logits [samples, T, vocabulary]."""
        config = self.config
        hidden = self.embed_tokens(ids)
        cos, sin = rope_tables(ids.shape[1], config.head_size, config.rope_base, ids.device)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.lm_head(self.norm(hidden))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw random ``ids`` and ``target``, both int64 [samples, sequence_length]."""
        shape = (samples, self.config.sequence_length)
        return {
            "ids": torch.randint(self.config.vocabulary, shape),
            "target": torch.randint(self.config.vocabulary, shape),
        }


def mixtral_8x7b(sequence_length: int = 4096, dispatch: bool = True) -> Mixtral:
    """Mixtral 8x7B of 46.7 billion parameters, of which each token uses 12.9 billion."""
    config = MixtralConfig(
        32, 4096, 32, 8, 14336, sequence_length, rope_base=1e6, dispatch=dispatch
    )
    return Mixtral(config)


def mixtral_tiny(
    sequence_length: int = 32,
    vocabulary: int = 256,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 48,
    experts: int = 4,
    dispatch: bool = True,
) -> Mixtral:
    """Mixtral small enough for tests on a CPU."""
    config = MixtralConfig(
        layers,
        width,
        heads,
        kv_heads,
        ffn,
        sequence_length,
        vocabulary,
        experts=experts,
        dispatch=dispatch,
    )
    return Mixtral(config)
