"""A plan whose costs are calibrated by a measured run of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.analysis.deviation import Comparison, Deviation, compare_with_measured
from planner.cluster.cluster import Cluster
from planner.cluster.hardware import LEAST, MOST
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.roofline import OperationTimes, computed_times
from planner.errors import PipeplanError
from planner.interop.calibrated_links import AGREEMENT, CalibratedLink, calibrated_cluster
from planner.measured.timeline import MeasuredTimeline
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord, graph_digest
from planner.plan.operations import KIND_LABELS, Kind, stages_label
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.prediction import refresh, replay
from planner.simulation.timeline import Timeline
from planner.units import format_seconds

NOTICEABLE_FACTOR = 1.2
"""A prediction that is off by more is noted."""
NOTICEABLE_SPREAD = 1.05
"""Devices of one type that differ by more are noted."""


@dataclass(frozen=True)
class StageTime:
    """An operation of a stage on a device type: predicted before, and the median measured.

    Attributes:
        stage, device_type, kind: which.
        predicted_s: before the calibration.
        measured_s: median over all samples, without what others on the host slowed it by.
        samples: how many there are.
        device_s: the median of each device.
    """

    stage: int
    device_type: str
    kind: Kind
    predicted_s: float
    measured_s: float
    samples: int
    device_s: Mapping[str, float]

    @property
    def spread(self) -> float:
        """The slowest device's median over the fastest one's."""
        least, most = min(self.device_s.values()), max(self.device_s.values())
        return 1.0 if least == most else most / least if least else float("inf")


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


@dataclass(frozen=True)
class ReductionChange:
    """The all-reduce of some stages' gradients, against its prediction before and after."""

    stages: tuple[int, ...]
    before: Deviation
    after: Deviation

    @property
    def is_worse(self) -> bool:
        """Whether the calibration made the prediction noticeably worse."""
        return (
            self.after.factor > NOTICEABLE_FACTOR
            and self.after.factor > (1 + AGREEMENT) * self.before.factor
        )

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Predicted before, predicted after, measured."""
        before_s, after_s = self.before.predicted_s or 0.0, self.after.predicted_s or 0.0
        return before_s, after_s, self.before.measured_s or 0.0


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
        notes: for the user, one line each.
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
            "calibrate links only with --links-only, or run the plan without emulation"
        )
    require_without(plan.job, "calibrate", degree=plan.degree)
    timeline = replay(plan)
    before = compare_with_measured(plan, timeline, measured)
    if before.clock_conflict is not None:
        raise PipeplanError(str(before.clock_conflict))
    cluster, links, link_notes = calibrated_cluster(timeline.pipeline.problem.cluster, measured)
    times = () if links_only else tuple(_stage_times(timeline, measured))
    record, time_notes = _calibrated_graph(timeline.pipeline, times)
    optimizers = () if links_only else tuple(_optimizer_changes(plan, before))
    cluster = _with_optimizers(cluster, optimizers)
    model = plan.model.model_copy(update={"graph": record, "graph_digest": graph_digest(record)})
    made = refresh(plan.model_copy(update={"model": model, "cluster": cluster}))
    after_timeline = replay(made)
    after = compare_with_measured(made, after_timeline, measured)
    reductions = tuple(
        ReductionChange(stages, row, after.reductions[stages])
        for stages, row in before.reductions.items()
        if row.predicted_s is not None and row.measured_s is not None
    )
    return Calibration(
        plan=made,
        before_s=timeline.iteration_time_s,
        after_s=after_timeline.iteration_time_s,
        measured_s=before.iteration.measured_s or 0.0,
        times=times,
        links=links,
        optimizers=optimizers,
        reductions=reductions,
        notes=(
            *before.other_hardware,
            *time_notes,
            *link_notes,
            *_optimizer_notes(optimizers),
            *_reduction_notes(reductions),
        ),
    )


# --- optimizer steps and all-reduces --------------------------------------------------------------


def _optimizer_changes(plan: Plan, comparison: Comparison) -> Iterator[OptimizerChange]:
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for device, row in comparison.optimizer.items():
        if row.predicted_s and row.measured_s:
            rows[plan.cluster.type_of(device)].append((row.predicted_s, row.measured_s))
    for kind, times in rows.items():
        ratios = [expected_s / found_s for expected_s, found_s in times]
        expected_s, found_s = (median(column) for column in zip(*times, strict=True))
        spread = max(ratios) / min(ratios)
        yield OptimizerChange(kind, expected_s, found_s, median(ratios), spread)


def _with_optimizers(cluster: Cluster, changes: Sequence[OptimizerChange]) -> Cluster:
    """Return a cluster whose device types take optimizer steps as fast as was measured."""
    kinds = dict(cluster.device_types)
    for change in changes:
        kind = kinds[change.device_type]
        share = min(max(kind.optimizer_efficiency * change.ratio, LEAST), MOST)
        kinds[change.device_type] = kind.model_copy(update={"optimizer_efficiency": share})
    return cluster.model_copy(update={"device_types": kinds})


def _optimizer_notes(changes: Iterable[OptimizerChange]) -> Iterator[str]:
    for change in changes:
        if change.spread > NOTICEABLE_FACTOR:
            yield (
                f"optimizer steps of {change.device_type} are off by factors that differ "
                f"{change.spread:.3g}x between devices; its optimizer_efficiency is that of the "
                "median device"
            )


def _reduction_notes(changes: Sequence[ReductionChange]) -> Iterator[str]:
    """Yield notes on all-reduces that are far off after the calibration."""
    words = "{} predicted before, {} after, {} measured"
    worse = [change for change in changes if change.is_worse]
    if worse:
        worst = max(worse, key=lambda change: change.after.factor)
        yield (
            f"calibration made the prediction of {len(worse)} of {len(changes)} all-reduces worse, "
            f"most that of {stages_label(worst.stages)}: "
            f"{words.format(*map(format_seconds, worst.seconds))}; correct bandwidth_gb_per_s and "
            "latency_us of its links manually, or measure larger messages"
        )
    elif changes and median(change.after.factor for change in changes) > NOTICEABLE_FACTOR:
        rows = zip(*(change.seconds for change in changes), strict=True)
        yield (
            "all-reduces are predicted from the links, and the prediction is off: "
            f"{words.format(*(format_seconds(median(row)) for row in rows))} (medians)"
        )


# --- layers ---------------------------------------------------------------------------------------


def _stage_times(timeline: Timeline, measured: MeasuredTimeline) -> Iterator[StageTime]:
    """Yield the operations of the steps that count, by stage, device type and kind."""
    pipeline, counted = timeline.pipeline, frozenset(measured.counted_steps)
    type_of = pipeline.problem.cluster.type_of
    # How many times as long operations took in the replay as they take alone.
    stretches: dict[tuple[int, str, Kind], list[float]] = defaultdict(list)
    for event in timeline.operations:
        stage, kind, _ = event.operation
        stretches[stage, type_of(event.device), kind].append(timeline.stretch(event))
    samples: dict[tuple[int, str, Kind], dict[str, list[float]]] = {}
    for row in measured.operations:
        if row.step in counted:
            key = (row.what.stage, type_of(row.device), row.what.kind)
            seconds = row.seconds / median(stretches.get(key, (1.0,)))
            samples.setdefault(key, {}).setdefault(row.device, []).append(seconds)
    kinds = list(KIND_LABELS)
    for key in sorted(samples, key=lambda key: (key[0], key[1], kinds.index(key[2]))):
        by_device = samples[key]
        every = [value for values in by_device.values() for value in values]
        predicted_s = pipeline.seconds(key[0], key[2], next(iter(by_device)))
        device_s = {device: median(values) for device, values in by_device.items()}
        yield StageTime(*key, predicted_s, median(every), len(every), device_s)


def _calibrated_graph(
    pipeline: PlacedPipeline, rows: Sequence[StageTime]
) -> tuple[GraphRecord, list[str]]:
    """Return the layer graph with measured times, and notes on them.

    Layers that did not run on a device type are scaled as those that did, all together; types that
    ran nothing keep their costs.
    """
    notes = []
    medians: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        medians[row.stage, row.device_type][row.kind] = row.measured_s
        if row.spread > NOTICEABLE_SPREAD:
            slow = max(row.device_s, key=row.device_s.__getitem__)
            fast = min(row.device_s, key=row.device_s.__getitem__)
            notes.append(
                f"{row.kind} of stage {row.stage} takes {row.spread:.2f} times as long on {slow} "
                f"as on {fast}, both of type {row.device_type}; the median is used for the type: "
                "give the slow device its own type"
            )
    found: dict[str, dict[str, OperationTimes]] = defaultdict(dict)
    for (stage, kind), seconds in medians.items():
        found[kind] |= _layer_times(pipeline, stage, kind, seconds, notes)
    for kind, ran in found.items():
        own = pipeline.problem.graph.on(kind).layers
        others = [name for name in own if name not in ran and own[name].may_run_on(kind)]
        new, old = (
            [sum(column) for column in zip(*times.values(), strict=True)]
            for times in (ran, _predicted(pipeline, kind, ran))
        )
        scales = [a / b if b else 1.0 for a, b in zip(new, old, strict=True)]
        for name, times in _predicted(pipeline, kind, others).items():
            ran[name] = OperationTimes(*(s * x for s, x in zip(scales, times, strict=True)))
        if others:
            notes.append(
                f"{len(others)} of {len(pipeline.problem.graph.layers)} layers did not run on "
                f"{kind}; their times there are scaled as those of the layers that did"
            )
    record = pipeline.problem.graph.record
    layers = []
    for layer in record.layers:
        new_of = {kind: _entry(ran[layer.name]) for kind, ran in found.items() if layer.name in ran}
        layers.append(layer.model_copy(update={"measured": {**layer.measured, **new_of}}))
    return record.model_copy(update={"layers": tuple(layers)}), notes


def _layer_times(
    pipeline: PlacedPipeline,
    stage: int,
    kind: str,
    medians: Mapping[str, float],
    notes: list[str],
) -> dict[str, OperationTimes]:
    """Return new times of a stage's layers: each median divided as the layers were predicted.

    The wait for the loader is no part of a forward: what is predicted for it is left to the
    loader's rate, which stays as it is. B and I run the forward of recomputed layers again.

    Args:
        pipeline: what ran.
        stage: its number.
        kind: a device type that ran it.
        medians: seconds of its operations by kind.
        notes: for more, if a backward is shorter than the forward it should recompute.
    """
    spec, problem = pipeline.stages[stage].spec, pipeline.problem
    own, device = problem.graph.on(kind).layers, problem.cluster.device_types[kind]
    before = list(_predicted(pipeline, kind, spec.layers).values())
    waited_s = sum(device.load_s(own[name].batch_bytes) for name in spec.layers)
    forward = _divided(medians["F"] - waited_s, [row.forward_s for row in before])
    rerun_s = sum(
        seconds
        for name, seconds in zip(spec.layers, forward, strict=True)
        if name in spec.recompute
    )
    notes += [
        f"{name} of stage {stage} on {kind} took less than the forward that it runs again; its "
        "gradients count as 0 s"
        for name in ("B", "I")
        if name in medians and medians[name] < rerun_s
    ]
    apart = [row.input_gradient_s + row.weight_gradient_s for row in before]
    if "B" in medians:
        whole = _divided(medians["B"] - rerun_s, [row.backward_s for row in before])
    if "I" in medians:
        inputs = _divided(medians["I"] - rerun_s, [row.input_gradient_s for row in before])
        weights = _divided(medians["W"], [row.weight_gradient_s for row in before])
        if "B" not in medians:
            # No whole backward ran: what it saved before it saves in the same proportion.
            shares = [
                row.backward_s / apart_s if apart_s else 1.0
                for row, apart_s in zip(before, apart, strict=True)
            ]
            whole = [(i + w) * s for i, w, s in zip(inputs, weights, shares, strict=True)]
    else:
        # Both halves of a layer's whole backward are scaled as it is.
        scales = [
            s / row.backward_s if row.backward_s else 0.0
            for s, row in zip(whole, before, strict=True)
        ]
        inputs, weights = (
            [
                getattr(row, name) * scale if row.backward_s else s / 2
                for row, scale, s in zip(before, scales, whole, strict=True)
            ]
            for name in ("input_gradient_s", "weight_gradient_s")
        )
    rows = zip(spec.layers, forward, inputs, weights, whole, strict=True)
    return {name: OperationTimes(*seconds) for name, *seconds in rows}


def _divided(total_s: float, weights: Sequence[float]) -> list[float]:
    """Return a time divided in proportion, equally where there is none; 0 s if it is negative."""
    whole, total_s = sum(weights), max(0.0, total_s)
    if whole == 0:
        return [total_s / len(weights)] * len(weights)
    return [total_s * (weight / whole) for weight in weights]


def _predicted(
    pipeline: PlacedPipeline, kind: str, names: Iterable[str]
) -> dict[str, OperationTimes]:
    """Return the predicted times of layers on a device type."""
    problem, own = pipeline.problem, pipeline.problem.graph.on(kind).layers
    device, precision = problem.cluster.device_types[kind], problem.job.precision
    return {name: computed_times(own[name], kind, device, precision) for name in names}


def _entry(times: OperationTimes) -> MeasuredTimes:
    apart_s = times.input_gradient_s + times.weight_gradient_s
    return MeasuredTimes(
        forward_s=times.forward_s,
        input_gradient_s=times.input_gradient_s,
        weight_gradient_s=times.weight_gradient_s,
        backward_s=None if times.backward_s == apart_s else times.backward_s,
    )
