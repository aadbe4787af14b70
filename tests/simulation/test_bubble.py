"""The bubble's causes sum to the idle time, and are what was worked out by hand.

By hand: forward 1 s and backward 2 s unless told otherwise, 10**9 bytes take a second.
"""

from collections import defaultdict
from itertools import pairwise

import pytest
from builders import GIGA, boundary, graph, layer, orders, parameter, pipeline, star
from chains import GIB, PAIR, chain
from hypothesis import given
from strategies import Scheduled, scheduled

from planner.analysis.explain import explain
from planner.analysis.explain.bubble import CAUSES, Bubble
from planner.analysis.explain.path_shares import Spent
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def causes(bubble: Bubble, device: str) -> dict[str, float]:
    """The causes of a device that are not nothing."""
    (row,) = (row for row in bubble.devices if row.device == device)
    return {name: getattr(row, name) for name in CAUSES if getattr(row, name)}


def idle_intervals(timeline: Timeline, device: str) -> list[tuple[float, float]]:
    """From the start of the iteration to its end, the optimizer step counted as busy."""
    step_s = timeline.pipeline.optimizer_s[device]
    end_s = timeline.end_s[device]
    runs = [(e.start_s, e.end_s) for e in timeline.operations if e.device == device]
    edges = [(0.0, 0.0), *runs, (end_s - step_s, end_s), (timeline.iteration_time_s, 0.0)]
    return [(left[1], right[0]) for left, right in pairwise(edges) if right[0] > left[1] + 1e-12]


@given(scheduled())
def test_the_causes_of_each_device_sum_to_its_idle_time(case: Scheduled) -> None:
    timeline = simulate(case.pipeline, case.orders)
    whole_s = timeline.iteration_time_s
    bubble = explain(timeline).bubble
    assert [row.device for row in bubble.devices] == list(case.pipeline.devices)
    for row in bubble.devices:
        intervals = idle_intervals(timeline, row.device)
        idle_s = sum(end - start for start, end in intervals)
        assert row.idle_s == pytest.approx(idle_s, rel=1e-9, abs=1e-9 * whole_s)
        parts = [getattr(row, name) for name in CAUSES]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(idle_s, rel=1e-9, abs=1e-9 * whole_s)
    assert bubble.share == pytest.approx(timeline.bubble, abs=1e-9)
    total_s = sum(bubble.cause_s(name) for name in CAUSES)
    assert total_s == pytest.approx(bubble.idle_s, abs=1e-9 * whole_s * len(bubble.devices))


@given(scheduled())
def test_what_a_device_waited_for_sums_to_its_idle_time(case: Scheduled) -> None:
    timeline = simulate(case.pipeline, case.orders)
    for row in explain(timeline).bubble.devices:
        seconds = [waited.seconds for waited in row.waited_for]
        assert seconds == sorted(seconds, reverse=True)
        assert sum(seconds) == pytest.approx(
            row.idle_s, rel=1e-9, abs=1e-9 * timeline.iteration_time_s
        )
        assert all(
            row.device not in waited.spent.on
            for waited in row.waited_for
            if waited.spent.cause in ("computation", "optimizer")
        )


@given(scheduled())
def test_a_device_waits_for_no_more_than_what_ran_elsewhere_meanwhile(case: Scheduled) -> None:
    """A computation on a device that is waited for ran there, in these very intervals."""
    timeline = simulate(case.pipeline, case.orders)
    runs = defaultdict(list)
    for event in timeline.operations:
        runs[event.device, event.operation.stage].append((event.start_s, event.end_s))
    for row in explain(timeline).bubble.devices:
        intervals = idle_intervals(timeline, row.device)
        for waited in row.waited_for:
            if waited.spent.cause != "computation":
                continue
            meanwhile_s = sum(
                max(0.0, min(end, until) - max(start, since))
                for start, end in runs[waited.spent.on[0], waited.spent.stages[0]]
                for since, until in intervals
            )
            assert waited.seconds <= meanwhile_s + 1e-9 * timeline.iteration_time_s


def test_equal_stages_without_transfers_only_fill_and_drain() -> None:
    """Of p = 2 stages each idles (p - 1) * (1 + 2) s, whatever the microbatches."""
    timeline = simulate(chain((1, 2), (1, 2)), PAIR)
    bubble = explain(timeline).bubble
    assert timeline.iteration_time_s == 9
    assert causes(bubble, "d0") == causes(bubble, "d1") == {"fill_and_drain_s": 3}


def test_what_a_device_has_less_to_do_is_imbalance() -> None:
    """d1 works 2 * 12 s, from 1 s on; the last 0B1 follows. d0 works 6 s of the 27."""
    timeline = simulate(chain((1, 2), (4, 8)), PAIR)
    bubble = explain(timeline).bubble
    assert (timeline.iteration_time_s, bubble.busiest) == (27, "d1")
    assert causes(bubble, "d1") == {"fill_and_drain_s": 3}
    assert causes(bubble, "d0") == {"imbalance_s": 18, "fill_and_drain_s": 3}
    waited = bubble.devices[0].waited_for
    assert waited == ((Spent("computation", ("d1",), (1,)), 21),)


def test_the_busiest_device_tells_transfers_from_filling() -> None:
    """As above with 0.5 s a transfer: d1 waits for 0F0, its transfer, one back and 0B1."""
    timeline = simulate(chain((1, 2), (4, 8), bytes_=GIGA // 2), PAIR)
    bubble = explain(timeline).bubble
    assert timeline.iteration_time_s == 28
    assert causes(bubble, "d1") == {"fill_and_drain_s": 3, "transfers_s": 1}
    assert causes(bubble, "d0") == {"imbalance_s": 18, "fill_and_drain_s": 3, "transfers_s": 1}


def test_all_reduces_and_optimizer_steps_of_others_are_synchronisation() -> None:
    """Replicas d0, d1 reduce 4 GB in 4 s; SGD moves 12 GB at 1000 GB/s after it."""
    rows = [layer("a", parameters=["w"]), layer("b", 4, 8)]
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)], [parameter("w", GIGA)])
    stages = [(["a"], ["d0", "d1"]), (["b"], ["d2"])]
    placed = pipeline(the_graph, star(3), stages)
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1B0 1F1 1B1"))
    bubble = explain(timeline).bubble
    assert timeline.iteration_time_s == pytest.approx(1 + 24 + 2 + 4 + 0.012)
    assert bubble.busiest == "d2"
    assert causes(bubble, "d2") == pytest.approx(
        {"fill_and_drain_s": 3, "synchronisation_s": 4.012}
    )
    assert causes(bubble, "d0") == pytest.approx(
        {"imbalance_s": 24 - 3.012, "fill_and_drain_s": 3, "synchronisation_s": 4.012}
    )


def test_recomputation_is_work_and_not_idle_time() -> None:
    """It takes 1 s a microbatch on one device, which never idles: no bubble."""
    placed = pipeline(graph([layer("a", stash_bytes=GIB)], []), star(1), [(["a"], ["d0"], ["a"])])
    explanation = explain(simulate(placed, orders(d0="0F0 0B0 0F1 0B1")))
    assert explanation.memory.recomputes
    assert causes(explanation.bubble, "d0") == {}
    assert explanation.bubble.share == 0
