"""A language model with several heads, each for a token further ahead.

As in Gloeckle et al., 2024, "Better & Faster Large Language Models via Multi-token Prediction": a
trunk, a transformer layer for each head, and one table of words for all of them. Each head computes
its own loss, so that a head may be on a stage of its own; the model returns their mean
(``loss = "output"``).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.models.vision_language import Block


class Head(nn.Module):
    """Predicts the token that is ``ahead`` places further.

    Args:
        width: of the trunk.
        ahead: 1 for the next token.
        words: the table that turns hidden vectors into logits, shared by all heads.
    """

    def __init__(self, width: int, ahead: int, words: nn.Linear) -> None:
        super().__init__()
        self.ahead = ahead
        self.block = Block(width, width // 16, True)
        self.norm = nn.LayerNorm(width)
        self.words = words

    def forward(self, hidden: Tensor, text: Tensor) -> Tensor:
        """Return the loss of this head, a scalar.

        Args:
            hidden: what the trunk makes, [samples, T, width].
            text: tokens, [samples, T + number of heads].
        """
        logits = self.words(self.norm(self.block(hidden)))
        target = text[:, self.ahead : self.ahead + hidden.shape[1]]
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class SeveralHeads(nn.Module):
    """Predicts several tokens from each place of a text.

    Args:
        width, layers: sizes of the trunk.
        heads: number of tokens ahead.
        length: places from which it predicts.
        vocabulary: number of different tokens.
    """

    def __init__(
        self,
        width: int = 64,
        layers: int = 4,
        heads: int = 3,
        length: int = 32,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.length, self.vocabulary = length, vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.trunk = nn.ModuleList(Block(width, width // 16, True) for _ in range(layers))
        words = nn.Linear(width, vocabulary, bias=False)
        self.heads = nn.ModuleList(Head(width, 1 + k, words) for k in range(heads))

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss of all heads, a scalar.

        Args:
            text: tokens, [samples, length + number of heads].
        """
        hidden = self.embedding(text[:, : self.length])
        for block in self.trunk:
            hidden = block(hidden)
        losses = [head(hidden, text) for head in self.heads]
        return sum(losses[1:], losses[0]) / len(losses)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Return random texts."""
        shape = samples, self.length + len(self.heads)
        return {"text": torch.randint(self.vocabulary, shape)}
