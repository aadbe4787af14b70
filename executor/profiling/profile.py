"""All distinct layers of a model, one after the other; what is known is written at once."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from executor.distributed.host_tuning import keep_freed_memory
from executor.distributed.machines import hardware_name
from executor.profiling.kinds import alike
from executor.profiling.measure import CacheSweep, Patience, measured, optimizer_costs
from executor.profiling.sizes import SizedModel, sized_models
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.measured_costs import Costs, LayerKind, SizedCosts, in_order, in_words
from planner.records.document import require_file_path
from planner.units import plural

UNSTEADY = 1.0
"""A spread over its median that no machine which does nothing else shows."""
MATTERS_S = 1e-3
"""Shorter times vary more, and weigh little."""
FAR_ABOVE = 1.5
"""A whole backward does no more than its two halves, which is the same work in two parts."""
Told = Callable[[str], None]
"""Called with a line of progress."""


@dataclass(frozen=True)
class ProfileRequest:
    """The request for a profile.

    Attributes:
        model: ``module:factory``, which is imported.
        job: precision, loss, model arguments.
        sizes: samples of a microbatch, ascending.
        device: that computes.
        device_type: its name in cluster files.
        output: the costs file; one that is there already is added to.
        patience: for each layer and size.
    """

    model: str
    job: Job
    sizes: tuple[int, ...]
    device: torch.device
    device_type: str
    output: Path
    patience: Patience


def profile(request: ProfileRequest, tell: Told) -> Costs:
    """Measure every kind of layer at every size that the output does not have yet, or not surely.

    Args:
        request: what is wanted.
        tell: told what has been measured.

    Raises:
        PipeplanError: if the model cannot be exported, or the output is of something else.
    """
    require_file_path(request.output)
    if request.device.type == "cpu":
        keep_freed_memory()
    models = [
        model
        for samples in request.sizes
        for model in sized_models(request.model, request.job, samples)
    ]
    names = {model.layers.names for model in models}
    if len(names) > 1:
        raise PipeplanError(
            f"--samples: the model has other layers at {request.sizes[0]} samples than at "
            f"{request.sizes[-1]}; profile one size at a time, each to a file of its own"
        )
    costs = _begun(request, models)
    todo = [
        (number, model)
        for model in models
        for number, kind in enumerate(costs.kinds)
        if (row := kind.at(model.size)) is None or is_unsteady(row)
    ]
    weights = models[0].graph.parameters
    sweep = CacheSweep(request.device, sum(weight.bytes for weight in weights))
    for done, (number, model) in enumerate(todo, 1):
        kind = costs.kinds[number]
        row = measured(model, kind.layers[0], request.device, request.patience, sweep)
        costs = with_row(costs, number, row)
        costs.save(request.output)
        tell(f"{done}/{len(todo)}  {_line(kind, row)}")
    if costs.optimizer is None or costs.optimizer.optimizer != request.job.optimizer:
        timed = optimizer_costs(request.job, request.device, request.patience)
        costs = costs.model_copy(update={"optimizer": timed})
        costs.save(request.output)
        tell(
            f"step of {timed.optimizer}: {1e9 * timed.step.median_s / timed.elements:.3f} ns a "
            f"parameter (spread {100 * timed.step.spread:.0f}%)"
        )
    unsteady = sum(is_unsteady(row) for kind in costs.kinds for row in kind.sizes)
    if unsteady:
        tell(
            f"note: times of {plural(unsteady, 'measurement')}, of a millisecond or more, spread "
            f"over more than {UNSTEADY:.0%}, or have a backward far above its halves I and W: "
            "something else used this machine; when nothing does, the same command measures these "
            "again"
        )
    if (warning := costs.spread_warning) is not None:
        tell(f"note: {warning}")
    return costs


def is_unsteady(row: SizedCosts) -> bool:
    """Return whether times that matter varied so much that other work must have interfered."""
    timings = (row.forward, row.backward, row.input_gradient, row.weight_gradient)
    halves_s = row.input_gradient.median_s + row.weight_gradient.median_s
    far_above = row.backward.median_s > max(MATTERS_S, FAR_ABOVE * halves_s)
    varied = any(time.median_s >= MATTERS_S and time.spread > UNSTEADY for time in timings)
    return varied or far_above


def _begun(request: ProfileRequest, models: Sequence[SizedModel]) -> Costs:
    """A costs file without figures, or the one that is there."""
    fresh = without_figures(models, request.device, request.device_type)
    if not request.output.exists():
        return fresh
    old = Costs.load(request.output)
    wrong = [
        f"{name} {getattr(old, name)!r} is {getattr(fresh, name)!r} here"
        for name in ("model", "precision", "device_type", "hardware", "threads", "made_with")
        if getattr(old, name) != getattr(fresh, name)
    ]
    if [kind.layers for kind in old.kinds] != [kind.layers for kind in fresh.kinds]:
        wrong.append("kinds: other layers are alike there")
    flops = {model.size: model.flops for model in models}
    wrong += [
        f"kinds: layer {kind.layers[0]!r} had {row.forward_flops} forward FLOPs at "
        f"{in_words(row.size)}, and has others here"
        for kind in old.kinds
        for row in kind.sizes
        if row.size in flops and row.forward_flops != flops[row.size][kind.layers[0]]
    ]
    if wrong:
        raise PipeplanError(
            f"{request.output}: holds other costs, which cannot be added to ({problem}); name "
            "another file with --output, or delete this one"
            for problem in wrong
        )
    return old


def without_figures(models: Sequence[SizedModel], device: torch.device, device_type: str) -> Costs:
    """Return what a costs file says of a model and a machine before anything is measured.

    Args:
        models: the model at each size.
        device: that will compute.
        device_type: its name in cluster files.
    """
    return Costs(
        model=models[0].graph.name,
        precision=models[0].job.precision,
        device_type=device_type,
        hardware=hardware_name(device),
        threads=None if device.type == "cuda" else torch.get_num_threads(),
        made_with=_versions(),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        kinds=tuple(LayerKind(layers=names) for names in alike([m.signatures for m in models])),
    )


def with_row(costs: Costs, number: int, row: SizedCosts) -> Costs:
    """Return costs with those of a kind of layer, by its number, at one size."""
    kind = costs.kinds[number]
    others = (other for other in kind.sizes if other.size != row.size)
    sizes = sorted((*others, row), key=lambda row: in_order(row.size))
    kinds = list(costs.kinds)
    kinds[number] = LayerKind(layers=kind.layers, sizes=tuple(sizes))
    return costs.model_copy(update={"kinds": tuple(kinds)})


def _line(kind: LayerKind, row: SizedCosts) -> str:
    more = f" and {len(kind.layers) - 1} alike" if len(kind.layers) > 1 else ""
    times = "  ".join(
        f"{letter} {1e3 * timing.median_s:.3f} ms"
        for letter, timing in (
            ("F", row.forward),
            ("B", row.backward),
            ("I", row.input_gradient),
            ("W", row.weight_gradient),
        )
    )
    spread = max(timing.spread for timing in (row.forward, row.backward))
    return (
        f"{kind.layers[0]}{more}, {in_words(row.size)}: {times}  "
        f"(spread {100 * spread:.0f}%, {row.forward.repeats} repeats)"
    )


def _versions() -> dict[str, str]:
    found = {"pipeplan": metadata.version("pipeplan"), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return {**found, "python": platform.python_version()}
