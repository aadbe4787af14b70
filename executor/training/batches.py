"""Batches of microbatches: of text, or drawn at random."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from executor.stage.random_numbers import microbatch_seed
from planner.errors import PipeplanError
from planner.job import TARGET, Job, text_problem, token_input
from planner.tracing.factory import Form, batch_at, example_batch

Source = Literal["text", "random"]
BatchOf = Callable[[int, int], Mapping[str, Tensor]]
"""Returns the batch of a step and a microbatch, by the names of its entries."""
MAX_TEXT_BYTES = 16 * 2**20


def batches(
    source: Source, model: nn.Module, job: Job, seed: int, too_small: str | None = None
) -> BatchOf:
    """A function ``(step, microbatch) -> batch``; equal arguments give equal batches everywhere.

    Args:
        source: ``text``: byte-level language modelling over the Python standard library's own
            sources; ``random``: the model's example batch (``example_batch`` or the job's
            ``inputs``), drawn anew under a seed of its own for every microbatch.
        model: whose example batch says which entries there are.
        job: microbatch size and lengths.
        seed: of the order of samples.
        too_small: why the model has no room for bytes
            (:func:`planner.tracing.lookups.too_small_for_text`), if it has none.

    Raises:
        PipeplanError: if ``text`` is asked for and the model does not read sequences of tokens
            with room for 256 values.
    """
    whole = _random(model, job, seed) if source == "random" else _text(model, job, seed, too_small)
    lengths = job.lengths
    if lengths is None:
        return whole

    def cut(step: int, microbatch: int) -> Mapping[str, Tensor]:
        place = lengths.of_iteration(step, job.microbatches)[microbatch]
        return batch_at(whole(step, microbatch), lengths, place)

    return cut


def _random(model: nn.Module, job: Job, seed: int) -> BatchOf:
    def batch(step: int, microbatch: int) -> Mapping[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(microbatch_seed(seed, step, microbatch))
            return example_batch(model, job)

    return batch


def _text(model: nn.Module, job: Job, seed: int, too_small: str | None) -> BatchOf:
    forms = {
        entry: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for entry, tensor in example_batch(model, job).items()
    }
    problem, name = text_problem(forms, job) or too_small, token_input(forms)
    if problem is not None or name is None:
        larger = "" if name is None else "give the model a larger vocabulary or "
        raise PipeplanError(f"{problem}; {larger}use --data random")
    samples, tokens = forms[name][1]
    text = standard_library_text()

    def batch(step: int, microbatch: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(microbatch_seed(seed, step, microbatch))
        starts = torch.randint(0, len(text) - tokens - 1, (samples,), generator=generator)
        rows = torch.stack([text[s : s + tokens + 1] for s in starts.tolist()]).long()
        return {name: rows[:, :-1].contiguous(), TARGET: rows[:, 1:].contiguous()}

    return batch


def is_always_the_same(batch_of: BatchOf, step: int, microbatches: int) -> bool:
    """Return whether a step has several microbatches that are all equal bit by bit."""
    if microbatches < 2:
        return False
    first = batch_of(step, 0)
    return all(_equal(first, batch_of(step, microbatch)) for microbatch in range(1, microbatches))


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return one.keys() == other.keys() and all(
        Form.of(value) == Form.of(other[name]) and bits(value).equal(bits(other[name]))
        for name, value in one.items()
    )


def standard_library_text() -> Tensor:
    """The standard library's sources as one uint8 tensor, in a fixed order."""
    folder, text = Path(sysconfig.get_paths()["stdlib"]), bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            text += path.read_bytes()
        if len(text) >= MAX_TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)
