"""Solution of a dnn-partitioning file for its own objective, the largest device load."""

from __future__ import annotations

import resource
import sys
import time
from math import isfinite
from pathlib import Path
from typing import TypedDict

from benchmarks.placement.solver.result import Status
from benchmarks.placement.solver.solve import solve_loads
from planner.interop.importing.dnn_partitioning import load_instance
from planner.search.budget import Clock, Settings


class Solved(TypedDict):
    """The results for a file's problem; times are in the file's unit.

    ``objective`` is None where no placement was found, ``lower_bound`` where it is infinite: no
    placement exists.
    """

    instance: str
    objective: float | None
    lower_bound: float | None
    status: Status
    seconds: float
    peak_memory_gib: float


def solve_file(
    path: str | Path, contiguous: bool, time_limit_s: float, settings: Settings
) -> Solved:
    """Read a file and place its nodes so that the largest load is least.

    Args:
        path: of a file that :mod:`planner.interop.importing.dnn_partitioning` reads.
        contiguous: whether the devices' parts must be stages in an order.
        time_limit_s: when to stop, reading included.
        settings: of the solver.

    Returns:
        The figures; ``peak_memory_gib`` is that of this process since it began.

    Raises:
        PipeplanError: naming everything wrong with the file.
    """
    start = time.perf_counter()
    clock = Clock(time_limit_s, settings.deterministic)
    result = solve_loads(load_instance(path), contiguous=contiguous, settings=settings, clock=clock)
    return Solved(
        instance=Path(path).stem,
        objective=result.objective,
        lower_bound=result.lower_bound if isfinite(result.lower_bound) else None,
        status=result.status,
        seconds=time.perf_counter() - start,
        peak_memory_gib=peak_memory_bytes() / 2**30,
    )


def peak_memory_bytes() -> int:
    """The most memory this process ever held; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
