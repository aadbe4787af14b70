"""Finding and building the user's model, its example batch and its loss."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.artifacts.job import Job
from planner.errors import PipeplanError, shorten
from planner.tracing.user_code import FAILURES, is_exports_own, place, told

TARGET = "target"


def import_factory(name: str) -> Callable[..., nn.Module]:
    """Import ``module:factory``, the current folder included, as ``python -m`` would.

    Only call this with a name the user typed or the zoo holds: importing runs code.

    Raises:
        PipeplanError: if the name has no such form, the module or factory does not exist, or
            importing the module fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise PipeplanError(
            f"model {name!r}: expected module:factory, for example models.gpt:gpt2_small"
        )
    if "/" in module_name or "\\" in module_name or "" in module_name.split("."):
        raise PipeplanError(
            f"model {name!r}: {module_name!r} is not the name of a module; write folders and file "
            "as Python imports them from the current folder, for example models.gpt:gpt2_small "
            "for models/gpt.py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise PipeplanError(_failed_import(name, module_name, error)) from error
        raise PipeplanError(
            f"model {name!r}: no module {error.name!r} in {here} or on PYTHONPATH"
        ) from error
    except FAILURES as error:
        raise PipeplanError(
            f"model {name!r}: importing module {module_name!r} failed: {told(error)}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if _is_factory(value, module_name)]
        raise PipeplanError(
            f"model {name!r}: module {module_name!r} has no callable {attribute!r}; "
            f"it has {', '.join(known) or 'none'}"
        )
    return factory  # type: ignore[no-any-return]


def _failed_import(name: str, module_name: str, error: ModuleNotFoundError) -> str:
    missing = repr(error.name) if error.name else str(error)
    where = place(error)
    return (
        f"model {name!r}: importing module {module_name!r} failed: ModuleNotFoundError: "
        f"the module {missing} that it imports{f' ({where})' if where else ''} is missing; "
        "install it or correct that import"
    )


def _is_factory(value: object, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name


def build(factory: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Call the factory on the current default device.

    Raises:
        PipeplanError: if the factory raises or the result is not a module.
    """
    try:
        model = factory(**arguments)
    except PipeplanError:
        raise
    except FAILURES as error:
        given = f" with model_arguments {shorten(dict(arguments), 400)}" if arguments else ""
        wrong = isinstance(error, TypeError | ValueError)
        remedy = "; correct model_arguments in the job file" if wrong else ""
        raise PipeplanError(
            f"model {_qualified_name(factory)!r}{given} cannot be built: {told(error)}{remedy}"
        ) from error
    if not isinstance(model, nn.Module):
        raise PipeplanError(
            f"model {_qualified_name(factory)!r}: the factory returned {type(model).__name__}, "
            "expected a torch.nn.Module"
        )
    return model


def _qualified_name(of: object) -> str:
    """``module:name``, as the user would name it."""
    named = of if hasattr(of, "__qualname__") else type(of)
    return f"{named.__module__}:{named.__qualname__}"


def example_batch(model: nn.Module, job: Job) -> dict[str, Tensor]:
    """One microbatch: the job's ``inputs`` if it lists any, else ``model.example_batch``.

    Returns:
        Tensors by the names of forward's arguments, and ``target`` for the loss.

    Raises:
        PipeplanError: if neither describes a batch, or ``example_batch`` raises or returns
            something else.
    """
    if job.inputs:
        batch = {name: _random_input(job, name) for name in job.inputs}
    elif hasattr(model, "example_batch"):
        batch = _own_batch(model, job.samples_per_microbatch)
    else:
        raise PipeplanError(
            f"model {type(model).__name__} has no example_batch(samples) method and the job lists "
            'no inputs; add [inputs.NAME] shape = [...], dtype = "int64" for each argument of '
            "forward, and [inputs.target] for the loss"
        )
    if job.loss != "output" and TARGET not in batch:
        raise PipeplanError(
            f"the batch has {', '.join(batch)} but no 'target', which loss = {job.loss!r} needs; "
            'add [inputs.target] to the job, or set loss = "output" if the model returns its loss'
        )
    dtype = getattr(torch, job.precision)
    return {
        name: value.to(dtype) if value.dtype == torch.float32 else value
        for name, value in batch.items()
    }


def _own_batch(model: nn.Module, samples: int) -> dict[str, Tensor]:
    call = f"{_qualified_name(model)}.example_batch({samples})"
    try:
        batch: object = model.example_batch(samples)  # type: ignore[operator]
    except PipeplanError:
        raise
    except FAILURES as error:
        raise PipeplanError(f"{call} failed: {told(error)}") from error
    wanted = "a mapping of tensors by the names of forward's arguments"
    if not isinstance(batch, Mapping):
        raise PipeplanError(f"{call} returned {_kind(batch)}, expected {wanted}")
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise PipeplanError(
                f"{call} returned {_kind(value)} for {shorten(name)}, expected {wanted}"
            )
    return dict(batch)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sized) else "")


def _random_input(job: Job, name: str) -> Tensor:
    spec = job.inputs[name]
    shape = (job.samples_per_microbatch, *spec.shape)
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, spec.below if dtype != torch.bool else 2, shape).to(dtype)


class TrainingStep(nn.Module):
    """A model and its loss as one module, so that the loss is traced and cut like any layer."""

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, **batch: Tensor) -> Tensor:
        """The scalar loss of one microbatch.

        Raises:
            PipeplanError: if the model returns something other than one tensor, or one that does
                not fit the target.
        """
        inputs = {name: value for name, value in batch.items() if name != TARGET}
        output = self.model(**inputs)
        if not isinstance(output, Tensor):
            raise PipeplanError(self._no_tensor(output))
        if self.loss == "output":
            return output
        loss = functional.mse_loss if self.loss == "mse" else _cross_entropy
        target = batch[TARGET]
        try:
            return loss(output, target)
        except (RuntimeError, ValueError, IndexError) as error:
            if is_exports_own(error):
                raise
            raise PipeplanError(
                f"loss = {self.loss!r} cannot be taken of what {type(self.model).__name__}.forward "
                f"returned, {_form(output)}, and the target, {_form(target)}: {told(error)}; "
                "correct the target or the loss"
            ) from error

    def _no_tensor(self, output: object) -> str:
        remedy = "return its loss alone, a tensor with a single number, from forward"
        if self.loss != "output":
            remedy = 'return the prediction alone from forward, or its loss and set loss = "output"'
        return (
            f"{type(self.model).__name__}.forward returned {_kind(output)}, "
            f"expected one tensor for loss = {self.loss!r}; {remedy}"
        )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy; classes are the last dimension, or the second as in images."""
    if output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape:
        return functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())
    return functional.cross_entropy(output.float(), target)
