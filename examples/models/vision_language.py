"""A vision-language model: a frozen image encoder and a trained projection before a decoder.

As in LLaVA (Liu et al., 2023, "Visual Instruction Tuning"), whose image encoder is not trained: the
decoder reads the projected patches as the first tokens of the text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """One pre-norm transformer layer, [samples, T, width] to the same shape."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.is_causal = is_causal
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the attention, then the feed-forward network, to the residual stream."""
        query, key, value = (
            torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(hidden)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal
        )
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_2(hidden))))


class Encoder(nn.Module):
    """Images [samples, 3, size, size] to one vector for each patch of 16 by 16 pixels."""

    def __init__(self, width: int, layers: int, image_size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.places = nn.Parameter(torch.randn((image_size // 16) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, width // 16, False) for _ in range(layers))

    def forward(self, image: Tensor) -> Tensor:
        """Return [samples, patches, width]."""
        seen = self.patches(image).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            seen = block(seen)
        return seen


class VisionLanguage(nn.Module):
    """Predicts the next token of a text about an image.

    Args:
        image_width, image_layers: sizes of the image encoder.
        width, layers: sizes of the decoder.
        image_size: height and width of an image, a multiple of 16.
        text_length: tokens of a text.
        vocabulary: number of different tokens.
        frozen: the parts that are not trained.
    """

    def __init__(
        self,
        image_width: int = 64,
        image_layers: int = 4,
        width: int = 64,
        layers: int = 4,
        image_size: int = 64,
        text_length: int = 32,
        vocabulary: int = 256,
        frozen: Sequence[str] = ("encoder",),
    ) -> None:
        super().__init__()
        self.image_size, self.text_length, self.vocabulary = image_size, text_length, vocabulary
        length = (image_size // 16) ** 2 + text_length
        self.encoder = Encoder(image_width, image_layers, image_size)
        self.project = nn.Sequential(
            nn.Linear(image_width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.decoder = nn.ModuleList(Block(width, width // 16, True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """Return the logits of each next token, [samples, text_length, vocabulary].

        Args:
            image: [samples, 3, image_size, image_size].
            text: [samples, text_length].
        """
        seen = self.project(self.encoder(image))
        hidden = torch.cat([seen, self.words(text)], dim=1) + self.positions
        for block in self.decoder:
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, -self.text_length :]))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Return random images, and random texts with their next tokens."""
        text = torch.randint(self.vocabulary, (samples, self.text_length + 1))
        image = torch.randn(samples, 3, self.image_size, self.image_size)
        return {"image": image, "text": text[:, :-1], "target": text[:, 1:]}
