"""Functions compiled by numba, their cache on disk, and tables that they read and write in place.

Compiled functions share numpy arrays without passing them: a *block* is an int64 array, its header,
that holds the address and the length of each of its tables, then its numbers. A function takes the
pointer to a header; ``row(block, TABLE, n)`` is the n-th record of a table, whose fields are read
and written as attributes, ``items(block, TABLE)`` a table of plain numbers, and ``header(block,
BLOCK)`` its numbers. As in C, neither tests bounds. Arrays passed from function to function would
cost reference counts, which took half of the time of a replay.

With NUMBA_DISABLE_JIT=1 the same code runs as plain Python: slowly, but bounds are tested and a
debugger can step through it.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import event
from numba.extending import intrinsic

from planner.program.parts import PartCompiler

F = TypeVar("F", bound=Callable[..., Any])
LOG = logging.getLogger(__name__)
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_OF_PARTS: dict[str, Any] = {
    **_OPTIONS,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": PartCompiler,
}


# --- compiling, and what was compiled before ------------------------------------------------------


def compiled(function: F) -> F:
    """Compile a function that other compiled functions call."""
    return _compiled_once(njit(**_OF_PARTS)(function))


def inlined(function: F) -> F:
    """Compile a short function into those that call it."""
    return _compiled_once(njit(forceinline=True, **_OF_PARTS)(function))


def _compiled_once(function: Any) -> Any:
    """Have a function take all whole numbers as int64: numba compiles it anew for every type."""
    if config.DISABLE_JIT:
        return function
    template = function.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        return template(tuple(map(_widened, args)), {k: _widened(kind) for k, kind in kws.items()})

    function.get_call_template = get_call_template
    return function


def _widened(kind: Any) -> Any:
    return types.int64 if isinstance(kind, types.Integer) else kind


def entry(function: F) -> F:
    """Compile a function that Python calls, at its first call, unless the cache has it."""
    with _cache_folder():
        try:
            done: F = njit(cache=True, **_OPTIONS)(function)
        except RuntimeError as error:
            LOG.warning("What is compiled is not kept, so every start compiles anew: %s", error)
            done = njit(**_OPTIONS)(function)
    return done


def cache_folder() -> Path:
    """Return the folder that holds what was compiled of the present sources.

    numba itself looks only at the file of the function that Python calls, so the folder's name is
    a digest of all sources of the planner that are compiled.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    planner = Path(__file__).parent.parent
    for folder in ("program", "costs", "bounds", "search/walk", "search/orders"):
        for path in sorted((planner / folder).rglob("*.py")):
            digest.update(str(path.relative_to(planner)).encode() + path.read_bytes())
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pipeplan" / "compiled" / digest.hexdigest()[:16]


@contextmanager
def _cache_folder() -> Iterator[None]:
    """Have numba keep what is decorated here in our folder, where the user names none."""
    if config.CACHE_DIR:
        yield
        return
    config.CACHE_DIR = str(_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = ""


@cache
def _folder() -> Path:
    return cache_folder()


class _Compiling(event.Listener):  # type: ignore[misc]
    """Says once that functions of the planner are being compiled, and stops collecting meanwhile.

    What numba makes in a compilation lives until its end: searching it for garbage takes a tenth
    of the time.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._nested = 0
        self._collects = False

    def on_start(self, event: Any) -> None:
        if self._nested == 0:
            self._collects = gc.isenabled()
            gc.disable()
        self._nested += 1
        module = event.data["dispatcher"].py_func.__module__
        if not self._is_known and module.startswith("planner."):
            self._is_known = True
            LOG.warning(
                "Compiling the planner's core, once a version; a command compiles what it needs of "
                "it, up to about 20 s."
            )

    def on_end(self, event: Any) -> None:
        """Collect garbage again after the outermost compilation."""
        self._nested -= 1
        if self._nested == 0 and self._collects:
            gc.enable()


if not config.DISABLE_JIT:
    event.register("numba:compile", _Compiling())


# --- tables ---------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """A table of a block: its place in the header, and what its rows are."""

    block: int
    slot: int
    kind: np.dtype[Any]


_TABLES: list[_Table] = []
"""Tables and headers by their numbers, which compiled code knows as constants."""


def block(numbers: str, reals: str = "", **tables: np.dtype[Any]) -> tuple[int, ...]:
    """Declare a kind of block; return the number of its header, then those of its tables.

    Args:
        numbers: names of the whole numbers in its header.
        reals: names of those that are not whole.
        tables: the kinds of rows of its tables, by their names.
    """
    fields = [(f"{name}_{what}", np.dtype("i8")) for name in tables for what in ("at", "rows")]
    fields += [(name, np.dtype("i8")) for name in numbers.split()]
    kind = np.dtype(fields + [(name, np.dtype("f8")) for name in reals.split()])
    first = len(_TABLES)
    _TABLES.append(_Table(first, -1, kind))
    _TABLES.extend(_Table(first, 2 * n, row) for n, row in enumerate(tables.values()))
    return tuple(range(first, len(_TABLES)))


class Block:
    """The tables of a block, as numpy arrays.

    Args:
        kind: number of its header, as :func:`block` returned it.
        rows: of each table, by its number; tables that are not named have none.

    Attributes:
        header: that compiled functions are given.
        numbers: of the header, a record of numpy.
    """

    def __init__(self, kind: int, rows: Mapping[int, int]) -> None:
        self.kind = kind
        layout = _TABLES[kind].kind
        self.header = np.zeros(layout.itemsize // 8, np.int64)
        self.numbers = self.header.view(layout)[0]
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        for number, table in enumerate(_TABLES):
            if table.block == kind and table.slot >= 0:
                self._arrays[number] = array = _aligned(table.kind, rows.get(number, 0))
                self.header[table.slot] = array.ctypes.data
                self.header[table.slot + 1] = len(array)

    def __getitem__(self, table: int) -> np.ndarray[Any, Any]:
        """Return a table, all that there is room for."""
        return self._arrays[table]


def _aligned(kind: np.dtype[Any], rows: int) -> np.ndarray[Any, Any]:
    """Return zeros that begin at a cache line."""
    raw = np.zeros(kind.itemsize * rows + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + kind.itemsize * rows].view(kind)


# --- tables in compiled code ----------------------------------------------------------------------

_POINTER = types.CPointer(types.int64)


def _numba_kind(table: Any) -> Any:
    return numba.from_dtype(_TABLES[table.literal_value].kind)


def _address(context: Any, builder: Any, block: Any, table: Any, to: Any) -> Any:
    """Return the address of a table; it is never written while compiled code runs."""
    slot = ir.Constant(ir.IntType(64), _TABLES[table.literal_value].slot)
    address = builder.load(builder.gep(block, [slot]))
    address.set_metadata("invariant.load", builder.module.add_metadata([]))
    return builder.inttoptr(address, to)


@intrinsic(prefer_literal=True)
def _row(typing: Any, block: Any, table: Any, n: Any) -> Any:
    kind = _numba_kind(table)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = _address(context, builder, args[0], table, context.get_value_type(kind))
        return builder.gep(rows, [args[2]], inbounds=True)

    return kind(block, table, types.intp), build


@intrinsic(prefer_literal=True)
def _items(typing: Any, block: Any, table: Any) -> Any:
    kind = types.CPointer(_numba_kind(table))

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _address(context, builder, args[0], table, context.get_value_type(kind))

    return kind(block, table), build


@intrinsic(prefer_literal=True)
def _header(typing: Any, block: Any, table: Any) -> Any:
    kind = _numba_kind(table)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(kind))

    return kind(block, table), build


@intrinsic
def _pointer(typing: Any, array: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return _POINTER(array), build


@intrinsic(prefer_literal=True)
def _pointer_at(typing: Any, address: Any, table: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(_POINTER))

    return _POINTER(types.int64, table), build


# --- the same in plain Python ---------------------------------------------------------------------


class _Record:
    """A record, whose fields are read and written as attributes."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Any) -> None:
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name: str) -> Any:
        return self._fields[name]

    def __setattr__(self, name: str, value: object) -> None:
        self._fields[name] = value


class _Items:
    """Numbers of a table that have no negative places."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, n: int) -> Any:
        assert n >= 0
        return self._array[n]

    def __setitem__(self, n: int, value: object) -> None:
        assert n >= 0
        self._array[n] = value


def _table_in_python(block: Any, table: int) -> Any:
    _, slot, kind = _TABLES[table]
    size = int(block[slot + 1]) * kind.itemsize
    if not size:
        return np.zeros(0, kind)
    memory: Any = (ctypes.c_char * size).from_address(int(block[slot]))
    return np.frombuffer(memory, kind)


def _row_in_python(block: Any, table: int, n: int) -> Any:
    assert n >= 0
    return _Record(_table_in_python(block, table)[n])


def _items_in_python(block: Any, table: int) -> Any:
    return _Items(_table_in_python(block, table))


def _header_in_python(block: Any, table: int) -> Any:
    return _Record(block.view(_TABLES[table].kind)[0])


def _pointer_in_python(array: Any) -> Any:
    return array


def _pointer_at_in_python(address: int, table: int) -> Any:
    size = _TABLES[table].kind.itemsize
    memory: Any = (ctypes.c_char * size).from_address(int(address))
    return np.frombuffer(memory, np.int64)


row: Any
items: Any
header: Any
pointer: Any
pointer_at: Any
if config.DISABLE_JIT:
    row, items, header = _row_in_python, _items_in_python, _header_in_python
    pointer, pointer_at = _pointer_in_python, _pointer_at_in_python
else:
    row, items, header, pointer, pointer_at = _row, _items, _header, _pointer, _pointer_at
