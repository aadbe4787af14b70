"""ResNet image classifiers, version 1.5.

He et al., 2016, "Deep Residual Learning for Image Recognition".
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut.

    Takes [samples, inputs, H, W] to [samples, 4 * width, H / stride, W / stride]. Version 1.5 has
    the stride in the 3x3 convolution, where the paper has it in the first.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Add the convolved images to the shortcut."""
        shortcut = images if self.downsample is None else self.downsample(images)
        hidden = functional.relu(self.bn1(self.conv1(images)), inplace=True)
        hidden = functional.relu(self.bn2(self.conv2(hidden)), inplace=True)
        return functional.relu(self.bn3(self.conv3(hidden)) + shortcut, inplace=True)


class ResNet(nn.Module):
    """ResNet of bottleneck blocks.

    Args:
        depths: number of blocks in ``layer1`` to ``layer4``.
        width: channels of the stem; the inner width of the blocks doubles with each layer.
        image_size: height and width of the images.
        classes: number of classes.
    """

    def __init__(self, depths: Sequence[int], width: int, image_size: int, classes: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.classes = classes
        self.stem = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False),
                bn=nn.BatchNorm2d(width),
                relu=nn.ReLU(inplace=True),
                pool=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            )
        )
        outputs = [width * 2**layer * Bottleneck.expansion for layer in range(4)]
        self.layer1 = _layer(width, width, depths[0], stride=1)
        self.layer2 = _layer(outputs[0], 2 * width, depths[1], stride=2)
        self.layer3 = _layer(outputs[1], 4 * width, depths[2], stride=2)
        self.layer4 = _layer(outputs[2], 8 * width, depths[3], stride=2)
        self.head = nn.Sequential(
            OrderedDict(
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(outputs[3], classes),
            )
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Classify float [samples, 3, image_size, image_size]: logits [samples, classes]."""
        hidden = self.stem(images)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            hidden = layer(hidden)
        return self.head(hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw random ``images`` [samples, 3, side, side] and int64 ``target`` [samples]."""
        return {
            "images": torch.randn(samples, 3, self.image_size, self.image_size),
            "target": torch.randint(self.classes, (samples,)),
        }


def _layer(inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    """Chain ``depth`` blocks, the first of which changes the channels and the resolution."""
    outputs = Bottleneck.expansion * width
    return nn.Sequential(
        Bottleneck(inputs, width, stride),
        *(Bottleneck(outputs, width, stride=1) for _ in range(depth - 1)),
    )


def resnet50(image_size: int = 224, classes: int = 1000) -> ResNet:
    """ResNet of 50 layers with weights."""
    return ResNet((3, 4, 6, 3), 64, image_size, classes)


def resnet101(image_size: int = 224, classes: int = 1000) -> ResNet:
    """ResNet of 101 layers with weights."""
    return ResNet((3, 4, 23, 3), 64, image_size, classes)


def resnet_tiny(image_size: int = 64, classes: int = 10) -> ResNet:
    """ResNet small enough for tests on a CPU.

    At 64 pixels ``layer4`` sees 2x2; batch norm refuses to train on one sample of 1x1.
    """
    return ResNet((1, 1, 1, 1), 8, image_size, classes)
