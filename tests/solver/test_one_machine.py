"""Jackson's preemptive bound of single devices."""

import random
from itertools import permutations

import pytest

from planner.search.schedule.bounds.one_machine import Chains, Timed, preemptive_makespan_s


def least_makespan(operations: list[Timed]) -> float:
    """Of all orders, without interruptions."""
    best = float("inf")
    for order in permutations(operations):
        now = end = 0.0
        for head, duration, tail in order:
            now = max(now, head) + duration
            end = max(end, now + tail)
        best = min(best, end)
    return best


@pytest.mark.parametrize("seed", range(200))
def test_no_order_beats_the_preemptive_bound(seed: int) -> None:
    draw = random.Random(seed)
    operations = [
        (float(draw.randint(0, 9)), float(draw.randint(0, 4)), float(draw.randint(0, 9)))
        for _ in range(draw.randint(1, 6))
    ]
    bound = preemptive_makespan_s(operations)
    assert bound <= least_makespan(operations)
    assert bound >= max(sum(row) for row in operations)
    start = min(head for head, _, _ in operations)
    assert bound >= start + sum(duration for _, duration, _ in operations)


def test_interruption_pays_where_a_long_tail_comes_late() -> None:
    # The second is released while the first runs, and has the longest tail.
    operations = [(0.0, 4.0, 3.0), (1.0, 1.0, 6.0)]
    assert preemptive_makespan_s(operations) == 8
    assert least_makespan(operations) == 9


def test_earliest_starts_by_hand() -> None:
    """Two stages of 1 s there and 2 s back, one a device, one microbatch in flight on the second.

    F0 F1 of the first stage at 0 and 1; the second runs F0 1-2, B0 2-4, F1 4-5, B1 5-7; the first
    B0 4-6, B1 not before 7.
    """
    chains = Chains(
        there=[1, 1],
        back=[2, 2],
        send=[0, 0],
        send_back=[0, 0],
        lead=[0, 0],
        lead_from=[0, 0],
        limit=[2, 1],
        on_same_device={0: (0,), 1: (1,)},
        microbatches=2,
    )
    there, back = chains.earliest()
    assert there == [[0, 1], [1, 4]]
    assert back == [[4, 7], [2, 5]]
