"""A small model and data that a fixed network has labelled, so that time to a loss says something.

Classes come from a narrower network with weights of its own, one label in ten is wrong: the loss
falls for as long as these benchmarks train, and never to zero.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

INPUTS, WIDTH, CLASSES = 64, 256, 10
SAMPLES, HELD_OUT = 65_536, 4096
WRONG_LABELS = 0.1
_TEACHER_WIDTH = 32


class Student(nn.Module):
    """An MLP of about 85,000 parameters, a block a hidden layer.

    Args:
        depth: hidden layers after the first.
        width: of hidden layers.
    """

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        widths = [INPUTS, *[width] * (depth + 1)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)
        )
        self.head = nn.Linear(width, CLASSES)
        for block in self.blocks:
            # He et al. 2015, so that deep and narrow ones begin to learn at once.
            nn.init.kaiming_normal_(block[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes, [samples, classes]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """A batch in the shapes of the data."""
        return {"x": torch.randn(samples, INPUTS), "target": torch.randint(CLASSES, (samples,))}


def student(depth: int = 1, width: int = WIDTH) -> nn.Module:
    """The model."""
    return Student(depth, width)


class Taught:
    """A map-style data set of inputs and the teacher's classes.

    Args:
        seed: of inputs and wrong labels; the teacher is always the same.
        samples: how many.
    """

    def __init__(self, seed: int, samples: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, INPUTS, generator=draw)
        labels = _teacher(self.inputs)
        wrong = torch.rand(samples, generator=draw) < WRONG_LABELS
        drawn = torch.randint(CLASSES, (samples,), generator=draw)
        self.labels = torch.where(wrong, drawn, labels)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Input and class."""
        return self.inputs[index], self.labels[index]


def _teacher(inputs: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(INPUTS, _TEACHER_WIDTH, generator=draw) / INPUTS**0.5
    second = torch.randn(_TEACHER_WIDTH, CLASSES, generator=draw)
    return (inputs @ (2 * first)).tanh().matmul(second).argmax(-1)


def taught(seed: int = 0) -> Taught:
    """The training data."""
    return Taught(seed, SAMPLES)


@cache
def _held_out() -> Taught:
    return Taught(2**31, HELD_OUT)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Mean cross entropy over samples that no training sees."""
    data = _held_out()
    return float(functional.cross_entropy(model(data.inputs), data.labels))
