"""Random numbers in training: the same ones, however the model is cut.

Each microbatch has a seed of its own, a function of the run's seed, the iteration and the
microbatch. The first stage that draws starts from it, and hands the generator's state on with its
activations; so all stages together draw what a single process draws that seeds itself with
:func:`microbatch_seed` before each microbatch. Masks are the same on devices of one kind: a CPU and
a GPU draw different numbers from one seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """Go on from here."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.state, self.device)
        else:
            torch.set_rng_state(self.state)

    @staticmethod
    @contextmanager
    def borrowed(state: RandomState | None) -> Iterator[None]:
        """Go on from ``state`` inside, and from where one was before after it; None: as it is."""
        if state is None:
            yield
            return
        before = RandomState.now(state.device)
        state.restore()
        try:
            yield
        finally:
            before.restore()


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the generator of one device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def state_bytes(device: torch.device) -> int:
    """Size of a generator's state."""
    return RandomState.now(device).state.numel()
