"""Inception-v3 image classifiers: blocks of parallel branches.

Szegedy et al., 2016, "Rethinking the Inception Architecture for Computer Vision", without the
auxiliary classifier. Every branch is a layer of its own to plan with, so the layer graph is no
chain.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Kernel = tuple[int, int]


class ConvBlock(nn.Sequential):
    """Convolution, batch norm and ReLU.

    ``padded`` images keep their size at a stride of 1; else the kernel takes the places that it
    fits into, as in the paper.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: Kernel, stride: int = 1, padded: bool = True
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)
        self.relu = nn.ReLU(inplace=True)


class Fork(nn.Module):
    """Two convolutions side by side, along rows and along columns (figure 7 of the paper)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.rows = ConvBlock(inputs, outputs, (1, 3))
        self.columns = ConvBlock(inputs, outputs, (3, 1))

    def forward(self, images: Tensor) -> Tensor:
        """[samples, inputs, H, W] to [samples, 2 * outputs, H, W]."""
        return torch.cat((self.rows(images), self.columns(images)), dim=1)


class Inception(nn.Module):
    """Branches that read the same images; their channels are joined.

    Args:
        branches: each takes [samples, inputs, H, W] to the same height and width.
    """

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor) -> Tensor:
        """Run all branches and join their channels."""
        return torch.cat([branch(images) for branch in self.branches], dim=1)


def _branch(inputs: int, *layers: tuple[int, int | Kernel], reduce: int = 0) -> nn.Sequential:
    """Convolutions ``(outputs, kernel)``, and one to ``reduce`` channels with stride 2 if given."""
    branch = nn.Sequential()
    for outputs, kernel in layers:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        branch.append(ConvBlock(inputs, outputs, sides))
        inputs = outputs
    if reduce:
        branch.append(ConvBlock(inputs, reduce, (3, 3), stride=2, padded=False))
    return branch


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    pool = nn.AvgPool2d(3, stride=1, padding=1)
    return nn.Sequential(pool, ConvBlock(inputs, outputs, (1, 1)))


def _square(inputs: int, pooled: int, part: int) -> tuple[Inception, int]:
    """Figure 5 of the paper: two 3x3 convolutions in place of one 5x5; torch calls it A."""
    block = Inception(
        _branch(inputs, (64 // part, 1)),
        _branch(inputs, (48 // part, 1), (64 // part, 5)),
        _branch(inputs, (64 // part, 1), (96 // part, 3), (96 // part, 3)),
        _pooled(inputs, pooled // part),
    )
    return block, (64 + 64 + 96 + pooled) // part


def _first_reduction(inputs: int, _: int, part: int) -> tuple[Inception, int]:
    """Figure 10: half the height and width without a bottleneck; torch calls it B."""
    block = Inception(
        _branch(inputs, reduce=384 // part),
        _branch(inputs, (64 // part, 1), (96 // part, 3), reduce=96 // part),
        nn.Sequential(nn.MaxPool2d(3, stride=2)),
    )
    return block, (384 + 96) // part + inputs


def _factorised(inputs: int, inner: int, part: int) -> tuple[Inception, int]:
    """Figure 6: 7x7 convolutions as 1x7 and 7x1; torch calls it C."""
    narrow, wide = inner // part, 192 // part
    row, column = (1, 7), (7, 1)
    block = Inception(
        _branch(inputs, (wide, 1)),
        _branch(inputs, (narrow, 1), (narrow, row), (wide, column)),
        _branch(
            inputs, (narrow, 1), (narrow, column), (narrow, row), (narrow, column), (wide, row)
        ),
        _pooled(inputs, wide),
    )
    return block, 4 * wide


def _second_reduction(inputs: int, _: int, part: int) -> tuple[Inception, int]:
    """Half the height and width once more; torch calls it D."""
    wide = 192 // part
    block = Inception(
        _branch(inputs, (wide, 1), reduce=320 // part),
        _branch(inputs, (wide, 1), (wide, (1, 7)), (wide, (7, 1)), reduce=wide),
        nn.Sequential(nn.MaxPool2d(3, stride=2)),
    )
    return block, 320 // part + wide + inputs


def _forked(inputs: int, _: int, part: int) -> tuple[Inception, int]:
    """Figure 7: branches that fork, for high dimensions; torch calls it E."""
    wide = 384 // part
    block = Inception(
        _branch(inputs, (320 // part, 1)),
        _branch(inputs, (wide, 1)).append(Fork(wide, wide)),
        _branch(inputs, (448 // part, 1), (wide, 3)).append(Fork(wide, wide)),
        _pooled(inputs, 192 // part),
    )
    return block, 320 // part + 4 * wide + 192 // part


_BLOCKS = {
    "square": _square,
    "first_reduction": _first_reduction,
    "factorised": _factorised,
    "second_reduction": _second_reduction,
    "forked": _forked,
}


class InceptionV3(nn.Module):
    """A stem of plain convolutions, blocks of branches and a linear classifier.

    Args:
        blocks: ``(kind, channels)`` of each; the channels are those of the pooled branch of
            ``square`` blocks and the inner ones of ``factorised`` blocks.
        part: all widths of the paper are divided by this.
        image_size: height and width of the images.
        classes: number of classes.
        dropout: probability before the classifier.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, int]],
        part: int,
        image_size: int,
        classes: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if image_size < 75:
            raise ValueError(f"image_size {image_size} must be at least 75")
        self.image_size = image_size
        self.classes = classes
        self.stem = _stem(part)
        self.mixed = nn.ModuleDict()
        channels = 192 // part
        for index, (kind, inner) in enumerate(blocks):
            # Not numbered: what a number ends is one layer, and here the branches are layers.
            self.mixed[f"block{index}"], channels = _BLOCKS[kind](channels, inner, part)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.1)

    def forward(self, images: Tensor) -> Tensor:
        """Classify float [samples, 3, image_size, image_size]: logits [samples, classes]."""
        hidden = self.stem(images)
        for block in self.mixed.values():
            hidden = block(hidden)
        hidden = functional.adaptive_avg_pool2d(hidden, 1).flatten(1)
        return self.fc(self.dropout(hidden))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw random ``images`` [samples, 3, side, side] and int64 ``target`` [samples]."""
        return {
            "images": torch.randn(samples, 3, self.image_size, self.image_size),
            "target": torch.randint(self.classes, (samples,)),
        }


def _stem(part: int) -> nn.Sequential:
    """Plain convolutions and pools, [samples, 3, H, W] to about an eighth of H and W."""
    first, second, third, last = (width // part for width in (32, 64, 80, 192))
    return nn.Sequential(
        ConvBlock(3, first, (3, 3), stride=2, padded=False),
        ConvBlock(first, first, (3, 3), padded=False),
        ConvBlock(first, second, (3, 3)),
        nn.MaxPool2d(3, stride=2),
        ConvBlock(second, third, (1, 1)),
        ConvBlock(third, last, (3, 3), padded=False),
        nn.MaxPool2d(3, stride=2),
    )


_V3 = (
    ("square", 32),
    ("square", 64),
    ("square", 64),
    ("first_reduction", 0),
    ("factorised", 128),
    ("factorised", 160),
    ("factorised", 160),
    ("factorised", 192),
    ("second_reduction", 0),
    ("forked", 0),
    ("forked", 0),
)
_TINY = (("square", 32), ("first_reduction", 0), ("factorised", 128), ("forked", 0))


def inception_v3(image_size: int = 299, classes: int = 1000, dropout: float = 0.0) -> InceptionV3:
    """Inception-v3 of 24 million parameters; published training uses a dropout of 0.5."""
    return InceptionV3(_V3, 1, image_size, classes, dropout)


def inception_tiny(image_size: int = 75, classes: int = 10, dropout: float = 0.0) -> InceptionV3:
    """Inception with one block of each kind but the second reduction, small enough for a CPU."""
    return InceptionV3(_TINY, 16, image_size, classes, dropout)
