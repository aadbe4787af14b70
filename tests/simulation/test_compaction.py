"""Compaction delays without changing what matters; spans against the brute force's own ways."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from strategies import Scheduled, scheduled

from planner.plan.operations import Operation
from planner.search.schedule.measure import compacted, measured_s, timed
from planner.search.schedule.ticks import in_ticks
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

pytestmark = pytest.mark.extensive


def by_device(timeline: Timeline) -> dict[str, list[tuple[Operation, float, float]]]:
    rows = defaultdict(list)
    for event in timeline.operations:
        rows[event.device].append((event.operation, event.start_s, event.end_s))
    return dict(rows)


def by_link(timeline: Timeline) -> dict[object, list[tuple[object, float, float]]]:
    """Transfers that take time; the others hold no link."""
    rows = defaultdict(list)
    for event in timeline.transfers:
        for link in event.links:
            if event.end_s > event.start_s:
                row = (event.operation, event.source, event.target)
                rows[link].append((row, event.start_s, event.end_s))
    return dict(rows)


def names(rows: dict) -> dict:
    return {key: [name for name, *_ in row] for key, row in rows.items()}


def longest_span(timeline: Timeline) -> float:
    first, last = {}, {}
    for event in timeline.operations:
        stage = event.operation.stage
        first[stage] = min(first.get(stage, event.start_s), event.start_s)
        last[stage] = max(last.get(stage, event.end_s), event.end_s)
    return max(last[stage] - first[stage] for stage in first)


def check(before: Timeline, slack: float) -> None:
    after = compacted(before)
    for rows in (by_device, by_link):
        assert names(rows(after)) == names(rows(before))
        for row in rows(after).values():
            for (_, _, end), (_, start, _) in pairwise(row):
                assert start >= end - slack
    ends = [{d: row[-1][2] for d, row in by_device(t).items()} for t in (before, after)]
    assert ends[1] == pytest.approx(ends[0], abs=slack)
    old = {event.operation: event for event in before.operations}
    new = {event.operation: event for event in after.operations}
    for operation, event in new.items():
        assert event.start_s >= old[operation].start_s - slack
        length = old[operation].end_s - old[operation].start_s
        assert event.end_s - event.start_s == pytest.approx(length, abs=slack)
    assert len(after.transfers) == len(before.transfers)
    for sent in after.transfers:
        stage, kind, microbatch = sent.operation
        kinds, other = ("F", stage + 1) if kind == "F" else ("BI", stage - 1)
        (producer,) = (e for k in kinds if (e := new.get(Operation(stage, k, microbatch))))
        (consumer,) = (e for k in kinds if (e := new.get(Operation(other, k, microbatch))))
        assert producer.end_s <= sent.start_s + slack
        assert sent.end_s <= consumer.start_s + slack
    assert longest_span(after) <= longest_span(before) + slack
    assert measured_s(before, "longest_stage_span") <= longest_span(before) + slack


@given(scheduled(links="in_turn"))
def test_compaction_keeps_orders_ends_and_transfers_and_lengthens_no_longest_span(
    case: Scheduled,
) -> None:
    before = simulate(case.pipeline, case.orders)
    check(before, 1e-9 * before.iteration_time_s)


@given(scheduled(links="in_turn"))
def test_compaction_in_ticks_is_exact(case: Scheduled) -> None:
    check(simulate(in_ticks(case.pipeline), case.orders), 0.0)


@given(scheduled(links="in_turn"))
def test_compacting_twice_changes_nothing(case: Scheduled) -> None:
    once = compacted(simulate(in_ticks(case.pipeline), case.orders))
    twice = compacted(once)
    assert by_device(twice) == by_device(once)
    assert timed(once, "makespan") is once
