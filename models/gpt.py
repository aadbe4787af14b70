"""GPT-2 language models.

Radford et al., 2019, "Language Models are Unsupervised Multitask Learners".
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: ``width`` is the hidden size, of which each head takes an equal part."""

    layers: int
    width: int
    heads: int
    sequence_length: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check that the heads divide the width."""
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


class SelfAttention(nn.Module):
    """Causal multi-head self-attention, [samples, T, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Let every position attend to itself and to those before it."""
        query, key, value = (
            torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(hidden).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """The position-wise network, four times as wide inside, [samples, T, width] to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.c_proj = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Expand, apply GELU in GPT-2's tanh form, and project back."""
        return self.dropout(self.c_proj(functional.gelu(self.c_fc(hidden), approximate="tanh")))


class Block(nn.Module):
    """One pre-norm transformer layer, [samples, T, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the attention, then the MLP, to the residual stream."""
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class GPT(nn.Module):
    """GPT-2 with learned positions and a head tied to the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.sequence_length, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self._initialise()

    def _initialise(self) -> None:
        # Each layer adds two projections to the residual stream; the smaller deviation keeps the
        # variance of their sum independent of the depth (section 2.3 of the paper).
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=residual_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the next token at every position.

        Args:
            ids: int64 [samples, T], with T at most ``sequence_length``.

        Returns:
            Logits, [samples, T, vocabulary].
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw random ``ids`` and ``target``, both int64 [samples, sequence_length]."""
        shape = (samples, self.config.sequence_length)
        return {
            "ids": torch.randint(self.config.vocabulary, shape),
            "target": torch.randint(self.config.vocabulary, shape),
        }


def gpt2_small(sequence_length: int = 1024, vocabulary: int = 50257) -> GPT:
    """GPT-2 of 124 million parameters."""
    return GPT(GPTConfig(12, 768, 12, sequence_length, vocabulary))


def gpt2_medium(sequence_length: int = 1024, vocabulary: int = 50257) -> GPT:
    """GPT-2 of 355 million parameters."""
    return GPT(GPTConfig(24, 1024, 16, sequence_length, vocabulary))


def gpt2_large(sequence_length: int = 1024, vocabulary: int = 50257) -> GPT:
    """GPT-2 of 774 million parameters."""
    return GPT(GPTConfig(36, 1280, 20, sequence_length, vocabulary))


def gpt2_xl(sequence_length: int = 1024, vocabulary: int = 50257) -> GPT:
    """GPT-2 of 1.56 billion parameters."""
    return GPT(GPTConfig(48, 1600, 25, sequence_length, vocabulary))


def gpt_tiny(
    sequence_length: int = 64,
    vocabulary: int = 256,
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
) -> GPT:
    """GPT small enough for tests on a CPU."""
    return GPT(GPTConfig(layers, width, heads, sequence_length, vocabulary))
