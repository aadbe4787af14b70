"""What a user brings: a data set, a loss, an optimizer and a schedule of their own."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset


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


class Noisy(nn.Module):
    """Dropout and batch norm, which differ in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        rows = [nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 6), nn.BatchNorm1d(6)]
        self.rows = nn.ModuleList([*rows, nn.Dropout(0.2), nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = row(x)
        return x

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 6), "target": torch.randn(samples, 6)}


class Points:
    """Eleven samples for :class:`Noisy`, with noise drawn for each."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((6,), float(index)) + torch.rand(6), torch.full((6,), float(index))


def lines(count: int = 21) -> Iterator[dict[str, Tensor]]:
    """A stream of sequences, each drawn when it is read."""
    for number in range(count):
        row = (number + torch.randint(0, 200, (65,))) % 256
        yield {"ids": row[:-1], "target": row[1:]}


class Lines(IterableDataset):
    """The same, which says where it is; ``read`` counts what was read in this process."""

    read = 0

    def __init__(self, count: int = 21) -> None:
        self.count, self.place = count, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.place < self.count:
            self.place += 1
            Lines.read += 1
            row = (self.place - 1 + torch.randint(0, 200, (65,))) % 256
            yield {"ids": row[:-1], "target": row[1:]}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
