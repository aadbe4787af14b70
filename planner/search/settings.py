"""What a caller of :func:`planner.search.solve.solve` asks for, checked."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from planner.errors import PipeplanError, require_kind, shorten

if TYPE_CHECKING:
    from planner.plan.problem import Problem
    from planner.search.cp_sat.decisions import Constrain

OPTIMALITY_TOLERANCE = 1e-4
"""A gap that counts as none."""
DEFAULT_WORKERS = max(2, min(8, os.cpu_count() or 2))
"""A thread for each core, up to eight."""
Preference = Literal["fast", "simple"]
WITHIN = 0.01
"""Share by which a simple plan may take longer than the fastest, unless the caller says more."""


@dataclass(frozen=True)
class Settings:
    """Limits of a search, and what it may use.

    Attributes:
        time_limit_s: seconds of the clock; in deterministic mode of counted work.
        gap_limit: a gap that is small enough.
        seed: of random numbers.
        workers: threads.
        deterministic: whether the same input gives the same plan on every machine.
        constrain: constraints of the caller.
        without: steps to leave out.
    """

    time_limit_s: float
    gap_limit: float
    seed: int
    workers: int
    deterministic: bool
    constrain: Constrain | None = None
    without: frozenset[str] = frozenset()

    @property
    def threads(self) -> int:
        """Walks at a time."""
        return 1 if self.deterministic else self.workers

    @property
    def limit_text(self) -> str:
        """The limit as it stands in a plan's provenance."""
        return f"{'deterministic' if self.deterministic else 'wall'} {self.time_limit_s:g} s"


def check_settings(time_limit_s: float, gap_limit: float, seed: int, workers: int) -> None:
    """Check the limits of a search.

    Raises:
        PipeplanError: naming every setting that is out of range.
    """
    for name, value in (("time_limit_s", time_limit_s), ("gap_limit", gap_limit)):
        require_kind(value, (int, float), name, "give a number")
    problems = []
    if not time_limit_s > 0:
        problems.append(f"time_limit_s: {time_limit_s} is not a positive number of seconds")
    if not gap_limit >= 0:
        problems.append(f"gap_limit: {gap_limit} is not a number of at least 0, such as 0.01")
    if not 0 <= seed < 2**31:
        problems.append(f"seed: {seed} is not a whole number from 0 to {2**31 - 1}")
    if not 1 <= workers <= 1024:
        problems.append(f"workers: {workers} is not a whole number from 1 to 1024")
    if problems:
        raise PipeplanError(problems)


def check_steps(names: Collection[str], steps: Collection[str]) -> None:
    """Check the names of steps to leave out.

    Raises:
        PipeplanError: naming each that no step has.
    """
    unknown = [name for name in names if name not in steps]
    if unknown:
        words = f"choose from {', '.join(steps)}"
        raise PipeplanError(
            [f"without_steps: no step is named {shorten(name)}; {words}" for name in unknown]
        )


def check_preference(prefer: str, within: float, *, is_robust: bool) -> None:
    """Check what a plan is chosen by besides its time.

    Raises:
        PipeplanError: naming a wrong setting.
    """
    if prefer not in get_args(Preference):
        raise PipeplanError(
            f"prefer: {shorten(prefer)} is not one of {', '.join(get_args(Preference))}"
        )
    if not 0 <= within <= 1:
        raise PipeplanError(f"prefer_within: {within} is not a share from 0 to 1, such as 0.01")
    if prefer == "simple" and is_robust:
        raise PipeplanError("prefer: simple and robust are two choices; ask for one of them")


def check_buffers(problem: Problem) -> None:
    """Refuse freedoms under which a buffer that forward writes would differ from one process's.

    Raises:
        PipeplanError: naming the layers, the buffers and the fields to set.
    """
    job = problem.job
    fields = [name for name in ("replication", "recompute") if getattr(job, name)]
    rows = [layer for layer in problem.graph.record.layers if layer.writes]
    if rows and fields:
        raise PipeplanError(
            f"layer {rows[0].name!r} writes {', '.join(rows[0].writes)} in its forward, which "
            "replicas or a second forward would change; set "
            f"{' and '.join(f'{name} = false' for name in fields)} in the job"
        )
