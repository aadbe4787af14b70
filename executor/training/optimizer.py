"""The optimizer of this rank's parameters: the job's, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import PipeplanError, shorten
from planner.job import Job
from planner.tracing.user_code import FAILURES, import_callable, one_line

Parameters = Mapping[str, nn.Parameter]
OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""Called with a list of (name, parameter) pairs, and keyword arguments."""
MOMENTUM = 0.9
"""Momentum of ``sgd_momentum`` where the arguments give none."""
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
            f"{one_line(error)}"
        ) from error
    if not isinstance(found, torch.optim.Optimizer):
        raise PipeplanError(
            f"optimizer {name!r}: the factory returned {type(found).__name__}, expected a "
            "torch.optim.Optimizer"
        )
    _require_all(name, found, held)
    begin = getattr(found, "train", None)
    if callable(begin):
        begin()  # Schedule-free optimizers step in training mode alone.
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


NUMBER = ":number"
"""Ends the name of what is a Python number in the optimizer, a 0-d tensor here."""
NONE = ":none"
"""Ends the name of what is None in the optimizer, an empty tensor here."""
_ON_CPU = ("step", "mu_product")
"""Counters that torch keeps on the CPU unless the optimizer is capturable or fused."""
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
GROUP = ":group"
"""Ends the key of what a parameter's group holds; each of its parameters has a copy."""
_NO_STATE = ("params", "lr", "initial_lr")
"""Entries of a group that come from where the optimizer was made, or from the schedule."""
Groups = Sequence[Mapping[str, Any]]


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Return copies of what the groups of an optimizer hold, in their order."""
    return [
        {k: _copied(v) for k, v in group.items() if k not in _NO_STATE}
        for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def export_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    first: Groups | None = None,
) -> dict[str, Tensor]:
    """The optimizer's state as tensors named ``FQN/STATE``, such as ``wte.weight/exp_avg``.

    Parameters without state yet add nothing. Hyperparameters (the learning rate, say) are no
    state: they come from where the optimizer was made. What steps have changed in groups is state,
    such as ``d`` of Prodigy: ``FQN/KEY:group`` of each parameter of the group.

    Args:
        optimizer: whose state is tensors, numbers and None, as of AdamW, SGD and most of
            torch.optim.
        parameters: those whose state is wanted, by the model's own names (FQNs).
        first: of :func:`groups_of` when the optimizer was made; None: no group has state.

    Returns:
        The optimizer's own tensors, not copies: write them before the next step.

    Raises:
        PipeplanError: if the optimizer keeps something else.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found.update([_exported(optimizer, name, key, value)])
    changed = [] if first is None else [*zip(optimizer.param_groups, first, strict=True)]
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group, before in changed:
        entries = {k: v for k, v in group.items() if k not in _NO_STATE}
        own = {k: v for k, v in entries.items() if k not in before or not _is_same(v, before[k])}
        for name in (names[id(p)] for p in group["params"] if id(p) in names):
            rows = (_exported(optimizer, name, key, value, GROUP) for key, value in own.items())
            found.update((key, tensor.clone()) for key, tensor in rows)
    return found


def _exported(
    optimizer: torch.optim.Optimizer, name: str, key: object, value: Any, kind: str = ""
) -> tuple[str, Tensor]:
    if not isinstance(key, str) or "/" in key or ":" in key:
        raise _refusal(optimizer, f"names its state of {name} {shorten(key)}")
    key += kind
    if type(value) in (Tensor, nn.Parameter):
        return f"{name}/{key}", value.detach()
    if value is None:
        return f"{name}/{key}{NONE}", torch.empty(0)
    dtype = _NUMBERS.get(type(value))
    if dtype is None or (dtype == torch.int64 and not -(2**63) <= value < 2**63):
        raise _refusal(optimizer, f"keeps {shorten(value)} as {key} of {name}")
    return f"{name}/{key}{NUMBER}", torch.tensor(value, dtype=dtype)


def _refusal(optimizer: torch.optim.Optimizer, what: str) -> PipeplanError:
    return PipeplanError(
        f"{type(optimizer).__name__} {what}; a checkpoint holds optimizers whose state is plain "
        "tensors and numbers, such as AdamW and SGD: train with one of these, or without "
        "checkpoints"
    )


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, or of the one that it stands for."""
    return str(getattr(optimizer, "stands_for", type(optimizer).__name__))


def import_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Tensor],
) -> None:
    """Give the optimizer the state that :func:`export_state` took; it goes on bit by bit.

    Parameters that ``state`` says nothing of are left without state, as before a first step.

    Args:
        optimizer: of the same kind and with the same options.
        parameters: those of this optimizer, by the model's own names (FQNs).
        state: tensors by ``FQN/STATE``; copied.

    Raises:
        PipeplanError: if the state is of parameters that are not there; nothing is changed then.
    """
    per_name: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    unknown = []
    for key, value in state.items():
        name, _, leaf = key.rpartition("/")
        if name in per_name:
            leaf, imported = _imported(leaf, value)
            per_name[name][leaf] = imported
        else:
            unknown.append(key)
    if unknown:
        raise PipeplanError(
            f"optimizer state of parameters that are not held here: {', '.join(unknown[:10])}; "
            "pass the names that begin with those of the parameters"
        )
    first: dict[tuple[int, str], Any] = {}
    for group, name, parameter in _grouped(optimizer, parameters):
        optimizer.state.pop(parameter, None)
        rows = per_name[name]
        shared = {k.removesuffix(GROUP): rows.pop(k) for k in [*rows] if k.endswith(GROUP)}
        for key, value in shared.items():
            if not _is_same(first.setdefault((id(group), key), value), value):
                raise _refusal(
                    optimizer, f"has a group whose parameters were saved with other {key}"
                )
            group[key] = _placed(key, value, parameter, group)
        if rows:
            optimizer.state[parameter] = {
                key: _placed(key, value, parameter, group) for key, value in rows.items()
            }


def _imported(leaf: str, value: Tensor) -> tuple[str, Any]:
    if leaf.endswith(NONE):
        return leaf.removesuffix(NONE), None
    if leaf.endswith(NUMBER):
        return leaf.removesuffix(NUMBER), value.item()
    return leaf, value


def _grouped(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in group_of]
    if missing:
        raise PipeplanError(
            f"{type(optimizer).__name__} does not train {', '.join(missing[:10])}; pass the "
            "parameters it was made of"
        )
    for name, parameter in parameters.items():
        yield group_of[id(parameter)], name, parameter


def _placed(key: str, value: Any, parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """A copy where torch's optimizers expect it; its dtype is kept."""
    if not isinstance(value, Tensor):
        return value
    on_device = key not in _ON_CPU or group.get("capturable") or group.get("fused")
    return value.detach().clone().to(parameter.device if on_device else "cpu")
