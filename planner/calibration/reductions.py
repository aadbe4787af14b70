"""All-reduces: what their times prove of links, and what a calibration does to their predictions.

They have no costs of their own: :func:`planner.costs.collectives.all_reduce_s` predicts them from
the links alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from planner.artifacts.cluster import Cluster
from planner.artifacts.measured import MeasuredTimeline
from planner.artifacts.names import stages_label
from planner.calibration.fits import AGREEMENT, is_short
from planner.calibration.routes import route_of, without_sharing
from planner.costs.collectives import Algorithm, all_reduce_algorithms, all_reduce_s
from planner.costs.placement import PlacedPipeline, Synchronisation
from planner.deviation import Comparison, Deviation
from planner.units import format_seconds

NOTICEABLE_FACTOR = 1.2
"""A prediction that far off is told."""


@dataclass(frozen=True)
class ReductionChange:
    """The all-reduce of some stages' gradients, against its prediction before and after."""

    stages: tuple[int, ...]
    before: Deviation
    after: Deviation

    @property
    def is_worse(self) -> bool:
        """Whether the calibration made it noticeably worse predicted than it was."""
        return (
            self.after.factor > NOTICEABLE_FACTOR
            and self.after.factor > (1 + AGREEMENT) * self.before.factor
        )

    def __str__(self) -> str:
        before_s, after_s = self.before.predicted_s or 0.0, self.after.predicted_s or 0.0
        return _figures(before_s, after_s, self.before.measured_s or 0.0)


def reduction_changes(before: Comparison, after: Comparison) -> tuple[ReductionChange, ...]:
    """Of all-reduces that the plan has and the run measured, in the order of the plan."""
    return tuple(
        ReductionChange(stages, row, after.reductions[stages])
        for stages, row in before.reductions.items()
        if row.predicted_s is not None and row.measured_s is not None
    )


def reduction_notes(changes: Sequence[ReductionChange]) -> Iterator[str]:
    """What people should know of all-reduces that are far off after the calibration."""
    worse = [change for change in changes if change.is_worse]
    if worse:
        worst = max(worse, key=lambda change: change.after.factor)
        yield (
            f"calibration made the prediction of {len(worse)} of {len(changes)} all-reduces worse, "
            f"most that of {stages_label(worst.stages)}: {worst}; correct bandwidth_gb_per_s and "
            "latency_us of its links by hand, or measure larger messages"
        )
    elif changes and median(change.after.factor for change in changes) > NOTICEABLE_FACTOR:
        before_s = median(change.before.predicted_s or 0.0 for change in changes)
        after_s = median(change.after.predicted_s or 0.0 for change in changes)
        found_s = median(change.after.measured_s or 0.0 for change in changes)
        yield (
            "all-reduces have no costs of their own, and the links do not explain them: "
            f"{_figures(before_s, after_s, found_s)} (medians)"
        )


def _figures(before_s: float, after_s: float, found_s: float) -> str:
    return (
        f"{format_seconds(before_s)} predicted before, {format_seconds(after_s)} after, "
        f"{format_seconds(found_s)} measured"
    )


def least_bandwidths_gb_per_s(
    pipeline: PlacedPipeline, measured: MeasuredTimeline, before: Comparison
) -> dict[int, float]:
    """What links must carry for the measured all-reduces to be possible, by index.

    Lower bounds under the cost model: even without any latency, all the bytes that cross a link in
    the ring, or in the tree if these are fewer, had to cross it in the time measured. All-reduces
    that are short (:func:`planner.calibration.fits.is_short`) prove next to nothing and are left
    out, and so are those of other devices than the plan's.
    """
    cluster = pipeline.problem.cluster
    visible = without_sharing(cluster)
    found: dict[int, float] = {}
    for synchronisation in pipeline.synchronisations:
        row = before.reductions[synchronisation.stages]
        bytes_ = _bytes(synchronisation, measured)
        if not row.measured_s or not _is_long(cluster, synchronisation.devices, bytes_):
            continue
        ring, tree = (
            _crossing_bytes(visible, cluster, algorithm)
            for algorithm in all_reduce_algorithms(synchronisation.devices, bytes_)
        )
        for link in ring.keys() & tree.keys():
            least = min(ring[link], tree[link]) / row.measured_s * 1e-9
            found[link] = max(found.get(link, 0.0), least)
    return found


def _bytes(synchronisation: Synchronisation, measured: MeasuredTimeline) -> int:
    """Bytes of an all-reduce as it ran; 0 if it did not run on the plan's devices."""
    events = [
        event
        for event in measured.reductions
        if event.stages == synchronisation.stages and event.step in measured.counted_steps
    ]
    if {event.device for event in events} != set(synchronisation.devices):
        return 0
    return min(event.bytes for event in events)


def _is_long(cluster: Cluster, devices: Sequence[str], bytes_: int) -> bool:
    latency_s = all_reduce_s(cluster, devices, 1)
    return bytes_ > 0 and not is_short(
        all_reduce_s(cluster, devices, bytes_) - latency_s, latency_s
    )


def _crossing_bytes(visible: Cluster, cluster: Cluster, algorithm: Algorithm) -> dict[int, float]:
    """Bytes through the busier direction of each link.

    Args:
        visible: the cluster, with shared links on its routes.
        cluster: as it is.
        algorithm: what sends them.
    """
    uses = Counter(link for edge in algorithm.edges for link in route_of(visible, edge).links)
    found: dict[int, float] = {}
    for (index, _), count in uses.items():
        # A shared link carries each message at its full bandwidth.
        messages = 1 if cluster.links[index].shared else count
        moved = algorithm.steps * algorithm.bytes_ * messages
        found[index] = max(found.get(index, 0.0), moved)
    return found
