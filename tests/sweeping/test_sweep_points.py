"""Which points a sweep asks for, and what it refuses to ask for."""

import pytest
from small_sweeps import JOB, ring

from planner.analysis.sweep.points import batches_of, points_of
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.sweep_index import Point


def test_every_combination_is_a_point_once() -> None:
    found = points_of({"a": ring(4), "b": ring(2)}, [(1, 8), (2, 8)], [2, 2])
    assert found == (
        Point("a", 2, 1, 8),
        Point("a", 2, 2, 8),
        Point("b", 2, 1, 8),
        Point("b", 2, 2, 8),
    )


def test_all_devices_of_each_cluster_are_the_default() -> None:
    found = points_of({"a": ring(4), "b": ring(2)}, [(1, 8)])
    assert [point.devices for point in found] == [4, 2]


def test_a_cluster_may_have_fewer_devices_than_are_asked_of_another() -> None:
    assert len(points_of({"a": ring(4), "b": ring(2)}, [(1, 8)], [4])) == 2


def test_the_job_s_batch_is_the_default_and_can_be_kept() -> None:
    job = Job(samples_per_microbatch=4, microbatches=6)
    assert batches_of(job) == ((4, 6),)
    assert batches_of(job, [2, 4], [8]) == ((2, 8), (4, 8))
    assert batches_of(job, [1, 2, 3, 24], keep_batch=True) == ((1, 24), (2, 12), (3, 8), (24, 1))


@pytest.mark.parametrize(
    ("samples", "microbatches", "keep", "reason"),
    [
        ([0], [], False, "microbatch samples: 0 is not a whole number from 1 to"),
        ([], [0], False, "microbatches: 0 is not a whole number from 1 to 65,536"),
        ([3], [], True, "2 samples an iteration cannot be divided into microbatches of 3"),
        ([1], [4], True, "microbatches: given, and the batch is to be kept"),
    ],
)
def test_batches_that_cannot_be_are_refused(
    samples: list[int], microbatches: list[int], keep: bool, reason: str
) -> None:
    with pytest.raises(PipeplanError, match=reason):
        batches_of(JOB, samples, microbatches, keep_batch=keep)


@pytest.mark.parametrize(
    ("label", "devices", "reason"),
    [
        ("a", [0], r"devices: 0 is not a whole number from 1 to 4 \(the dev"),
        ("a", [5], "devices: 5 is not a whole number from 1 to 4"),
        ("../a", [2], "cluster '../a': its label stands in file names"),
        (".a", [2], "the first no '-' or '.'"),
        ("a\n", [2], "its label stands in file names"),
    ],
)
def test_points_that_cannot_be_are_refused(label: str, devices: list[int], reason: str) -> None:
    with pytest.raises(PipeplanError, match=reason):
        points_of({label: ring(4)}, [(1, 8)], devices)


def test_a_sweep_of_too_many_points_is_refused() -> None:
    with pytest.raises(PipeplanError, match="10,100 points: more than 10,000"):
        points_of({"a": ring(101)}, [(1, m) for m in range(1, 101)], range(1, 102))
