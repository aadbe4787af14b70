"""The random numbers that training draws: seeds of microbatches, and states of generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from planner.tracing.sharing import attribute_of

_STEPS = 1_000_003


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of a microbatch; torch takes seeds below 2**64."""
    return ((seed * _STEPS + step) * _STEPS + microbatch) % 2**63


@dataclass(frozen=True)
class RandomState:
    """The state of a device's generator, as a tensor of bytes on the CPU."""

    device: torch.device
    state: Tensor

    @staticmethod
    def now(device: torch.device) -> RandomState:
        """The state at this moment."""
        if device.type == "cuda":
            return RandomState(device, torch.cuda.get_rng_state(device))
        return RandomState(device, torch.get_rng_state())

    def restore(self) -> None:
        """Continue from here."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.state, self.device)
        else:
            torch.set_rng_state(self.state)

    @staticmethod
    @contextmanager
    def borrowed(state: RandomState | None) -> Iterator[None]:
        """Continue from ``state`` inside, and restore the present one after it; None: nothing."""
        if state is None:
            yield
            return
        before = RandomState.now(state.device)
        state.restore()
        try:
            yield
        finally:
            before.restore()


@contextmanager
def own_draws() -> Iterator[None]:
    """Leave the CPU's global generators (of torch, numpy, ``random``) as they were before."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def seed_draws(seed: int) -> None:
    """Seed the global generators on the CPU: those of torch, numpy and Python's ``random``."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_generator(device: torch.device, seed: int, offset: int = 0) -> None:
    """Seed the generator of one device.

    Args:
        device: whose generator.
        seed: of its numbers.
        offset: of a GPU's counter; its numbers continue from there.
    """
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        torch.default_generator.manual_seed(seed)


def state_bytes(device: torch.device) -> int:
    """Size of a generator's state."""
    return RandomState.now(device).state.numel()


def drawn_offset(nodes: Iterable[fx.Node], device: torch.device) -> int:
    """Return how far operations move the counter that is a GPU's generator.

    The counter depends on shapes and on the kind of GPU, and is the same for all microbatches.

    Args:
        nodes: that draw random numbers, of an exported graph, in order.
        device: a GPU; it runs each once, on tensors that it makes for that.
    """
    with RandomState.borrowed(RandomState.now(device)):
        seed_generator(device, 0)
        draw(nodes, device)
        return int(torch.cuda.default_generators[device.index or 0].get_offset())


@torch.no_grad()
def draw(nodes: Iterable[fx.Node], device: torch.device) -> None:
    """Run operations on tensors of ones, for what they draw alone.

    Args:
        nodes: of an exported graph; their inputs have shapes and types in ``meta``.
        device: that they run on.
    """

    def ones(node: fx.Node) -> Any:
        value = node.meta.get("val")
        if node.op == "get_attr" and not isinstance(value, Tensor):
            return attribute_of(node.graph.owning_module, str(node.target))  # A graph of its own.
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made.fill_(1)

    for node in nodes:
        assert callable(node.target)
        kwargs = dict(fx.node.map_arg(node.kwargs, ones))
        if kwargs.get("device") is not None:
            kwargs["device"] = device
        node.target(*fx.node.map_arg(node.args, ones), **kwargs)
