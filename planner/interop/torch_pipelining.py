"""torch.distributed.pipelining: its schedule files read, and plans exported to its runtime.

A file has a row for each rank and cells such as ``2F0``: stage, one of F B I W, microbatch.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.plan.operations import Operation, parse_operation
from planner.records.document import read_text

_COMMUNICATION = re.compile(r"[0-9]+(?:(?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class ScheduleTable:
    """The operations of each rank of a pipeline, in order.

    Attributes:
        rows: operations by rank; a stage is on the rank whose row names it.
        source: where the table stands, for messages.
    """

    rows: tuple[tuple[Operation, ...], ...]
    source: str = "schedule"

    @property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {op.stage: rank for rank, row in enumerate(self.rows) for op in row}


def read_schedule_csv(path: Path) -> ScheduleTable:
    """Read a schedule file, of computations alone or lowered with communication.

    Communication (SEND, RECV, UNSHARD, RESHARD, REDUCE_GRAD) is left out: what is sent follows from
    the stages. An overlapped pair, ``(0F1;1B0)OVERLAP_F_B``, counts as its two operations one after
    the other.

    Raises:
        PipeplanError: naming row, cell and word of what is no action, or a row without any.
    """
    try:
        cells = list(csv.reader(read_text(path).splitlines()))
    except csv.Error as error:
        raise PipeplanError(f"{path}: {error}; expected a CSV file, a row for each rank") from None
    if not cells:
        raise PipeplanError(f"{path}: it is empty; expected a row of actions for each rank")
    problems: list[str] = []
    rows = tuple(
        tuple(_operations(row, f"{path}: row {number}", problems))
        for number, row in enumerate(cells, start=1)
    )
    if not problems:
        problems = [
            f"{path}: row {rank + 1} (rank {rank}) has no F, B, I or W; remove it, or give it some"
            for rank, operations in enumerate(rows)
            if not operations
        ]
    if problems:
        raise PipeplanError(problems)
    return ScheduleTable(rows, str(path))


def _operations(row: list[str], place: str, problems: list[str]) -> Iterator[Operation]:
    for number, cell in enumerate(row, start=1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for part in map(str.strip, pair[1].split(";") if pair else [word]):
            operation = parse_operation(part)
            if operation is not None:
                yield operation
            elif part and not _COMMUNICATION.fullmatch(part):
                problems.append(
                    f"{place}, cell {number} is {shorten(word)}: expected an action such as 2F0 "
                    "(stage, one of F B I W, microbatch), or nothing for idle time"
                )


def schedule_csv(orders: Iterable[Sequence[Operation]]) -> str:
    """Return the text of a schedule file, for ``_load_csv(…, format="compute_only")``.

    No cell is blank: torch reads blanks as idle time and drops them when it adds communication.

    Args:
        orders: of rank 0, rank 1, ….
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(str, order) for order in orders)
    return text.getvalue()
