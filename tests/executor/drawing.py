"""Models and data that differ from rank to rank, because something other than torch draws them."""

import os

import numpy as np
import torch
from torch import Tensor, nn

WIDTH, WORDS = 8, 11


def _own() -> np.random.Generator:
    """Seeded by the rank, as a process without a seed has numbers of its own."""
    return np.random.default_rng(int(os.environ.get("RANK", "0")))


def _drawn(*shape: int) -> Tensor:
    return torch.from_numpy(_own().normal(0, 0.3, shape))


class Words(nn.Module):
    """Two layers between a table and a head; a buffer that no checkpoint has scales them."""

    def __init__(self, drawn: str = "weights", tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)
        if drawn == "buffer":
            self.scale.copy_(_drawn(WIDTH))
        if drawn == "weights":
            self.table.weight.data.copy_(_drawn(WORDS, WIDTH))
            self.blocks[0].weight.data.copy_(_drawn(WIDTH, WIDTH))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        return self.head(x)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        ids = torch.randint(WORDS, (samples, 5))
        return {"ids": ids[:, :-1], "target": ids[:, 1:]}


class Sentences:
    """Sentences that follow from the index; or drawn by a generator that each process has."""

    def __init__(self, own: bool) -> None:
        self._generator = _own() if own else None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = self._generator or np.random.default_rng(index)
        ids = torch.from_numpy(generator.integers(0, WORDS, 5))
        return {"ids": ids[:-1], "target": ids[1:]}


def own_generator() -> Sentences:
    return Sentences(own=True)


def by_index() -> Sentences:
    return Sentences(own=False)


class Numbers(nn.Module):
    """Reads numbers, of which one may be NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 3), "target": torch.randn(samples, 1)}


class Holed:
    """Rows of numbers in float64; one has NaN for a target."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.arange(4, dtype=torch.float64) * 0.1 * (index + 1)
        return {"x": row[:3], "target": row[3:] if index != 7 else row[3:] * torch.nan}
