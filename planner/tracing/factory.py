"""Import and construction of the user's model, its example batch and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import PipeplanError, shorten
from planner.job import LOSSES, TARGET, Job
from planner.lengths import Lengths
from planner.tracing.hugging_face import PREFIX, factory_of
from planner.tracing.user_code import FAILURES, import_callable, is_exports_own, one_line

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of the model's output and the batch's target that returns a scalar."""


@dataclass(frozen=True)
class Form:
    """A dtype and a shape; as text such as ``float32 [2, 3]``."""

    dtype: torch.dtype
    shape: Sequence[int]

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tensor.dtype, tensor.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def import_factory(name: str) -> Callable[..., nn.Module]:
    """Import ``module:factory``, including from the current folder, as ``python -m`` would.

    ``hf:ClassName`` and ``hf:CONFIG.json`` are models of Hugging Face transformers, see
    :mod:`planner.tracing.hugging_face`.

    Only call this with a name that the user typed or the zoo contains: importing runs code.

    Raises:
        PipeplanError: if the name has no such form, the module or factory does not exist, or
            importing the module fails.
    """
    if name.startswith(PREFIX):
        return factory_of(name)
    return import_callable(name, "model", "models.gpt:gpt2_small")


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
        remedy = "; correct model_arguments in the job file, or --set" if wrong else ""
        raise PipeplanError(
            f"model {_qualified_name(factory)!r}{given} cannot be built: {one_line(error)}{remedy}"
        ) from error
    if not isinstance(model, nn.Module):
        raise PipeplanError(
            f"model {_qualified_name(factory)!r}: the factory returned {type(model).__name__}, "
            "expected a torch.nn.Module"
        )
    # Without torch.compile: stages run exported graphs, under the plain names.
    for module in model.modules():
        module._compiled_call_impl = None
        for name, child in module.named_children():
            setattr(module, name, getattr(child, "_orig_mod", child))
    plain: nn.Module = getattr(model, "_orig_mod", model)
    return plain


def _qualified_name(of: object) -> str:
    """Return ``module:name``, as the user would name it."""
    named = of if hasattr(of, "__qualname__") else type(of)
    return f"{named.__module__}:{named.__qualname__}"


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sized) else "")


# --- batches --------------------------------------------------------------------------------------


def example_batch(model: nn.Module, job: Job) -> dict[str, Tensor]:
    """Return one microbatch: the job's ``inputs`` if it lists any, else ``model.example_batch``.

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


def _random_input(job: Job, name: str) -> Tensor:
    spec = job.inputs[name]
    shape = (job.samples_per_microbatch, *spec.shape)
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, spec.below if dtype != torch.bool else 2, shape).to(dtype)


def _own_batch(model: nn.Module, samples: int) -> dict[str, Tensor]:
    call = f"{_qualified_name(model)}.example_batch({samples})"
    try:
        batch: object = model.example_batch(samples)  # type: ignore[operator]
    except PipeplanError:
        raise
    except FAILURES as error:
        raise PipeplanError(f"{call} failed: {one_line(error)}") from error
    wanted = "a mapping of tensors by the names of forward's arguments"
    if not isinstance(batch, Mapping):
        raise PipeplanError(f"{call} returned {_kind(batch)}, expected {wanted}")
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            nested = isinstance(value, Mapping | list | tuple)
            remedy = "; give forward an argument for each tensor, and nest them in it"
            raise PipeplanError(
                f"{call} returned {_kind(value)} for {shorten(name)}, expected {wanted}"
                f"{remedy if nested else ''}"
            )
    return dict(batch)


def batch_at(batch: Mapping[str, Tensor], lengths: Lengths, place: int) -> dict[str, Tensor]:
    """Return a batch of one length: cut from one as long as the longest, or itself.

    Entries of [samples, positions, ...] with as many positions as the longest length are cut; all
    others stay whole.

    Args:
        batch: entries by name.
        lengths: of the job.
        place: of the length among them.

    Raises:
        PipeplanError: if no entry is of the longest length.
    """
    longest, tokens = lengths.tokens[-1], lengths.tokens[place]
    cut = {name: x for name, x in batch.items() if x.ndim > 1 and x.shape[1] == longest}
    if not cut:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
        raise PipeplanError(
            f"lengths.tokens: the longest is {longest}, but no entry of the model's batch is of "
            f"[samples, {longest}, ...]: {shapes}; let the last of tokens be the length of the "
            "model's batch, or change model_arguments or inputs"
        )
    return {**batch, **{name: value[:, :tokens].contiguous() for name, value in cut.items()}}


# --- losses ---------------------------------------------------------------------------------------


def import_loss(job: Job) -> Loss | None:
    """Import the job's own ``module:function``; return None for a built-in loss.

    Only call this for a job of the user's own: importing runs code, and a plan is data.

    Raises:
        PipeplanError: if it cannot be imported.
    """
    if job.loss in LOSSES:
        return None
    loss: Loss = import_callable(job.loss, "loss", "lib.losses:smoothed")
    return loss


class TrainingStep(nn.Module):
    """A model and its loss as one module, so that the loss is traced and cut like any layer.

    Args:
        model: the model, whose output the loss takes.
        loss: the job's name of the loss.
        own_loss: the function that ``loss`` names, if it is the user's own ``module:function``.

    Raises:
        PipeplanError: if such a function is missing; nothing is imported here.
    """

    def __init__(self, model: nn.Module, loss: str, own_loss: Loss | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._of_output = own_loss or _KNOWN.get(loss)
        if self._of_output is None and loss != "output":
            raise PipeplanError(
                f"loss = {loss!r} is not one of {', '.join(LOSSES)}, and the function it names was "
                f"not given; if you trust it, name it: --loss {loss}"
            )

    def takes(self, name: str) -> bool:
        """Return whether the model takes an entry; the target only if it returns its own loss."""
        if name != TARGET:
            return True
        return self.loss == "output" and TARGET in inspect.signature(self.model.forward).parameters

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the scalar loss of one microbatch.

        Raises:
            PipeplanError: if the model returns something other than one tensor, or one that does
                not fit the target, or the user's own loss fails.
        """
        output = self.model(**{name: value for name, value in batch.items() if self.takes(name)})
        if not isinstance(output, Tensor):
            remedy = "return its loss alone, a tensor with a single number, from forward"
            if self.loss != "output":
                remedy = (
                    'return the prediction alone from forward, or its loss and set loss = "output"'
                )
            raise PipeplanError(
                f"{type(self.model).__name__}.forward returned {_kind(output)}, "
                f"expected one tensor for loss = {self.loss!r}; {remedy}"
            )
        if self._of_output is None:
            return output
        return self._loss_of(output, batch[TARGET], self._of_output)

    def _loss_of(self, output: Tensor, target: Tensor, function: Loss) -> Tensor:
        try:
            found: object = function(output, target)
        except FAILURES as error:
            if is_exports_own(error) or isinstance(error, PipeplanError):
                raise
            raise PipeplanError(
                f"loss = {self.loss!r} cannot be taken of what {type(self.model).__name__}.forward "
                f"returned, {Form.of(output)}, and the target, {Form.of(target)}: {one_line(error)}"
                "; correct the target or the loss"
            ) from error
        if not isinstance(found, Tensor):
            raise PipeplanError(
                f"loss = {self.loss!r} returned {_kind(found)}, expected a tensor with a single "
                "number"
            )
        return found


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy, computed in float32 for low precisions.

    Classes are the last dimension, or the second as in images.
    """
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    if output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape:
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())
    return functional.cross_entropy(output, target)


_KNOWN: Mapping[str, Loss] = {"cross_entropy": _cross_entropy, "mse": functional.mse_loss}
