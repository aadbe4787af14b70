"""Batches of the samples of a data set, which no plan and no number of ranks changes.

A step takes the next ``microbatches`` x samples of the training, so a training that resumes under
another plan continues with the samples that the first one would have taken. Anything that a data
set draws at random for a sample (torch's CPU generator, numpy's and Python's global ones) is drawn
anew from the seed and the sample's number, and changes nothing for code outside.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from executor.stage.random_numbers import own_draws, seed_draws
from planner.errors import PipeplanError
from planner.tracing.factory import Form
from planner.tracing.user_code import FAILURES, one_line


def fitted_entries(
    found: object, forms: Mapping[str, Form], place: str, what: str
) -> dict[str, Tensor]:
    """Entries as tensors on the CPU; float32 ones are rounded where a low precision is wanted.

    Args:
        found: returned by the user's code: a mapping with exactly these names, or a tuple or list
            in their order.
        forms: the expected forms.
        place: where the entries come from, for messages.
        what: what the expected forms are of, for messages.

    Raises:
        PipeplanError: naming every entry that does not fit.
    """
    if isinstance(found, tuple | list) and len(found) == len(forms):
        found = dict(zip(forms, found, strict=True))
    if not isinstance(found, Mapping) or set(found) != set(forms):
        told = f"a {type(found).__name__}"
        if isinstance(found, Mapping):
            told = f"entries {', '.join(map(str, found)) or 'none'}"
        elif isinstance(found, tuple | list):
            told += f" of {len(found)}"
        raise PipeplanError(
            f"{place} returned {told}; expected the entries {', '.join(forms)}, by name or as a "
            "tuple in this order"
        )
    fitted, problems = dict[str, Tensor](), list[str]()
    for name, form in forms.items():
        try:
            fitted[name] = _fitted(found[name], form, what)
        except ValueError as error:
            problems.append(f"{place}: entry {name!r} {error}")
    if problems:
        raise PipeplanError(problems)
    return fitted


def _fitted(value: object, form: Form, what: str) -> Tensor:
    """Return the entry as a tensor of this form, or raise a ValueError."""
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        kind = type(value).__name__
        raise ValueError(f"is a {kind}; expected a tensor, an array or a number")
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"cannot be made a tensor: {error}") from None
    rounds = tensor.dtype == torch.float32 and form.dtype in (torch.float16, torch.bfloat16)
    if tuple(tensor.shape) != tuple(form.shape) or (tensor.dtype != form.dtype and not rounds):
        raise ValueError(
            f"is {Form.of(tensor)}; expected {form}, {what} that the plan was made for"
        )
    return tensor.detach().to("cpu", form.dtype)


# --- the order of samples -------------------------------------------------------------------------

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


def draw_seed(seed: int, position: int) -> int:
    """A seed below 2**63 for the random numbers of the sample at a position."""
    return int.from_bytes(_digest(f"draw {seed} {position}")[:8], "little") >> 1


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


# --- batches of samples ---------------------------------------------------------------------------


class SampleBatches:
    """A function ``(step, microbatch) -> batch`` of samples; equal arguments, equal batches.

    Args:
        name: of the data in messages.
        example: the model's example batch (:func:`planner.tracing.factory.example_batch`): names,
            shapes with samples first, dtypes. Float32 entries of samples are rounded to an
            example's low precision; nothing else is converted.
        microbatches: of a step.
        seed: of the order, and of the numbers drawn for samples.
        samples_seen: before ``first_step``, for a training that is resumed.
        first_step: the first step that will be asked for.

    Raises:
        PipeplanError: if the example's entries have no common first dimension.
    """

    def __init__(
        self,
        name: str,
        example: Mapping[str, Tensor],
        microbatches: int,
        seed: int,
        samples_seen: int,
        first_step: int,
    ) -> None:
        self.name = name
        self.seed = seed
        self._samples = samples_of(example)
        self._per_step = microbatches * self._samples
        self._forms = {entry: Form(x.dtype, x.shape[1:]) for entry, x in example.items()}
        self._origin = samples_seen - first_step * self._per_step

    def samples_seen_after(self, step: int) -> int:
        """Samples of all steps up to this one, for the checkpoint."""
        return self._origin + (step + 1) * self._per_step

    def __call__(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """Load a microbatch.

        Raises:
            PipeplanError: if the data fails, or a sample does not fit the example batch.
        """
        start = self._origin + step * self._per_step + microbatch * self._samples
        with own_draws():
            rows = [self._sample(step, start + row) for row in range(self._samples)]
        return {entry: torch.stack([row[entry] for row in rows]) for entry in self._forms}

    def _sample(self, step: int, position: int) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def _read(self, position: int, place: str, read: Callable[[], object]) -> object:
        """Return what ``read`` returns, with the random numbers of a sample."""
        seed_draws(draw_seed(self.seed, position))
        try:
            return read()
        except PipeplanError:
            raise
        except FAILURES as error:
            raise PipeplanError(f"{place} failed: {one_line(error)}") from error


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


class Dataset(Protocol):
    """A map-style data set, as ``torch.utils.data.Dataset`` with a length."""

    def __len__(self) -> int:
        """Return the number of samples, the same on every rank."""

    def __getitem__(self, index: int) -> Mapping[str, Any] | Sequence[Any]:
        """One sample: entries by the names of forward's arguments, and ``target`` for the loss.

        Or a tuple of them in the order of the model's example batch. Entries are tensors, arrays
        or numbers, in the shapes of the example batch without its first dimension.
        """


class DatasetBatches(SampleBatches):
    """Batches of a map-style data set; a rank loads the microbatches it asks for and no others.

    Args:
        dataset: the user's.
        example, microbatches, seed, samples_seen, first_step: see :class:`SampleBatches`.
        name: of the data set in messages; None: its class.
        shuffled: see :class:`SampleOrder`.
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
        name = name or type(dataset).__name__
        super().__init__(name, example, microbatches, seed, samples_seen, first_step)
        self.dataset = dataset
        self.order = SampleOrder(len(dataset), seed, shuffled)

    def _sample(self, step: int, position: int) -> Mapping[str, Tensor]:
        index = self.order.index(position)
        place = f"data {self.name}[{index}]"
        found = self._read(position, place, lambda: self.dataset[index])
        return fitted_entries(found, self._forms, place, "one sample of the batch")


@dataclass(frozen=True)
class Stream:
    """Samples that can be read from the first one again.

    Attributes:
        begin: returns the samples of a pass.
        dataset: whose ``state_dict``, ``load_state_dict`` and ``set_epoch`` are called, if it has
            them.
        name: for messages.
    """

    begin: Callable[[], Iterable[Any]]
    dataset: Any
    name: str

    @property
    def is_stateful(self) -> bool:
        """Whether it can save its position, and load it."""
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")


class StreamBatches(SampleBatches):
    """Batches of a stream; steps are asked for in order.

    Every rank that reads batches reads all samples from the first one on, in the stream's own
    order, and keeps those of the microbatches it is asked for, so a stream must not depend on
    anything that differs between ranks. When a pass has ended the next one begins, as epochs do.

    Args:
        stream: the user's.
        example, microbatches, seed, first_step: see :class:`SampleBatches`.
        samples_seen: before ``first_step``; they are skipped, unless ``state`` is given.
        state: that :meth:`state_after` returned after so many samples.
    """

    def __init__(
        self,
        stream: Stream,
        example: Mapping[str, Tensor],
        microbatches: int,
        seed: int,
        *,
        samples_seen: int = 0,
        first_step: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(stream.name, example, microbatches, seed, samples_seen, first_step)
        self.stream = stream
        self._passes, self._done, self._in_pass = 0, 0, 0
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._iterator: Iterator[Any] | None = None
        if state is not None:
            self._passes, self._done = int(state["passes"]), samples_seen
            stream.dataset.load_state_dict(state["state"])

    def state_after(self, step: int) -> dict[str, Any] | None:
        """Return the stream's position after a step; None if this rank reads none or cannot say.

        A state that is not plain JSON is left out: a resumed training skips samples then.
        """
        end = self.samples_seen_after(step)
        if not self.stream.is_stateful or self._iterator is None or self._done > end:
            return None
        with own_draws():
            self._read_to(end, end)
        found = {"passes": self._passes, "state": self.stream.dataset.state_dict()}
        try:
            return found if json.loads(json.dumps(found)) == found else None
        except (TypeError, ValueError):
            return None

    def _sample(self, step: int, position: int) -> Mapping[str, Tensor]:
        # Another stage of this rank may ask for any sample of the step again.
        self._read_to(position + 1, self._origin + step * self._per_step)
        if position not in self._kept:
            raise PipeplanError(
                f"data {self.name}: step {step} was read past, and a stream is read in order; give "
                "a map-style data set or a function (step, microbatch) -> batch"
            )
        return self._kept[position]

    def _read_to(self, end: int, kept_from: int) -> None:
        """Read so many samples in all, and keep those from a number on."""
        if end > self._done:
            self._kept = {n: row for n, row in self._kept.items() if n >= kept_from}
        while self._done < end:
            place = f"data {self.name}: sample {self._done}"
            sample = self._read(self._done, place, self._next)
            if self._done >= kept_from:
                what = "one sample of the batch"
                self._kept[self._done] = fitted_entries(sample, self._forms, place, what)
            self._done += 1

    def _next(self) -> object:
        while True:
            if self._iterator is None:
                if hasattr(self.stream.dataset, "set_epoch"):
                    self.stream.dataset.set_epoch(self._passes)
                self._iterator = iter(self.stream.begin())
            try:
                sample: object = next(self._iterator)
            except StopIteration:
                if not self._in_pass:
                    raise PipeplanError(
                        f"data {self.name}: a pass has no sample; give a stream that has"
                    ) from None
                self._passes, self._in_pass, self._iterator = self._passes + 1, 0, None
            else:
                self._in_pass += 1
                return sample
