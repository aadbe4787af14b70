"""Custom autograd Functions as operators of the exported graph.

torch.export records the operations of a Function's forward and loses its backward. While a model is
exported, :func:`functions_kept` lets every call of ``Function.apply`` become one operator,
``pipeplan::custom_function``, that calls the Function itself: autograd then finds the user's
backward, in the trace as in the executor. Checkpoints that re-enter autograd run their function as
any other code: the plan decides what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from planner.errors import PipeplanError
from planner.tracing.torch_private import FunctionBase, tree_leaves

_HERE = object()
"""Stands for an operand, or a result, that is a tensor."""
Apply = Callable[..., Any]


@dataclass
class _Call:
    """A Function with the arguments that are no tensors.

    Attributes:
        function: the class.
        arguments: its arguments, with a mark for each tensor.
        results: what it returned, with a mark for each tensor; a single result is not a tuple.
    """

    function: type
    arguments: tuple[Any, ...]
    results: Any = field(default=_HERE)


_calls: list[_Call] = []
_library = torch.library.Library("pipeplan", "FRAGMENT")
_library.define("custom_function(int call, Tensor[] operands) -> Tensor[]")


def apply_itself(function: Any, *arguments: Any) -> Any:
    """Call ``Function.apply`` as torch does when nothing is watched."""
    return super(FunctionBase, function).apply(*arguments)


def _run(call: int, operands: Sequence[Tensor]) -> list[Tensor]:
    kept, given = _calls[call], iter(operands)
    found = apply_itself(
        kept.function, *(next(given) if value is _HERE else value for value in kept.arguments)
    )
    several = found if isinstance(found, tuple) else (found,)
    marked = tuple(_HERE if isinstance(value, Tensor) else value for value in several)
    kept.results = marked if isinstance(found, tuple) else marked[0]
    return [value for value in several if isinstance(value, Tensor)]


_library.impl("custom_function", _run, "CompositeImplicitAutograd")


def _as_operator(function: Any, *arguments: Any) -> Any:
    if is_of_torch(function):
        return apply_itself(function, *arguments)
    if function is checkpoint.CheckpointFunction:
        return without_checkpoint(*arguments)
    number = _number_of(function, arguments)
    operands = [value for value in arguments if isinstance(value, Tensor)]
    made = iter(torch.ops.pipeplan.custom_function(number, operands))
    results = _calls[number].results
    if not isinstance(results, tuple):
        return next(made) if results is _HERE else results
    return tuple(next(made) if value is _HERE else value for value in results)


def _number_of(function: Any, arguments: Sequence[Any]) -> int:
    """Return the number of a call; equal calls share it, so that equal layers have equal graphs."""
    marked = tuple(_HERE if isinstance(value, Tensor) else value for value in arguments)
    for number, known in enumerate(_calls):
        if known.function is function and _is_same(known.arguments, marked):
            return number
    _calls.append(_Call(function, marked))
    return len(_calls) - 1


def _is_same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(
        one is other
        or ((type(one) is type(other) and isinstance(one, str | int | float)) and one == other)
        for one, other in zip(left, right, strict=True)
    )


def is_of_torch(function: Any) -> bool:
    """Return whether a Function is part of torch's own machinery, such as that of operators."""
    return str(function.__module__).startswith("torch._")


def without_checkpoint(run: Callable[..., Any], _: Any, *arguments: Any) -> Any:
    """Run the function of a reentrant checkpoint.

    As with the checkpoint, nothing in it has a gradient unless one of its arguments has.
    """
    trains = any(isinstance(value, Tensor) and value.requires_grad for value in arguments)
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        return run(*arguments)


def require_operator(function: type, arguments: Sequence[Any], results: Any, where: str) -> None:
    """Refuse a Function that cannot be one operator.

    Args:
        function: its class.
        arguments: what it was called with.
        results: what it returned.
        where: the module and line of the call, for the message.

    Raises:
        PipeplanError: naming the Function and the remedy.
    """
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    others = tree_leaves([value for value in arguments if not isinstance(value, Tensor)])
    problem = ""
    if any(isinstance(value, Tensor) for value in others):
        problem = "takes tensors inside a list or dict; give each as an argument of its own"
    elif any(made is tensor for made in tree_leaves([results]) for tensor in tensors):
        problem = "writes into its argument (mark_dirty); return a new tensor instead"
    if problem:
        raise PipeplanError(f"autograd Function {function.__qualname__} ({where}) {problem}")


@contextmanager
def applied_by(apply: Apply) -> Iterator[None]:
    """Let every ``Function.apply``, also one that was bound before, call something else.

    Args:
        apply: takes the class and its arguments.
    """
    setattr(FunctionBase, "apply", classmethod(apply))  # noqa: B010
    try:
        yield
    finally:
        delattr(FunctionBase, "apply")


def functions_kept() -> Any:
    """Keep calls of Functions as operators while a model is exported."""
    return applied_by(_as_operator)
