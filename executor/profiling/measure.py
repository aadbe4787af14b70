"""The costs of one layer at one size: rounds of all its operations, until they agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from executor.profiling.layer_run import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    OPERATIONS,
    WEIGHT_GRADIENT,
    Handed,
    LayerRun,
    MadeUp,
)
from executor.profiling.sizes import SizedModel
from executor.runtime.runtime import clock_of
from executor.stage.gradient_types import gradient_type, set_gradient_types
from executor.training.master_weights import MasterWeights
from executor.training.optimizer import job_optimizer
from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.measured_costs import OptimizerCosts, SizedCosts, Timing, in_words
from planner.tracing.user_code import one_line

_TIMES_THE_CACHE = 2
"""A sweep over so many times its size leaves nothing of a layer in a cache."""
_STEPPED = tuple(f"w{number}" for number in range(16))
_ROWS, _COLUMNS = 1024, 1024
"""Parameters whose step is timed: far more than caches hold."""
Run = Callable[[int], None]
"""Runs the operation at a place."""


def _nothing(_: int) -> None:
    """No preparation."""


def timed_round(
    run: Run, operations: int, device: torch.device, before: Run = _nothing
) -> list[float]:
    """Run the operations of a round one after the other.

    Args:
        run: one of them, by its place.
        operations: how many.
        device: that computes.
        before: called with its place before each of them, and not timed.

    Returns:
        Seconds of each.
    """
    clock: Any = clock_of(device)
    marks = []
    for place in range(operations):
        before(place)
        begin = clock.mark()
        run(place)
        marks.append((begin, clock.mark()))
    clock.settle(marks[0][0], marks[-1][1])
    return [clock.seconds(end) - clock.seconds(begin) for begin, end in marks]


class CacheSweep:
    """Drives a layer's weights out of the caches, as the other layers of a model do.

    A layer that runs again and again finds its weights there, which it does in no training of a
    model that is larger than the caches. Of a smaller model it may well, and nothing is done.

    Args:
        device: that computes.
        model_bytes: of the whole model's weights.

    Attributes:
        bytes: that a sweep reads; 0: there is nothing to do.
    """

    def __init__(self, device: torch.device, model_bytes: int) -> None:
        cache_bytes = _cache_bytes(device)
        self.bytes = _TIMES_THE_CACHE * cache_bytes if model_bytes > cache_bytes else 0
        self._swept = torch.zeros(self.bytes // 4, device=device)

    def __call__(self) -> None:
        """Read more than the caches hold."""
        self._swept.sum()


def _cache_bytes(device: torch.device) -> int:
    """Return the size of the largest cache; 32 MiB where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) * 1024)
    return max(sizes, default=32 * 2**20)


@dataclass(frozen=True)
class Patience:
    """The amount of measuring that is enough.

    Attributes:
        seconds: of rounds that count, if there are enough of them.
        least, most: rounds that count.
    """

    seconds: float = 1.0
    least: int = 3
    most: int = 200


def measured(
    model: SizedModel,
    layer: str,
    device: torch.device,
    patience: Patience,
    sweep: CacheSweep | None = None,
) -> SizedCosts:
    """Run a layer alone, as the executor runs it, and tell its times and bytes.

    Args:
        model: exported at the size.
        layer: its name.
        device: that computes.
        patience: how much is enough.
        sweep: of the caches, before each operation; None: weights may stay there.

    Raises:
        PipeplanError: if the layer cannot run alone, or does not fit into the device's memory.
    """
    try:
        return MeasuredLayer(model, layer, device, sweep).costs(patience)
    except (RuntimeError, IndexError, ValueError) as error:
        remedy = "give smaller --samples" if _is_memory(error) else "see the layer's own code"
        raise PipeplanError(
            f"layer {layer!r} cannot be run alone at {in_words(model.size)}: {one_line(error)}; "
            f"{remedy}"
        ) from error


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class MeasuredLayer:
    """A layer alone, ready to be measured as often as one likes.

    Args:
        model: exported at the size.
        layer: its name.
        device: that computes.
        sweep: of the caches, before each operation; None: weights may stay there.
    """

    def __init__(
        self, model: SizedModel, layer: str, device: torch.device, sweep: CacheSweep | None = None
    ) -> None:
        self._model, self._layer, self._device = model, layer, device
        made_up = MadeUp(device)
        cut = partial(model.cut, (layer,), made_up.held, device)
        stage = cut()
        entries = {name: model.batch[name] for name in stage.model_inputs}
        handed = Handed(
            [made_up.like(b.sent_shape, b.dtype) for b in stage.receives],
            {n: x.pin_memory() if device.type == "cuda" else x for n, x in entries.items()},
            [made_up.like(b.shape, b.dtype) for b in stage.gradients_in],
        )
        self._run = LayerRun(stage, handed, device)
        begin_s = time.perf_counter()
        self._run.round()  # Warms up, and makes the parameters' gradients.
        self._warm_up_s = time.perf_counter() - begin_s
        self._bytes = self._run.held_bytes()
        self._before: Run = _nothing
        if sweep is not None and sweep.bytes:
            own_bytes = sum(weight.nbytes for weight in stage.parameters.values())
            # Weights that fill the caches by themselves are as cold the second time.
            other = stage if own_bytes > sweep.bytes else cut()
            self._before = after_another(sweep, LayerRun(other, handed, device))

    def costs(self, patience: Patience) -> SizedCosts:
        """Return its times and bytes.

        Args:
            patience: how much is enough.
        """
        timed = partial(timed_round, self._run.run, OPERATIONS, self._device, self._before)
        table, bytes_ = np.asarray(_rounds(timed, patience, self._warm_up_s)), self._bytes
        return SizedCosts(
            samples_per_microbatch=self._model.job.samples_per_microbatch,
            tokens=self._model.tokens,
            forward_flops=self._model.flops[self._layer],
            forward=_timing(table[:, FORWARD]),
            backward=_timing(table[:, BACKWARD]),
            input_gradient=_timing(table[:, INPUT_GRADIENT]),
            weight_gradient=_timing(table[:, WEIGHT_GRADIENT]),
            stash_bytes=max(0, bytes_.after[FORWARD]),
            weight_stash_bytes=max(0, bytes_.after[INPUT_GRADIENT] - bytes_.after[BACKWARD]),
            forward_bytes=max(0, bytes_.peak[FORWARD]),
            backward_bytes=max(0, bytes_.peak[BACKWARD]),
        )


def after_another(sweep: Callable[[], object], other: LayerRun) -> Run:
    """Return what leaves the caches as a layer finds them in training: its weights are not there.

    But a layer of the same kind has just run, so that its code is, and what it is handed has just
    been made. A sweep alone would drive out these as well: of ResNet-50 in microbatches of two it
    made forwards of single layers sum to a sixth more than all together take.

    Args:
        sweep: of the caches.
        other: the same layer with weights of its own, handed the same tensors.
    """
    other.round()

    def run(operation: int) -> None:
        sweep()
        other.run(operation)

    return run


def _rounds(
    timed: Callable[[], list[float]], patience: Patience, warm_up_s: float
) -> list[list[float]]:
    """Times of each operation, by round; one that takes long needs no second to warm up."""
    if warm_up_s < patience.seconds:
        timed()
    rounds: list[list[float]] = []
    until_s = time.perf_counter() + patience.seconds
    while len(rounds) < patience.least or (
        len(rounds) < patience.most and time.perf_counter() < until_s
    ):
        rounds.append(timed())
    return rounds


def optimizer_costs(job: Job, device: torch.device, patience: Patience) -> OptimizerCosts:
    """Time the step of the job's optimizer on matrices of a usual size.

    Args:
        job: its optimizer and precision.
        device: that computes.
        patience: how much is enough.
    """
    kind = getattr(torch, job.precision)
    shape = (len(_STEPPED), _ROWS, _COLUMNS)
    values = torch.full(shape, 0.01, dtype=kind, device=device)
    parameters = {name: nn.Parameter(row) for name, row in zip(_STEPPED, values, strict=True)}
    weights = MasterWeights(parameters, lambda held: job_optimizer(job, held))
    set_gradient_types(parameters.values(), job)
    summed = gradient_type(parameters[_STEPPED[0]])
    gradients = torch.full(shape, 1e-3, dtype=summed, device=device)

    def step(_: int) -> None:
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        weights.unscale()
        weights.step()

    step(0)  # Makes the state.
    rounds = _rounds(lambda: timed_round(step, 1, device), patience, 0.0)
    times = np.asarray(rounds)[:, 0]
    return OptimizerCosts(optimizer=job.optimizer, elements=values.numel(), step=_timing(times))


def _timing(values: FloatArray) -> Timing:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Timing(median_s=median, low_s=low, high_s=high, repeats=len(values))
