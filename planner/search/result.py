"""The result of ``solve``, and the rows of its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.lengths import LengthOrder
from planner.plan.plan import Plan, gap
from planner.simulation.noise import Noise, NoisyTimes
from planner.units import format_seconds, plural

FEW_LAYOUTS, SMALL_GAP, BUSY = 1000, 0.01, 0.7
"""Fewer layouts, larger gaps and smaller shares of a core tell of a search that was short."""
Status = Literal["optimal", "feasible", "interrupted"]
Ended = Literal["proved", "gap limit", "time limit", "nothing left to try", "interrupted"]


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


class StepRow(NamedTuple):
    """What a step of a search took and brought.

    Attributes:
        name: of the step; with the size of groups where there are several.
        seconds: that it took, in those of the limit.
        layouts: that were judged in it.
        iteration_time_s: of the best plan after it; infinite before the first.
        lower_bound_s: after it.
    """

    name: str
    seconds: float
    layouts: int
    iteration_time_s: float
    lower_bound_s: float


@dataclass(frozen=True)
class Robustness:
    """Why a plan was chosen for keeping its time.

    Attributes:
        noise: that schedules were compared under.
        times: of the plan.
        fastest: of the fastest plan found; the same where that keeps its time best.
        compared: number of schedules.
    """

    noise: Noise
    times: NoisyTimes
    fastest: NoisyTimes
    compared: int

    @property
    def provenance(self) -> str:
        """The words of a plan's provenance."""
        return f"chosen for robustness under noise ({self.noise})"

    def summary(self) -> str:
        """Return a few lines that sum it up."""
        text = (
            f"robust: 95th percentile {format_seconds(self.times.percentile_95_s)} under noise "
            f"({self.noise})"
        )
        compared = plural(self.compared, "schedule")
        if self.times == self.fastest:
            return f"{text}; of {compared} none keeps its time clearly better than the fastest"
        return (
            f"{text}, the least of {compared}; the fastest plan found takes "
            f"{format_seconds(self.fastest.predicted_s)} without noise, its 95th percentile is "
            f"{format_seconds(self.fastest.percentile_95_s)}"
        )


@dataclass(frozen=True)
class LengthChoice:
    """Why a plan was chosen for microbatches of several lengths.

    Times are estimates of the mean of expected time and 95th percentile.

    Attributes:
        order: of an iteration's microbatches.
        time_s: of the plan.
        fastest_s: of the plan with the least mean iteration, in the first order that was tried.
        compared: number of schedules with an order each.
    """

    order: LengthOrder
    time_s: float
    fastest_s: float
    compared: int

    @property
    def provenance(self) -> str:
        """The words of a plan's provenance."""
        return f"chosen over lengths, microbatches {self.order.replace('_', ' ')}"

    def summary(self) -> str:
        """Return a line that sums it up."""
        text = (
            f"lengths: microbatches {self.order.replace('_', ' ')}, the best of "
            f"{plural(self.compared, 'schedule')} with an order"
        )
        if self.time_s >= self.fastest_s:
            return text
        return (
            f"{text}; the plan with the least mean iteration takes "
            f"{self.fastest_s / self.time_s - 1:.1%} longer in the first order tried (mean of "
            "expected and 95th percentile)"
        )


@dataclass(frozen=True, order=True)
class Complexity:
    """What makes a plan harder to set up, to read and to run elsewhere; the first counts most.

    Attributes:
        unaligned_stages: stages with more devices on one of their nodes than on another.
        stages: number of stages.
        uneven_stages: stages with another number of replicas than most, of several device types, or
            whose replicas run different numbers of microbatches.
        divided_blocks: numbered blocks of the model that lie in several stages.
        searched_orders: 1 if the orders were searched, 0 if a published schedule gives them.
    """

    unaligned_stages: int
    stages: int
    uneven_stages: int
    divided_blocks: int
    searched_orders: int

    def instead_of(self, other: Complexity, schedule: str) -> str:
        """Return how it differs from another's, in words.

        Args:
            other: of another plan.
            schedule: what gave this plan's orders.
        """
        counts = (
            (self.stages, other.stages, "stage", ""),
            (self.unaligned_stages, other.unaligned_stages, "stage", " unevenly over nodes"),
            (self.uneven_stages, other.uneven_stages, "stage", " with uneven replicas"),
            (self.divided_blocks, other.divided_blocks, "divided block", ""),
        )
        parts = [
            f"{plural(mine, noun)}{what} instead of {theirs}"
            for mine, theirs, noun, what in counts
            if mine != theirs
        ]
        if self.searched_orders < other.searched_orders:
            parts.append(f"a published schedule ({schedule}) instead of searched orders")
        elif self.searched_orders > other.searched_orders:
            parts.append("searched orders instead of a published schedule")
        return ", ".join(parts)


@dataclass(frozen=True)
class Simplicity:
    """Why a plan was chosen for being simple.

    Attributes:
        within: share by which it may take longer than the fastest plan found.
        complexity, iteration_time_s, schedule: of the plan; the last names what gave its orders.
        fastest_complexity, fastest_s: of the fastest plan found.
        compared: number of schedules.
    """

    within: float
    complexity: Complexity
    iteration_time_s: float
    schedule: str
    fastest_complexity: Complexity
    fastest_s: float
    compared: int

    @property
    def provenance(self) -> str:
        """The words of a plan's provenance."""
        return f"chosen as the simplest within {self.within:.2%} of the fastest"

    def summary(self) -> str:
        """Return a line that sums it up."""
        compared = plural(self.compared, "schedule")
        if self.complexity == self.fastest_complexity:
            return f"simple: none of {compared} within {self.within:.2%} of the fastest is simpler"
        why = self.complexity.instead_of(self.fastest_complexity, self.schedule)
        return (
            f"simple: {why}; takes {self.iteration_time_s / self.fastest_s - 1:.2%} longer than "
            f"the fastest of {compared}, {format_seconds(self.fastest_s)}"
        )


Reason = Robustness | Simplicity | LengthChoice
"""Why a plan was chosen that need not be the fastest."""


@dataclass(frozen=True, repr=False)
class Result:
    """The best plan found and what is proved about it.

    Attributes:
        status: ``optimal`` if the gap is at most 1e-4, or the smaller limit that was asked for;
            ``interrupted`` if the search was stopped by the user before that; else ``feasible``.
        plan: the plan, verified.
        lower_bound_s: no plan of the problem's space is faster; ``plan.provenance.bound_covers``
            says which space that is.
        history: every new incumbent and bound.
        tried: number of layouts (stages, devices, memory) that were judged by whole schedules.
        ended: why the search ended; ``nothing left to try`` where all its steps were through
            before the limit and a gap is left that none of them could close.
        search_s: how long it took, in the seconds of the limit.
        deterministic: whether those are CP-SAT's deterministic seconds.
        robustness: of a plan that was chosen for keeping its time, which may take longer than the
            fastest one found; status, gap and bound are about its time without noise.
        simplicity: of a plan that was chosen for being simple, which may take longer than the
            fastest one found; status and gap are about its own time.
        processor_share: seconds of a core that each thread had in each second of the search; None
            in deterministic mode.
        steps: what each step took and brought, in order.
        lengths: of a plan for microbatches of several lengths; status, gap and bound are about its
            mean iteration.
        sizes: of microbatches, where the job leaves them open: bound, gap and status are for all of
            them then, those of the plan's file for its own size alone.
    """

    status: Status
    plan: Plan
    lower_bound_s: float
    history: tuple[HistoryRow, ...]
    tried: int
    ended: Ended
    search_s: float
    deterministic: bool
    robustness: Robustness | None = None
    simplicity: Simplicity | None = None
    lengths: LengthChoice | None = None
    processor_share: float | None = None
    steps: tuple[StepRow, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def iteration_time_s(self) -> float:
        """Predicted time of one iteration."""
        return self.plan.predicted.iteration_time_s

    @property
    def gap(self) -> float | None:
        """Iteration time / lower bound - 1."""
        return gap(self.iteration_time_s, self.lower_bound_s)

    def shortcoming(self) -> str | None:
        """Return what the search lacked, with the remedy; None if it lacked nothing.

        It was short if it ended by its limit with a gap, and had judged few layouts or shared its
        cores with other programs.
        """
        if self.ended != "time limit" or (self.gap is not None and self.gap <= SMALL_GAP):
            return None
        slow = self.processor_share is not None and self.processor_share < BUSY
        if self.tried >= FEW_LAYOUTS and not slow:
            return None
        limit = f"--time-limit {3 * max(self.search_s, 1.0):.0f}"
        why = f"only {plural(self.tried, 'layout')} could be judged in the time limit"
        if slow:
            why = (
                f"the machine was busy: each thread had {self.processor_share:.0%} of a core, and "
                f"{plural(self.tried, 'layout')} were judged"
            )
        return f"the search was short: {why}; a longer one ({limit}) may find a faster plan"

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.summary(), self.shortcoming())))

    def __repr__(self) -> str:
        return f"<Result: {self.status}, {self.ended}, {self.plan!r}>"

    def summary(self) -> str:
        """Return a few lines that sum it up."""
        proved = (
            "no bound proved"
            if self.gap is None
            else f"bound {format_seconds(self.lower_bound_s)}, gap {self.gap:.2%}"
        )
        used, devices = self.plan.world_size, len(self.plan.cluster.devices)
        seconds = "deterministic s" if self.deterministic else "s"
        chosen = (self.robustness, self.simplicity, self.lengths)
        reasons = (reason for reason in chosen if reason is not None)
        return (
            f"{self.status}: {format_seconds(self.iteration_time_s)} an iteration, {proved}; "
            f"{plural(len(self.plan.stages), 'stage')} on {used} of {plural(devices, 'device')}, "
            f"{self.tried:,} layouts judged; "
            f"ended after {self.search_s:.1f} {seconds}: {self.ended}"
            + "".join(f"\n{reason.summary()}" for reason in reasons)
            + self._of_sizes()
        )

    def _of_sizes(self) -> str:
        """Return a line on the size of microbatches, if the job leaves it open."""
        if not self.sizes:
            return ""
        samples = plural(self.plan.job.samples_per_microbatch, "sample")
        own = format_seconds(self.plan.predicted.lower_bound_s)
        return (
            f"\nmicrobatches of {samples}, the best of {', '.join(map(str, self.sizes))}; the "
            f"bound is for all these sizes, for this one it is {own}"
        )
