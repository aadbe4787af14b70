"""The optimizer of this rank's parameters: the job's, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner.artifacts.job import Job
from planner.errors import PipeplanError, shorten
from planner.tracing.imports import import_callable
from planner.tracing.user_code import FAILURES, told

Parameters = Mapping[str, nn.Parameter]
OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""Called with a list of (name, parameter) pairs, and keyword arguments."""
MOMENTUM = 0.9
"""Of ``sgd_momentum`` where the arguments say nothing."""
OWN_STEPS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Arguments that choose another way to step."""


def job_optimizer(
    job: Job,
    parameters: Parameters,
    arguments: Mapping[str, Any] | None = None,
    learning_rate: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that the plan was made for, and whose memory it counts.

    Its step is fused unless the arguments choose otherwise: one pass over weights, gradients and
    state, without the temporaries that a plan would have to find memory for.

    Args:
        job: names it, and its learning rate.
        parameters: this rank's, by the model's own names (FQNs); may be empty.
        arguments: of ``torch.optim.AdamW`` or ``torch.optim.SGD``, such as ``weight_decay``.
        learning_rate: over the job's.

    Raises:
        PipeplanError: if torch refuses the arguments.
    """
    given = dict(arguments or {})
    adamw = job.optimizer == "adamw"
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if adamw else torch.optim.SGD
    if job.optimizer == "sgd_momentum":
        given.setdefault("momentum", MOMENTUM)
    rate = job.learning_rate if learning_rate is None else learning_rate
    step = {} if OWN_STEPS.intersection(given) else {"fused": True}
    documented = "torch.optim.AdamW" if adamw else "torch.optim.SGD"
    try:
        # Lists of numbers, as a TOML file has them, where torch wants pairs.
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return kind(list(_held(parameters).values()), **{"lr": rate, **step, **plain})
    except (TypeError, ValueError, RuntimeError) as error:
        raise PipeplanError(
            f"optimizer {job.optimizer!r} with optimizer_arguments {shorten(given, 400)} cannot be "
            f"made: {error}; correct them as {documented} documents them"
        ) from error


def own_optimizer(
    own: str | OptimizerFactory,
    parameters: Parameters,
    arguments: Mapping[str, Any] | None = None,
    learning_rate: float | None = None,
) -> torch.optim.Optimizer:
    """The user's own: called with (name, parameter) pairs, returns an optimizer.

    Only call this with a name the user typed: importing runs code.

    Args:
        own: the factory, or its name ``module:factory``.
        parameters: this rank's, by the model's own names (FQNs). A rank that holds none passes
            one of no elements, named ``nothing``.
        arguments: further keyword arguments of the factory.
        learning_rate: passed as ``lr`` if given.

    Raises:
        PipeplanError: if it fails, returns something else, or leaves parameters out.
    """
    if isinstance(own, str):
        name, factory = own, import_callable(own, "optimizer", "lib.optimizers:lion")
    else:
        name, factory = str(getattr(own, "__name__", type(own).__name__)), own
    given = dict(arguments or {})
    if learning_rate is not None:
        given = {"lr": learning_rate, **given}
    held = _held(parameters)
    try:
        found: object = factory(list(held.items()), **given)
    except FAILURES as error:
        raise PipeplanError(
            f"optimizer {name!r} with optimizer_arguments {shorten(given, 400)} cannot be made: "
            f"{told(error)}"
        ) from error
    if not isinstance(found, torch.optim.Optimizer):
        raise PipeplanError(
            f"optimizer {name!r}: the factory returned {type(found).__name__}, expected a "
            "torch.optim.Optimizer"
        )
    _require_all(name, found, held)
    return found


def _held(parameters: Parameters) -> Parameters:
    # Torch refuses an optimizer of nothing; a rank may hold no parameter at all.
    return parameters or {"nothing": nn.Parameter(torch.zeros(0))}


def _require_all(name: str, optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [key for key, p in parameters.items() if p.requires_grad and id(p) not in trained]
    if left:
        raise PipeplanError(
            f"optimizer {name!r} leaves out {', '.join(left[:10])}; put every parameter it is "
            "given into a group, or set requires_grad = False in the model for those to freeze"
        )
    if len(trained) > len(parameters):
        raise PipeplanError(
            f"optimizer {name!r} trains {len(trained) - len(parameters)} tensors that it was not "
            "given; use the parameters passed to the factory, which are this rank's"
        )
