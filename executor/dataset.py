"""Batches of the user's own data set, in an order that no plan and no number of ranks changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from executor.entries import fitted_entries
from executor.sample_order import SampleOrder
from planner.errors import PipeplanError, shorten
from planner.tracing.form import Form
from planner.tracing.imports import import_callable
from planner.tracing.user_code import FAILURES, told

Sample = Mapping[str, Any] | Sequence[Any]


class Dataset(Protocol):
    """A map-style data set, as ``torch.utils.data.Dataset`` with a length."""

    def __len__(self) -> int:
        """How many samples there are, the same on every rank."""

    def __getitem__(self, index: int) -> Sample:
        """One sample: entries by the names of forward's arguments, and ``target`` for the loss.

        Or a tuple of them in the order of the model's example batch. Entries are tensors, arrays
        or numbers, in the shapes of the example batch without its first dimension.
        """


def load_dataset(name: str, arguments: Mapping[str, Any]) -> Dataset:
    """Import ``module:factory`` and call it.

    Only call this with a name the user typed: importing runs code.

    Raises:
        PipeplanError: if that fails, or gives something without a length or without samples.
    """
    factory = import_callable(name, "data", "lib.data:reviews")
    try:
        dataset: Any = factory(**arguments)
        size = len(dataset)
    except FAILURES as error:
        given = f" with data_arguments {shorten(dict(arguments), 400)}" if arguments else ""
        raise PipeplanError(
            f"data {name!r}{given} cannot be made: {told(error)}; expected a map-style data set, "
            "with a length and [index]"
        ) from error
    if size < 1 or not hasattr(dataset, "__getitem__"):
        raise PipeplanError(
            f"data {name!r}: the factory returned a {type(dataset).__name__} of {size} samples; "
            "expected a map-style data set, with a length of at least 1 and [index]"
        )
    return dataset  # type: ignore[no-any-return]


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
        example: the model's example batch (:func:`planner.tracing.factory.example_batch`): names,
            shapes with samples first, dtypes. Float32 entries of samples are rounded to an
            example's low precision; nothing else is converted.
        microbatches: of a step.
        seed: of the order.
        samples_seen: before ``first_step``, for a training that is resumed.
        first_step: the first step that will be asked for.
        name: of the data set in messages.

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
    ) -> None:
        self.dataset = dataset
        self.name = name or type(dataset).__name__
        self.order = SampleOrder(len(dataset), seed)
        self.samples_per_microbatch = _samples(example)
        self.samples_per_step = microbatches * self.samples_per_microbatch
        self._forms = {entry: Form(t.dtype, t.shape[1:]) for entry, t in example.items()}
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
        with _own_draws():
            rows = [self._sample(start + row) for row in range(self.samples_per_microbatch)]
        return {entry: torch.stack([row[entry] for row in rows]) for entry in self._forms}

    def _sample(self, position: int) -> dict[str, Tensor]:
        index = self.order.index(position)
        place = f"data {self.name}[{index}]"
        _seed_draws(self.order.draw_seed(position))
        try:
            sample: object = self.dataset[index]
        except FAILURES as error:
            raise PipeplanError(f"{place} failed: {told(error)}") from error
        return fitted_entries(sample, self._forms, place, "one sample of the batch")


def _samples(example: Mapping[str, Tensor]) -> int:
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
def _own_draws() -> Iterator[None]:
    """Leave the global generators as they were, whatever is drawn inside."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _seed_draws(seed: int) -> None:
    # Torch's CPU generator alone: manual_seed would seed the accelerators' too.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
