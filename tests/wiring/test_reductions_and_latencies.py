"""All-reduces beside their predictions, and latencies that suit them and messages."""

from __future__ import annotations

import pytest
from builders import star
from figures import figures_of, measurements

from planner.cluster.cluster import Cluster
from planner.costs.collectives import all_reduce_s
from planner.topology.choice import reduction_errors, suited_latencies
from planner.topology.measurements import Measurements, TimedReduction

NAMES = ("d0", "d1", "d2", "d3")


def known(latency_us: float = 50.0) -> Cluster:
    return star(4, 1.0, latency_us=latency_us)


def found(messages: Cluster, reductions: Cluster) -> Measurements:
    """Messages of one cluster and all-reduces of another."""
    rows = [
        TimedReduction(NAMES[:count], bytes_, all_reduce_s(reductions, NAMES[:count], bytes_))
        for count in (2, 3, 4)
        for bytes_ in (4096, 10**6)
    ]
    return measurements(dict.fromkeys(NAMES, "host"), figures_of(messages), (), rows)


def test_two_ranks_exchange_halves_twice() -> None:
    """By hand: 2 steps of 5 * 10**5 bytes at 1 GB/s with 100 us each; measured 3 ms."""
    row = TimedReduction(("d0", "d1"), 10**6, 3e-3)
    (error,) = reduction_errors(known(), [row])
    assert error.predicted_s == pytest.approx(2 * (1e-4 + 5e-4))
    assert error.ratio == pytest.approx(2.5)


def test_latencies_stay_where_all_is_explained() -> None:
    suited = suited_latencies(known(), found(known(), known()))
    assert suited.factor == 1
    assert suited.cluster == known()
    assert suited.errors.reductions == pytest.approx(1)


def test_latencies_rise_for_slow_all_reduces_as_far_as_messages_allow() -> None:
    suited = suited_latencies(known(), found(known(), known(500)))
    assert 1 < suited.factor < 10
    assert suited.errors.reductions < suited.before.reductions
    assert suited.errors.messages <= 1.25
    for row in suited.cluster.links:
        assert row.latency_us == pytest.approx(50 * suited.factor, rel=1e-3)


def test_without_all_reduces_latencies_are_those_of_messages() -> None:
    lone = measurements(dict.fromkeys(NAMES, "host"), figures_of(known()))
    suited = suited_latencies(known(), lone)
    assert suited.factor == 1


def test_all_reduces_among_devices_without_a_path_are_left_out() -> None:
    apart = known().model_copy(update={"links": known().links[:3]})
    rows = [TimedReduction(NAMES, 10**6, 1e-3), TimedReduction(NAMES[:2], 10**6, 1e-3)]
    assert [error.reduction for error in reduction_errors(apart, rows)] == rows[1:]
