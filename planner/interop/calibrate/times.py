"""Times of layers from the times of their stages' operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.costs.group_collectives import inside_times
from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage
from planner.costs.roofline import OperationTimes, computed_times
from planner.interop.calibrate.groups import Alike, alike, with_times
from planner.measured.timeline import MeasuredTimeline
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord, Layer
from planner.plan.operations import KIND_LABELS, Kind
from planner.plan.plan import Plan
from planner.simulation.timeline import Timeline
from planner.units import format_seconds

NOTICEABLE_SPREAD = 1.05
"""Devices of one type that differ by more are told."""


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


def stage_times(timeline: Timeline, measured: MeasuredTimeline) -> tuple[StageTime, ...]:
    """The operations of a measurement, in the steps that count, by stage, device type and kind.

    Args:
        timeline: the replay of what ran; says how much devices of a host slowed each other.
        measured: its measurement.
    """
    pipeline, counted = timeline.pipeline, frozenset(measured.counted_steps)
    cluster, stretches = pipeline.problem.cluster, _stretches(timeline)
    samples: dict[tuple[int, str, Kind], dict[str, list[float]]] = {}
    for event in measured.operations:
        if event.step in counted:
            key = (event.what.stage, cluster.type_of(event.device), event.what.kind)
            by_device = samples.setdefault(key, defaultdict(list))
            by_device[event.device].append(event.seconds / stretches.get(key, 1.0))
    return tuple(
        _stage_time(pipeline, key, by_device)
        for key, by_device in sorted(samples.items(), key=_in_order)
    )


def _stretches(timeline: Timeline) -> dict[tuple[int, str, Kind], float]:
    """Return how many times as long operations took in a replay as they take alone (medians)."""
    cluster = timeline.pipeline.problem.cluster
    found: dict[tuple[int, str, Kind], list[float]] = defaultdict(list)
    for event in timeline.operations:
        stage, kind, _ = event.operation
        found[stage, cluster.type_of(event.device), kind].append(timeline.stretch(event))
    return {key: median(values) for key, values in found.items()}


def _in_order(item: tuple[tuple[int, str, Kind], object]) -> tuple[int, str, int]:
    (stage, device_type, kind), _ = item
    return stage, device_type, list(KIND_LABELS).index(kind)


def _stage_time(
    pipeline: PlacedPipeline, key: tuple[int, str, Kind], by_device: Mapping[str, list[float]]
) -> StageTime:
    stage, _, kind = key
    every = [value for values in by_device.values() for value in values]
    return StageTime(
        *key,
        predicted_s=pipeline.seconds(stage, kind, next(iter(by_device))),
        measured_s=median(every),
        samples=len(every),
        device_s={device: median(values) for device, values in by_device.items()},
    )


def calibrated_graph(
    plan: Plan, pipeline: PlacedPipeline, rows: Sequence[StageTime]
) -> tuple[GraphRecord, tuple[str, ...]]:
    """The plan's layer graph with measured times, and what people should know of them.

    A stage's median is divided among its layers in proportion to their predicted times. Layers
    that did not run on a device type are scaled as those that did, all together; types that ran
    nothing keep their costs. Of tensor-parallel groups it is what collectives leave of it.

    Args:
        plan: what ran.
        pipeline: its stages on devices, or groups, whose links are calibrated.
        rows: what was measured.
    """
    found: dict[Alike, dict[str, OperationTimes]] = defaultdict(dict)
    notes = []
    samples: dict[tuple[int, Alike], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    types: dict[Alike, str] = {}
    for row in rows:
        device = next(iter(row.device_s))
        which = alike(plan, device)
        types.setdefault(which, pipeline.problem.cluster.type_of(device))
        inside_s = _inside_s(pipeline, row)
        samples[row.stage, which][row.kind].append(max(0.0, row.measured_s - inside_s))
        notes += [*_spread_notes(row), *_inside_notes(row, inside_s)]
    for (stage, which), by_kind in samples.items():
        medians = {kind: median(values) for kind, values in by_kind.items()}
        notes += list(_short_notes(pipeline, (stage, types[which]), medians))
        placed = pipeline.stages[stage]
        found[which].update(_layers_of_stage(pipeline, placed, types[which], medians))
    for which, by_layer in found.items():
        notes += list(_other_notes(pipeline, types[which], by_layer))
        found[which] = {**_others(pipeline, types[which], by_layer), **by_layer}
    entries = {
        which: {name: _entry(times) for name, times in by_layer.items()}
        for which, by_layer in found.items()
    }
    return with_times(plan, entries), tuple(notes)


def _inside_s(pipeline: PlacedPipeline, row: StageTime) -> float:
    """Return the seconds of collectives inside groups in an operation, as predicted."""
    inside = (inside_times(pipeline, row.stage, device) for device in row.device_s)
    return median(times.seconds(row.kind) for times in inside)


def _inside_notes(row: StageTime, inside_s: float) -> Iterator[str]:
    if inside_s > row.measured_s:
        yield (
            f"{row.kind} of stage {row.stage} on {row.device_type} took "
            f"{format_seconds(row.measured_s)}, less than its collectives are predicted to "
            f"({format_seconds(inside_s)}); its computation counts as 0 s: correct the links "
            "inside groups"
        )


def _entry(times: OperationTimes) -> MeasuredTimes:
    apart_s = times.input_gradient_s + times.weight_gradient_s
    return MeasuredTimes(
        forward_s=times.forward_s,
        input_gradient_s=times.input_gradient_s,
        weight_gradient_s=times.weight_gradient_s,
        backward_s=None if times.backward_s == apart_s else times.backward_s,
    )


def _layers_of_stage(
    pipeline: PlacedPipeline, placed: PlacedStage, kind: str, medians: Mapping[str, float]
) -> dict[str, OperationTimes]:
    """New times of a stage's layers on a device type that ran it."""
    layers = pipeline.problem.graph.on(kind).layers
    before = [_times(pipeline, layers[name], kind) for name in placed.spec.layers]
    forward = _forward(pipeline, placed, kind, medians)
    gradients = _gradients(medians, _rerun_s(placed, forward), before)
    return {
        name: OperationTimes(forward_s, *row)
        for (name, forward_s), row in zip(forward.items(), gradients, strict=True)
    }


def _forward(
    pipeline: PlacedPipeline, placed: PlacedStage, kind: str, medians: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of the forward of each layer of a stage, without the wait for the loader.

    What is predicted for that is left to the loader's rate, which stays as it is.
    """
    own = pipeline.problem.graph.on(kind).layers
    layers = [own[name] for name in placed.spec.layers]
    device = pipeline.problem.cluster.device_types[kind]
    waited_s = sum(device.load_s(layer.batch_bytes) for layer in layers)
    rows = [_times(pipeline, layer, kind) for layer in layers]
    divided = _divided(max(0.0, medians["F"] - waited_s), [times.forward_s for times in rows])
    return dict(zip(placed.spec.layers, divided, strict=True))


def _rerun_s(placed: PlacedStage, forward: Mapping[str, float]) -> float:
    """Return the part of a backward that runs the forward of recomputed layers again."""
    return sum(forward[name] for name in placed.spec.recompute)


def _gradients(
    medians: Mapping[str, float], rerun_s: float, before: Sequence[OperationTimes]
) -> list[tuple[float, float, float]]:
    """Input gradient, weight gradient and whole backward of each layer.

    Args:
        medians: of the stage's operations by kind, in seconds.
        rerun_s: what of B and of I is the forward of recomputed layers, run again.
        before: predicted times of the layers.
    """
    if "I" not in medians:
        whole = _divided(max(0.0, medians["B"] - rerun_s), [row.backward_s for row in before])
        return [_apart(s, row) for s, row in zip(whole, before, strict=True)]
    input_s = max(0.0, medians["I"] - rerun_s)
    inputs = _divided(input_s, [row.input_gradient_s for row in before])
    weights = _divided(medians["W"], [row.weight_gradient_s for row in before])
    apart = [a + b for a, b in zip(inputs, weights, strict=True)]
    if "B" in medians:
        whole = _divided(max(0.0, medians["B"] - rerun_s), [row.backward_s for row in before])
    else:
        # No whole backward ran: what it saved before it saves in the same proportion.
        whole = [s * _whole_share(row) for s, row in zip(apart, before, strict=True)]
    return list(zip(inputs, weights, whole, strict=True))


def _apart(whole_s: float, before: OperationTimes) -> tuple[float, float, float]:
    """Both halves of a layer's whole backward, scaled as it is."""
    if before.backward_s == 0:
        return whole_s / 2, whole_s / 2, whole_s
    scale = whole_s / before.backward_s
    return before.input_gradient_s * scale, before.weight_gradient_s * scale, whole_s


def _whole_share(before: OperationTimes) -> float:
    apart_s = before.input_gradient_s + before.weight_gradient_s
    return before.backward_s / apart_s if apart_s else 1.0


def _divided(total_s: float, weights: Sequence[float]) -> list[float]:
    """A time divided in proportion, equally where there is none."""
    whole = sum(weights)
    if whole == 0:
        return [total_s / len(weights)] * len(weights)
    return [total_s * (weight / whole) for weight in weights]


def _times(pipeline: PlacedPipeline, layer: Layer, kind: str) -> OperationTimes:
    problem = pipeline.problem
    return computed_times(layer, kind, problem.cluster.device_types[kind], problem.job.precision)


def _others(
    pipeline: PlacedPipeline, kind: str, measured: Mapping[str, OperationTimes]
) -> dict[str, OperationTimes]:
    """The layers that did not run on a type, scaled by what those that did took in all."""
    layers = pipeline.problem.graph.on(kind).layers
    before = [_times(pipeline, layers[name], kind) for name in measured]
    scales = [
        sum(new) / sum(old) if sum(old) else 1.0
        for new, old in zip(
            zip(*measured.values(), strict=True), zip(*before, strict=True), strict=True
        )
    ]
    return {
        name: OperationTimes(
            *(s * x for s, x in zip(_times(pipeline, layers[name], kind), scales, strict=True))
        )
        for name in _unmeasured(pipeline, kind, measured)
    }


def _unmeasured(
    pipeline: PlacedPipeline, kind: str, measured: Mapping[str, OperationTimes]
) -> list[str]:
    layers = pipeline.problem.graph.on(kind).layers
    return [
        name for name, layer in layers.items() if name not in measured and layer.may_run_on(kind)
    ]


def _spread_notes(row: StageTime) -> Iterator[str]:
    if row.spread > NOTICEABLE_SPREAD:
        slow = max(row.device_s, key=lambda device: row.device_s[device])
        fast = min(row.device_s, key=lambda device: row.device_s[device])
        yield (
            f"{row.kind} of stage {row.stage} takes {row.spread:.2f} times as long on {slow} as on "
            f"{fast}, both of type {row.device_type}; the median is used for the type: give the "
            f"slow device its own type"
        )


def _short_notes(
    pipeline: PlacedPipeline, key: tuple[int, str], medians: Mapping[str, float]
) -> Iterator[str]:
    """Yield a note if a backward is shorter than the forward it should recompute."""
    stage, kind = key
    placed = pipeline.stages[stage]
    rerun_s = _rerun_s(placed, _forward(pipeline, placed, kind, medians))
    for name in ("B", "I"):
        if name in medians and medians[name] < rerun_s:
            yield (
                f"{name} of stage {stage} on {kind} took less than the forward that it runs again; "
                "its gradients count as 0 s"
            )


def _other_notes(
    pipeline: PlacedPipeline, kind: str, measured: Mapping[str, OperationTimes]
) -> Iterator[str]:
    others = _unmeasured(pipeline, kind, measured)
    if others:
        yield (
            f"{len(others)} of {len(pipeline.problem.graph.layers)} layers did not run on {kind}; "
            "their times there are scaled as those of the layers that did"
        )
