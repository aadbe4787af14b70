"""T5, encoder-decoder language models.

Raffel et al., 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer".
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.llama import RMSNorm


@dataclass(frozen=True)
class T5Config:
    """Sizes of a T5: encoder and decoder have ``layers`` layers each.

    Distances between tokens fall into ``buckets``, exact up to a fraction of them and then growing
    logarithmically until ``farthest``.
    """

    layers: int
    width: int
    heads: int
    head_size: int
    ffn: int
    sequence_length: int = 512
    vocabulary: int = 32128
    dropout: float = 0.0
    buckets: int = 32
    farthest: int = 128
    norm_eps: float = 1e-6


class RelativeBias(nn.Module):
    """A learned score a head for every bucket of distances (section 2.1)."""

    def __init__(self, config: T5Config, causal: bool) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        self.embedding = nn.Embedding(config.buckets, config.heads)

    def forward(self, length: int) -> Tensor:
        """Bias to add to the scores, [1, heads, length, length]; minus infinity for the future."""
        positions = torch.arange(length, device=self.embedding.weight.device)
        offset = positions[None, :] - positions[:, None]  # Of the key from the query.
        bias = self.embedding(self._bucket(offset)).permute(2, 0, 1)[None]
        return bias.masked_fill(offset > 0, -torch.inf) if self.causal else bias

    def _bucket(self, offset: Tensor) -> Tensor:
        """Half of the buckets are for keys behind the query, unless it cannot see them."""
        if self.causal:
            return self._of_distance((-offset).clamp(min=0), self.config.buckets)
        half = self.config.buckets // 2
        return self._of_distance(offset.abs(), half) + (offset > 0) * half

    def _of_distance(self, distance: Tensor, buckets: int) -> Tensor:
        exact = buckets // 2
        growth = (buckets - exact) / math.log(self.config.farthest / exact)
        # In float32, in the order of the published implementation: borders round the same way.
        far = exact + (torch.log(distance.clamp(min=exact).float() / exact) * growth).long()
        return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class Attention(nn.Module):
    """Multi-head attention without scaling, queries [samples, T, width] to the same shape."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        inner = config.heads * config.head_size
        self.q = nn.Linear(config.width, inner, bias=False)
        self.k = nn.Linear(config.width, inner, bias=False)
        self.v = nn.Linear(config.width, inner, bias=False)
        self.o = nn.Linear(inner, config.width, bias=False)

    def forward(self, hidden: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        """Attend to ``source``, [samples, S, width]; ``bias`` is [1, heads, T, S]."""
        query, key, value = (
            torch.unflatten(features, -1, (self.heads, -1)).transpose(1, 2)
            for features in (self.q(hidden), self.k(source), self.v(source))
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0
        )
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The position-wise network, [samples, T, width] to the same shape."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.wi = nn.Linear(config.width, config.ffn, bias=False)
        self.wo = nn.Linear(config.ffn, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Expand, apply ReLU and project back."""
        return self.wo(self.dropout(functional.relu(self.wi(hidden))))


class EncoderBlock(nn.Module):
    """One pre-norm layer of the encoder, [samples, S, width] to the same shape."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Add the attention, then the MLP, to the residual stream."""
        normed = self.attention_norm(hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed, bias))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class DecoderBlock(nn.Module):
    """One pre-norm layer of the decoder, [samples, T, width] to the same shape."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.cross_norm = RMSNorm(config.width, config.norm_eps)
        self.cross_attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, bias: Tensor, source: Tensor) -> Tensor:
        """Attend to itself, then to the encoder's output ``source``, [samples, S, width]."""
        normed = self.attention_norm(hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed, bias))
        crossed = self.cross_attention(self.cross_norm(hidden), source, None)
        hidden = hidden + self.dropout(crossed)
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class T5(nn.Module):
    """T5 of version 1.0: one embedding for encoder, decoder and head."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocabulary, config.width)
        self.encoder_bias = RelativeBias(config, causal=False)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.encoder_norm = RMSNorm(config.width, config.norm_eps)
        self.decoder_bias = RelativeBias(config, causal=True)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.decoder_norm = RMSNorm(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.shared.weight
        self.dropout = nn.Dropout(config.dropout)
        self._initialise()

    def _initialise(self) -> None:
        # The published draws: attention does not scale its scores, so the queries' weights do.
        config = self.config
        deviations = {
            "shared": 1.0,
            "embedding": config.width**-0.5,
            "q": (config.width * config.head_size) ** -0.5,
            "o": (config.heads * config.head_size) ** -0.5,
            "wo": config.ffn**-0.5,
        }
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                module = name.split(".")[-2]
                nn.init.normal_(parameter, std=deviations.get(module, config.width**-0.5))

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        """Predict the output text's next token at every position.

        Args:
            ids: int64 [samples, S], the input text.
            decoder_ids: int64 [samples, T], the output text, one token later.

        Returns:
            Logits, [samples, T, vocabulary].
        """
        source = self.dropout(self.shared(ids))
        bias = self.encoder_bias(ids.shape[1])
        for block in self.encoder:
            source = block(source, bias)
        source = self.dropout(self.encoder_norm(source))
        hidden = self.dropout(self.shared(decoder_ids))
        bias = self.decoder_bias(decoder_ids.shape[1])
        for block in self.decoder:
            hidden = block(hidden, bias, source)
        hidden = self.dropout(self.decoder_norm(hidden))
        # The embedding is drawn large; as a head it is scaled down.
        return self.lm_head(hidden * self.config.width**-0.5)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw ``ids``, ``decoder_ids`` and ``target``, int64 [samples, sequence_length]."""
        shape = (samples, self.config.sequence_length)
        return {
            name: torch.randint(self.config.vocabulary, shape)
            for name in ("ids", "decoder_ids", "target")
        }


def t5_small(sequence_length: int = 512, dropout: float = 0.0) -> T5:
    """T5 of 60 million parameters; the paper trains with a dropout of 0.1."""
    return T5(T5Config(6, 512, 8, 64, 2048, sequence_length, dropout=dropout))


def t5_base(sequence_length: int = 512, dropout: float = 0.0) -> T5:
    """T5 of 220 million parameters; the paper trains with a dropout of 0.1."""
    return T5(T5Config(12, 768, 12, 64, 3072, sequence_length, dropout=dropout))


def t5_large(sequence_length: int = 512, dropout: float = 0.0) -> T5:
    """T5 of 740 million parameters; the paper trains with a dropout of 0.1."""
    return T5(T5Config(24, 1024, 16, 64, 4096, sequence_length, dropout=dropout))


def t5_tiny(
    sequence_length: int = 24,
    vocabulary: int = 256,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    head_size: int = 8,
    ffn: int = 64,
    dropout: float = 0.0,
) -> T5:
    """T5 small enough for tests on a CPU, with few buckets so that all are used."""
    config = T5Config(
        layers, width, heads, head_size, ffn, sequence_length, vocabulary, dropout, 8, 16
    )
    return T5(config)
