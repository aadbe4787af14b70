"""One layer as the executor runs it: forwards, whole backwards and split ones; what it holds."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from executor.split.stage_module import StageModule
from executor.stage.runner import StageRunner

WHOLE, SPLIT = 0, 1
"""Two microbatches: the backward of the one is whole, of the other in two halves."""
OPERATIONS = 5
FORWARD, BACKWARD, SPLIT_FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(OPERATIONS)
"""The operations of a round, in order; a forward whose backward is split does a little more."""
_SPREAD = 0.02
"""Scale of weights, as models are initialised: outputs are neither huge nor denormal, which some
processors compute much more slowly."""


class MadeUp:
    """Makes tensors of given forms, with numbers of their own.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def held(self, tensor: Tensor) -> Tensor:
        """Make a parameter or buffer like one of the model's."""
        value = self.like(tensor.shape, tensor.dtype, _SPREAD)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, requires_grad=tensor.requires_grad)
        return value

    def like(self, shape: Sequence[int], dtype: torch.dtype, spread: float = 1.0) -> Tensor:
        """Make normal numbers around zero, around one for vectors; integers are zero.

        Zero indexes all tables.
        """
        if dtype.is_complex or not dtype.is_floating_point:
            value = torch.ones if dtype == torch.bool or dtype.is_complex else torch.zeros
            return value(shape, dtype=dtype, device=self._device)
        tensor = torch.empty(shape, dtype=torch.float32)
        tensor.normal_(0.0, spread, generator=self._generator)
        return (tensor + 1.0 if len(shape) == 1 else tensor).to(self._device, dtype)


@dataclass(frozen=True)
class Handed:
    """What others hand to a layer, again and again the same.

    Attributes:
        received: what it reads of layers before.
        batch: what it reads of the batch, where the device fetches it from, as in training.
        gradients: that come back for what it makes.
    """

    received: Sequence[Tensor]
    batch: Mapping[str, Tensor]
    gradients: Sequence[Tensor]


class LayerRun:
    """Runs a layer's operations on the same inputs, again and again.

    Args:
        stage: the layer, its parameters filled.
        handed: to it.
        device: of all tensors.
    """

    def __init__(self, stage: StageModule, handed: Handed, device: torch.device) -> None:
        self._runner = StageRunner(stage, microbatches=2, split=(SPLIT,), device=device)
        self._handed = handed
        self._device = device

    def run(self, operation: int) -> None:
        """Run one of the operations; all that come before it have run."""
        runner, handed = self._runner, self._handed
        microbatch = WHOLE if operation in (FORWARD, BACKWARD) else SPLIT
        if operation in (FORWARD, SPLIT_FORWARD):
            batch = {n: x.to(self._device, non_blocking=True) for n, x in handed.batch.items()}
            runner.forward(microbatch, handed.received, batch)
        elif operation in (BACKWARD, INPUT_GRADIENT):
            runner.backward(microbatch, handed.gradients)
        else:
            runner.weight_gradients(microbatch)

    def round(self) -> None:
        """Run all of them once."""
        for operation in range(OPERATIONS):
            self.run(operation)

    def held_bytes(self) -> Held:
        """Run a round, as has been done before, and return what it held."""
        gc.collect()
        return self._on_gpu() if self._device.type == "cuda" else self._on_cpu()

    def _on_gpu(self) -> Held:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        peaks, after = [], []
        for operation in range(OPERATIONS):
            torch.cuda.reset_peak_memory_stats(self._device)
            self.run(operation)
            torch.cuda.synchronize(self._device)
            peaks.append(torch.cuda.max_memory_allocated(self._device) - before)
            after.append(torch.cuda.memory_allocated(self._device) - before)
        return Held(tuple(peaks), tuple(after))

    def _on_cpu(self) -> Held:
        # Torch's profiler says on standard error that it starts and stops, each time.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for operation in range(OPERATIONS):
                with record_function(f"{_MARK} {operation}"):
                    self.run(operation)
        with tempfile.TemporaryDirectory(prefix="pipeplan-") as folder:
            path = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        ends = {row["name"]: row["ts"] + row["dur"] for row in events if row.get("ph") == "X"}
        changes = [(r["ts"], r["args"]["Bytes"]) for r in events if r.get("name") == "[memory]"]
        changes.sort(key=lambda change: change[0], reverse=True)
        held, peaks, after = 0, [], []
        for operation in range(OPERATIONS):
            peak = held
            # Changes up to the end of an operation are its own: nothing else runs between two.
            while changes and changes[-1][0] <= ends[f"{_MARK} {operation}"]:
                held += changes.pop()[1]
                peak = max(peak, held)
            peaks.append(peak)
            after.append(held)
        return Held(tuple(peaks), tuple(after))


_MARK = "pipeplan operation"


@dataclass(frozen=True)
class Held:
    """Bytes beside what was held before the first operation of a round, by operation.

    Attributes:
        peak: the most while it ran.
        after: once it had run.
    """

    peak: tuple[int, ...]
    after: tuple[int, ...]
