"""The costs of one layer at one size: rounds of all its operations, until they agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from executor.profiling.layer_run import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    OPERATIONS,
    WEIGHT_GRADIENT,
    Held,
    LayerRun,
    entries,
    gradients,
    held,
    held_bytes,
    received,
)
from executor.profiling.sizes import SizedModel
from executor.training.master_weights import MasterWeights
from executor.training.optimizer import job_optimizer
from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.measured_costs import OptimizerCosts, SizedCosts, Timing
from planner.model.tracing.user_code import one_line

_STEPPED = tuple(f"w{number}" for number in range(16))
_ROWS, _COLUMNS = 1024, 1024
"""Parameters whose step is timed: far more than caches hold."""
Run = Callable[[int], None]
"""Runs the operation at a place."""


def timed_round(run: Run, operations: int, device: torch.device) -> list[float]:
    """Run the operations of a round one after the other.

    Args:
        run: one of them, by its place.
        operations: how many.
        device: that computes.

    Returns:
        Seconds of each.
    """
    if device.type == "cuda":
        return _by_events(run, operations, device)
    times = [time.perf_counter()]
    for place in range(operations):
        run(place)
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]


def _by_events(run: Run, operations: int, device: torch.device) -> list[float]:
    """A GPU works behind: its own marks between the operations, read when all are done."""
    marks = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(operations + 1)
    ]
    torch.cuda.synchronize(device)
    marks[0].record()
    for place in range(operations):
        run(place)
        marks[place + 1].record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


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


def measured(model: SizedModel, layer: str, device: torch.device, patience: Patience) -> SizedCosts:
    """Run a layer alone, as the executor runs it, and tell its times and bytes.

    Args:
        model: exported at the size.
        layer: its name.
        device: that computes.
        patience: how much is enough.

    Raises:
        PipeplanError: if the layer cannot run alone, or does not fit into the device's memory.
    """
    try:
        return _measured(model, layer, device, patience)
    except (RuntimeError, IndexError, ValueError) as error:
        remedy = "give smaller --samples" if _is_memory(error) else "see the layer's own code"
        raise PipeplanError(
            f"layer {layer!r} cannot be run alone at {model.samples} samples: {one_line(error)}; "
            f"{remedy}"
        ) from error


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _measured(
    model: SizedModel, layer: str, device: torch.device, patience: Patience
) -> SizedCosts:
    generator = torch.Generator().manual_seed(0)
    stage = model.cut(layer, held(device, generator), device)
    run = LayerRun(
        stage,
        received(stage, device, generator),
        entries(stage, model.batch, device),
        gradients(stage, device, generator),
        device,
    )
    begin_s = time.perf_counter()
    run.round()  # Warms up, and makes the parameters' gradients.
    rounds = _rounds(run, device, patience, time.perf_counter() - begin_s)
    bytes_ = held_bytes(run.run, OPERATIONS, device)
    return _costs(model, layer, rounds, bytes_)


def _rounds(
    run: LayerRun, device: torch.device, patience: Patience, warm_up_s: float
) -> list[list[float]]:
    """Times of each operation, by round; one that takes long needs no second to warm up."""
    if warm_up_s < patience.seconds:
        run.round()
    rounds: list[list[float]] = []
    until_s = time.perf_counter() + patience.seconds
    while len(rounds) < patience.least or (
        len(rounds) < patience.most and time.perf_counter() < until_s
    ):
        rounds.append(timed_round(run.run, OPERATIONS, device))
    return rounds


def _costs(
    model: SizedModel, layer: str, rounds: Sequence[Sequence[float]], bytes_: Held
) -> SizedCosts:
    table = np.asarray(rounds)
    return SizedCosts(
        samples_per_microbatch=model.samples,
        forward_flops=model.flops[layer],
        forward=_timing(table[:, FORWARD]),
        backward=_timing(table[:, BACKWARD]),
        input_gradient=_timing(table[:, INPUT_GRADIENT]),
        weight_gradient=_timing(table[:, WEIGHT_GRADIENT]),
        stash_bytes=max(0, bytes_.after[FORWARD]),
        weight_stash_bytes=max(0, bytes_.after[INPUT_GRADIENT] - bytes_.after[BACKWARD]),
        forward_bytes=max(0, bytes_.peak[FORWARD]),
        backward_bytes=max(0, bytes_.peak[BACKWARD]),
    )


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
    gradients = torch.full(shape, 1e-3, dtype=kind, device=device)

    def step(_: int) -> None:
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        weights.unscale()
        weights.step()

    step(0)  # Makes the state.
    times: list[float] = []
    while len(times) < patience.least or (
        len(times) < patience.most and sum(times) < patience.seconds
    ):
        times += timed_round(step, 1, device)
    return OptimizerCosts(
        optimizer=job.optimizer, elements=values.numel(), step=_timing(np.asarray(times))
    )


def _timing(values: FloatArray) -> Timing:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Timing(median_s=median, low_s=low, high_s=high, repeats=len(values))
