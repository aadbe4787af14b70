"""The small language model that the models of this folder vary."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

KINDS, TOKENS, WIDTH, BLOCKS = 40, 8, 16, 4


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks and head; subclasses change one thing."""

    make_block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(KINDS, WIDTH)
        self.blocks = nn.ModuleList(type(self).make_block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, KINDS, bias=False)

    def block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for number in range(len(self.blocks)):
            x = self.block(number, x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        tokens = torch.randint(KINDS, (samples, TOKENS + 1))
        return {"ids": tokens[:, :-1], "target": tokens[:, 1:]}
