"""Batches of the user's own data set, in an order that no plan and no number of ranks changes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from executor.training.data import GlobalGenerators, seed_draws
from planner.errors import PipeplanError
from planner.tracing.factory import Form
from planner.tracing.user_code import FAILURES, one_line


def fitted_entries(
    found: object, forms: Mapping[str, Form], place: str, what: str
) -> dict[str, Tensor]:
    """Entries as tensors on the CPU; float32 ones are rounded where a low precision is wanted.

    Args:
        found: what the user's code gave: a mapping with exactly these names, or a tuple or list
            in their order.
        forms: what is expected.
        place: whose it is, for messages.
        what: the expected forms are those of, for messages.

    Raises:
        PipeplanError: naming every entry that does not fit.
    """
    entries = _by_name(found, list(forms), place)
    fitted = {
        name: _fitted(entries[name], form, f"{place}: entry {name!r}", what)
        for name, form in forms.items()
    }
    problems = [text for text in fitted.values() if isinstance(text, str)]
    if problems:
        raise PipeplanError(problems)
    return {name: tensor for name, tensor in fitted.items() if isinstance(tensor, Tensor)}


def _by_name(found: object, names: Sequence[str], place: str) -> Mapping[str, object]:
    if isinstance(found, tuple | list) and len(found) == len(names):
        return dict(zip(names, found, strict=True))
    if isinstance(found, Mapping) and set(found) == set(names):
        return found
    told = f"a {type(found).__name__}"
    if isinstance(found, Mapping):
        told = f"entries {', '.join(map(str, found)) or 'none'}"
    elif isinstance(found, tuple | list):
        told = f"a {type(found).__name__} of {len(found)}"
    raise PipeplanError(
        f"{place} returned {told}; expected the entries {', '.join(names)}, by name or as a "
        "tuple in this order"
    )


def _fitted(value: object, form: Form, where: str, what: str) -> Tensor | str:
    """The entry as a tensor that fits, or what is wrong with it."""
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        return f"{where} is a {type(value).__name__}; expected a tensor, an array or a number"
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{where} cannot be made a tensor: {error}"
    rounds = tensor.dtype == torch.float32 and form.dtype in (torch.float16, torch.bfloat16)
    has_shape = tuple(tensor.shape) == tuple(form.shape)
    if not has_shape or (tensor.dtype != form.dtype and not rounds):
        return f"{where} is {Form.of(tensor)}; expected {form}, {what} that the plan was made for"
    return tensor.detach().to("cpu", form.dtype)


_ROUNDS = 8
_LEAST_HALF_BITS = 3
_MASK = 2**64 - 1


@dataclass(frozen=True)
class SampleOrder:
    """The samples of a data set, epoch after epoch, each epoch in an order of its own.

    An epoch's order is a Feistel network over index bits (Luby and Rackoff 1988, "How to
    construct pseudorandom permutations"), walked until the index is in range (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains", section 4). It takes no memory and some
    microseconds a sample, for 10 samples or 10^12, and does not change with torch's versions.

    Attributes:
        size: number of samples, at least 1.
        seed: any whole number.
        shuffled: whether epochs have orders of their own; else each is that of the indices.
    """

    size: int
    seed: int
    shuffled: bool = True

    def index(self, position: int) -> int:
        """The sample at a position of the whole training, which begins at 0."""
        epoch, place = divmod(position, self.size)
        if not self.shuffled:
            return place
        keys = _keys(self.seed, epoch)
        half_bits = max(_LEAST_HALF_BITS, ((self.size - 1).bit_length() + 1) // 2)
        place = _permuted(place, half_bits, keys)
        while place >= self.size:
            place = _permuted(place, half_bits, keys)
        return place

    def draw_seed(self, position: int) -> int:
        """A seed below 2**63 for what the data set draws for the sample there."""
        return int.from_bytes(_digest(f"draw {self.seed} {position}")[:8], "little") >> 1


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return struct.unpack(f"<{_ROUNDS}Q", _digest(f"epoch {seed} {epoch}"))


def _permuted(index: int, half_bits: int, keys: tuple[int, ...]) -> int:
    low = (1 << half_bits) - 1
    left, right = index >> half_bits, index & low
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & low)
    return left << half_bits | right


def _mixed(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


Sample = Mapping[str, Any] | Sequence[Any]


class Dataset(Protocol):
    """A map-style data set, as ``torch.utils.data.Dataset`` with a length."""

    def __len__(self) -> int:
        """Return the number of samples, the same on every rank."""

    def __getitem__(self, index: int) -> Sample:
        """One sample: entries by the names of forward's arguments, and ``target`` for the loss.

        Or a tuple of them in the order of the model's example batch. Entries are tensors, arrays
        or numbers, in the shapes of the example batch without its first dimension.
        """


class DatasetBatches:
    """A function ``(step, microbatch) -> batch`` over a data set; equal arguments, equal batches.

    Sample n of the training is a pure function of the seed and n, and a step takes the next
    ``microbatches`` x samples of them, on into the next epoch's order. So a training that resumes
    by another plan goes on with the very samples that the first one would have taken. A rank loads
    the microbatches it asks for and no others. What the data set draws at random for a sample
    (torch's CPU generator, numpy's and Python's global ones) is drawn anew from the seed and n, and
    changes nothing for whoever draws outside.

    Args:
        dataset: the user's.
        example: the model's example batch (:func:`planner.tracing.factory.example_batch`):
        names,
            shapes with samples first, dtypes. Float32 entries of samples are rounded to an
            example's low precision; nothing else is converted.
        microbatches: of a step.
        seed: of the order.
        samples_seen: before ``first_step``, for a training that is resumed.
        first_step: the first step that will be asked for.
        name: of the data set in messages.
        shuffled: see :class:`SampleOrder`.

    Raises:
        PipeplanError: if the example's entries have no common first dimension.
    """

    def __init__(
        self,
        dataset: Dataset,
        example: Mapping[str, Tensor],
        microbatches: int,
        seed: int,
        *,
        samples_seen: int = 0,
        first_step: int = 1,
        name: str | None = None,
        shuffled: bool = True,
    ) -> None:
        self.dataset = dataset
        self.name = name or type(dataset).__name__
        self.order = SampleOrder(len(dataset), seed, shuffled)
        self.samples_per_microbatch = samples_of(example)
        self.samples_per_step = microbatches * self.samples_per_microbatch
        self._forms = forms_of_sample(example)
        self._origin = samples_seen - first_step * self.samples_per_step

    def samples_seen_after(self, step: int) -> int:
        """Samples of all steps up to this one, for the checkpoint."""
        return self._origin + (step + 1) * self.samples_per_step

    def __call__(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """Load a microbatch.

        Raises:
            PipeplanError: if the data set fails, or a sample does not fit the example batch.
        """
        start = self._origin + step * self.samples_per_step
        start += microbatch * self.samples_per_microbatch
        with own_draws():
            rows = [self._sample(start + row) for row in range(self.samples_per_microbatch)]
        return {entry: torch.stack([row[entry] for row in rows]) for entry in self._forms}

    def _sample(self, position: int) -> dict[str, Tensor]:
        index = self.order.index(position)
        place = f"data {self.name}[{index}]"
        seed_draws(self.order.draw_seed(position))
        try:
            sample: object = self.dataset[index]
        except FAILURES as error:
            raise PipeplanError(f"{place} failed: {one_line(error)}") from error
        return fitted_entries(sample, self._forms, place, "one sample of the batch")


def forms_of_sample(example: Mapping[str, Tensor]) -> dict[str, Form]:
    """Return the forms of one sample's entries."""
    return {entry: Form(tensor.dtype, tensor.shape[1:]) for entry, tensor in example.items()}


def samples_of(example: Mapping[str, Tensor]) -> int:
    """Return the samples of a microbatch.

    Raises:
        PipeplanError: if the example's entries have no common first dimension.
    """
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in example.values()}
    size = next(iter(sizes), None)
    if len(sizes) != 1 or size is None:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in example.items())
        raise PipeplanError(
            f"the model's example batch ({shapes or 'empty'}) has entries without the samples as "
            "their first dimension, so no data set of samples can fill it; train with a function "
            "(step, microbatch) -> batch from Python"
        )
    return size


@contextmanager
def own_draws() -> Iterator[None]:
    """Leave the global generators as they were, whatever is drawn inside."""
    before = GlobalGenerators.now()
    try:
        yield
    finally:
        before.restore()
