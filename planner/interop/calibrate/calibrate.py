"""A plan whose costs are calibrated by a measured run of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from planner.analysis.deviation import Comparison, compare_with_measured
from planner.errors import PipeplanError
from planner.interop.calibrate.fits import transfer_samples
from planner.interop.calibrate.links import (
    NOTICEABLE_FACTOR,
    CalibratedLink,
    ReductionChange,
    calibrated_cluster,
    least_bandwidths_gb_per_s,
    reduction_changes,
    reduction_notes,
)
from planner.interop.calibrate.times import StageTime, calibrated_graph, stage_times
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan
from planner.prediction import refresh, replay
from planner.records.document import digest
from planner.units import format_seconds


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
        reductions: all-reduces, whose predictions follow from the links.
        notes: what people should know of it.
    """

    plan: Plan
    before_s: float
    after_s: float
    measured_s: float
    times: tuple[StageTime, ...]
    links: tuple[CalibratedLink, ...]
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
            devices' clocks differ.
    """
    if measured.emulated and not links_only:
        raise PipeplanError(
            "the compute in this timeline was emulated, so its durations are the predicted ones; "
            "calibrate links only with --links-only, or "
            "run the plan without emulation"
        )
    timeline = replay(plan)
    comparison = compare_with_measured(plan, timeline, measured)
    if comparison.clock_conflict is not None:
        raise PipeplanError(str(comparison.clock_conflict))
    pipeline = timeline.pipeline
    times = () if links_only else stage_times(pipeline, measured)
    record, time_notes = calibrated_graph(pipeline, times)
    samples = transfer_samples(pipeline.problem.cluster, measured)
    least_gb_per_s = least_bandwidths_gb_per_s(pipeline, measured, comparison)
    cluster, links, link_notes = calibrated_cluster(pipeline, samples, least_gb_per_s)
    model = plan.model.model_copy(update={"graph": record, "graph_digest": digest(record)})
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
        reductions=reductions,
        notes=(
            *time_notes,
            *link_notes,
            *_optimizer_notes(compared),
            *reduction_notes(reductions),
        ),
    )


def _optimizer_notes(comparison: Comparison) -> Iterator[str]:
    """No cost of a layer or link says what optimizer steps take: where they are far off."""
    rows = comparison.optimizer.values()
    known = [row for row in rows if row.measured_s is not None and row.predicted_s]
    if known and median(row.factor for row in known) > NOTICEABLE_FACTOR:
        expected = format_seconds(median(row.predicted_s or 0.0 for row in known))
        found = format_seconds(median(row.measured_s or 0.0 for row in known))
        yield (
            f"optimizer steps are not calibrated: {expected} predicted, {found} measured (medians)"
        )
