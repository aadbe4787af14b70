"""Batches: real text that every machine has, or random tensors in the model's shapes."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from executor.random_state import microbatch_seed
from planner.artifacts.job import Job
from planner.errors import PipeplanError
from planner.tracing.factory import TARGET, example_batch

Source = Literal["text", "random"]
BatchOf = Callable[[int, int], Mapping[str, Tensor]]
MAX_TEXT_BYTES = 16 * 2**20


def batches(source: Source, model: nn.Module, job: Job, seed: int) -> BatchOf:
    """A function ``(step, microbatch) -> batch``; equal arguments give equal batches everywhere.

    Args:
        source: ``text``: byte-level language modelling over the Python standard library's own
            sources; ``random``: tensors like the model's example batch.
        model: whose example batch says which entries there are.
        job: microbatch size.
        seed: of the order of samples.

    Raises:
        PipeplanError: if ``text`` is asked for and the model does not read sequences of tokens
            with room for 256 values.
    """
    if source == "random":
        return lambda step, microbatch: _random(model, job, microbatch_seed(seed, step, microbatch))
    example = example_batch(model, job)
    name, shape = _token_input(example)
    _require_room_for_bytes(job, name)
    text = standard_library_text()

    def batch(step: int, microbatch: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(microbatch_seed(seed, step, microbatch))
        starts = torch.randint(0, len(text) - shape[1] - 1, (shape[0],), generator=generator)
        rows = torch.stack([text[s : s + shape[1] + 1] for s in starts.tolist()]).long()
        return {name: rows[:, :-1].contiguous(), TARGET: rows[:, 1:].contiguous()}

    return batch


def _random(model: nn.Module, job: Job, seed: int) -> Mapping[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return example_batch(model, job)


def _token_input(example: Mapping[str, Tensor]) -> tuple[str, torch.Size]:
    names = [name for name in example if name != TARGET]
    target = example.get(TARGET)
    if len(names) == 1 and target is not None:
        tokens = example[names[0]]
        if tokens.dtype == torch.int64 and tokens.ndim == 2 and target.shape == tokens.shape:
            return names[0], tokens.shape
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in example.items())
    raise PipeplanError(
        "--data text needs a model that reads one int64 input of shape [samples, tokens] and has "
        f"a target of the same shape; this one's batch is {shapes}; use --data random"
    )


def _require_room_for_bytes(job: Job, tokens: str) -> None:
    for name in (tokens, TARGET):
        if name in job.inputs and job.inputs[name].below < 256:
            raise PipeplanError(
                f"inputs.{name}.below: {job.inputs[name].below}, but --data text has 256 kinds of "
                "bytes; give the model a larger vocabulary or use --data random"
            )


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
