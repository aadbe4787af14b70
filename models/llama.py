"""Llama 2 language models.

Touvron et al., 2023, "Llama 2: Open Foundation and Fine-Tuned Chat Models".
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.rope import apply_rope, rope_tables


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama: ``kv_heads`` heads of keys and values serve ``heads`` heads of queries."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    sequence_length: int = 4096
    vocabulary: int = 32000
    norm_eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        """Check that the heads divide the width and can be rotated and grouped."""
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of 2 * heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.width // self.heads


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., width]."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., 2023), [samples, T, width] to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally; ``cos`` and ``sin`` are [T, head_size / 2]."""
        query = apply_rope(self._split(self.q_proj(hidden)), cos, sin)
        key = apply_rope(self._split(self.k_proj(hidden)), cos, sin)
        value = self._split(self.v_proj(hidden))
        mixed = functional.scaled_dot_product_attention(
            query, self._expand(key), self._expand(value), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, features: Tensor) -> Tensor:
        """[samples, T, n * head_size] to [samples, n, T, head_size]."""
        return torch.unflatten(features, -1, (-1, self.config.head_size)).transpose(1, 2)

    def _expand(self, heads: Tensor) -> Tensor:
        """Give each query head its copy: [samples, kv_heads, ...] to [samples, heads, ...]."""
        groups = self.config.heads // self.config.kv_heads
        return heads[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


class MLP(nn.Module):
    """SwiGLU feed-forward network (Shazeer, 2020), [samples, T, width] to the same shape."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Gate the expanded features with SiLU and project back."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer, [samples, T, width] to the same shape."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the attention, then the MLP, to the residual stream."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Llama(nn.Module):
    """Llama 2 with an untied head; its weights start as torch's layers draw them."""

    def __init__(self, config: LlamaConfig) -> None:
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


def llama2_7b(sequence_length: int = 4096) -> Llama:
    """Llama 2 of 6.7 billion parameters, with one key and value head for every query head."""
    return Llama(LlamaConfig(32, 4096, 32, 32, 11008, sequence_length))


def llama2_13b(sequence_length: int = 4096) -> Llama:
    """Llama 2 of 13 billion parameters, with one key and value head for every query head."""
    return Llama(LlamaConfig(40, 5120, 40, 40, 13824, sequence_length))


def llama2_70b(sequence_length: int = 4096) -> Llama:
    """Llama 2 of 69 billion parameters, with eight query heads to a key and value head."""
    return Llama(LlamaConfig(80, 8192, 64, 8, 28672, sequence_length))


def llama_tiny(
    sequence_length: int = 64,
    vocabulary: int = 256,
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 176,
) -> Llama:
    """Llama small enough for tests on a CPU, with grouped queries."""
    return Llama(LlamaConfig(layers, width, heads, kv_heads, ffn, sequence_length, vocabulary))
