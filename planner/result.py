"""What ``solve`` returns, and how it tells of its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.artifacts.plan import Plan
from planner.verifier import gap

Status = Literal["optimal", "feasible", "interrupted"]


class HistoryRow(NamedTuple):
    """A new incumbent or bound: when, and what was best then. ``time_s`` counts from the start."""

    time_s: float
    iteration_time_s: float
    lower_bound_s: float
    event: str

    @property
    def gap(self) -> float | None:
        """Iteration time / lower bound - 1."""
        return gap(self.iteration_time_s, self.lower_bound_s)


@dataclass(frozen=True)
class Result:
    """The best plan found and what is proved about it.

    Attributes:
        status: ``optimal`` if the gap is at most 1e-4, or the smaller limit that was asked for;
            ``interrupted`` if the search was stopped by hand before that; else ``feasible``.
        plan: the plan, verified.
        lower_bound_s: no plan of the problem's space is faster; ``plan.provenance.bound_covers``
            says which space that is.
        history: every new incumbent and bound.
        tried: number of partitions that were scheduled.
    """

    status: Status
    plan: Plan
    lower_bound_s: float
    history: tuple[HistoryRow, ...]
    tried: int

    @property
    def iteration_time_s(self) -> float:
        """Predicted time of one iteration."""
        return self.plan.predicted.iteration_time_s

    @property
    def gap(self) -> float | None:
        """Iteration time / lower bound - 1."""
        return gap(self.iteration_time_s, self.lower_bound_s)

    def summary(self) -> str:
        """A few lines for people."""
        percent = "unknown" if self.gap is None else f"{100 * self.gap:.2f}%"
        return (
            f"{self.status}: {self.iteration_time_s * 1e3:.3f} ms an iteration, "
            f"bound {self.lower_bound_s * 1e3:.3f} ms, gap {percent}; "
            f"{len(self.plan.stages)} stages on {len(self.plan.ranks)} devices, "
            f"{self.tried} partitions scheduled"
        )
