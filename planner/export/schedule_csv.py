"""Orders as torch.distributed.pipelining reads them: a CSV file with one row a rank."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import pairwise

from planner.artifacts.operations import Operation
from planner.simulator import Orders


def schedule_csv(orders: Iterable[Sequence[Operation]]) -> str:
    """The text of a schedule file, for ``_load_csv(…, format="compute_only")``.

    No cell is blank: torch reads blanks as idle time and drops them when it adds communication.

    Args:
        orders: of rank 0, rank 1, ….
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(str, order) for order in orders)
    return text.getvalue()


def last_forward_problems(orders: Orders, last: int, tool: str) -> list[str]:
    """A forward of the last stage that comes after one of a later microbatch.

    torch keeps the losses in the order in which they are made, and takes microbatch m's to be the
    m-th (``_PipelineSchedule._maybe_get_loss``, torch 2.13): other orders fail or, worse, train on
    wrong gradients.

    Args:
        orders: of one pipeline, by device.
        last: the last stage.
        tool: as the line names it.
    """
    for device, order in orders.items():
        forwards = [row.microbatch for row in order if row.stage == last and row.kind == "F"]
        for before, after in pairwise(forwards):
            if after < before:
                return [
                    f"orders[{device!r}]: {last}F{after} comes after {last}F{before}, but {tool} "
                    "takes the losses to be in the order of microbatches; number the "
                    "microbatches in the order of the last stage's forwards"
                ]
    return []
