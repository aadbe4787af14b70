"""The best of the classic schedules and the list schedules, within memory."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.errors import DeadlockError
from planner.schedule.assignment import Assignment, balanced_assignment
from planner.schedule.classics import (
    BREADTH_FIRST,
    DoesNotApplyError,
    classic_orders,
    join_halves,
    one_by_one,
    split_backwards,
    zero_bubble_orders,
)
from planner.schedule.list_scheduler import (
    ALL,
    TARGETS,
    TWICE,
    Limits,
    backward_first,
    forward_first,
    in_flight_limits,
    lifetime_limits,
    list_schedule,
    orders_of,
)
from planner.schedule.measure import Measure, measured_s
from planner.simulator import Orders, Timeline, owners, simulate

MANY_OPERATIONS = 1500
"""Beyond this many (stage, microbatch) pairs only two limits are tried."""


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


def fits_memory(timeline: Timeline) -> bool:
    """Whether every device stays within its capacity at every moment."""
    return not timeline.overflow_bytes


def best_heuristic_schedule(
    pipeline: PlacedPipeline, *, split: bool = False, measure: Measure = "makespan"
) -> Schedule | None:
    """The best schedule within memory that needs no search; None if none fits.

    Without replicas and with one stage a device, None proves that no schedule fits.

    Args:
        pipeline: the stages.
        split: run input and weight gradients apart.
        measure: what is to be small.
    """
    best = _best_that_fits([*quick_schedules(pipeline, split=split)], measure)
    if best is not None:
        return best
    owner = balanced_assignment(pipeline)
    least = _least_memory(pipeline, owner, split=split)
    if least is None:
        return None
    roomier = _roomier_schedules(pipeline, owner, split=split)
    found = (_best_that_fits(schedules, measure) for schedules in roomier)
    return next((schedule for schedule in found if schedule is not None), least)


def quick_schedules(pipeline: PlacedPipeline, *, split: bool = False) -> Iterator[Schedule]:
    """All schedules that need no search, whether they fit memory or not.

    Args:
        pipeline: the stages.
        split: those that run input and weight gradients apart, also joined where that is quicker;
            else those with whole backwards.
    """
    owner = balanced_assignment(pipeline)
    if not split:
        yield from _classic_schedules(pipeline, owner)
        yield from _list_schedules(pipeline, owner, split=False)
        return
    listed = _list_schedules(pipeline, owner, split=True)
    for schedule in chain(_split_schedules(pipeline, owner), listed):
        yield schedule
        if pipeline.has_quicker_wholes:
            yield _joined(schedule)


def _joined(schedule: Schedule) -> Schedule:
    """Halves of a backward that follow each other run as a whole where that is quicker."""
    pipeline = schedule.timeline.pipeline
    owner = owners(schedule.orders)

    def is_quicker(operation: Operation) -> bool:
        device = owner[operation.stage, operation.microbatch]
        return pipeline.stages[operation.stage].times[device].is_quicker_whole

    orders = {device: join_halves(order, is_quicker) for device, order in schedule.orders.items()}
    return Schedule(orders, simulate(pipeline, orders), f"{schedule.method}, halves joined")


def _roomier_schedules(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool
) -> Iterator[list[Schedule]]:
    """List schedules with fewer and fewer microbatches in flight than memory alone would allow.

    Tensors on their way need room too, which limits on stashes do not see.
    """
    most = next(in_flight_limits(pipeline, [ALL]), {})
    many = len(pipeline.stages) * pipeline.microbatches > MANY_OPERATIONS
    less = 1
    while less < max(most.values(), default=0):
        limits = {replica: max(1, limit - less) for replica, limit in most.items()}
        yield [*_listed(pipeline, owner, limits, split=split)]
        less += less if many else 1 + less // 4


def _split_schedules(pipeline: PlacedPipeline, owner: Assignment) -> Iterator[Schedule]:
    for method, orders in classic_orders(pipeline, owner, split=True):
        apart = {device: split_backwards(order) for device, order in orders.items()}
        try:
            yield Schedule(apart, simulate(pipeline, apart), method)
        except DeadlockError:
            continue
    try:
        for orders in zero_bubble_orders(pipeline):
            yield Schedule(orders, simulate(pipeline, orders), "zero-bubble rules")
    except DoesNotApplyError:
        return


def best_classic_schedule(pipeline: PlacedPipeline) -> Schedule | None:
    """The fastest of the published schedules within memory; None if none fits.

    Of those with whole backwards; where none of them fits, one microbatch after the other.
    """
    owner = balanced_assignment(pipeline)
    classic = _best_that_fits([*_classic_schedules(pipeline, owner)])
    return classic or _least_memory(pipeline, owner)


def probe_s(pipeline: PlacedPipeline) -> float | None:
    """Iteration time of a good schedule, in a small part of the time that the best quick one takes.

    Twice 1F1B's limits are mostly within a percent of the best of all limits. Seconds; None if
    memory is too small for it, which says nothing of other schedules.
    """
    owner = balanced_assignment(pipeline)
    limits = next(in_flight_limits(pipeline, [TWICE]), None)
    if limits is None:
        return None
    found = (
        list_schedule(pipeline, owner, limits, order) for order in (backward_first, forward_first)
    )
    return min((t.iteration_time_s for t in found if t and fits_memory(t)), default=None)


def _best_that_fits(schedules: list[Schedule], measure: Measure = "makespan") -> Schedule | None:
    ranked = sorted(schedules, key=lambda schedule: measured_s(schedule.timeline, measure))
    return next((schedule for schedule in ranked if fits_memory(schedule.timeline)), None)


def _least_memory(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool = False
) -> Schedule | None:
    orders: Orders = one_by_one(pipeline, owner)
    if split:
        orders = {device: split_backwards(order) for device, order in orders.items()}
    timeline = simulate(pipeline, orders)
    return Schedule(orders, timeline, "one by one") if fits_memory(timeline) else None


def _classic_schedules(pipeline: PlacedPipeline, owner: Assignment) -> Iterator[Schedule]:
    for method, orders in _classic_orders(pipeline, owner):
        try:
            yield Schedule(orders, simulate(pipeline, orders), method)
        except DeadlockError:
            continue


def _list_schedules(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool = False
) -> Iterator[Schedule]:
    for limits in _limits(pipeline, split=split):
        yield from _listed(pipeline, owner, limits, split=split)


def _listed(
    pipeline: PlacedPipeline, owner: Assignment, limits: Limits, *, split: bool
) -> Iterator[Schedule]:
    for priority in (backward_first, forward_first):
        timeline = list_schedule(pipeline, owner, limits, priority, split=split)
        if timeline is not None:
            yield Schedule(orders_of(timeline), timeline, f"list, {priority.__name__}")


def _limits(pipeline: PlacedPipeline, *, split: bool) -> Iterator[Limits]:
    operations = len(pipeline.stages) * pipeline.microbatches
    targets = TARGETS[:2] if operations > MANY_OPERATIONS else TARGETS
    yield from in_flight_limits(pipeline, targets)
    if any(len(stages) > 1 for stages in pipeline.stages_on.values()):
        yield from lifetime_limits(pipeline, split=split)


def _classic_orders(pipeline: PlacedPipeline, owner: Assignment) -> Iterator[tuple[str, Orders]]:
    holds_all = _may_hold_all(pipeline, owner)
    for method, orders in classic_orders(pipeline, owner, split=False):
        if holds_all or method not in BREADTH_FIRST:
            yield method, orders


def _may_hold_all(pipeline: PlacedPipeline, owner: Assignment) -> bool:
    """Whether memory could hold all microbatches in flight, as GPipe's order needs."""
    held = Counter((stage, device) for (stage, _), device in owner.items())
    return all(count <= pipeline.stash_limit(*replica) for replica, count in held.items())
