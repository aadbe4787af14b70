"""Times and costs a sample, worked out by hand."""

import pytest
from builders import cluster, device_type, graph, layer, link

from planner.analysis.sweep import rows
from planner.analysis.sweep.rows import Bill, SweepRow, currency_of, has_costs, require_bill
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.problem import Problem
from planner.plan.sweep_index import SweptPoint

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
) -> SweptPoint:
    return SweptPoint(
        cluster=label,
        devices=4,
        samples_per_microbatch=samples,
        microbatches=microbatches,
        plan="a.json",
        iteration_time_s=seconds,
        lower_bound_s=seconds / 2,
        chosen=tuple(NAMES),
        used=tuple(used),
    )


def rows_of(
    points: list[SweptPoint], clusters: dict[str, Cluster], bill: Bill = "devices", **job: object
) -> tuple[SweepRow, ...]:
    """The rows of points of a model of 9 TFLOP a microbatch."""
    problems = {}
    for row in points:
        samples = row.samples_per_microbatch
        record = graph([layer("a", 3, 6)], samples_per_microbatch=samples)
        sizes = {"samples_per_microbatch": samples, "microbatches": row.microbatches}
        the_job = Job.model_validate({**sizes, **job})
        problems[row.point] = Problem(record, clusters[row.cluster], the_job)
    return rows.rows_of(points, problems, bill)


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
    (whole,) = rows_of([found(NAMES[1:3], 12.0)], {"a": priced()}, "machines", epoch_samples=1000)
    assert whole.throughput is not None
    assert whole.throughput.cost_per_epoch == pytest.approx(9)
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
    assert row.devices_used == 2


def test_idle_devices_of_a_machine_in_use_may_be_paid_for_too() -> None:
    used = ["n0/gpu1", "desk"]
    (alone,) = rows_of([found(used, 1.0)], {"a": priced()})
    (whole,) = rows_of([found(used, 1.0)], {"a": priced()}, "machines")
    assert alone.cost_per_million_samples == pytest.approx(500)
    assert whole.cost_per_million_samples == pytest.approx(750)
    assert whole.devices_used == 2


def test_a_device_without_a_price_makes_no_cost_of_zero() -> None:
    (row,) = rows_of([found(NAMES[:1], 1.0)], {"a": priced(None)})
    assert row.cost_per_million_samples is None
    assert not has_costs([row])


def test_a_free_device_has_a_cost_of_zero() -> None:
    (row,) = rows_of([found(NAMES[:1], 1.0)], {"a": priced(0.0)})
    assert row.cost_per_million_samples == 0.0
    assert has_costs([row])


def test_the_front_is_of_time_cost_and_devices() -> None:
    """The last one is slower on as many devices as the second, and dearer than the first."""
    points = [
        found(NAMES[:1], 4.0, samples=1),
        found(NAMES[:2], 2.0, microbatches=4, samples=1),
        found(NAMES[:2], 18.0, microbatches=6, samples=1),
    ]
    found_rows = rows_of(points, {"a": priced()})
    assert [row.on_front for row in found_rows] == [True, True, False]


def test_cheap_and_slow_counts_only_where_every_plan_has_a_cost() -> None:
    clusters = {"a": priced(3.6), "b": priced(0.36)}
    found_rows = rows_of([found(NAMES[:1], 1.0), found(NAMES[:1], 2.0, "b")], clusters)
    assert [row.on_front for row in found_rows] == [True, True]
    clusters["a"] = priced(None)
    found_rows = rows_of([found(NAMES[:1], 1.0), found(NAMES[:1], 2.0, "b")], clusters)
    assert [row.on_front for row in found_rows] == [True, False]


def test_prices_in_different_currencies_do_not_compare() -> None:
    assert currency_of({"a": priced(currency="EUR"), "b": priced(currency="EUR")}) == "EUR"
    assert currency_of({"a": priced(currency="EUR"), "b": priced(None)}) == "EUR"
    assert currency_of({"a": priced()}) is None
    with pytest.raises(PipeplanError, match=r"do not compare \(a EUR, b names none\)"):
        currency_of({"a": priced(currency="EUR"), "b": priced()})


def test_what_is_paid_for_is_one_of_two() -> None:
    require_bill("machines")
    with pytest.raises(PipeplanError, match="bill: 'racks' is not known; choose from devices, mac"):
        require_bill("racks")
