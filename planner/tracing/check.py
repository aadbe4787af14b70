"""Comparison of the step that will run with eager autograd, on a small batch with real weights.

Both train two steps from the same weights, batches and seeds in one process; loss, gradients and
buffers have to agree. It shows what torch.export did not record.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, fx, nn

from planner.errors import PipeplanError
from planner.job import LOW_PRECISION, Job
from planner.model.graph_record import GraphRecord
from planner.tracing.export import ExportedStep, export_step
from planner.tracing.factory import Loss, TrainingStep, batch_at, build, example_batch
from planner.tracing.user_code import FAILURES, one_line
from planner.units import format_bytes, plural

TOLERANCE = 1e-5
"""Largest error of a tensor over its norm."""
LOW_PRECISION_TOLERANCE = 2e-2
"""The same where forward itself computes in 16 bits, which torch may round in another order."""
MOST_BYTES = 2**30
MOST_FLOPS = 2e10
STEPS = 2
_REMEDY = (
    "the exported step has the torch operations of forward alone: write what else it does (hooks, "
    "backwards of your own, values computed in Python, state outside parameters and buffers, "
    "weights changed in forward) as torch operations on parameters and registered buffers; "
    "--no-check runs the exported step although it differs"
)

Run = Callable[[Mapping[str, Tensor], int], Tensor]
"""Runs forward and backward of a batch with a seed, and returns the loss."""
_Found = dict[str, Tensor | None]
"""``loss``, ``gradient of NAME`` and ``buffer NAME`` of a step."""


def compare_with_eager(
    factory: Callable[..., nn.Module],
    job: Job,
    graph: GraphRecord,
    own_loss: Loss | None = None,
    make_run: Callable[[ExportedStep], Run] | None = None,
) -> str:
    """Train two steps by the exported step and by the model itself, on the CPU in float32.

    Args:
        factory: builds the model with weights.
        job: model arguments, loss and inputs; at most two samples are used.
        graph: the traced layers, which tell what the comparison takes.
        own_loss: the function that ``job.loss`` names, if it is the user's own.
        make_run: makes what runs the exported step; default: the graph as it is.

    Returns:
        One line: what agrees, or why nothing was compared.

    Raises:
        PipeplanError: naming what differs and the remedy.
    """
    reason = _too_large(graph)
    if reason is None:
        with _generators_kept():
            reason = _compared(factory, job, own_loss, make_run)
    if reason is not None:
        return f"not compared with eager autograd: {reason}"
    return f"compared with eager autograd: loss, gradients and buffers of {STEPS} small steps agree"


def _too_large(graph: GraphRecord) -> str | None:
    """Return why a model is too large to be compared at every start; None if it is not."""
    share = min(graph.samples_per_microbatch, 2) / graph.samples_per_microbatch
    stash = sum(layer.stash_bytes for layer in graph.layers)
    bytes_ = 5 * sum(4 * parameter.elements for parameter in graph.parameters) + share * stash
    flops = sum(row.forward_flops * 3 for row in graph.layers) * share * 2 * STEPS
    if bytes_ > MOST_BYTES:
        return f"it needs {format_bytes(bytes_)}, more than {format_bytes(MOST_BYTES)}"
    if flops > MOST_FLOPS:
        return f"it takes {flops / 1e9:,.0f} GFLOP, more than {MOST_FLOPS / 1e9:g}"
    return None


def _compared(
    factory: Callable[..., nn.Module],
    job: Job,
    own_loss: Loss | None,
    make_run: Callable[[ExportedStep], Run] | None,
) -> str | None:
    """Return why nothing could be compared; None if all agrees."""
    precision = "float32" if job.precision in LOW_PRECISION else job.precision
    samples = min(job.samples_per_microbatch, 2)
    job = job.model_copy(update={"precision": precision, "samples_per_microbatch": samples})
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    try:
        models, batches = [], []
        for _ in range(2):
            _seed(0)
            built = build(factory, job.model_arguments).train()
            models.append(built.to(getattr(torch, precision)))
        model, copy = models
        for number in range(STEPS):
            _seed(1 + number)
            batch = example_batch(model, job)
            batches.append(batch if job.lengths is None else batch_at(batch, job.lengths, 0))
        _start_alike(copy, model)
        run = _run_of(TrainingStep(model, job.loss, own_loss))
        expected = [_trained(model, batch, run) for batch in batches]
    except (PipeplanError, *FAILURES) as error:
        words = str(error) if isinstance(error, PipeplanError) else one_line(error)
        return f"on the CPU in {precision} it fails: {words}"
    exported = export_step(copy, batches[0], job, own_loss)
    run = _run_of(exported.module) if make_run is None else make_run(exported)
    try:
        found = [_trained(copy, batch, run) for batch in batches]
    except FAILURES as error:
        raise PipeplanError(
            f"{name}: the exported step fails where the model itself trains: {one_line(error)}; "
            f"{_REMEDY}"
        ) from error
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        if rows := [*_differences(ours, theirs, _tolerance(exported))]:
            raise PipeplanError(
                f"{name}: the step that would run differs from eager autograd in step {number}"
                f": {'; '.join(rows[:3])} ({plural(len(rows), 'difference')}); {_REMEDY}"
            )
    return None


# --- training -------------------------------------------------------------------------------------


@torch.no_grad()
def _start_alike(model: nn.Module, other: nn.Module) -> None:
    """Copy weights and buffers, should the constructor have drawn others."""
    values = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in values and tensor.shape == values[name].shape:
            tensor.copy_(values[name])


def _run_of(step: Callable[..., Tensor]) -> Run:
    def run(batch: Mapping[str, Tensor], seed: int) -> Tensor:
        torch.manual_seed(seed)
        with torch.compiler.set_stance("force_eager"):
            loss = step(**batch)
            loss.backward()
        return loss.detach()

    return run


def _trained(model: nn.Module, batch: Mapping[str, Tensor], run: Run) -> _Found:
    """Train one step by gradient descent, with the norm of all gradients clipped to 1."""
    found: _Found = {"loss": run({name: x.clone() for name, x in batch.items()}, 100).clone()}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    torch.optim.SGD(parameters.values(), lr=0.1).step()
    for parameter in parameters.values():
        parameter.grad = None
    return found | {f"buffer {name}": x.clone() for name, x in model.named_buffers()}


# --- comparison -----------------------------------------------------------------------------------


def _differences(ours: _Found, theirs: _Found, tolerance: float) -> Iterator[str]:
    tensors = [x for name, x in theirs.items() if x is not None and not name.startswith("buffer ")]
    floor = 1e-7 * float(nn.utils.get_total_norm([x[x.isfinite()] for x in tensors]))
    for name, right in theirs.items():
        if not _is_close(ours.get(name), right, tolerance, floor):
            norms = [
                "none" if tensor is None else f"{float(tensor.detach().double().norm()):.4g}"
                for tensor in (ours.get(name), right)
            ]
            yield f"{name} has norm {' instead of '.join(norms)}"


def _is_close(ours: Tensor | None, right: Tensor | None, tolerance: float, floor: float) -> bool:
    if ours is None or right is None:
        return ours is right
    wide = torch.promote_types(right.dtype, torch.float64)
    there = right.isfinite()
    error = (ours.to(wide) - right.to(wide))[there].norm()
    norm = right.to(wide)[there].norm()
    return torch.equal(ours.isfinite(), there) and bool(error <= tolerance * norm + floor)


def _tolerance(exported: ExportedStep) -> float:
    graphs = [m.graph for m in exported.module.modules() if isinstance(m, fx.GraphModule)]
    values = [node.meta.get("val") for graph in graphs for node in graph.nodes]
    low = [getattr(torch, name) for name in LOW_PRECISION]
    is_low = any(isinstance(value, Tensor) and value.dtype in low for value in values)
    return LOW_PRECISION_TOLERANCE if is_low else TOLERANCE


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the generators of this process as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
