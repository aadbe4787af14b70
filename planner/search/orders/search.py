"""The search for the fastest schedule of given stages: list schedules, annealing, then CP-SAT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import DeadlockError, InfeasibleError, PipeplanError
from planner.plan.operations import Orders
from planner.plan.plan import Stage
from planner.plan.problem import Problem
from planner.schedules.best import best_schedule
from planner.search.clock import TASKS_PER_S, Clock
from planner.search.cp_sat.plan_model import Effort
from planner.search.cp_sat.schedule_model import ScheduleInstance, improve, prove
from planner.search.orders.bound import StagesBound
from planner.search.orders.stages import StageOrders
from planner.search.settings import DEFAULT_WORKERS, check_settings
from planner.simulation.simulator import reduced_soonest, simulate
from planner.simulation.timeline import Timeline

PROVED = 1 + 1e-8
"""A gap no larger is rounding."""
HOTTEST, COOLEST = 0.002, 2e-5
"""Heats of annealing at its begin and its end."""
TRIES, REPLAYED = 200, 200_000
"""Changes of orders between two looks at the clock, fewer where they replay more operations."""
LISTED_UNTIL, HINTED_UNTIL, MODELLED_UNTIL = 0.1, (0.15, 0.3), 0.55
"""Shares of the time at the end of list schedules, of annealing one start or several,
and of CP-SAT's whole model, which mostly ends before or not at all."""
ANNEALED_UNTIL, ALONE_ANNEALED_UNTIL = 0.9, 0.5
"""The same of annealing from there on, and where each device holds one stage: there CP-SAT's
windows, which have the rest, find what single changes of orders do not."""
MOST_OPERATIONS, MOST_WHOLE = 6_000, 800
"""Operations of a schedule that CP-SAT improves in windows, and as a whole."""
WINDOW_S = 2.0
"""Most seconds of one window."""
MODEL_S = 2e-5
"""Seconds in which Python makes a model of CP-SAT and replays what it finds, for each operation."""
Told = Callable[[Timeline, str], None]
"""Called with each schedule that is better than all before, and the step that found it."""


class Limit(Protocol):
    """A part of a search's time, as :class:`planner.search.clock.Clock` has it."""

    deterministic: bool

    def left_s(self, until: float = 1.0) -> float:
        """Return the seconds before a share of the limit is used."""

    def spend(self, seconds: float) -> None:
        """Count work."""


@dataclass(frozen=True)
class Schedule:
    """Orders and their simulation.

    ``lower_bound_s`` holds for every schedule of the same stages on the same devices; 0 if none
    was proved. ``method`` says what found it.
    """

    orders: Orders
    timeline: Timeline
    method: str
    lower_bound_s: float = 0.0

    @property
    def iteration_time_s(self) -> float:
        """Simulated time of one iteration."""
        return self.timeline.iteration_time_s

    @property
    def gap(self) -> float | None:
        """Iteration time / lower bound - 1; None if no bound was proved."""
        if self.lower_bound_s <= 0:
            return None
        return max(0.0, self.iteration_time_s / self.lower_bound_s - 1)


def search_schedule(
    problem: Problem,
    stages: Iterable[Stage | StageSpec],
    *,
    split: bool = False,
    time_limit_s: float = 30.0,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
) -> Schedule:
    """Find the fastest microbatch schedule of given stages on given devices.

    Args:
        problem: the model, cluster and job.
        stages: in pipeline order, such as a plan's; every layer in one, no edge backwards.
        split: let backwards run as input and weight gradients, or whole where that turns out
            better; else all backwards are whole.
        time_limit_s: stop after this long; seconds of counted work in deterministic mode.
        seed: of random numbers.
        workers: threads of annealing.
        deterministic: the same schedule on every machine.

    Returns:
        The best schedule found; its ``lower_bound_s`` holds for every schedule of these stages
        whose backwards may be split, or are all whole, as asked.

    Raises:
        InfeasibleError: if no schedule was found that fits memory.
        PipeplanError: if a setting is out of range, or two devices that must exchange data have no
            path of links.
    """
    check_settings(time_limit_s, 0.0, seed, workers)
    if split and problem.job.shards_parameters:
        raise PipeplanError(
            "split: job.shard_parameters is true, and replicas that divide weights run whole "
            "backwards; leave it out, or plan with shard_parameters = false"
        )
    specs = [StageSpec(row.layers, row.devices, row.recompute, row.offload) for row in stages]
    placed = place(problem, specs)
    if not is_connected(placed):
        raise PipeplanError("stages: two devices that must exchange data have no path of links")
    clock = Clock(time_limit_s, deterministic=deterministic)
    search = ScheduleSearch(placed, clock, splits=split, seed=seed, workers=workers)
    clock.run(search.run)
    if search.best is None:
        raise InfeasibleError("no schedule of these stages was found that fits memory")
    bound_s = min(search.bound_s, search.best_s)
    return Schedule(search.best.orders, search.best, search.method, bound_s)


@dataclass
class ScheduleSearch:
    """A search for schedules of placed stages.

    Args:
        placed: the stages.
        limit: of time or work.
        splits: whether backwards may be split, or else are all whole.
        best: a schedule to start from; None: list schedules.
        seed: of random numbers.
        workers: threads of annealing; one where work is counted.
        told: called with each better schedule.

    Attributes:
        method: the step that found the best schedule.
        bound_s: no schedule of the stages takes less.
    """

    placed: PlacedPipeline
    limit: Limit
    splits: bool
    best: Timeline | None = None
    seed: int = 0
    workers: int = 1
    told: Told = field(default=lambda timeline, method: None)
    method: str = field(default="given", init=False)
    bound_s: float = field(init=False)
    _starts: list[Orders | None] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.bound_s = StagesBound(self.placed, self.splits).seconds
        count = 1 if self.limit.deterministic else self.workers
        self._threads = [StageOrders(self.placed, self.seed * count + n) for n in range(count)]

    @property
    def best_s(self) -> float:
        """The time of the best schedule; infinite before the first."""
        return float("inf") if self.best is None else self.best.iteration_time_s

    def run(self) -> None:
        """Search until the limit, or until nothing can be better."""
        if self.best is None:
            self._schedule()
        if self.best is None or self.placed.problem.job.order == "1f1b":
            return
        if not self._may_model:
            self._anneal(1.0)
            return
        self._anneal_starts()
        if self._may_prove:
            self._prove()
        self._anneal(self._annealed_until)
        self._improve()

    @property
    def _is_done(self) -> bool:
        return self.best_s <= self.bound_s * PROVED

    def _offer(self, orders: Orders | None, method: str) -> Timeline | None:
        """Return the replay of orders, None if it does not fit or deadlocks; keep the best."""
        if orders is None:
            return None
        try:
            found = simulate(self.placed, orders)
        except DeadlockError:
            return None
        if found.overflow_bytes:
            return None
        if found.iteration_time_s < self.best_s:
            self.best, self.method = reduced_soonest(found), method
            self.told(self.best, method)
        return found

    # --- list schedules -------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Find the best list schedule that fits, or any schedule that does."""
        first, found_s = self._threads[0], float("inf")
        kinds = [(True, False), (True, True), (False, True)]
        last = 1 if self.placed.problem.job.backward == "split" else 3
        for splits, may_stay_whole in kinds[:last] if self.splits else kinds[2:]:
            if self._is_done or (self.best and self.limit.left_s(LISTED_UNTIL) <= 0):
                break
            self._starts.append(None)
            least_s = float("inf")
            for time_s, orders in first.lists(splits=splits, may_stay_whole=may_stay_whole):
                if time_s < least_s:
                    least_s, self._starts[-1] = time_s, orders
                if time_s < found_s:
                    found_s = time_s
                    self._offer(orders, "list schedule")
                if self._is_done or self.limit.left_s(LISTED_UNTIL) <= 0:
                    break
        self._spend(first.tasks_done)
        may_help = self.best is None or self.placed.shares_devices
        if may_help and self.placed.problem.job.order != "1f1b":
            found = best_schedule(self.placed, backward="any" if self.splits else "whole")
            self._offer(None if found is None else found.orders, "published schedule")

    def _spend(self, tasks: int) -> None:
        self.limit.spend(tasks / TASKS_PER_S)

    # --- annealing ------------------------------------------------------------------------------

    @property
    def _annealed_until(self) -> float:
        return ANNEALED_UNTIL if self.placed.shares_devices else ALONE_ANNEALED_UNTIL

    def _anneal_starts(self) -> None:
        """Anneal the best list schedule of each kind: annealing splits no backwards."""
        assert self.best is not None
        given = [orders for orders in self._starts if orders is not None] or [self.best.orders]
        starts = [row for number, row in enumerate(given) if row not in given[:number]]
        if len(starts) == 1 and not self._may_prove:
            return  # The long annealing that follows has all of the time.
        for number, orders in enumerate(starts, 1):
            self._anneal(HINTED_UNTIL[len(starts) > 1] * number / len(starts), orders)

    def _anneal(self, until: float, orders: Orders | None = None) -> None:
        """Anneal orders, by default the best ones, on each thread with other random numbers."""
        if self.best is None or self._is_done:
            return
        orders = orders or self.best.orders
        with ThreadPoolExecutor(len(self._threads)) as pool:
            list(pool.map(lambda row: self._anneal_on(row, orders, until), self._threads))
        for row in self._threads:
            self._offer(row.annealed, "annealing")

    def _anneal_on(self, row: StageOrders, orders: Orders, until: float) -> None:
        row.replay(orders)
        now_s, left_s, tasks = row.anneal(COOLEST, 1), self.limit.left_s(until), row.tasks_done
        begin_s, tries = max(left_s, 1e-9), max(1, min(TRIES, REPLAYED // self._count))
        while left_s > 0 and now_s > self.bound_s * PROVED:
            heat = COOLEST * (HOTTEST / COOLEST) ** (left_s / begin_s)
            now_s = row.anneal(heat, tries)
            if self.limit.deterministic:
                self._spend(row.tasks_done - tasks)
                tasks = row.tasks_done
            left_s = self.limit.left_s(until)

    # --- CP-SAT ---------------------------------------------------------------------------------

    @property
    def _may_model(self) -> bool:
        """Whether CP-SAT's model knows what schedules have to keep to."""
        job = self.placed.problem.job
        return not job.has_pipelines and job.lengths is None and self._count <= MOST_OPERATIONS

    @property
    def _count(self) -> int:
        each = len(self.placed.stages) * self.placed.microbatches
        return each * (3 if self.splits else 2)

    def _instance(self) -> ScheduleInstance:
        assert self.best is not None
        return ScheduleInstance(self.best, splits=self.splits)

    @property
    def _may_prove(self) -> bool:
        return self._count <= MOST_WHOLE and self._instance().is_exact

    def _prove(self) -> None:
        """Solve the whole model."""
        left_s = self.limit.left_s(MODELLED_UNTIL)
        if self._is_done or left_s <= 0:
            return
        self.limit.spend(MODEL_S * self._count)
        effort = Effort(left_s, self.limit.deterministic, self.seed, self.limit.spend)
        proof = prove(self._instance(), effort, lambda row: self._offer(row, "CP-SAT"))
        self.bound_s = max(self.bound_s, proof.bound_s)

    def _improve(self) -> None:
        """Improve the best schedule in windows."""
        if self._is_done or self.limit.left_s() <= 0:
            return

        def may_go_on() -> bool:
            left = self.limit.left_s() > 0 and not self._is_done
            self.limit.spend(MODEL_S * self._count)
            return left

        seconds = min(WINDOW_S, self.limit.left_s())
        effort = Effort(seconds, self.limit.deterministic, self.seed, self.limit.spend)
        for _ in improve(
            self._instance(), effort, lambda row: self._offer(row, "CP-SAT's windows"), may_go_on
        ):
            pass
