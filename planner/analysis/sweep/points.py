"""The combinations that a sweep asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import MAX_MICROBATCHES, Job
from planner.units import plural

MOST_TRIED_SAMPLES = 16
MAX_SAMPLES = 2**20
MOST_POINTS = 10_000
LABEL_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"
"""Label of a cluster, used in file names."""


class Point(NamedTuple):
    """One combination of a sweep.

    Attributes:
        cluster: label of the cluster.
        devices: largest number of devices that a plan may use.
        samples_per_microbatch: microbatch size.
        microbatches: microbatches per iteration.
    """

    cluster: str
    devices: int
    samples_per_microbatch: int
    microbatches: int

    @property
    def plan_name(self) -> str:
        """File name of the point's plan."""
        batch = f"{self.microbatches}x{self.samples_per_microbatch}"
        return f"{self.cluster}-{self.devices}-devices-{batch}.json"

    @property
    def batch(self) -> str:
        """Number and size of the microbatches, such as ``8 x 32``."""
        return f"{self.microbatches} x {self.samples_per_microbatch}"

    def __str__(self) -> str:
        return f"{self.cluster}, {plural(self.devices, 'device')}, {self.batch} samples"


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
        PipeplanError: naming every label and number that is out of range, or for too many points.
    """
    most = max((len(cluster.devices) for cluster in clusters.values()), default=0)
    problems = [] if clusters else ["cluster: none given; a sweep needs one or more"]
    problems += [
        f"cluster {label!r}: its label stands in file names; use 1 to 80 letters, digits, "
        "'_', '-' and '.', the first no '-' or '.'"
        for label in clusters
        if not re.fullmatch(LABEL_PATTERN, label)
    ]
    problems += _out_of_range("devices", devices, most, " (the devices of the largest cluster)")
    found = dict.fromkeys(
        Point(label, number, *batch)
        for label, cluster in clusters.items()
        for number in devices or [len(cluster.devices)]
        for batch in batches
    )
    if len(found) > MOST_POINTS:
        problems.append(
            f"{plural(len(found), 'point')}: more than {MOST_POINTS:,}; sweep fewer values at once"
        )
    if problems:
        raise PipeplanError(problems)
    return tuple(found)


def batches_of(
    job: Job,
    samples: Iterable[int] = (),
    microbatches: Sequence[int] = (),
    global_batch: int | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return combinations of the microbatch size and the number of microbatches.

    Args:
        job: has the values where none are given.
        samples: of a microbatch.
        microbatches: of an iteration.
        global_batch: samples of an iteration; instead of ``microbatches``, as many as make these.

    Raises:
        PipeplanError: naming every number that is out of range.
    """
    sizes = list(dict.fromkeys(samples)) or [job.samples_per_microbatch]
    counts = list(dict.fromkeys(microbatches)) or [job.microbatches]
    problems = [*_out_of_range("microbatch samples", sizes, MAX_SAMPLES)]
    problems += _out_of_range("microbatches", counts, MAX_MICROBATCHES)
    if global_batch is not None and microbatches:
        problems.append("microbatches: the global batch fixes them already; leave one of them out")
    if global_batch is not None and not problems:
        problems += _undivided(global_batch, sizes)
    if problems:
        raise PipeplanError(problems)
    return tuple(
        (size, count)
        for size in sizes
        for count in (counts if global_batch is None else [global_batch // size])
    )


def sizes_of(global_batch: int) -> tuple[int, ...]:
    """Return the microbatch sizes to try for a batch: powers of two up to 16 that divide it.

    Args:
        global_batch: samples of an iteration.
    """
    powers = (2**power for power in range(MOST_TRIED_SAMPLES.bit_length()))
    return tuple(size for size in powers if global_batch % size == 0)


def _out_of_range(what: str, values: Iterable[int], most: int, of: str = "") -> Iterator[str]:
    for value in values:
        if not 1 <= value <= most:
            yield f"{what}: {value} is not a whole number from 1 to {most:,}{of}"


def _undivided(whole: int, sizes: Iterable[int]) -> Iterator[str]:
    for size in sizes:
        if whole % size:
            yield (
                f"microbatch samples: {plural(whole, 'sample')} an iteration cannot be divided "
                f"into microbatches of {size} samples; leave {size} out, or change the global batch"
            )
        elif whole // size > MAX_MICROBATCHES:
            yield f"microbatch samples: {size} makes more than {MAX_MICROBATCHES:,} microbatches"
