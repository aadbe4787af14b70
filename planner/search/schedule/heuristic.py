"""The best of the classic schedules and the list schedules, within memory."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders, one_forward_one_backward, owners
from planner.search.schedule.assignment import Assignment, balanced_assignment
from planner.search.schedule.classics import (
    BREADTH_FIRST,
    WHOLE,
    WITHOUT_REPLICAS,
    DoesNotApplyError,
    classic_orders,
    join_split_backwards,
    one_by_one,
    split_backwards,
    zb_h1,
    zero_bubble_orders,
)
from planner.search.schedule.equal_pipelines import pipelines_of
from planner.search.schedule.list_scheduler import (
    ALL,
    STRETCHES,
    TARGETS,
    TWICE,
    Limits,
    Priority,
    backward_first,
    forward_first,
    in_even_rhythm,
    in_flight_limits,
    lifetime_limits,
    list_schedule,
    roomier_schedule,
    split_stages,
)
from planner.search.schedule.measure import Measure, measured_s
from planner.search.schedule.pipeline_groups import (
    MANY_OPERATIONS,
    PipelineGroups,
    ScheduledForm,
    operation_count,
    scheduled_forms,
)
from planner.simulation.simulator import reduced_soonest, simulate
from planner.simulation.timeline import Timeline
from planner.space import Backward

BEST_OF_GROUP = 3
"""Schedules of one of several equal groups that are replayed for all; of many operations one."""
MOST_ROOMIER = 2
"""List schedules that an estimate makes fit, the fastest first."""
HasTime = Callable[[], bool]
"""Whether more schedules may be tried."""


def always() -> bool:
    """Return that there is time: :data:`HasTime` without a limit."""
    return True


def never() -> bool:
    """Return that there is no time."""
    return False


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
    """Return whether every device stays within its capacity at every moment."""
    return not timeline.overflow_bytes


def best_heuristic_schedule(
    pipeline: PlacedPipeline,
    *,
    backward: Backward = "whole",
    measure: Measure = "makespan",
    has_time: HasTime = always,
) -> Schedule | None:
    """Return the best schedule within memory that needs no search; None if none fits.

    Without replicas and with one stage a device, None proves that no schedule fits.

    Args:
        pipeline: the stages.
        backward: kinds of backward that schedules may have.
        measure: what is to be small.
        has_time: for more than a few schedules, as of :func:`quick_schedules`.
    """
    found = [*quick_schedules(pipeline, backward=backward, has_time=has_time)]
    best = _best_that_fits(found, measure)
    job = pipeline.problem.job
    if best is not None or job.order == "1f1b" or (job.has_pipelines and pipeline.has_replicas):
        return best
    split = backward == "split"
    return _least_memory(pipeline, balanced_assignment(pipeline), split=split)


def quick_schedules(
    pipeline: PlacedPipeline,
    *,
    backward: Backward = "whole",
    listed: bool = True,
    has_time: HasTime = always,
) -> Iterator[Schedule]:
    """Yield all schedules that need no search, whether they fit memory or not.

    Args:
        pipeline: the stages.
        backward: kinds of backward that schedules may have. Of ``any``, those that split all
            backwards are also joined where whole ones are quicker.
        listed: list schedules besides the published ones.
        has_time: asked after each. Once there is none, the likeliest few end what is yielded, as
            soon as one has fitted memory.
    """
    job = pipeline.problem.job
    if job.has_pipelines and pipeline.has_replicas:
        yield from _in_pipelines(pipeline, backward, has_time)
        return
    if job.order == "1f1b":
        yield from _one_forward_one_backward(pipeline)
        return
    fits = False
    for form in scheduled_forms(pipeline):
        schedules = _quick_schedules(form.pipeline, form.owner, backward, listed=listed)
        likely = _likely(form, split=backward != "whole") if listed else ()
        for schedule in _of_all(form, _in_time(schedules, likely, has_time)):
            yield schedule
            fits = fits or fits_memory(schedule.timeline)
        if fits and not has_time():
            return


def _in_time(
    schedules: Iterable[Schedule], likely: Iterable[Schedule], has_time: HasTime
) -> Iterator[Schedule]:
    """Yield schedules while there is time, and until one fits; then the likely if any are left."""
    fits = False
    for schedule in schedules:
        yield schedule
        fits = fits or fits_memory(schedule.timeline)
        if fits and not has_time():
            yield from likely
            return


def _likely(form: ScheduledForm, *, split: bool) -> Iterator[Schedule]:
    """Yield the schedules that are mostly near the best, as :func:`quick_estimate_s` has them."""
    if form.pipeline.shares_devices:
        return _rhythmic(form.pipeline, form.owner, split=split)
    twice = in_flight_limits(form.pipeline, [TWICE])
    return _listed(form.pipeline, form.owner, twice, split=split)


def _of_all(form: ScheduledForm, schedules: Iterable[Schedule]) -> Iterable[Schedule]:
    """Return schedules of the whole: the best of the first group, carried over to all.

    Groups that share no link run alike, so that no other schedule of one is better for all.
    """
    groups = form.groups
    if groups is None:
        return schedules
    ranked = sorted(schedules, key=lambda s: (not fits_memory(s.timeline), s.iteration_time_s))
    many = operation_count(form.whole) > MANY_OPERATIONS
    kept = ranked[: 1 if many else BEST_OF_GROUP]
    return carried_over(form.whole, groups, kept)


def carried_over(
    pipeline: PlacedPipeline, groups: PipelineGroups, schedules: Iterable[Schedule]
) -> Iterator[Schedule]:
    """Yield schedules of the first of a pipeline's equal groups as schedules of all of them.

    Groups may wait for each other's reductions in a circle.
    """
    suffix = f", in {len(groups.counterparts)} equal groups"
    rows = ((f"{row.method}{suffix}", groups.spread(row.orders)) for row in schedules)
    return _that_run(pipeline, rows)


def _that_run(pipeline: PlacedPipeline, rows: Iterable[tuple[str, Orders]]) -> Iterator[Schedule]:
    """Yield schedules by their methods and orders; not those whose devices wait in a circle."""
    for method, orders in rows:
        with suppress(DeadlockError):
            yield Schedule(orders, simulate(pipeline, orders), method)


def _quick_schedules(
    pipeline: PlacedPipeline, owner: Assignment, backward: Backward, *, listed: bool
) -> Iterator[Schedule]:
    if backward != "split":
        yield from _that_run(pipeline, _classic_orders(pipeline, owner))
        if listed:
            yield from _list_schedules(pipeline, owner, split=False)
    if backward == "whole":
        return
    lists = _list_schedules(pipeline, owner, split=True) if listed else ()
    for schedule in chain(_split_schedules(pipeline, owner), lists):
        yield schedule
        if backward == "any" and pipeline.has_quicker_wholes:
            yield from _that_run(pipeline, [_joined(schedule)])


def _one_forward_one_backward(pipeline: PlacedPipeline) -> Iterator[Schedule]:
    """Yield 1F1B, or interleaved 1F1B, of one pipeline if it is defined for its stages."""
    by_stage = [stage.spec.devices[0] for stage in pipeline.stages]
    loop = list(dict.fromkeys(by_stage))
    rounds, rest = divmod(len(by_stage), len(loop))
    if rest or by_stage != loop * rounds or pipeline.has_replicas:
        return
    count, microbatches = len(by_stage), range(pipeline.microbatches)
    ranks = range(len(loop))
    rows = [one_forward_one_backward(rank, len(loop), count, microbatches) for rank in ranks]
    orders = {device: row for device, row in zip(loop, rows, strict=True) if row is not None}
    if len(orders) == len(loop):
        name = "1f1b" if rounds == 1 else "interleaved 1f1b"
        yield from _that_run(pipeline, [(name, orders)])


def _in_pipelines(
    pipeline: PlacedPipeline, backward: Backward, has_time: HasTime
) -> Iterator[Schedule]:
    """Yield the quick schedules of one pipeline, each run by all of them."""
    groups = pipelines_of(pipeline)
    if groups is None:
        return
    first = quick_schedules(groups.first_of(pipeline), backward=backward, has_time=has_time)
    yield from carried_over(pipeline, groups, first)


def _joined(schedule: Schedule) -> tuple[str, Orders]:
    """Join split backwards whose parts follow each other where whole ones are quicker."""
    pipeline = schedule.timeline.pipeline
    owner = owners(schedule.orders)

    def is_quicker(operation: Operation) -> bool:
        device = owner[operation.stage, operation.microbatch]
        return pipeline.stages[operation.stage].times[device].is_quicker_whole

    orders = {
        device: join_split_backwards(order, is_quicker) for device, order in schedule.orders.items()
    }
    return f"{schedule.method}, backwards joined", orders


def _split_schedules(pipeline: PlacedPipeline, owner: Assignment) -> Iterator[Schedule]:
    every = classic_orders(pipeline, owner, split=True)
    published = chain(every, _side_by_side(pipeline, split=True))
    stages = split_stages(pipeline)
    apart = ((method, _apart(orders, stages)) for method, orders in published)
    yield from _that_run(pipeline, apart)
    with suppress(DoesNotApplyError):
        by_rules = (("zero-bubble rules", orders) for orders in zero_bubble_orders(pipeline))
        yield from _that_run(pipeline, by_rules)


def _apart(orders: Orders, stages: Collection[int]) -> Orders:
    """Return orders with every whole backward of some stages split."""
    return {device: split_backwards(order, stages) for device, order in orders.items()}


def best_classic_schedule(
    pipeline: PlacedPipeline, *, backward: Backward = "whole", has_time: HasTime = always
) -> Schedule | None:
    """Return the fastest of the published schedules; None if no schedule fits memory.

    Where memory is too small for the fastest of them, the microbatches in flight are limited as in
    our own search: of the published schedules that fit and the list schedules, the fastest.

    Args:
        pipeline: the stages.
        backward: kinds of backward that schedules may have.
        has_time: for more than a few schedules, as of :func:`quick_schedules`.
    """
    published = quick_schedules(pipeline, backward=backward, listed=False, has_time=has_time)
    fastest = min(published, key=lambda schedule: schedule.iteration_time_s, default=None)
    if fastest is not None and fits_memory(fastest.timeline):
        return fastest
    return best_heuristic_schedule(pipeline, backward=backward, has_time=has_time)


def quick_estimate_s(*choices: PlacedPipeline, split: bool = False) -> float | None:
    """Return the iteration time of a good schedule, much faster than finding the best quick one.

    Twice 1F1B's limits are mostly within a percent of the best of all limits. Only where there are
    few microbatches does ZB-H1 gain more.

    Args:
        choices: the stages, with one choice or another of what they recompute.
        split: run input and weight gradients apart.

    Returns:
        Seconds; None if memory is too small for it, which says nothing of other schedules.
    """
    if choices[0].problem.job.order == "1f1b":
        every = chain.from_iterable(map(quick_schedules, choices))
        return _least_s(schedule.timeline for schedule in every)
    if choices[0].shares_devices:
        forms = [scheduled_forms(pipeline)[0] for pipeline in choices]
        rows = (_rhythmic(form.pipeline, form.owner, split=split) for form in forms)
        return _least_s(schedule.timeline for schedule in chain.from_iterable(rows))
    tries = [row for pipeline in choices for row in _tries(pipeline, split=split)]
    found = [row.timeline for row in tries if fits_memory(row.timeline)]
    if len(found) < len(tries):
        found += chain.from_iterable(_lean(pipeline, split=split) for pipeline in choices)
    if split and found:
        form = scheduled_forms(found[0].pipeline)[0]
        found += _zero_bubble(form.pipeline, form.owner)
    least_s = _least_s(found)
    # What does not fit takes no less if it is made to fit.
    for row in sorted(tries, key=lambda row: row.timeline.iteration_time_s)[:MOST_ROOMIER]:
        if least_s is None or row.timeline.iteration_time_s < least_s:
            roomier = roomier_schedule(*row, split=split)
            least_s = _least_s(found if roomier is None else [*found, roomier])
    return least_s


def _lean(pipeline: PlacedPipeline, *, split: bool) -> Iterator[Timeline]:
    """Yield 1F1B, which keeps few microbatches in flight."""
    form = scheduled_forms(pipeline)[0]
    stages = split_stages(form.pipeline) if split else frozenset()
    with suppress(DoesNotApplyError, DeadlockError):
        orders = WHOLE["1f1b"](form.pipeline, form.owner)
        yield simulate(form.pipeline, _apart(orders, stages))


def _least_s(timelines: Iterable[Timeline]) -> float | None:
    """Return the least time of those that fit, reductions at their soonest; None if none does."""
    fit = (reduced_soonest(timeline) for timeline in timelines if fits_memory(timeline))
    return min((timeline.iteration_time_s for timeline in fit), default=None)


class _Try(NamedTuple):
    """A list schedule and what it was made of, as for :func:`roomier_schedule`."""

    timeline: Timeline
    owner: Assignment
    limits: Limits
    priority: Priority


def _tries(pipeline: PlacedPipeline, *, split: bool) -> Iterator[_Try]:
    """Yield list schedules with twice 1F1B's limits, whether they fit memory or not."""
    form = scheduled_forms(pipeline)[0]
    for limits in in_flight_limits(form.pipeline, [TWICE]):
        for priority in (backward_first, forward_first):
            timeline = list_schedule(form.pipeline, form.owner, limits, priority, split=split)
            if timeline is not None:
                yield _Try(timeline, form.owner, limits, priority)


def _zero_bubble(pipeline: PlacedPipeline, owner: Assignment) -> Iterator[Timeline]:
    """Yield ZB-H1 where it is defined, perhaps in each of several equal pipelines."""
    groups = pipelines_of(pipeline)
    with suppress(DoesNotApplyError, DeadlockError):
        if groups is None:
            yield simulate(pipeline, zb_h1(pipeline, owner))
        else:
            one = groups.first_of(pipeline)
            yield simulate(pipeline, groups.spread(zb_h1(one, balanced_assignment(one))))


def _best_that_fits(schedules: list[Schedule], measure: Measure = "makespan") -> Schedule | None:
    ranked = sorted(schedules, key=lambda schedule: measured_s(schedule.timeline, measure))
    return next((schedule for schedule in ranked if fits_memory(schedule.timeline)), None)


def _least_memory(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool = False
) -> Schedule | None:
    orders: Orders = one_by_one(pipeline, owner)
    stages = range(len(pipeline.stages)) if split else ()
    found = _that_run(pipeline, [("one by one", _apart(orders, stages))])
    return next((schedule for schedule in found if fits_memory(schedule.timeline)), None)


def _list_schedules(
    pipeline: PlacedPipeline, owner: Assignment, *, split: bool = False
) -> Iterator[Schedule]:
    yield from _listed(pipeline, owner, _limits(pipeline, split=split), split=split)
    if pipeline.shares_devices:
        yield from _rhythmic(pipeline, owner, split=split)


def _rhythmic(pipeline: PlacedPipeline, owner: Assignment, *, split: bool) -> Iterator[Schedule]:
    """Yield list schedules in an even rhythm, with as much in flight as memory allows."""
    for limits in in_flight_limits(pipeline, [ALL]):
        for stretch in STRETCHES:
            priority = in_even_rhythm(pipeline, stretch, split=split)
            timeline = list_schedule(pipeline, owner, limits, priority, split=split)
            if timeline is not None:
                yield Schedule(timeline.orders, timeline, "list, even rhythm")


def _listed(
    pipeline: PlacedPipeline, owner: Assignment, limits: Iterable[Limits], *, split: bool
) -> Iterator[Schedule]:
    """Yield list schedules, one by each priority under all limits.

    One that does not fit gives way to a roomier one, if it is faster than all before that fit.
    """
    best_s = math.inf
    for each in limits:
        for priority in (backward_first, forward_first):
            timeline = list_schedule(pipeline, owner, each, priority, split=split)
            if timeline is None:
                continue
            if not fits_memory(timeline) and timeline.iteration_time_s < best_s:
                roomier = roomier_schedule(timeline, owner, each, priority, split=split)
                timeline = roomier or timeline
            if fits_memory(timeline):
                best_s = min(best_s, timeline.iteration_time_s)
            yield Schedule(timeline.orders, timeline, f"list, {priority.__name__}")


def _limits(pipeline: PlacedPipeline, *, split: bool) -> Iterator[Limits]:
    targets = TARGETS[:2] if operation_count(pipeline) > MANY_OPERATIONS else TARGETS
    yield from in_flight_limits(pipeline, targets)
    if pipeline.shares_devices:
        yield from lifetime_limits(pipeline, split=split)


def _classic_orders(pipeline: PlacedPipeline, owner: Assignment) -> Iterator[tuple[str, Orders]]:
    holds_all = _may_hold_all(pipeline, owner)
    for method, orders in classic_orders(pipeline, owner, split=False):
        if holds_all or method not in BREADTH_FIRST:
            yield method, orders
    yield from _side_by_side(pipeline, split=False)


def _side_by_side(pipeline: PlacedPipeline, *, split: bool) -> Iterator[tuple[str, Orders]]:
    """Yield schedules that are defined without replicas, in each of several equal pipelines."""
    groups = pipelines_of(pipeline) if len(pipeline.stages) > 1 else None
    if groups is None:
        return
    one, count = groups.first_of(pipeline), len(groups.counterparts)
    for name, orders in classic_orders(one, balanced_assignment(one), split=split):
        if name in WITHOUT_REPLICAS:
            yield f"{name} in {count} pipelines", groups.spread(orders)


def _may_hold_all(pipeline: PlacedPipeline, owner: Assignment) -> bool:
    """Return whether memory could hold all microbatches in flight, as GPipe's order needs."""
    held = Counter((stage, device) for (stage, _), device in owner.items())
    return all(count <= pipeline.stash_limit(*replica) for replica, count in held.items())
