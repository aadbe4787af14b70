"""Samples that come one after the other: iterable data sets and generator functions."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from executor.training.data import seed_draws
from executor.training.dataset import (
    SampleOrder,
    fitted_entries,
    forms_of_sample,
    own_draws,
    samples_of,
)
from planner.errors import PipeplanError, shorten
from planner.tracing.user_code import FAILURES, import_callable, one_line

logger = logging.getLogger(__name__)
KINDS_OF_DATA = (
    "'text', 'random', module:factory, a map-style data set with a length and [index], an iterable "
    "one, a generator function, or a function (step, microbatch) -> batch"
)


@dataclass(frozen=True)
class Stream:
    """Samples that can be read from the first one again.

    Attributes:
        begin: returns what is read in a pass.
        dataset: whose ``state_dict``, ``load_state_dict`` and ``set_epoch`` are called, if it has
            them.
        name: for messages.
    """

    begin: Callable[[], Iterable[Any]]
    dataset: object
    name: str

    @property
    def is_stateful(self) -> bool:
        """Whether it can say where it is, and go on from there."""
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")


def open_data(data: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a map-style data set or a :class:`Stream` of what the user named or gave.

    Only call this with a name the user typed: importing runs code.

    Args:
        data: ``module:factory``, a data set, or a generator function.
        arguments: keyword arguments of the factory.

    Raises:
        PipeplanError: if making it fails, or it is no data set.
    """
    is_named = isinstance(data, str)
    name = data if is_named else getattr(data, "__name__", type(data).__name__)
    make: Callable[..., Any] = data
    if is_named:
        make = import_callable(data, "data", "lib.data:reviews")
    elif not inspect.isgeneratorfunction(data):
        make = lambda: data  # noqa: E731 - an object that is there
    try:
        found = make(**arguments)
    except FAILURES as error:
        given = f" with data_arguments {shorten(dict(arguments), 400)}" if arguments else ""
        raise PipeplanError(
            f"data {name!r}{given} cannot be made: {one_line(error)}; expected a map-style data "
            "set, with a length and [index], or an iterable one"
        ) from error
    if isinstance(found, DataLoader):
        raise PipeplanError(
            f"data {name!r}: a DataLoader makes batches of its own, and a plan has microbatches of "
            "a fixed size; give the data set that it reads"
        )
    is_stream = isinstance(found, IterableDataset) or not hasattr(found, "__getitem__")
    # The order of a set differs between processes.
    if is_stream and hasattr(found, "__iter__") and not isinstance(found, Set):
        is_iterator = hasattr(found, "__next__")
        if is_iterator and make(**arguments) is found:
            raise PipeplanError(
                f"data {name!r}: an iterator can be read only once, and restarts read it again; "
                "give the generator function, or a data set with __iter__"
            )
        return Stream((lambda: make(**arguments)) if is_iterator else lambda: found, found, name)
    _require_map_style(name, found)
    return found


def _require_map_style(name: str, found: Any) -> None:
    kind = type(found).__name__
    if not hasattr(found, "__getitem__"):
        raise PipeplanError(f"data: {shorten(found)} is of type {kind}; expected {KINDS_OF_DATA}")
    try:
        size = len(found)
    except FAILURES as error:
        raise PipeplanError(
            f"data {name!r}: a {kind} has no length: {one_line(error)}; expected {KINDS_OF_DATA}"
        ) from error
    if size < 1:
        raise PipeplanError(
            f"data {name!r}: a {kind} of {size} samples; expected a map-style data set with a "
            "length of at least 1, and [index]"
        )


class StreamBatches:
    """A function ``(step, microbatch) -> batch`` over a stream; steps are asked for in order.

    Every rank that reads batches reads all samples from the first one on, in the stream's own
    order, and keeps those of the microbatches it is asked for. What is drawn at random for a sample
    (torch's CPU generator, numpy's and Python's global ones) is drawn anew from the seed and the
    sample's number, so that all ranks read the same; a stream must not depend on anything else that
    differs between ranks. When a pass has ended the next one begins, as epochs do.

    Args:
        stream: the user's.
        example: the model's example batch; its names, shapes with samples first, dtypes.
        microbatches: of a step.
        seed: of what is drawn.
        samples_seen: before ``first_step``; they are skipped, unless ``state`` is given.
        first_step: the first step that will be asked for.
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
        self.stream = stream
        self._order = SampleOrder(1, seed)
        self._samples = samples_of(example)
        self._per_step = microbatches * self._samples
        self._forms = forms_of_sample(example)
        self._origin = samples_seen - first_step * self._per_step
        self._passes, self._read, self._in_pass = 0, 0, 0
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._iterator: Iterator[Any] | None = None
        if state is not None:
            self._passes, self._read = int(state["passes"]), samples_seen
            stream.dataset.load_state_dict(state["state"])  # type: ignore[attr-defined]

    def samples_seen_after(self, step: int) -> int:
        """Samples of all steps up to this one, for the checkpoint."""
        return self._origin + (step + 1) * self._per_step

    def state_after(self, step: int) -> dict[str, Any] | None:
        """Return where the stream is after a step; None if this rank reads none or cannot say.

        A state that is not plain JSON is left out: who resumes skips samples then.
        """
        end = self.samples_seen_after(step)
        if not self.stream.is_stateful or self._iterator is None or self._read > end:
            return None
        self._read_to(end, end)
        state = self.stream.dataset.state_dict()  # type: ignore[attr-defined]
        found = {"passes": self._passes, "state": state}
        try:
            return found if json.loads(json.dumps(found)) == found else None
        except (TypeError, ValueError):
            return None

    def __call__(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """Read up to a microbatch and return it.

        Raises:
            PipeplanError: if the stream fails or is empty, a sample does not fit the example
                batch, or the microbatch was read past.
        """
        start = self._origin + step * self._per_step + microbatch * self._samples
        # Another stage of this rank may ask for it again, as may who looks at the first step.
        self._read_to(start + self._samples, self._origin + step * self._per_step)
        rows = [self._kept.get(start + row) for row in range(self._samples)]
        if None in rows:
            raise PipeplanError(
                f"data {self.stream.name}: step {step} was read past, and a stream is read in "
                "order; give a map-style data set or a function (step, microbatch) -> batch"
            )
        return {entry: torch.stack([row[entry] for row in rows if row]) for entry in self._forms}

    def _read_to(self, end: int, kept_from: int) -> None:
        """Read so many samples in all, and keep those from a number on."""
        if end > self._read:
            self._kept = {n: row for n, row in self._kept.items() if n >= kept_from}
        with own_draws():
            while self._read < end:
                sample = self._next()
                if self._read >= kept_from:
                    place = f"data {self.stream.name}: sample {self._read}"
                    what = "one sample of the batch"
                    self._kept[self._read] = fitted_entries(sample, self._forms, place, what)
                self._read += 1

    def _next(self) -> object:
        seed_draws(self._order.draw_seed(self._read))
        while True:
            try:
                if self._iterator is None:
                    self._iterator = self._begin()
                sample: object = next(self._iterator)
                self._in_pass += 1
                return sample
            except StopIteration:
                if not self._in_pass:
                    raise PipeplanError(
                        f"data {self.stream.name}: a pass has no sample; give a stream that has"
                    ) from None
                self._passes, self._in_pass, self._iterator = self._passes + 1, 0, None
            except FAILURES as error:
                raise PipeplanError(
                    f"data {self.stream.name}: sample {self._read} failed: {one_line(error)}"
                ) from error

    def _begin(self) -> Iterator[Any]:
        if hasattr(self.stream.dataset, "set_epoch"):
            self.stream.dataset.set_epoch(self._passes)
        return iter(self.stream.begin())
