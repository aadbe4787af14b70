"""What a user brings: a data set, a loss, an optimizer and a schedule of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bytes:
    """Sequences of one token after the other; with noise drawn for each sample."""

    def __init__(self, size: int = 37) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(65) * (index + 1) + torch.randint(0, 3, (65,))) % 256
        return {"ids": row[:-1], "target": row[1:]}


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with smoothed labels."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=0.1)


def decayed(parameters: Sequence[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    """RAdam that decays matrices only."""
    rows = [
        {"params": [p for _, p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.RAdam(
        [row for row in rows if row["params"]], lr=lr, decoupled_weight_decay=True
    )


def halving(step: int) -> float:
    """Half the rate with each step."""
    return 0.5 ** (step - 1)


class Padded:
    """Sequences of which all but a few targets are ignored, of some all."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(0, 256, (65,))
        target = row[1:].clone()
        target[(0, 0, 1, 64)[index % 4] :] = -100
        return {"ids": row[:-1], "target": target}
