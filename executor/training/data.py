"""Batches of microbatches, and the random numbers that training draws for them."""

from __future__ import annotations

import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from planner.errors import PipeplanError
from planner.job import TARGET, Job, text_problem, token_input
from planner.tracing.factory import Form, batch_at, example_batch
from planner.tracing.lookups import Lookup

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


@dataclass(frozen=True)
class GlobalGenerators:
    """The states of the generators that anybody's code may draw from on the CPU."""

    torch_state: Tensor
    numpy_state: Any
    python_state: Any

    @staticmethod
    def now() -> GlobalGenerators:
        """The states at this moment."""
        return GlobalGenerators(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.torch_state)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)


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
        offset: of a GPU's counter; its numbers go on from there.
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


Source = Literal["text", "random"]
BatchOf = Callable[[int, int], Mapping[str, Tensor]]
MAX_TEXT_BYTES = 16 * 2**20


class DeviceBatches:
    """What a stage reads of its microbatches, on its device.

    For a GPU all microbatches of a step are loaded before its first operation and lie in pinned
    memory, from which the GPU copies them while the host goes on. A CPU loads each as it is needed.

    Args:
        batch_of: returns the batch of a step and microbatch.
        names: of the entries that the stage reads.
        microbatches: of each step, that the stage runs here, in order.
        device: of the stage.
        pin: moves an entry to where the device can fetch it by itself; None: nothing is loaded
            ahead.

    Attributes:
        waited_s: for which the host loaded the batches of this step.
    """

    def __init__(
        self,
        batch_of: BatchOf,
        names: Sequence[str],
        microbatches: Sequence[int],
        device: torch.device,
        pin: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._batch_of = batch_of
        self._names = tuple(names)
        self._microbatches = tuple(microbatches)
        self._device = device
        self._pin = pin
        self.waited_s = 0.0
        self._step = 0
        self._loaded: dict[int, Mapping[str, Tensor]] = {}

    @classmethod
    def of(
        cls,
        batch_of: BatchOf,
        names: Sequence[str],
        microbatches: Sequence[int],
        device: torch.device,
    ) -> DeviceBatches:
        """Load ahead for a GPU, and into its pinned memory."""
        pin = Tensor.pin_memory if device.type == "cuda" else None
        return cls(batch_of, names, microbatches, device, pin)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step, self.waited_s = step, 0.0
        self._loaded = {}
        if self._pin is not None and self._names:
            self.load_all()

    def load_all(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Load all microbatches of the step now, unless they are, and return them."""
        pin = self._pin or _as_it_is
        self._loaded = self._loaded or {m: self._load(m, pin) for m in self._microbatches}
        return dict(self._loaded)

    def take(self, microbatch: int) -> Mapping[str, Tensor]:
        """Return the entries of a microbatch, by name."""
        if not self._names:
            return {}
        batch = self._loaded.pop(microbatch, None) or self._load(microbatch, _as_it_is)
        return {name: x.to(self._device, non_blocking=True) for name, x in batch.items()}

    def _load(self, microbatch: int, pin: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
        begin_s = time.perf_counter()
        whole = self._batch_of(self._step, microbatch)
        found = {name: pin(whole[name]) for name in self._names}
        self.waited_s += time.perf_counter() - begin_s
        return found


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def within(batch_of: BatchOf, limits: Sequence[Lookup]) -> BatchOf:
    """Return a function that refuses batches with indices that the model cannot look up.

    Args:
        batch_of: returns the batch of a step and microbatch.
        limits: of the model's exported step.
    """

    def batch(step: int, microbatch: int) -> Mapping[str, Tensor]:
        found = batch_of(step, microbatch)
        for limit in limits:
            if problem := limit.problem(found):
                raise PipeplanError(
                    f"data: step {step}, microbatch {microbatch}: {problem}; correct the data, or "
                    "take a model with as many entries"
                )
        return found

    return batch


def batches(
    source: Source, model: nn.Module, job: Job, seed: int, too_small: str | None = None
) -> BatchOf:
    """A function ``(step, microbatch) -> batch``; equal arguments give equal batches everywhere.

    Args:
        source: ``text``: byte-level language modelling over the Python standard library's own
            sources; ``random``: the model's example batch (``example_batch`` or the job's
            ``inputs``), drawn anew under a seed of its own for every microbatch.
        model: whose example batch says which entries there are.
        job: microbatch size.
        seed: of the order of samples.
        too_small: why the model has no room for bytes
            (:func:`planner.tracing.lookups.too_small_for_text`), if it has none.

    Raises:
        PipeplanError: if ``text`` is asked for and the model does not read sequences of tokens
            with room for 256 values.
    """
    if source == "random":
        return of_lengths(
            lambda step, microbatch: _random(model, job, microbatch_seed(seed, step, microbatch)),
            job,
        )
    example = example_batch(model, job)
    name, shape = _token_input(example, job, too_small)
    text = standard_library_text()

    def batch(step: int, microbatch: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(microbatch_seed(seed, step, microbatch))
        starts = torch.randint(0, len(text) - shape[1] - 1, (shape[0],), generator=generator)
        rows = torch.stack([text[s : s + shape[1] + 1] for s in starts.tolist()]).long()
        return {name: rows[:, :-1].contiguous(), TARGET: rows[:, 1:].contiguous()}

    return of_lengths(batch, job)


def of_lengths(batch_of: BatchOf, job: Job) -> BatchOf:
    """Return a function whose batches are cut to the lengths of the job's microbatches.

    Args:
        batch_of: returns batches of the longest length.
        job: whose microbatches.
    """
    lengths = job.lengths
    if lengths is None:
        return batch_of

    def cut(step: int, microbatch: int) -> Mapping[str, Tensor]:
        place = lengths.of_iteration(step, job.microbatches)[microbatch]
        return batch_at(batch_of(step, microbatch), lengths, place)

    return cut


def _random(model: nn.Module, job: Job, seed: int) -> Mapping[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return example_batch(model, job)


def _token_input(
    example: Mapping[str, Tensor], job: Job, too_small: str | None
) -> tuple[str, torch.Size]:
    forms = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in example.items()
    }
    problem, name = text_problem(forms, job) or too_small, token_input(forms)
    if name is None:
        raise PipeplanError(f"{problem}; use --data random")
    if problem is not None:
        raise PipeplanError(f"{problem}; give the model a larger vocabulary or use --data random")
    return name, example[name].shape


def is_always_the_same(batch_of: BatchOf, step: int, microbatches: int) -> bool:
    """Return whether a step has several microbatches that are all equal bit by bit."""
    if microbatches < 2:
        return False
    first = batch_of(step, 0)
    return all(_equal(first, batch_of(step, microbatch)) for microbatch in range(1, microbatches))


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        Form.of(value) == Form.of(other[name]) and _bytes(value).equal(_bytes(other[name]))
        for name, value in one.items()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def standard_library_text() -> Tensor:
    """The standard library's sources as one uint8 tensor, in a fixed order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        content = path.read_bytes()
        parts.append(content)
        size += len(content)
        if size >= MAX_TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
