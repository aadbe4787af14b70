"""Custom autograd Functions as operators of the exported graph.

torch.export records the operations of a Function's forward and loses its backward. While a model is
exported, :func:`functions_kept` lets every call of ``Function.apply`` become one operator,
``pipeplan::custom_function``, that calls the Function itself: autograd then finds the user's
backward, in the trace as in the executor. Checkpoints that re-enter autograd run their function as
any other code: the plan decides what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from planner.errors import PipeplanError
from planner.tracing.torch_private import FunctionBase, tree_leaves, tree_map_only

_TENSOR = object()
"""Stands for an operand, or a result, that is a tensor."""


@dataclass
class _Call:
    """A Function with those of its arguments and results that are no tensors."""

    function: type
    arguments: tuple[Any, ...]
    results: Any = None

    def is_of(self, function: type, arguments: Sequence[Any]) -> bool:
        """Return whether another call differs in its tensors alone."""
        if function is not self.function or len(arguments) != len(self.arguments):
            return False
        return all(
            one is other
            or (type(one) is type(other) and isinstance(one, str | int | float) and one == other)
            for one, other in zip(self.arguments, _marked(arguments), strict=True)
        )


def _marked(values: Any) -> Any:
    return tree_map_only(Tensor, lambda _: _TENSOR, values)


def _filled(marked: Any, tensors: Sequence[Tensor]) -> Any:
    left = iter(tensors)
    return tree_map_only(object, lambda x: next(left) if x is _TENSOR else x, marked)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


_calls: list[_Call] = []
_library = torch.library.Library("pipeplan", "FRAGMENT")
_library.define("custom_function(int call, Tensor[] operands) -> Tensor[]")


def _run(call: int, operands: Sequence[Tensor]) -> list[Tensor]:
    kept = _calls[call]
    found = apply_itself(kept.function, *_filled(kept.arguments, operands))
    kept.results = _marked(found)
    return _tensors(found)


_library.impl("custom_function", _run, "CompositeImplicitAutograd")


def _as_operator(function: Any, *arguments: Any) -> Any:
    # Equal calls share a number, so that equal layers have equal graphs.
    number = next((i for i, row in enumerate(_calls) if row.is_of(function, arguments)), None)
    if number is None:
        number = len(_calls)
        _calls.append(_Call(function, _marked(arguments)))
    made = torch.ops.pipeplan.custom_function(number, _tensors(arguments))
    return _filled(_calls[number].results, made)


def functions_kept() -> AbstractContextManager[None]:
    """Keep calls of Functions as operators while a model is exported."""
    return applied_by(_as_operator)


def apply_itself(function: Any, *arguments: Any) -> Any:
    """Call ``Function.apply`` as torch does when nothing is watched."""
    return super(FunctionBase, function).apply(*arguments)


@contextmanager
def applied_by(
    apply: Callable[..., Any], note_checkpoint: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Let every ``Function.apply`` of a user, also one that was bound before, call something else.

    Args:
        apply: takes the class and its arguments.
        note_checkpoint: called for each checkpoint, whose function runs as any other code.
    """

    def chosen(function: Any, *arguments: Any) -> Any:
        if str(function.__module__).startswith("torch._"):  # Torch's own, such as of operators.
            return apply_itself(function, *arguments)
        if function is not checkpoint.CheckpointFunction:
            return apply(function, *arguments)
        note_checkpoint()
        run, _, *given = arguments
        # Nothing in it has a gradient unless one of its arguments has.
        trains = any(isinstance(value, Tensor) and value.requires_grad for value in given)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            return run(*given)

    setattr(FunctionBase, "apply", classmethod(chosen))  # noqa: B010
    try:
        yield
    finally:
        delattr(FunctionBase, "apply")


def require_operator(function: type, arguments: Sequence[Any], results: Any, where: str) -> None:
    """Refuse a Function that cannot be one operator, called at a module and line.

    Raises:
        PipeplanError: naming the Function and the remedy.
    """
    operands, problem = _tensors(arguments), ""
    if len(operands) > sum(isinstance(value, Tensor) for value in arguments):
        problem = "takes tensors inside a list or dict; give each as an argument of its own"
    elif any(made is operand for made in _tensors(results) for operand in operands):
        problem = "writes into its argument (mark_dirty); return a new tensor instead"
    if problem:
        raise PipeplanError(f"autograd Function {function.__qualname__} ({where}) {problem}")
