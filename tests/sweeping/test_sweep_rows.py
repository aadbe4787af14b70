"""Times and costs a sample, worked out by hand."""

from types import SimpleNamespace
from typing import cast

import pytest
from builders import cluster, device_type, graph, layer, link
from hypothesis import given
from hypothesis import strategies as st

from planner.analysis.sweep.points import Point
from planner.analysis.sweep.rows import (
    SweepRow,
    currency_of,
    has_costs,
    pareto_front,
    row_of,
    with_front,
)
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.plan.problem import Problem

NAMES = ["n0/gpu0", "n0/gpu1", "n1/gpu0", "desk"]


def priced(price: float | None = 3.6, currency: str | None = None) -> Cluster:
    """Two machines and a desk, each device 3.6 an hour: a thousandth a second."""
    fields = {} if price is None else {"price_per_hour": price}
    made = cluster(
        NAMES, [link(name, "hub") for name in NAMES], ["hub"], {"unit": device_type(**fields)}
    )
    return made.model_copy(update={"currency": currency})


def found(
    used: list[str], seconds: float, label: str = "a", microbatches: int = 2, samples: int = 2
) -> tuple[Point, list[str], float]:
    return Point(label, 4, samples, microbatches), used, seconds


def rows_of(
    points: list[tuple[Point, list[str], float]], clusters: dict[str, Cluster], **job: object
) -> tuple[SweepRow, ...]:
    """The rows of plans with a bound of half their time, of a model of 9 TFLOP a microbatch."""
    rows = []
    for point, used, seconds in points:
        samples = point.samples_per_microbatch
        record = graph([layer("a", 3, 6)], samples_per_microbatch=samples)
        sizes = {"samples_per_microbatch": samples, "microbatches": point.microbatches}
        problem = Problem(record, clusters[point.cluster], Job.model_validate({**sizes, **job}))
        predicted = SimpleNamespace(iteration_time_s=seconds, lower_bound_s=seconds / 2)
        plan = SimpleNamespace(
            predicted=predicted, cluster=problem.cluster, rank_devices=tuple(used), degrees=(1,)
        )
        rows.append(row_of(point, problem, cast("Plan", plan)))
    return with_front(rows)


def test_a_row_has_the_figures_of_its_plan() -> None:
    """18 TFLOP in 12 s on 3 TFLOP/s; 4 samples of 5 tokens; 0.003 a second.

    A data set of 1,000 samples takes 250 iterations, 3,000 s.
    """
    inputs = {"tokens": {"shape": (5,), "dtype": "int64"}}
    point = found(NAMES[:3], 12.0)
    (row,) = rows_of([point], {"a": priced()}, inputs=inputs, epoch_samples=1000)
    assert row.throughput is not None
    assert row.throughput.mfu == pytest.approx(0.5)
    assert row.throughput.tokens_per_s == pytest.approx(20 / 12)
    assert row.throughput.epoch_s == pytest.approx(3000)
    assert row.throughput.cost_per_epoch == pytest.approx(9)
    (unknown,) = rows_of([point], {"a": priced()})
    assert unknown.throughput is not None
    assert unknown.throughput.epoch_s is unknown.throughput.cost_per_epoch is None


def test_a_sample_s_time_and_cost_are_those_of_an_iteration_s_samples() -> None:
    """2 devices of 0.001 a second for 2 s, 4 samples: 0.5 s and 0.001 each."""
    (row,) = rows_of([found(NAMES[:2], 2.0)], {"a": priced()})
    assert row.time_per_sample_s == 0.5
    assert row.throughput is not None
    assert row.throughput.samples_per_s == 2.0
    assert row.cost_per_million_samples == pytest.approx(1000.0)
    assert row.gap == pytest.approx(1.0)


@pytest.mark.parametrize(("price", "cost"), [(3.6, 500), (None, None), (0, 0)])
def test_devices_in_use_are_paid_for(price: float | None, cost: float | None) -> None:
    (row,) = rows_of([found(["n0/gpu1", "desk"], 1.0)], {"a": priced(price)})
    assert row.cost_per_million_samples == (cost and pytest.approx(cost))
    assert has_costs([row]) == (cost is not None)


def test_the_front_is_of_time_cost_and_devices() -> None:
    """The last one is slower on as many devices as the second, and dearer than the first."""
    points = [
        found(NAMES[:1], 4.0, samples=1),
        found(NAMES[:2], 2.0, microbatches=4, samples=1),
        found(NAMES[:2], 18.0, microbatches=6, samples=1),
    ]
    found_rows = rows_of(points, {"a": priced()})
    assert [row.on_front for row in found_rows] == [True, True, False]


@pytest.mark.parametrize(("price", "front"), [(3.6, [True, True]), (None, [True, False])])
def test_cheap_and_slow_counts_only_where_every_plan_has_a_cost(
    price: float | None, front: list[bool]
) -> None:
    points = [found(NAMES[:1], 1.0), found(NAMES[:1], 2.0, "b")]
    found_rows = rows_of(points, {"a": priced(price), "b": priced(0.36)})
    assert [row.on_front for row in found_rows] == front


def test_prices_in_different_currencies_do_not_compare() -> None:
    assert currency_of({"a": priced(currency="EUR"), "b": priced(currency="EUR")}) == "EUR"
    assert currency_of({"a": priced(currency="EUR"), "b": priced(None)}) == "EUR"
    assert currency_of({"a": priced()}) is None
    with pytest.raises(PipeplanError, match=r"do not compare \(a EUR, b names none\)"):
        currency_of({"a": priced(currency="EUR"), "b": priced()})


costs = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])] * width))
)


@given(costs)
def test_a_row_is_on_the_front_unless_another_is_better_somewhere_and_worse_nowhere(
    costs: list[tuple[float, ...]],
) -> None:
    front = pareto_front(costs)
    for index, row in enumerate(costs):
        beaten = any(
            other != row and all(o <= r for o, r in zip(other, row, strict=True)) for other in costs
        )
        assert (index in front) == (not beaten)
