"""One layer as the executor runs it: forwards, whole backwards and split ones."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, device, nn
from torch.profiler import ProfilerActivity, profile, record_function

from executor.split.piece_graph import Filled
from executor.split.stage_module import StageModule
from executor.stage.runner import StageRunner

WHOLE, SPLIT = 0, 1
"""Two microbatches: the backward of the one is whole, of the other in two halves."""
OPERATIONS = 5
FORWARD, BACKWARD, SPLIT_FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(OPERATIONS)
"""The operations of a round, in order; a forward whose backward is split does a little more."""


class LayerRun:
    """Runs a layer's operations on the same inputs, again and again.

    Args:
        stage: the layer, its parameters filled.
        received: what it reads of layers before.
        batch: what it reads of the batch, which every forward fetches, as in training.
        gradients: that come back for what it makes.
        on: the device of all of them.
    """

    def __init__(
        self,
        stage: StageModule,
        received: Sequence[Tensor],
        batch: Mapping[str, Tensor],
        gradients: Sequence[Tensor],
        on: device,
    ) -> None:
        self._runner = StageRunner(stage, microbatches=2, split=(SPLIT,), device=on)
        self._received = received
        self._batch = batch
        self._on = on
        self._gradients = gradients

    def run(self, operation: int) -> None:
        """Run one of the operations; all that come before it have run."""
        runner = self._runner
        if operation in (FORWARD, SPLIT_FORWARD):
            microbatch = WHOLE if operation == FORWARD else SPLIT
            batch = {name: x.to(self._on, non_blocking=True) for name, x in self._batch.items()}
            runner.forward(microbatch, self._received, batch)
        elif operation in (BACKWARD, INPUT_GRADIENT):
            microbatch = WHOLE if operation == BACKWARD else SPLIT
            runner.backward(microbatch, self._gradients)
        else:
            runner.weight_gradients(SPLIT)

    def round(self) -> None:
        """All of them once."""
        for operation in range(OPERATIONS):
            self.run(operation)


_SPREAD = 0.02
"""Scale of weights, as models are initialised: outputs are neither huge nor denormal, which some
processors compute much more slowly."""


def held(device: torch.device, generator: torch.Generator) -> Filled:
    """Makes a parameter or buffer of the same form as the model's, with numbers of its own."""

    def filled(tensor: Tensor) -> Tensor:
        value = _numbers(tensor.shape, tensor.dtype, device, generator, _SPREAD)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, requires_grad=tensor.requires_grad)
        return value

    return filled


def received(
    stage: StageModule, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Tensors like those that the stage receives."""
    return tuple(_numbers(b.sent_shape, b.dtype, device, generator, 1.0) for b in stage.receives)


def gradients(
    stage: StageModule, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Gradients like those that come back to the stage."""
    return tuple(_numbers(b.shape, b.dtype, device, generator, 1.0) for b in stage.gradients_in)


def entries(
    stage: StageModule, batch: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """The entries of a batch that the stage reads, where the device fetches them from."""
    read = {name: batch[name] for name in stage.model_inputs}
    return {name: x.pin_memory() if device.type == "cuda" else x for name, x in read.items()}


def _numbers(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    spread: float,
) -> Tensor:
    """Normal numbers around zero, around one for vectors; integers are zero, which indexes all."""
    if dtype.is_complex or not dtype.is_floating_point:
        value = torch.ones if dtype == torch.bool or dtype.is_complex else torch.zeros
        return value(shape, dtype=dtype, device=device)
    tensor = torch.empty(shape, dtype=torch.float32).normal_(0.0, spread, generator=generator)
    if len(shape) == 1:
        tensor += 1.0
    return tensor.to(device, dtype)


_MARK = "pipeplan operation"
Run = Callable[[int], None]
"""Runs the operation at a place."""


@dataclass(frozen=True)
class Held:
    """Bytes beside what was held before the first operation of a round, by operation.

    Attributes:
        peak: the most while it ran.
        after: once it had run.
    """

    peak: tuple[int, ...]
    after: tuple[int, ...]


def held_bytes(run: Run, operations: int, device: torch.device) -> Held:
    """Run the operations of a round, which have run before, and tell what they held.

    Args:
        run: one of them, by its place.
        operations: how many.
        device: that computes.
    """
    gc.collect()
    if device.type == "cuda":
        return _of_gpu(run, operations, device)
    return _of_cpu(run, operations)


def _of_gpu(run: Run, operations: int, device: torch.device) -> Held:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    peaks, after = [], []
    for place in range(operations):
        torch.cuda.reset_peak_memory_stats(device)
        run(place)
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        after.append(torch.cuda.memory_allocated(device) - before)
    return Held(tuple(peaks), tuple(after))


def _of_cpu(run: Run, operations: int) -> Held:
    # Torch's profiler says on standard error that it starts and stops, each time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for place in range(operations):
            with record_function(f"{_MARK} {place}"):
                run(place)
    with tempfile.TemporaryDirectory(prefix="pipeplan-") as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return _from_events(json.loads(path.read_text())["traceEvents"], operations)


def _from_events(events: Iterable[dict[str, Any]], operations: int) -> Held:
    """Changes up to the end of an operation are its own: nothing else runs between two."""
    rows = list(events)
    ends = {row["name"]: row["ts"] + row["dur"] for row in rows if row.get("ph") == "X"}
    changes = [(r["ts"], r["args"]["Bytes"]) for r in rows if r.get("name") == "[memory]"]
    changes.sort(key=lambda change: change[0])
    held, place, peaks, after = 0, 0, [], []
    for operation in range(operations):
        peak, end = held, ends[f"{_MARK} {operation}"]
        while place < len(changes) and changes[place][0] <= end:
            held += changes[place][1]
            peak, place = max(peak, held), place + 1
        peaks.append(peak)
        after.append(held)
    return Held(tuple(peaks), tuple(after))
