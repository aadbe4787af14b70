"""U-Net for image segmentation.

Ronneberger et al., 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation".
"""

import torch
from torch import Tensor, nn


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions with batch norm and ReLU, [samples, inputs, H, W] to outputs.

    Unlike the paper's, the convolutions keep the image size, so the skips need no cropping.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU(inplace=True)


class Down(nn.Module):
    """One level of the contracting path."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = DoubleConv(inputs, outputs)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[samples, inputs, H, W] to the skip [samples, outputs, H, W] and its half-size pool."""
        skip = self.conv(images)
        return skip, self.pool(skip)


class Up(nn.Module):
    """One level of the expanding path."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, kernel_size=2, stride=2)
        self.conv = DoubleConv(2 * outputs, outputs)

    def forward(self, hidden: Tensor, skip: Tensor) -> Tensor:
        """[samples, inputs, H / 2, W / 2] and skip [samples, outputs, H, W] to the skip's shape."""
        return self.conv(torch.cat((skip, self.up(hidden)), dim=1))


class UNet(nn.Module):
    """U-Net whose skips join level i of ``down`` with level depth - 1 - i of ``up``.

    Args:
        width: channels of the first level; they double with each level.
        depth: number of times that the image is halved.
        image_size: height and width of the images, a multiple of 2 ** depth.
        classes: number of classes of a pixel.
        channels: channels of the images.
    """

    def __init__(
        self, width: int, depth: int, image_size: int, classes: int, channels: int
    ) -> None:
        super().__init__()
        if image_size % 2**depth:
            raise ValueError(f"image_size {image_size} must be a multiple of {2**depth}")
        self.image_size = image_size
        self.classes = classes
        self.channels = channels
        widths = [width * 2**level for level in range(depth + 1)]
        inputs = [channels, *widths[:-1]]
        self.down = nn.ModuleList(Down(inputs[level], widths[level]) for level in range(depth))
        self.bottom = DoubleConv(inputs[depth], widths[depth])
        self.up = nn.ModuleList(
            Up(widths[level + 1], widths[level]) for level in reversed(range(depth))
        )
        self.head = nn.Conv2d(width, classes, kernel_size=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # The paper's draw: deviation sqrt(2 / N) with N incoming connections.
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Classify each pixel: [samples, channels, H, W] to logits [samples, classes, H, W]."""
        skips = []
        hidden = images
        for down in self.down:
            skip, hidden = down(hidden)
            skips.append(skip)
        hidden = self.bottom(hidden)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            hidden = up(hidden, skip)
        return self.head(hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw random ``images`` [samples, channels, H, W] and int64 ``target`` [samples, H, W]."""
        size = (self.image_size, self.image_size)
        return {
            "images": torch.randn(samples, self.channels, *size),
            "target": torch.randint(self.classes, (samples, *size)),
        }


def unet(image_size: int = 256, classes: int = 2, channels: int = 3) -> UNet:
    """U-Net with the paper's widths, 64 to 1024 channels."""
    return UNet(64, 4, image_size, classes, channels)


def unet_tiny(image_size: int = 32, classes: int = 2, channels: int = 3) -> UNet:
    """U-Net small enough for tests on a CPU."""
    return UNet(8, 2, image_size, classes, channels)
