"""Samples and tokens a second, MFU and cost of iterations worked out by hand."""

import pytest
from builders import cluster, device_type, graph, layer, link

from planner.costs.throughput import throughput
from planner.job import Job

LAYERS = graph([layer("a", 1, 2), layer("b", 2, 4)]).record
"""9 TFLOP for a microbatch."""


def two(**fields: object):
    types = {"unit": device_type(**fields), "twice": device_type(peak_tflop_per_s={"float32": 2})}
    return cluster({"d0": "unit", "d1": "twice"}, [link("d0", "d1")], types=types)


def test_figures_of_an_iteration() -> None:
    """4 microbatches of 9 TFLOP on 3 TFLOP/s take 12 s at best; 8 samples in 24 s."""
    inputs = {"tokens": {"shape": (100,), "dtype": "int64"}}
    job = Job(microbatches=4, samples_per_microbatch=2, inputs=inputs)
    found = throughput(LAYERS, two(), job, ["d0", "d1"], 24.0)
    assert found is not None
    assert found.mfu == pytest.approx(0.5)
    assert found.samples_per_s == pytest.approx(8 / 24)
    assert found.tokens_per_s == pytest.approx(800 / 24)
    assert found.cost_per_million_samples is None


def test_only_devices_in_use_count() -> None:
    """36 TFLOP on 1 TFLOP/s for 3.60 an hour: 4 samples in 36 s cost 0.036.

    An epoch of 100 samples takes 900 s.
    """
    job = Job(microbatches=4, epoch_samples=100)
    found = throughput(LAYERS, two(price_per_hour=3.6), job, ["d0"], 36.0)
    assert found is not None
    assert found.mfu == pytest.approx(1)
    assert found.cost_per_million_samples == pytest.approx(1e6 * 0.036 / 4)
    assert found.tokens_per_s is None
    assert found.epoch_s == pytest.approx(900)
    assert found.cost_per_epoch == pytest.approx(0.9)


def test_what_is_not_known_is_left_out() -> None:
    assert throughput(LAYERS, two(), Job(), ["d0"], 0.0) is None
    other = two(peak_tflop_per_s={"bfloat16": 1})
    found = throughput(LAYERS, other, Job(), ["d0", "d1"], 1.0)
    assert found is not None
    assert found.mfu is None
    assert found.epoch_s is found.cost_per_epoch is None
    unpriced = throughput(LAYERS, other, Job(epoch_samples=100), ["d0", "d1"], 1.0)
    assert unpriced is not None
    assert unpriced.epoch_s is not None
    assert unpriced.cost_per_epoch is None
