"""VGG image classifiers.

Simonyan & Zisserman, 2015, "Very Deep Convolutional Networks for Large-Scale Image Recognition".
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ConvBlock(nn.Sequential):
    """3x3 convolution, ReLU and, at the end of a stage, a max pool that halves the image."""

    def __init__(self, inputs: int, outputs: int, pool: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        if pool:
            self.pool = nn.MaxPool2d(kernel_size=2, stride=2)


class LinearBlock(nn.Sequential):
    """Linear layer, ReLU and dropout, [samples, inputs] to [samples, outputs]."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)


class VGG(nn.Module):
    """VGG, in which every element of ``features`` and of ``classifier`` is one layer.

    Args:
        depths: number of convolutions in each stage.
        widths: output channels of each stage, as many as ``depths``.
        hidden: width of the two hidden linear layers.
        image_size: height and width of the images; each stage halves them.
        classes: number of classes.
        dropout: probability after each hidden linear layer.
    """

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        hidden: int,
        image_size: int,
        classes: int,
        dropout: float,
    ) -> None:
        super().__init__()
        side = image_size // 2 ** len(depths)
        if side < 1:
            raise ValueError(f"image_size {image_size} must be at least {2 ** len(depths)}")
        self.image_size = image_size
        self.classes = classes
        self.features = nn.Sequential()
        channels = 3
        for depth, width in zip(depths, widths, strict=True):
            for layer in range(depth):
                self.features.append(ConvBlock(channels, width, pool=layer == depth - 1))
                channels = width
        self.classifier = nn.Sequential(
            LinearBlock(channels * side**2, hidden, dropout),
            LinearBlock(hidden, hidden, dropout),
            nn.Linear(hidden, classes),
        )
        self._initialise()

    def _initialise(self) -> None:
        # He et al. (2015): without batch norm the signal of the default draw dies out in so many
        # layers.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Classify float [samples, 3, image_size, image_size]: logits [samples, classes]."""
        return self.classifier(self.features(images).flatten(1))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw random ``images`` [samples, 3, side, side] and int64 ``target`` [samples]."""
        return {
            "images": torch.randn(samples, 3, self.image_size, self.image_size),
            "target": torch.randint(self.classes, (samples,)),
        }


_WIDTHS = (64, 128, 256, 512, 512)


def vgg16(image_size: int = 224, classes: int = 1000, dropout: float = 0.5) -> VGG:
    """VGG of 16 layers with weights, configuration D of the paper."""
    return VGG((2, 2, 3, 3, 3), _WIDTHS, 4096, image_size, classes, dropout)


def vgg19(image_size: int = 224, classes: int = 1000, dropout: float = 0.5) -> VGG:
    """VGG of 19 layers with weights, configuration E of the paper."""
    return VGG((2, 2, 4, 4, 4), _WIDTHS, 4096, image_size, classes, dropout)


def vgg_tiny(image_size: int = 32, classes: int = 10) -> VGG:
    """VGG small enough for tests on a CPU, without dropout so that runs can be compared."""
    return VGG((1, 1, 2), (8, 16, 32), 64, image_size, classes, dropout=0.0)
