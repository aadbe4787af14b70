"""Which points a sweep asks for, and what it refuses to ask for."""

from collections.abc import Callable

import pytest
from small_sweeps import JOB, ring

from planner.analysis.sweep.points import Point, batches_of, points_of
from planner.errors import PipeplanError
from planner.job import Job

BATCH = [(1, 8)]


def test_every_combination_is_a_point_once() -> None:
    found = points_of({"a": ring(4), "b": ring(2)}, [(1, 8), (2, 8)], [2, 2])
    assert found == tuple(Point(*c, s, 8) for c in [("a", 2), ("b", 2)] for s in (1, 2))


def test_all_devices_of_each_cluster_are_the_default() -> None:
    found = points_of({"a": ring(4), "b": ring(2)}, BATCH)
    assert [point.devices for point in found] == [4, 2]
    # A cluster may have fewer devices than are asked of another.
    assert len(points_of({"a": ring(4), "b": ring(2)}, BATCH, [4])) == 2


def test_the_job_s_batch_is_the_default_and_can_be_kept() -> None:
    job = Job(samples_per_microbatch=4, microbatches=6)
    assert batches_of(job) == ((4, 6),)
    assert batches_of(job, [2, 4], [8]) == ((2, 8), (4, 8))
    assert batches_of(job, [1, 2, 3, 24], global_batch=24) == ((1, 24), (2, 12), (3, 8), (24, 1))


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda: batches_of(JOB, [0]), "microbatch samples: 0 is not a whole number from 1 to"),
        (lambda: batches_of(JOB, [], [0]), "microbatches: 0 is not a whole number from 1 to 65,5"),
        (lambda: batches_of(JOB, [3], global_batch=2), "divided into microbatches of 3 samples"),
        (lambda: batches_of(JOB, [1], [4], global_batch=2), "microbatches: the global batch"),
        (lambda: points_of({}, BATCH), "cluster: none given"),
        (lambda: points_of({"a": ring(4)}, BATCH, [0]), "devices: 0 is not a whole number"),
        (lambda: points_of({"a": ring(4)}, BATCH, [5]), r"devices: 5 is not .* from 1 to 4 \("),
        (lambda: points_of({"../a": ring(4)}, BATCH), "cluster '../a': its label stands in file"),
        (lambda: points_of({".a": ring(4)}, BATCH), "the first no '-' or '.'"),
        (lambda: points_of({"a\n": ring(4)}, BATCH), "its label stands in file names"),
        (
            lambda: points_of({"a": ring(101)}, [(1, m) for m in range(100)], range(1, 102)),
            "10,100 points: more than 10,000",
        ),
    ],
)
def test_points_out_of_range_are_refused(ask: Callable[[], object], reason: str) -> None:
    with pytest.raises(PipeplanError, match=reason):
        ask()
