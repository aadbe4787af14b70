"""Compiled functions that others call by their addresses, and that are compiled apart from them.

numba links all that a function calls into it and optimises the whole again, at every level of a
chain of calls: a deep one over the kernel takes minutes to compile. Here such chains are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cfunc, config, types
from numba.extending import intrinsic

from planner.program.compiled import _cache_folder as cached

_POINTER = types.CPointer(types.int64)
_PLAIN: dict[int, Callable[[Any], float]] = {}


class Apart:
    """A function of the pointer to a walk's memory, compiled when its address is first needed."""

    def __init__(self, function: Callable[[Any], float]) -> None:
        self._function = function
        self._compiled: Any = None

    @property
    def address(self) -> int:
        """The address to call it by."""
        if config.DISABLE_JIT:
            _PLAIN[id(self)] = self._function
            return id(self)
        if self._compiled is None:
            with cached():
                kind = types.float64(_POINTER)
                self._compiled = cfunc(kind, cache=True, error_model="numpy")(self._function)
        return int(self._compiled.address)


@intrinsic
def _call(typing: Any, address: Any, memory: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.DoubleType(), [args[1].type])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.float64(types.int64, _POINTER), build


def _call_plain(address: int, memory: Any) -> float:
    return _PLAIN[int(address)](memory)


call: Any = _call_plain if config.DISABLE_JIT else _call
"""``call(address, w)`` calls the function at an address with the pointer to a walk's memory."""
