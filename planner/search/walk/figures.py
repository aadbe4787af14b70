"""The StageTable behind one pointer, so that compiled code passes a word and not thirty arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, config

from planner.costs.stage_table import StageTable, TableArrays, stage_figures
from planner.program.compiled import Block, block, compiled, header, items, pointer_at
from planner.search.orders.calls import Apart, call
from planner.search.walk.memory import STAGE_FIGURES, WALK

_LONG, _REAL, _BYTE = np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.int8)
_NAMES = [name for name in TableArrays._fields if name != "in_blocks"]
_KINDS: dict[str, Any] = dict.fromkeys(_NAMES, _LONG)
_KINDS |= dict.fromkeys(("seconds", "again_s", "traffic"), _REAL)
_KINDS["may_run"] = _BYTE
(
    TABLE, SECONDS, AGAIN_S, MAY_RUN, STASH, WEIGHT_STASH, PEAK, SAVED_INPUT, HOST_STASH,
    RERUN_RANK, OFFLOAD_RANK, BLOCK, TENSOR_BYTES, PRODUCER, LAST_USER, SAVER, MADE_START, MADE,
    KEPT_START, KEPT, USER_START, USER, HELD_START, HELD, HELD_BEFORE, STATIC, TRAFFIC, SUMMED,
    GRADIENT, USERS, CROSSING, CROSSING_GRADIENT, SENT, RETURNED, GATHERED, RETURNED_GATHERED,
) = block("types layers tensors parameters holders in_blocks", **_KINDS)  # fmt: skip


def _plain_array(rows: Any, shape: tuple[int, ...]) -> Any:
    """Return a table as an array, where nothing is compiled."""
    return rows._array[: math.prod(shape)].reshape(shape).view(np.recarray)


_array: Any = _plain_array if config.DISABLE_JIT else carray


def figures_of(table: StageTable) -> Block:
    """Return the arrays of a table as a block."""
    arrays = table.arrays
    rows = {SECONDS + n: np.ravel(getattr(arrays, name)) for n, name in enumerate(_NAMES)}
    found = Block(TABLE, {number: len(row) for number, row in rows.items()})
    for number, row in rows.items():
        found[number][:] = row
    numbers = found.numbers
    numbers["types"], numbers["layers"] = arrays.again_s.shape
    numbers["tensors"] = len(arrays.producer)
    numbers["holders"], numbers["parameters"] = arrays.static.shape[1:]
    numbers["in_blocks"] = arrays.in_blocks
    return found


@compiled
def write_figures(
    w: Any, kind: int, first: int, last: int, rerun: int, offload: int, holders: int, at: int
) -> None:
    """Write the figures of a stage on a type into a row of STAGE_FIGURES.

    The arguments are those of :func:`planner.costs.stage_table.stage_figures`, with the pointer to
    the memory of a walk first.
    """
    h = header(w, WALK)
    h.f_kind, h.f_first, h.f_last, h.f_rerun = kind, first, last, rerun
    h.f_offload, h.f_holders, h.f_at = offload, holders, at
    call(h.figures_at, w)


@Apart
def stage_figures_asked(w: Any) -> float:
    """Write the figures that ``f_kind`` and so on ask for.

    Args:
        w: pointer to the memory of a walk.
    """
    asked = header(w, WALK)
    b = pointer_at(asked.table, TABLE)
    h = header(b, TABLE)
    k, n, one = h.types, h.layers, (h.layers,)
    each, cuts = (k, n), (k, n + 1)
    by_parameter = (k, h.parameters)
    arrays = TableArrays(
        _array(items(b, SECONDS), (k, n, 4)),
        _array(items(b, AGAIN_S), each),
        _array(items(b, MAY_RUN), each),
        _array(items(b, STASH), each),
        _array(items(b, WEIGHT_STASH), each),
        _array(items(b, PEAK), each),
        _array(items(b, SAVED_INPUT), each),
        _array(items(b, HOST_STASH), each),
        _array(items(b, RERUN_RANK), one),
        _array(items(b, OFFLOAD_RANK), one),
        _array(items(b, BLOCK), one),
        h.in_blocks == 1,
        _array(items(b, TENSOR_BYTES), (k, h.tensors)),
        _array(items(b, PRODUCER), (h.tensors,)),
        _array(items(b, LAST_USER), (h.tensors,)),
        _array(items(b, SAVER), (h.tensors,)),
        _array(items(b, MADE_START), (n + 1,)),
        _array(items(b, MADE), (h.made_rows,)),
        _array(items(b, KEPT_START), (n + 1,)),
        _array(items(b, KEPT), (h.kept_rows,)),
        _array(items(b, USER_START), (h.tensors + 1,)),
        _array(items(b, USER), (h.user_rows,)),
        _array(items(b, HELD_START), (n + 1,)),
        _array(items(b, HELD), (h.held_rows,)),
        _array(items(b, HELD_BEFORE), (h.held_rows,)),
        _array(items(b, STATIC), (k, h.holders, h.parameters)),
        _array(items(b, TRAFFIC), by_parameter),
        _array(items(b, SUMMED), by_parameter),
        _array(items(b, GRADIENT), by_parameter),
        _array(items(b, USERS), (h.parameters,)),
        _array(items(b, CROSSING), cuts),
        _array(items(b, CROSSING_GRADIENT), cuts),
        _array(items(b, SENT), cuts),
        _array(items(b, RETURNED), cuts),
        _array(items(b, GATHERED), cuts),
        _array(items(b, RETURNED_GATHERED), cuts),
    )
    out = _array(items(w, STAGE_FIGURES), (asked.stage_figures_rows,))
    stage_figures(
        arrays,
        asked.f_kind,
        asked.f_first,
        asked.f_last,
        asked.f_rerun,
        asked.f_offload,
        asked.f_holders,
        out,
        asked.f_at,
    )
    return 0.0
