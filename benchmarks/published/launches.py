"""Host time of an operation of a transformer block that torch runs eagerly.

Usage:
    python -m benchmarks.published.launches

Where launches block (``CUDA_LAUNCH_BLOCKING=1``) nothing hides it: the GPU waits while the host
goes on to the next operation. Tensors have so few elements that computing them takes next to
nothing.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDS, WARM_UP = 200, 20


class Block(nn.Module):
    """A transformer block as Megatron-LM's, by single operations: attention is not fused."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [samples, tokens, hidden] of the same."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
            for part in self.qkv(self.before(hidden)).chunk(3, dim=-1)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / 8
        weights = nn.functional.dropout(torch.softmax(scores, -1), 0.1)
        mixed = torch.matmul(weights, value).transpose(1, 2).contiguous().flatten(2)
        hidden = hidden + nn.functional.dropout(self.projection(mixed), 0.1)
        inner = nn.functional.gelu(self.up(self.behind(hidden)))
        return hidden + nn.functional.dropout(self.down(inner), 0.1)


class _Counted(TorchDispatchMode):
    """Counts the operations that would launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def host_us() -> tuple[int, float]:
    """Return the operations of a forward, one more and a backward, and the host's time of one."""
    torch.set_num_threads(1)
    block, given = Block(8, 2), torch.randn(1, 4, 8, requires_grad=True)

    def run() -> None:
        with torch.no_grad():
            block(given)
        block(given).sum().backward()

    with _Counted() as counted:
        run()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return counted.count, median(seconds[WARM_UP:]) / counted.count * 1e6


if __name__ == "__main__":
    operations, each_us = host_us()
    print(f"{operations} operations, {each_us:.1f} µs of the host each")
    sys.exit()
