"""The forward as eager torch runs it, compared with what an exported step can keep.

:func:`observe` calls the training step twice on fake tensors, which have shapes and no data, and
refuses by name what a stage would lose: hooks of modules and tensors, autocast, numbers drawn by
Python, state kept outside of buffers, and weights that forward writes. What it returns, the
parameters that take a gradient, is compared with the exported step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.utils import checkpoint

from planner.errors import PipeplanError
from planner.tracing.functions import applied_by, apply_itself, require_operator
from planner.tracing.gradients import backward_from
from planner.tracing.torch_private import (
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    schema_arguments,
    storage_key,
    tree_leaves,
)
from planner.tracing.user_code import is_users_own, shown_place

RECOMPUTATION = (
    "activation checkpoints in the model are left out: the plan decides what is recomputed"
)
_INSTEAD_OF_HOOKS = (
    "stages run without it: change gradients by an autograd Function in forward, which is kept, or "
    "by a hook on a parameter"
)
_REFUSED = {
    "autocast": "forward switches on torch.autocast ({where}); remove it and set "
    'precision = "bfloat16" in the job, or autocast in the training file, which apply to every '
    "stage",
    "to": "forward converts the weights of {what} by to() ({where}); convert them when the model "
    "is built. If this is a class of a library, wrap its parts in a module:factory of your own, "
    "with experts as in docs/experts.md",
    "hook": "forward registers a hook on a tensor ({where}); " + _INSTEAD_OF_HOOKS,
    "branch": "operator torch.{what} ({where}): control-flow operators cannot be measured, what "
    "they cost depends on the data; compute both branches and choose with torch.where, or write "
    "the loop out",
    "plain": "{what} is a tensor in a plain attribute, which stays as it was when the model was "
    "traced; use register_buffer ({where})",
    "drawn": "autograd Function {what} draws random numbers ({operator}); draw them before and "
    "give them to it as an argument",
    "written": "forward writes into the parameter {what!r} ({operator}, {where}), which "
    "microbatches of a pipeline would see at other times than one process; compute from a changed "
    "copy, as torch.nn.utils.parametrize does, change it in the optimizer, or make it a buffer if "
    "it is not trained",
    "python": "forward draws with Python's {what}, whose numbers stay those of the trace; draw "
    "with torch, such as torch.rand((), device=x.device), and multiply instead of branching",
    "module hook": "module {what!r} ({kind}) has a backward hook (register_full_backward_hook); "
    + _INSTEAD_OF_HOOKS,
    "all hooks": "all modules have a backward hook; " + _INSTEAD_OF_HOOKS,
    "state": "forward {what}: a stage would repeat the call that was traced; keep the state in a "
    "buffer (register_buffer), or draw with torch",
}
"""What a stage would lose, with what to do instead."""


def _refuse(reason: str, **found: object) -> PipeplanError:
    return PipeplanError(_REFUSED[reason].format(**found))


class Observation(NamedTuple):
    """What two calls of a training step have shown.

    Attributes:
        trained: names of the parameters whose gradient the backward computes.
        notes: what the exported step leaves out although it changes no gradient.
    """

    trained: frozenset[str]
    notes: tuple[str, ...]


def observe(step: nn.Module, batch: Mapping[str, Tensor]) -> Observation:
    """Call a training step twice without data.

    Args:
        step: the model with its loss; on any device, its tensors are not touched.
        batch: one microbatch.

    Raises:
        PipeplanError: naming the module and what to do instead.
        Exception: what the model raises, or torch where a value depends on data.
    """
    for name, module in step.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _refuse("module hook", what=_shown(name), kind=type(module).__name__)
    if hooks_of_all._global_backward_hooks or hooks_of_all._global_backward_pre_hooks:
        raise _refuse("all hooks")
    watch = _Watch(step)
    with attributes_restored(step), watch.active():
        _give_tensors(step, watch.fakes)
        watch.call(batch)
        first, before = watch.operations, _state(step)
        loss, after = watch.call(batch), _state(step)
    second, changed = watch.operations, sorted(n for n in after if before.get(n) != after[n])
    if first != second or changed:
        what = (
            f"keeps {', '.join(changed)} from call to call" if changed else "differs between calls"
        )
        if first != second:
            pairs = enumerate(zip(first, second, strict=False))
            place = next(
                (i for i, (one, other) in pairs if one != other), min(len(first), len(second))
            )
            what += f", first at {([*first, None][place] or second[place])[0]}"
        raise _refuse("state", what=what)
    names = {id(watch.fakes[id(value)]): _shown(n) for n, value in step.named_parameters()}
    reached = backward_from({loss.grad_fn})
    trained = {names.get(id(getattr(node, "variable", None)), "") for node in reached} - {""}
    return Observation(frozenset(trained), tuple(dict.fromkeys(watch.notes)))


def _shown(name: str) -> str:
    """Return a name as the model has it, without the step around it."""
    return name.removeprefix("model.") if name != "model" else "the model"


# --- what a call does -----------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Watches calls of a training step on fake tensors.

    Attributes:
        operations: what the last call dispatched, in order.
        notes: what is left out.
    """

    supports_higher_order_operators = True

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step
        self.notes: list[str] = []
        self.operations: list[tuple[str, object]] = []
        self.function = ""  # The autograd Function whose forward runs.
        self.plain: dict[int, str] = {}
        self.names = {id(module): _shown(name) for name, module in step.named_modules()}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        held = [*step.parameters(), *step.buffers()]
        self.fakes: dict[int, Tensor] = {id(value): self.fake.from_tensor(value) for value in held}
        self.parameters = {
            storage_key(self.fakes[id(p)]): _shown(name) for name, p in step.named_parameters()
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let torch tell of what it does besides operations."""
        replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (torch.autocast, "__enter__", self._refuse_autocast),
            (nn.Module, "to", self._refuse_conversion),
            (Tensor, "register_hook", self._refuse_hook),
            (Tensor, "register_post_accumulate_grad_hook", self._refuse_hook),
            (checkpoint, "_checkpoint_without_reentrant_generator", self._without_checkpoint),
        )
        with ExitStack() as stack:
            stack.enter_context(applied_by(self._apply, self._note_checkpoint))
            stack.enter_context(autocast_on_any_device())
            for row in replaced:
                stack.enter_context(_replaced(*row))
            yield

    def call(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Call the step; what it did is in ``operations`` afterwards."""
        self.operations, drawn = [], _drawn()
        registered = {*self.fakes, *map(id, self.fakes.values())}
        self.plain = {
            id(value): name
            for name, value in _attributes(self.step)
            if isinstance(value, Tensor) and id(value) not in registered
        }
        entries = {name: self.fake.from_tensor(value) for name, value in batch.items()}
        with self.fake, torch.enable_grad(), self:
            loss: Tensor = self.step(**entries)
        for library, after in _drawn().items():
            if drawn[library] != after:
                raise _refuse("python", what=library)
        return loss

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise _refuse("branch", what=func.name(), where=self._where())
        given = tree_leaves([args, kwargs or {}])
        if func.namespace != "prim":  # Questions about devices, no operations.
            self.operations.append((str(func), [_form(value) for value in given]))
        for value in given:
            if isinstance(value, Tensor) and id(value) in self.plain:
                raise _refuse("plain", what=self.plain[id(value)], where=self._where())
        if isinstance(func, OpOverload):
            for place, argument in enumerate(schema_arguments(func)):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
                    self._require_buffers(func, value)
            if self.function and torch.Tag.nondeterministic_seeded in func.tags:
                raise _refuse("drawn", what=self.function, operator=func)
        return func(*args, **(kwargs or {}))

    def _require_buffers(self, func: OpOverload, written: Any) -> None:
        """Refuse to write into parameters."""
        for tensor in tree_leaves([written]):
            name = self.parameters.get(storage_key(tensor)) if isinstance(tensor, Tensor) else None
            if name:
                raise _refuse("written", what=name, operator=func, where=self._where())

    def _apply(self, function: Any, *arguments: Any) -> Any:
        outside, self.function = self.function, f"{function.__qualname__} ({self._where()})"
        found = apply_itself(function, *arguments)
        self.function = outside
        require_operator(function, arguments, found, self._where())
        return found

    def _note_checkpoint(self) -> None:
        self.notes.append(RECOMPUTATION)

    def _without_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._note_checkpoint()
        return original(*args, **kwargs)

    def _refuse_autocast(self, original: Any, context: Any) -> Any:
        if getattr(context, "asked", context._enabled):
            raise _refuse("autocast", where=self._where())
        return original(context)

    def _refuse_hook(self, original: Any, tensor: Tensor, hook: Any) -> Any:
        if str(sys._getframe(2).f_globals["__name__"]).startswith("torch."):
            return original(tensor, hook)
        raise _refuse("hook", where=self._where())

    def _refuse_conversion(self, original: Any, module: nn.Module, *args: Any, **kw: Any) -> Any:
        raise _refuse("to", what=type(module).__name__, where=self._where())

    def _where(self) -> str:
        """Return the module and the user's line that runs."""
        frame: Any = sys._getframe(1)
        place = module = ""
        while frame is not None and not (place and module):
            if not place and is_users_own(frame):
                place = shown_place(frame.f_code.co_filename, frame.f_lineno)
            first = next(iter(frame.f_code.co_varnames), "")
            module = module or self.names.get(id(frame.f_locals.get(first)), "")
            frame = frame.f_back
        return ", ".join(part for part in (module and f"module {module!r}", place) if part)


def autocast_on_any_device() -> AbstractContextManager[None]:
    """Let models name the device of their input for autocast, also ``meta``, as tracing has it."""
    return _replaced(torch.autocast, "__init__", _make_autocast)


def _make_autocast(
    original: Any, context: Any, device_type: str, *args: Any, **kwargs: Any
) -> None:
    """Make a context of autocast; note whether it was to be enabled, which a device may refuse."""
    context.asked = kwargs.get("enabled", args[1] if len(args) > 1 else True)
    original(context, "cpu" if device_type == "meta" else device_type, *args, **kwargs)


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Call something else, which gets the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: by(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


# --- state between calls --------------------------------------------------------------------------

_NUMBERS = (bool, int, float, str)
_GENERATORS: Mapping[type, Callable[[Any], object]] = {
    random.Random: lambda generator: generator.getstate(),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state),
    np.random.RandomState: lambda generator: repr(generator.get_state()),
}
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""


def _drawn() -> dict[str, object]:
    return {"random": random.getstate(), "numpy.random": repr(np.random.get_state())}


def _form(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, _NUMBERS) else str(type(value))


def _attributes(step: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the plain attributes of all modules, and what their lists and dicts hold."""
    for path, module in step.named_modules():
        for name, value in vars(module).items():
            if name in _OF_TORCH:
                continue
            label = f"{_shown(path)}.{name}" if path not in ("", "model") else name
            yield label, value
            held = value.values() if isinstance(value, dict) else value
            if isinstance(value, dict | list | tuple):
                yield from ((label, inner) for inner in held)


def _state(step: nn.Module) -> dict[str, list[object]]:
    """Return the numbers and generators that modules hold."""
    found: dict[str, list[object]] = {}
    for name, value in _attributes(step):
        read = _GENERATORS.get(type(value))
        if read is not None or isinstance(value, _NUMBERS):
            found.setdefault(name, []).append(read(value) if read else value)
    return found


def _give_tensors(step: nn.Module, others: Mapping[int, Tensor]) -> None:
    """Give modules other tensors for parameters and buffers, also where an LSTM lists them."""
    for module in step.modules():
        for held in vars(module).values():
            if type(held) not in (dict, list):
                continue
            for place, value in [*(held.items() if type(held) is dict else enumerate(held))]:
                held[place] = others.get(id(value), value)


@contextmanager
def attributes_restored(step: nn.Module) -> Iterator[None]:
    """Give modules the attributes back that they had, which calls may set to fake tensors."""
    kept = [
        (module, {n: copy(x) if type(x) in (dict, list) else x for n, x in vars(module).items()})
        for module in step.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)
