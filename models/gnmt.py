"""LSTM encoder-decoder with attention for translation, as GNMT.

Wu et al., 2016, "Google's Neural Machine Translation System: Bridging the Gap between Human and
Machine Translation". One departure, as in later implementations: attention takes its queries from
the first decoder layer at the same token, not at the one before, and its context goes to the layers
above. So every layer runs over the whole text at once, and the model can be cut between layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class GNMTConfig:
    """Sizes of a GNMT: encoder and decoder have ``layers`` layers of ``width`` cells each."""

    layers: int
    width: int
    sequence_length: int = 50
    vocabulary: int = 32000
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check that there is a layer with and one without the attention's context."""
        if self.layers < 2:
            raise ValueError(f"layers {self.layers} must be at least 2")


class LSTMLayer(nn.Module):
    """One LSTM over the text, [samples, T, inputs] to [samples, T, width].

    Args:
        inputs: features that come in.
        width: cells; twice as many features come out if ``bidirectional``.
        dropout: probability on the inputs.
        residual: whether the first ``width`` input features are added to the output.
        bidirectional: whether a second LSTM reads the text backwards.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        dropout: float,
        residual: bool = False,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, width, batch_first=True, bidirectional=bidirectional)
        self.residual = residual
        for parameter in self.lstm.parameters():
            nn.init.uniform_(parameter, -0.04, 0.04)

    def forward(self, hidden: Tensor, context: Tensor | None = None) -> Tensor:
        """Run from a zero state; ``context``, [samples, T, width], is joined to the input."""
        joined = hidden if context is None else torch.cat((hidden, context), dim=-1)
        output, _ = self.lstm(self.dropout(joined))
        return output + hidden if self.residual else output


class Attention(nn.Module):
    """A feed-forward network scores every pair of tokens (Bahdanau et al., 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, source: Tensor) -> Tensor:
        """Mix ``source`` [samples, S, width] for each query [samples, T, width]."""
        pairs = torch.tanh(self.query(queries)[:, :, None] + self.key(source)[:, None])
        weights = self.score(pairs).squeeze(-1).softmax(-1)
        return weights @ source


class GNMT(nn.Module):
    """GNMT, with residual connections from the third layer on in encoder and decoder."""

    def __init__(self, config: GNMTConfig) -> None:
        super().__init__()
        self.config = config
        width, dropout = config.width, config.dropout
        self.source_embedding = nn.Embedding(config.vocabulary, width)
        self.encoder = nn.ModuleList(
            [
                LSTMLayer(width, width, dropout, bidirectional=True),
                LSTMLayer(2 * width, width, dropout),
                *(LSTMLayer(width, width, dropout, True) for _ in range(config.layers - 2)),
            ]
        )
        self.target_embedding = nn.Embedding(config.vocabulary, width)
        self.decoder = nn.ModuleList(
            [
                LSTMLayer(width, width, dropout),
                LSTMLayer(2 * width, width, dropout),
                *(LSTMLayer(2 * width, width, dropout, True) for _ in range(config.layers - 2)),
            ]
        )
        self.attention = Attention(width)
        self.classifier = nn.Linear(width, config.vocabulary)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        """Predict the translation's next token at every position.

        Args:
            ids: int64 [samples, S], the text to translate.
            decoder_ids: int64 [samples, T], the translation, one token later.

        Returns:
            Logits, [samples, T, vocabulary].
        """
        source = self.source_embedding(ids)
        for layer in self.encoder:
            source = layer(source)
        first, *others = self.decoder
        hidden = first(self.target_embedding(decoder_ids))
        context = self.attention(hidden, source)
        for layer in others:
            hidden = layer(hidden, context)
        return self.classifier(hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw ``ids``, ``decoder_ids`` and ``target``, int64 [samples, sequence_length]."""
        shape = (samples, self.config.sequence_length)
        return {
            name: torch.randint(self.config.vocabulary, shape)
            for name in ("ids", "decoder_ids", "target")
        }


def gnmt(sequence_length: int = 50, vocabulary: int = 32000, dropout: float = 0.0) -> GNMT:
    """GNMT of eight layers, 277 million parameters; the paper trains with a dropout of 0.2."""
    return GNMT(GNMTConfig(8, 1024, sequence_length, vocabulary, dropout))


def gnmt_tiny(
    sequence_length: int = 10,
    vocabulary: int = 256,
    layers: int = 3,
    width: int = 16,
    dropout: float = 0.0,
) -> GNMT:
    """GNMT small enough for tests on a CPU."""
    return GNMT(GNMTConfig(layers, width, sequence_length, vocabulary, dropout))
