"""Small models of a test's own, with a batch to classify."""

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """A network with a batch of rows to classify."""

    def __init__(self, *layers: nn.Module, inputs: tuple[int, ...] = (8,), classes: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.inputs = inputs
        self.classes = classes

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {
            "rows": torch.randn(samples, *self.inputs),
            "target": torch.randint(self.classes, (samples,)),
        }


def mlp() -> nn.Module:
    return Classifier(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def smooth_mlp() -> nn.Module:
    return Classifier(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    return Classifier(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 2, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8, 4),
        inputs=(3, 7, 7),
    )
