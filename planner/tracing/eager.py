"""The forward as eager torch runs it, compared with what an exported step can keep.

:func:`observe` calls the training step twice on fake tensors, which have shapes and no data, and
refuses by name what a stage would lose: hooks of modules and tensors, autocast, numbers drawn by
Python, state kept outside of buffers, and weights that forward writes. What it returns, the
parameters that take a gradient, is compared with the exported step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.utils import checkpoint

from planner.errors import PipeplanError
from planner.tracing.functions import (
    applied_by,
    apply_itself,
    is_of_torch,
    require_operator,
    without_checkpoint,
)
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
_NUMBERS = (bool, int, float, str)
_GENERATORS: Mapping[type, Callable[[Any], object]] = {
    random.Random: lambda generator: generator.getstate(),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state),
    np.random.RandomState: lambda generator: repr(generator.get_state()),
}


@dataclass
class Observation:
    """What two calls of a training step have shown.

    Attributes:
        trained: names of the parameters whose gradient the backward computes.
        notes: what the exported step leaves out although it changes no gradient.
    """

    trained: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def observe(step: nn.Module, batch: Mapping[str, Tensor]) -> Observation:
    """Call a training step twice without data.

    Args:
        step: the model with its loss; on any device, its tensors are not touched.
        batch: one microbatch.

    Raises:
        PipeplanError: naming the module and what to do instead.
        Exception: what the model raises, or torch where a value depends on data.
    """
    _require_no_hooks(step)
    watch = _Watch(step)
    with watch.active():
        states, operations = [_state(step)], []
        for _ in range(2):
            loss = watch.call(batch)
            operations.append(watch.operations)
            states.append(_state(step))
        _require_equal(operations[0], operations[1], _changed(states[1], states[2]))
        return Observation(watch.trained(loss), tuple(dict.fromkeys(watch.notes)))


# --- hooks ----------------------------------------------------------------------------------------

_INSTEAD_OF_HOOKS = (
    "stages run without it: change gradients by an autograd Function in forward, which is kept, or "
    "by a hook on a parameter"
)


def _require_no_hooks(step: nn.Module) -> None:
    for name, module in step.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise PipeplanError(
                f"module {_shown(name)!r} ({type(module).__name__}) has a backward hook "
                f"(register_full_backward_hook); {_INSTEAD_OF_HOOKS}"
            )
    if hooks_of_all._global_backward_hooks or hooks_of_all._global_backward_pre_hooks:
        raise PipeplanError(f"all modules have a backward hook; {_INSTEAD_OF_HOOKS}")


# --- what a call does -----------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Watches calls of a training step on fake tensors."""

    supports_higher_order_operators = True

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step
        self.notes: list[str] = []
        self.operations: list[tuple[str, object]] = []
        self.inside = ""
        self.plain: dict[int, str] = {}
        self.names = {id(module): _shown(name) for name, module in step.named_modules()}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        held = [*step.parameters(), *step.buffers()]
        self.fakes: dict[int, Tensor] = {id(value): self.fake.from_tensor(value) for value in held}
        self.parameters = {
            storage_key(self.fakes[id(value)]): _shown(name)
            for name, value in step.named_parameters()
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let torch tell of what it does besides operations."""
        with ExitStack() as stack:
            stack.enter_context(applied_by(self._apply))
            replaced = stack.enter_context
            replaced(autocast_on_any_device())
            replaced(_replaced(torch.autocast, "__enter__", self._autocast))
            replaced(_replaced(nn.Module, "to", self._refuse_conversion))
            for name in ("register_hook", "register_post_accumulate_grad_hook"):
                replaced(_replaced(Tensor, name, self._refuse_tensor_hook))
            replaced(
                _replaced(checkpoint, "_checkpoint_without_reentrant_generator", self._checkpointed)
            )
            yield

    def call(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Call the step; what it did is in ``operations`` afterwards."""
        self.operations = []
        self.plain = dict(_plain_tensors(self.step, self.fakes.values()))
        drawn = random.getstate(), repr(np.random.get_state())
        entries = {name: self.fake.from_tensor(value) for name, value in batch.items()}
        with _with_tensors(self.step, self.fakes), self.fake, torch.enable_grad(), self:
            loss: Tensor = self.step(**entries)
        for library, before, after in zip(
            ("random", "numpy.random"),
            drawn,
            (random.getstate(), repr(np.random.get_state())),
            strict=True,
        ):
            if before != after:
                raise PipeplanError(
                    f"forward draws with Python's {library}, whose numbers stay "
                    "those of the trace; draw with torch, such as "
                    "torch.rand((), device=x.device), and multiply instead of branching"
                )
        return loss

    def trained(self, loss: Tensor) -> frozenset[str]:
        """Return the names of the parameters that the backward reaches."""
        names = {id(self.fakes[id(value)]): n for n, value in self.step.named_parameters()}
        seen: set[Any] = set()
        ahead, found = [loss.grad_fn], set()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            ahead += [after for after, _ in node.next_functions]
            if name := names.get(id(getattr(node, "variable", None))):
                found.add(_shown(name))
        return frozenset(found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise PipeplanError(
                f"operator torch.{func.name()} ({self._where()}): control-flow operators cannot be "
                "measured, what they cost depends on the data; compute both branches and choose "
                "with torch.where, or write the loop out"
            )
        given = tree_leaves([args, kwargs or {}])
        if func.namespace != "prim":  # Questions about devices, no operations.
            self.operations.append((str(func), [_form(value) for value in given]))
        for value in given:
            if isinstance(value, Tensor) and id(value) in self.plain:
                raise PipeplanError(
                    f"{self.plain[id(value)]} is a tensor in a plain attribute, which stays as it "
                    f"was when the model was traced; use register_buffer ({self._where()})"
                )
        if isinstance(func, OpOverload):
            self._require_no_write(func, args, kwargs or {})
            if self.inside and torch.Tag.nondeterministic_seeded in func.tags:
                raise PipeplanError(
                    f"autograd Function {self.inside} draws random numbers ({func}); draw them "
                    "before and give them to it as an argument"
                )
        return func(*args, **(kwargs or {}))

    def _require_no_write(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(schema_arguments(func)):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves([value]):
                written = isinstance(tensor, Tensor) and self.parameters.get(storage_key(tensor))
                if written:
                    raise PipeplanError(
                        f"forward writes into the parameter {written!r} ({func}, {self._where()}), "
                        "which microbatches of a pipeline would see at other times than one "
                        "process; compute from a changed copy, as torch.nn.utils.parametrize "
                        "does, change it in the optimizer, or make it a buffer if it is not trained"
                    )

    def _apply(self, function: Any, *arguments: Any) -> Any:
        if is_of_torch(function):
            return apply_itself(function, *arguments)
        if function is checkpoint.CheckpointFunction:
            self.notes.append(RECOMPUTATION)
            return without_checkpoint(*arguments)
        outside, self.inside = self.inside, f"{function.__qualname__} ({self._where()})"
        found = apply_itself(function, *arguments)
        self.inside = outside
        require_operator(function, arguments, found, self._where())
        return found

    def _checkpointed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.notes.append(RECOMPUTATION)
        return original(*args, **kwargs)

    def _autocast(self, original: Any, context: Any) -> Any:
        if getattr(context, "asked", context._enabled):
            raise PipeplanError(
                f"forward switches on torch.autocast ({self._where()}); remove it and set "
                'precision = "bfloat16" in the job, or autocast in the training file, which '
                "apply to every stage"
            )
        return original(context)

    def _refuse_tensor_hook(self, original: Any, tensor: Tensor, hook: Any) -> Any:
        if str(sys._getframe(2).f_globals["__name__"]).startswith("torch."):
            return original(tensor, hook)
        raise PipeplanError(
            f"forward registers a hook on a tensor ({self._where()}); {_INSTEAD_OF_HOOKS}"
        )

    def _refuse_conversion(self, original: Any, module: nn.Module, *args: Any, **kw: Any) -> Any:
        raise PipeplanError(
            f"forward converts the weights of {type(module).__name__} by to() ({self._where()}); "
            "convert them when the model is built. If this is a class of a library, wrap its parts "
            "in a module:factory of your own, with experts as in docs/experts.md"
        )

    def _where(self) -> str:
        """Return the module and the user's line that runs."""
        frame: FrameType | None = sys._getframe(1)
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
    asked = kwargs.get("enabled", args[1] if len(args) > 1 else True)
    original(context, "cpu" if device_type == "meta" else device_type, *args, **kwargs)
    context.asked = asked


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Call something else, which gets the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: by(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _form(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, _NUMBERS) else str(type(value))


def _shown(name: str) -> str:
    """Return a name as the model has it, without the step around it."""
    return name.removeprefix("model.") if name != "model" else "the model"


# --- state between calls --------------------------------------------------------------------------


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


_OF_TORCH = frozenset(vars(nn.Module()))


def _plain_tensors(step: nn.Module, fakes: Iterable[Tensor]) -> Iterator[tuple[int, str]]:
    """Yield tensors in attributes; an LSTM lists its parameters there, fake ones when called."""
    registered = {id(value) for value in (*step.parameters(), *step.buffers(), *fakes)}
    for name, value in _attributes(step):
        if isinstance(value, Tensor) and id(value) not in registered:
            yield id(value), name


def _state(step: nn.Module) -> dict[str, list[object]]:
    """Return the numbers and generators that modules hold."""
    found: dict[str, list[object]] = {}
    for name, value in _attributes(step):
        read = _GENERATORS.get(type(value))
        if isinstance(value, _NUMBERS):
            found.setdefault(name, []).append(value)
        elif read is not None:
            found.setdefault(name, []).append(read(value))
    return found


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return sorted(name for name in after if before.get(name) != after[name])


def _require_equal(
    first: Sequence[object], second: Sequence[object], changed: Sequence[str]
) -> None:
    """Refuse a step whose second call differs from its first.

    Raises:
        PipeplanError: naming the attributes that changed.
    """
    if first == second and not changed:
        return
    what = f"keeps {', '.join(changed)} from call to call" if changed else "differs between calls"
    where = ""
    if first != second:
        pairs = enumerate(zip(first, second, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))
        at: Any = [*first, None][place] or second[place]
        where = f", first at {at[0]}"
    raise PipeplanError(
        f"forward {what}{where}: a stage would repeat the call that was traced; keep the state in "
        "a buffer (register_buffer), or draw with torch"
    )


@contextmanager
def _with_tensors(step: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Give modules other tensors for parameters and buffers, also where an LSTM lists them."""
    held: list[tuple[Any, Any, Tensor]] = []
    for module in step.modules():
        lists: list[Any] = [value for value in vars(module).values() if type(value) is list]
        rows: list[tuple[Any, Any]] = [
            (owner, place) for owner in lists for place in range(len(owner))
        ]
        rows += [(owner, name) for owner in (module._parameters, module._buffers) for name in owner]
        held += [(owner, key, owner[key]) for owner, key in rows if id(owner[key]) in others]
    for owner, key, value in held:
        owner[key] = others[id(value)]
    try:
        yield
    finally:
        for owner, key, value in held:
            owner[key] = value


@contextmanager
def attributes_restored(step: nn.Module) -> Iterator[None]:
    """Give modules the attributes back that they had, which calls may set to fake tensors."""
    kept = [(module, _copied(vars(module))) for module in step.modules()]
    try:
        yield
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = {}
    for name, value in attributes.items():
        is_container = type(value) in (dict, list) and name not in _OF_TORCH
        copies[name] = type(value)(value) if is_container else value
    return copies
