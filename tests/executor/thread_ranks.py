"""Ranks as threads of one process, and small checkpoints to write with them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

from executor.checkpoint import Checkpoint, Ranks
from planner.errors import PipeplanError


def together(count: int, action: Callable[[Ranks], object]) -> list:
    """Run an action on several ranks, each a thread; an exception is its result."""
    texts = [""] * count
    barrier = Barrier(count, timeout=600)

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        found = list(texts)
        barrier.wait()
        return found

    def run(rank: int) -> object:
        try:
            return action(Ranks(rank, lambda text: gather(rank, text)))
        except PipeplanError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def some(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "parameters/a.weight": torch.randn(3, 4, generator=generator),
        "optimizer/a.weight/step": torch.tensor(float(seed)),
        "buffers/count": torch.tensor(seed),
    }


def assert_holds(checkpoint: Checkpoint, expected: dict[str, Tensor]) -> None:
    found = checkpoint.read(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].equal(tensor), name
