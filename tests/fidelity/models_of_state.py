"""Models with state, random numbers, shared, tied and frozen parts, routing and branches."""

import random

import numpy as np
import torch
from fidelity_base import BLOCKS, KINDS, TOKENS, WIDTH, Block, Model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

# --- shared, tied and frozen parts ----------------------------------------------------------------


class OneBlockManyTimes(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[0](x)


class OneBlockInManyPlaces(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * BLOCKS)


class TiedHead(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.emb.weight


class TiedByFunction(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.hidden(ids), self.emb.weight)


class TiedNumpyDraws(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.emb.weight.copy_(torch.from_numpy(np.random.normal(0, 0.1, (KINDS, WIDTH))))


class SharedNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = self.blocks[0].norm


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


class LowRank(Model):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = _Adapted(block.up), _Adapted(block.down)


class FrozenFirstHalf(Model):
    def __init__(self) -> None:
        super().__init__()
        for module in (self.emb, self.blocks[0], self.blocks[1]):
            module.requires_grad_(False)


class FrozenMiddle(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].norm.bias.requires_grad_(False)


class UnusedPart(Model):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Long(Model):
    """A skip from the embedding to the head."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids) + self.emb(ids))


# --- state ----------------------------------------------------------------------------------------


class _Averaging(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x - self.mean)


class AverageInBuffer(Model):
    make_block = _Averaging


class _Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch(x))


class BatchNorm(Model):
    """The next block's normalisation removes what a normalisation before it adds."""

    make_block = _Normalised
    without_effect = [f"blocks.{number}.batch.bias" for number in range(BLOCKS - 1)]


class _Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)


class SpectralNorm(Model):
    make_block = _Spectral


class _WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(self.up)


class WeightNorm(Model):
    make_block = _WeightNorm


class CountedSteps(Model):
    """A warm-up by a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def hidden(self, ids: Tensor) -> Tensor:
        self.count.add_(1)
        return super().hidden(ids) * (self.count / 10).clamp(max=1.0)


class Masked(Model):
    """Constant buffers, one of them not part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.linspace(0, 1, TOKENS)[:, None])
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril(), persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        return super().hidden(ids) + self.mask @ self.emb(ids) + self.place


class Momentum(Model):
    """A second encoder that follows the first by an average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.fast = nn.Linear(WIDTH, WIDTH)

    def hidden(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        x = super().hidden(ids)
        return x + self.fast(x) + self.slow(x)


class ClampedWeights(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[number].up.weight.clamp_(-0.1, 0.1)
        return super().block(number, x)


class ClampedData(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        self.blocks[number].up.weight.data.clamp_(-0.1, 0.1)
        return super().block(number, x)


class BoundedEmbedding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(KINDS, WIDTH, max_norm=1.0)


class PaddedEmbedding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(KINDS, WIDTH, padding_idx=0, scale_grad_by_freq=True)


class KeptTensor(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(WIDTH)

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids) + self.kept
        self.kept = x.detach().mean((0, 1))
        return x


class KeptList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Tensor] = []

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        self.queue = [*self.queue[-2:], x.detach().mean((0, 1))]
        return x + torch.stack(self.queue).mean(0)


class PythonCounter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def hidden(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = super().hidden(ids)
        return x * 0.5 if self.calls > 100 else x


class CounterInAList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []

    def block(self, number: int, x: Tensor) -> Tensor:
        self.history.append(len(self.history))
        return super().block(number, x) if len(self.history) % 9 else x


class CachedNumber(Model):
    """Makes a number once, at the first call."""

    def block(self, number: int, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = x.shape[-1] ** -0.5
        return x + self.scale * super().block(number, x)


class ConvertedInForward(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number].to(torch.float32)(x)


class PlainTable(Model):
    """A constant table in a plain attribute, as many models of positions have it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0, 1, TOKENS)[:, None]

    def hidden(self, ids: Tensor) -> Tensor:
        return super().hidden(ids) + self.table.to(ids.device)


class InPlaceOperations(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        y = super().block(number, x) * 1.0
        y += x
        return functional.relu(y, inplace=True)


# --- random numbers -------------------------------------------------------------------------------


class Dropout(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return functional.dropout(super().block(number, x), 0.2, self.training)


class StochasticDepth(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        keep = (torch.rand((), device=x.device) < 0.7).to(x.dtype)
        return x + keep * (super().block(number, x) - x)


class Noise(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return super().block(number, x + 0.1 * torch.randn_like(x))


class PythonCoin(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return super().block(number, x) if random.random() < 0.7 else x


class NumpyNoise(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return super().block(number, x) * float(np.random.uniform(0.9, 1.1))


class OwnPythonGenerator(Model):
    def __init__(self) -> None:
        super().__init__()
        self.coin = random.Random(0)

    def block(self, number: int, x: Tensor) -> Tensor:
        return super().block(number, x) if self.coin.random() < 0.7 else x


class OwnGenerator(Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def block(self, number: int, x: Tensor) -> Tensor:
        return super().block(number, x + 0.1 * torch.randn(x.shape, generator=self.generator))


# --- routing, branches and other layers -----------------------------------------------------------


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class _DenseExperts(_Experts):
    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weight)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (made * share[..., None, :]).sum(-1)


class _RoutedExperts(_Experts):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, place, None])
        return x + out.view_as(x)


class DenseExperts(Model):
    make_block = _DenseExperts


class RoutedExperts(Model):
    make_block = _RoutedExperts


class BranchOnItem(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return x if torch.rand(()).item() < 0.3 else super().block(number, x)


class BranchOnData(Model):
    def forward(self, ids: Tensor) -> Tensor:
        if (ids == 0).any():
            ids = ids.clamp(min=1)
        return super().forward(ids)


class ChoiceByWhere(Model):
    def block(self, number: int, x: Tensor) -> Tensor:
        return torch.where(x.mean() > 0, super().block(number, x), x * 0.5)


class Recurrent(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.lstm(super().hidden(ids))[0]


class _Attention(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return super().forward(x + self.attention(normed, normed, normed, need_weights=False)[0])


class Attention(Model):
    make_block = _Attention
