"""The combinations that a sweep asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import MAX_MICROBATCHES, Job
from planner.plan.sweep_index import MAX_SAMPLES, MOST_POINTS, Label, Point
from planner.units import plural

_LABEL = re.compile(get_args(Label)[1].metadata[0].pattern)


def points_of(
    clusters: Mapping[str, Cluster],
    batches: Sequence[tuple[int, int]],
    devices: Sequence[int] = (),
) -> tuple[Point, ...]:
    """Return all combinations: by cluster, then by number of devices, then by batch.

    Args:
        clusters: by label.
        batches: samples of a microbatch, and number of microbatches.
        devices: numbers of devices; all of each cluster by default.

    Raises:
        PipeplanError: naming every label, number or combination that cannot be.
    """
    problems = [*_wrong_labels(clusters), *_wrong_devices(clusters, devices)]
    if problems:
        raise PipeplanError(problems)
    found = [
        Point(label, number, *batch)
        for label, cluster in clusters.items()
        for number in devices or [len(cluster.devices)]
        for batch in batches
    ]
    if len(found) > MOST_POINTS:
        raise PipeplanError(
            f"{plural(len(found), 'point')}: more than {MOST_POINTS:,}; sweep fewer values at once"
        )
    return tuple(dict.fromkeys(found))


def _wrong_labels(clusters: Mapping[str, Cluster]) -> Iterator[str]:
    if not clusters:
        yield "cluster: none given; a sweep needs one or more"
    for label in clusters:
        if not _LABEL.fullmatch(label):
            yield (
                f"cluster {label!r}: its label stands in file names; use 1 to 80 letters, digits, "
                "'_', '-' and '.', the first no '-' or '.'"
            )


def _wrong_devices(clusters: Mapping[str, Cluster], devices: Sequence[int]) -> Iterator[str]:
    most = max((len(cluster.devices) for cluster in clusters.values()), default=0)
    for number in devices:
        if number < 1:
            yield f"devices: {number} is not a whole number of at least 1"
        elif number > most:
            yield f"devices: {number} is more than any cluster has ({most}); leave it out"


def batches_of(
    job: Job,
    samples: Iterable[int] = (),
    microbatches: Iterable[int] = (),
    *,
    keep_batch: bool = False,
) -> tuple[tuple[int, int], ...]:
    """Return sizes and numbers of microbatches.

    Args:
        job: whose own hold where none are given.
        samples: of a microbatch.
        microbatches: of an iteration.
        keep_batch: as many microbatches as make the job's samples of an iteration.

    Raises:
        PipeplanError: naming every number that cannot be.
    """
    sizes = list(dict.fromkeys(samples)) or [job.samples_per_microbatch]
    counts = list(dict.fromkeys(microbatches)) or [job.microbatches]
    whole = job.samples_per_microbatch * job.microbatches
    problems = [*_out_of_range("microbatch samples", sizes, MAX_SAMPLES)]
    problems += _out_of_range("microbatches", counts, MAX_MICROBATCHES)
    if keep_batch and list(microbatches):
        problems.append("microbatches: given, and the batch is to be kept; leave one of them out")
    if not problems and keep_batch:
        problems += _undivided(whole, sizes)
    if problems:
        raise PipeplanError(problems)
    if keep_batch:
        return tuple((size, whole // size) for size in sizes)
    return tuple((size, count) for size in sizes for count in counts)


MOST_TRIED_SAMPLES = 16


def sizes_of(global_batch: int) -> tuple[int, ...]:
    """Return the sizes of microbatches to try for a batch: powers of two that divide it, up to 16.

    Args:
        global_batch: samples of an iteration.
    """
    powers = (2**power for power in range(MOST_TRIED_SAMPLES.bit_length()))
    return tuple(size for size in powers if global_batch % size == 0)


def _out_of_range(what: str, values: Iterable[int], most: int) -> Iterator[str]:
    for value in values:
        if not 1 <= value <= most:
            yield f"{what}: {value} is not a whole number from 1 to {most:,}"


def _undivided(whole: int, sizes: Iterable[int]) -> Iterator[str]:
    for size in sizes:
        if whole % size:
            yield (
                f"microbatch samples: the job's {plural(whole, 'sample')} an iteration cannot be "
                f"divided into microbatches of {size}; leave {size} out, or change the job's batch"
            )
        elif whole // size > MAX_MICROBATCHES:
            yield f"microbatch samples: {size} makes more than {MAX_MICROBATCHES:,} microbatches"
