"""BERT, masked language models.

Devlin et al., 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding". The loss is that of the masked tokens; next sentences are not predicted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
"""Target of a position that was not masked: cross entropy leaves it out."""


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT: ``width`` is the hidden size, of which each head takes an equal part."""

    layers: int
    width: int
    heads: int
    sequence_length: int = 512
    vocabulary: int = 30522
    dropout: float = 0.0
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        """Check that the heads divide the width."""
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings, int64 [samples, T] to [samples, T, width]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.position_embeddings = nn.Embedding(config.sequence_length, config.width)
        self.token_type_embeddings = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Embed and normalise; ``segments`` is 0 for the first text of a pair, 1 for the second."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        embedded = self.word_embeddings(ids) + self.token_type_embeddings(segments)
        return self.dropout(self.norm(embedded + self.position_embeddings(positions)))


class SelfAttention(nn.Module):
    """Multi-head attention in both directions, [samples, T, width] to the same shape."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Attend where ``mask``, bool [samples, 1, 1, T], is true."""
        query, key, value = (
            torch.unflatten(projection(hidden), -1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The position-wise network, four times as wide inside, [samples, T, width] to the same."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.width, 4 * config.width)
        self.output = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Expand, apply GELU and project back."""
        return self.output(functional.gelu(self.intermediate(hidden)))


class Layer(nn.Module):
    """One post-norm transformer layer, [samples, T, width] to the same shape."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)
        self.mlp_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Add the attention, then the MLP, and normalise after each."""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, mask)))
        return self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))


class Predictions(nn.Module):
    """The head of the masked language model, [samples, T, width] to [samples, T, vocabulary]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.decoder = nn.Linear(config.width, config.vocabulary)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform once more and score every token of the vocabulary."""
        return self.decoder(self.norm(functional.gelu(self.dense(hidden))))


class Bert(nn.Module):
    """BERT with the masked language model's head, tied to the token embedding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.predictions = Predictions(config)
        self.predictions.decoder.weight = self.embeddings.word_embeddings.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        """Predict the token at every position.

        Args:
            ids: int64 [samples, T], with T at most ``sequence_length``.
            segments: int64 [samples, T], 0 or 1.
            mask: bool [samples, T], false for padding, which nobody attends to.

        Returns:
            Logits, [samples, T, vocabulary].
        """
        hidden = self.embeddings(ids, segments)
        attended = mask[:, None, None, :]
        for layer in self.layer:
            hidden = layer(hidden, attended)
        return self.predictions(hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw pairs of texts, an eighth of each sample padding.

        A target is asked for in about 15 % of the positions and at the first, and is ``IGNORED``
        elsewhere.
        """
        length = self.config.sequence_length
        shape = (samples, length)
        position = torch.arange(length).expand(shape)
        asked = (torch.rand(shape) < 0.15) | (position == 0)
        return {
            "ids": torch.randint(self.config.vocabulary, shape),
            "segments": (position >= length // 2).long(),
            "mask": position < length - length // 8,
            "target": torch.where(asked, torch.randint(self.config.vocabulary, shape), IGNORED),
        }


def bert_base(sequence_length: int = 512, vocabulary: int = 30522, dropout: float = 0.0) -> Bert:
    """BERT of 110 million parameters; the paper trains with a dropout of 0.1."""
    return Bert(BertConfig(12, 768, 12, sequence_length, vocabulary, dropout))


def bert_large(sequence_length: int = 512, vocabulary: int = 30522, dropout: float = 0.0) -> Bert:
    """BERT of 335 million parameters; the paper trains with a dropout of 0.1."""
    return Bert(BertConfig(24, 1024, 16, sequence_length, vocabulary, dropout))


def bert_tiny(
    sequence_length: int = 32,
    vocabulary: int = 256,
    layers: int = 3,
    width: int = 32,
    heads: int = 4,
    dropout: float = 0.0,
) -> Bert:
    """BERT small enough for tests on a CPU."""
    return Bert(BertConfig(layers, width, heads, sequence_length, vocabulary, dropout))
