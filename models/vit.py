"""Vision transformers.

Dosovitskiy et al., 2021, "An Image is Worth 16x16 Words: Transformers for Image Recognition at
Scale".
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a vision transformer; images are cut into squares of ``patch`` pixels a side."""

    layers: int
    width: int
    heads: int
    patch: int = 16
    image_size: int = 224
    classes: int = 1000
    dropout: float = 0.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check that the heads divide the width and the patches the image."""
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.image_size % self.patch:
            raise ValueError(
                f"image_size {self.image_size} must be a multiple of patch {self.patch}"
            )

    @property
    def tokens(self) -> int:
        """Patches of an image, and one token more for the class."""
        return (self.image_size // self.patch) ** 2 + 1


class Embeddings(nn.Module):
    """Patches, class token and positions, [samples, 3, H, W] to [samples, tokens, width]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.position_embeddings = nn.Parameter(torch.empty(1, config.tokens, config.width))
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.position_embeddings, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Project every patch linearly, and put the class token before them."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        cls_token = self.cls_token.expand(images.shape[0], -1, -1)
        return self.dropout(torch.cat((cls_token, patches), dim=1) + self.position_embeddings)


class SelfAttention(nn.Module):
    """Multi-head attention among all tokens, [samples, tokens, width] to the same shape."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Let every token attend to every other."""
        query, key, value = (
            torch.unflatten(part, -1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The position-wise network, four times as wide inside."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Expand, apply GELU and project back, [samples, tokens, width] to the same shape."""
        return self.fc2(self.dropout(functional.gelu(self.fc1(hidden))))


class Block(nn.Module):
    """One pre-norm transformer layer, [samples, tokens, width] to the same shape."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attn = SelfAttention(config)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the attention, then the MLP, to the residual stream."""
        hidden = hidden + self.dropout(self.attn(self.norm1(hidden)))
        return hidden + self.dropout(self.mlp(self.norm2(hidden)))


class ViT(nn.Module):
    """Vision transformer that classifies by its class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify float [samples, 3, image_size, image_size]: logits [samples, classes]."""
        hidden = self.embeddings(images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)[:, 0])

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw random ``images`` [samples, 3, side, side] and int64 ``target`` [samples]."""
        side = self.config.image_size
        return {
            "images": torch.randn(samples, 3, side, side),
            "target": torch.randint(self.config.classes, (samples,)),
        }


def vit_base_16(image_size: int = 224, classes: int = 1000, dropout: float = 0.0) -> ViT:
    """ViT-B/16 of 86 million parameters; the paper trains on ImageNet with a dropout of 0.1."""
    return ViT(ViTConfig(12, 768, 12, 16, image_size, classes, dropout))


def vit_large_16(image_size: int = 224, classes: int = 1000, dropout: float = 0.0) -> ViT:
    """ViT-L/16 of 304 million parameters."""
    return ViT(ViTConfig(24, 1024, 16, 16, image_size, classes, dropout))


def vit_tiny(image_size: int = 32, classes: int = 10, dropout: float = 0.0) -> ViT:
    """ViT small enough for tests on a CPU, with 16 patches of 8 pixels a side."""
    return ViT(ViTConfig(3, 32, 4, 8, image_size, classes, dropout))
