"""A plan whose costs are calibrated by a measured run of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from planner.analysis.deviation import Comparison, compare_with_measured
from planner.cluster.cluster import Cluster
from planner.cluster.hardware import LEAST, MOST
from planner.errors import PipeplanError
from planner.interop.calibrate.fits import transfer_samples
from planner.interop.calibrate.links import (
    NOTICEABLE_FACTOR,
    CalibratedLink,
    ReductionChange,
    calibrated_cluster,
    reduction_changes,
    reduction_notes,
)
from planner.interop.calibrate.times import StageTime, calibrated_graph, stage_times
from planner.measured.timeline import MeasuredTimeline
from planner.model.graph_record import graph_digest
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.prediction import refresh, replay


@dataclass(frozen=True)
class OptimizerChange:
    """The optimizer step of a device type: medians of its devices that took one, in seconds.

    Attributes:
        device_type: the type.
        predicted_s, measured_s: before the calibration.
        ratio: median of predicted over measured.
        spread: the largest of these ratios over the least; of devices with unlike steps.
    """

    device_type: str
    predicted_s: float
    measured_s: float
    ratio: float
    spread: float

    @property
    def note(self) -> str | None:
        """What to say where one efficiency cannot fit all devices of the type."""
        if self.spread <= NOTICEABLE_FACTOR:
            return None
        return (
            f"optimizer steps of {self.device_type} are off by factors that differ "
            f"{self.spread:.3g}x between devices; its optimizer_efficiency is that of the median "
            "device"
        )


def optimizer_changes(plan: Plan, comparison: Comparison) -> tuple[OptimizerChange, ...]:
    """Return the optimizer steps of each device type as predicted and measured."""
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for device, row in comparison.optimizer.items():
        if row.predicted_s and row.measured_s:
            rows[plan.cluster.type_of(device)].append((row.predicted_s, row.measured_s))
    found = []
    for kind, times in rows.items():
        ratios = [expected_s / found_s for expected_s, found_s in times]
        expected_s, found_s = (median(column) for column in zip(*times, strict=True))
        spread = max(ratios) / min(ratios)
        found.append(OptimizerChange(kind, expected_s, found_s, median(ratios), spread))
    return tuple(found)


def with_optimizers(cluster: Cluster, changes: Sequence[OptimizerChange]) -> Cluster:
    """Return a cluster whose device types take optimizer steps as fast as was measured."""
    kinds = dict(cluster.device_types)
    for change in changes:
        kind = kinds[change.device_type]
        share = min(max(kind.optimizer_efficiency * change.ratio, LEAST), MOST)
        kinds[change.device_type] = kind.model_copy(update={"optimizer_efficiency": share})
    return cluster.model_copy(update={"device_types": kinds})


@dataclass(frozen=True)
class Calibration:
    """The calibrated plan, and what the measurement changed.

    Attributes:
        plan: with calibrated layer graph and cluster, and fresh predictions.
        before_s: iteration time predicted before.
        after_s: predicted now.
        measured_s: median over the steps that count.
        times: operations by stage, device type and kind; none where only links were calibrated.
        links: those whose figures changed.
        optimizers: optimizer steps by device type.
        reductions: all-reduces, whose predictions follow from the links.
        notes: what people should know of it.
    """

    plan: Plan
    before_s: float
    after_s: float
    measured_s: float
    times: tuple[StageTime, ...]
    links: tuple[CalibratedLink, ...]
    optimizers: tuple[OptimizerChange, ...]
    reductions: tuple[ReductionChange, ...]
    notes: tuple[str, ...]


def calibrate(plan: Plan, measured: MeasuredTimeline, *, links_only: bool = False) -> Calibration:
    """Derive the costs of a plan's layers and links from a measured run.

    The bound of the plan was proved for the old costs and is dropped.

    Args:
        plan: what ran.
        measured: its measurement.
        links_only: leave the layers' times as they are.

    Raises:
        PipeplanError: if the measurement is of another plan, its operations were slept, or its
            devices' clocks differ, or the job has features that calibration does not support, such
            as tensor-parallel groups.
    """
    if measured.emulated and not links_only:
        raise PipeplanError(
            "the compute in this timeline was emulated, so its durations are the predicted ones; "
            "calibrate links only with --links-only, or "
            "run the plan without emulation"
        )
    require_without(plan.job, "calibrate", degree=plan.degree)
    timeline = replay(plan)
    comparison = compare_with_measured(plan, timeline, measured)
    if comparison.clock_conflict is not None:
        raise PipeplanError(str(comparison.clock_conflict))
    pipeline = timeline.pipeline
    samples = transfer_samples(pipeline.problem, measured)
    cluster, links, link_notes = calibrated_cluster(pipeline, samples)
    times = () if links_only else stage_times(timeline, measured)
    record, time_notes = calibrated_graph(pipeline, times)
    optimizers = () if links_only else optimizer_changes(plan, comparison)
    cluster = with_optimizers(cluster, optimizers)
    model = plan.model.model_copy(update={"graph": record, "graph_digest": graph_digest(record)})
    made = refresh(plan.model_copy(update={"model": model, "cluster": cluster}))
    after = replay(made)
    compared = compare_with_measured(made, after, measured)
    reductions = reduction_changes(comparison, compared)
    return Calibration(
        plan=made,
        before_s=timeline.iteration_time_s,
        after_s=after.iteration_time_s,
        measured_s=comparison.iteration.measured_s or 0.0,
        times=times,
        links=links,
        optimizers=optimizers,
        reductions=reductions,
        notes=(
            *comparison.other_hardware,
            *time_notes,
            *link_notes,
            *(note for row in optimizers if (note := row.note) is not None),
            *reduction_notes(reductions),
        ),
    )
