"""Times of layers from the times of their stages' operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage
from planner.costs.roofline import OperationTimes, computed_times
from planner.measured.timeline import MeasuredTimeline
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord
from planner.plan.operations import KIND_LABELS, Kind
from planner.simulation.timeline import Timeline

NOTICEABLE_SPREAD = 1.05
"""Devices of one type that differ by more are told."""
_Times = Mapping[str, OperationTimes]
"""Times of layers by name."""


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
    found = []
    for key in sorted(samples, key=lambda key: (key[0], key[1], kinds.index(key[2]))):
        by_device = samples[key]
        every = [value for values in by_device.values() for value in values]
        predicted_s = pipeline.seconds(key[0], key[2], next(iter(by_device)))
        device_s = {device: median(values) for device, values in by_device.items()}
        found.append(StageTime(*key, predicted_s, median(every), len(every), device_s))
    return tuple(found)


def calibrated_graph(
    pipeline: PlacedPipeline, rows: Sequence[StageTime]
) -> tuple[GraphRecord, tuple[str, ...]]:
    """The layer graph with measured times, and what people should know of them.

    A stage's median is divided among its layers in proportion to their predicted times. Layers
    that did not run on a device type are scaled as those that did, all together; types that ran
    nothing keep their costs.

    Args:
        pipeline: what ran.
        rows: what was measured.
    """
    notes = [note for row in rows for note in _notes(row)]
    medians: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        medians[row.stage, row.device_type][row.kind] = row.measured_s
    found: dict[str, dict[str, OperationTimes]] = defaultdict(dict)
    for (stage, kind), seconds in medians.items():
        found[kind] |= _OfStage(pipeline, pipeline.stages[stage], kind, seconds).times
        notes += _short_notes(pipeline, stage, kind, seconds)
    for kind, by_layer in found.items():
        others = _others(pipeline, kind, by_layer)
        found[kind] = {**others, **by_layer}
        if others:
            notes.append(
                f"{len(others)} of {len(pipeline.problem.graph.layers)} layers did not run on "
                f"{kind}; their times there are scaled as those of the layers that did"
            )
    record = pipeline.problem.graph.record
    layers = tuple(
        layer.model_copy(
            update={
                "measured": layer.measured
                | {
                    kind: _entry(rows[layer.name])
                    for kind, rows in found.items()
                    if layer.name in rows
                }
            }
        )
        for layer in record.layers
    )
    return record.model_copy(update={"layers": layers}), tuple(notes)


def _entry(times: OperationTimes) -> MeasuredTimes:
    apart_s = times.input_gradient_s + times.weight_gradient_s
    return MeasuredTimes(
        forward_s=times.forward_s,
        input_gradient_s=times.input_gradient_s,
        weight_gradient_s=times.weight_gradient_s,
        backward_s=None if times.backward_s == apart_s else times.backward_s,
    )


@dataclass(frozen=True)
class _OfStage:
    """A stage on a device type that ran it.

    Attributes:
        pipeline: what ran.
        placed: the stage.
        kind: the device type.
        medians: seconds of its operations by kind.
    """

    pipeline: PlacedPipeline
    placed: PlacedStage
    kind: str
    medians: Mapping[str, float]

    @property
    def times(self) -> dict[str, OperationTimes]:
        """New times of its layers."""
        rows = zip(self.forward.items(), self._gradients(), strict=True)
        return {name: OperationTimes(forward_s, *row) for (name, forward_s), row in rows}

    @property
    def forward(self) -> dict[str, float]:
        """Seconds of the forward of each layer, without the wait for the loader.

        What is predicted for that is left to the loader's rate, which stays as it is.
        """
        names = self.placed.spec.layers
        device = self.pipeline.problem.cluster.device_types[self.kind]
        own = self.pipeline.problem.graph.on(self.kind).layers
        waited_s = sum(device.load_s(own[name].batch_bytes) for name in names)
        before = [times.forward_s for times in self._before]
        divided = _divided(max(0.0, self.medians["F"] - waited_s), before)
        return dict(zip(names, divided, strict=True))

    @property
    def rerun_s(self) -> float:
        """The part of B and of I that runs the forward of recomputed layers again."""
        forward = self.forward
        return sum(forward[name] for name in self.placed.spec.recompute)

    @property
    def _before(self) -> list[OperationTimes]:
        return list(_times(self.pipeline, self.kind, self.placed.spec.layers).values())

    def _gradients(self) -> list[tuple[float, float, float]]:
        """Input gradient, weight gradient and whole backward of each layer."""
        medians, before, rerun_s = self.medians, self._before, self.rerun_s
        whole = None
        if "B" in medians:
            whole = _divided(max(0.0, medians["B"] - rerun_s), [row.backward_s for row in before])
        if "I" not in medians:
            assert whole is not None  # A stage runs B, or I and W.
            return [_apart(s, row) for s, row in zip(whole, before, strict=True)]
        input_s = max(0.0, medians["I"] - rerun_s)
        inputs = _divided(input_s, [row.input_gradient_s for row in before])
        weights = _divided(medians["W"], [row.weight_gradient_s for row in before])
        if whole is None:
            # No whole backward ran: what it saved before it saves in the same proportion.
            rows = zip(inputs, weights, map(_whole_share, before), strict=True)
            whole = [(a + b) * share for a, b, share in rows]
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


def _times(pipeline: PlacedPipeline, kind: str, names: Iterable[str]) -> dict[str, OperationTimes]:
    """Return the predicted times of layers on a device type."""
    problem, own = pipeline.problem, pipeline.problem.graph.on(kind).layers
    device, precision = problem.cluster.device_types[kind], problem.job.precision
    return {name: computed_times(own[name], kind, device, precision) for name in names}


def _others(pipeline: PlacedPipeline, kind: str, measured: _Times) -> dict[str, OperationTimes]:
    """The layers that did not run on a type, scaled by what those that did took in all."""
    before = _times(pipeline, kind, measured)
    columns = zip(
        zip(*measured.values(), strict=True), zip(*before.values(), strict=True), strict=True
    )
    scales = [sum(new) / sum(old) if sum(old) else 1.0 for new, old in columns]
    own = pipeline.problem.graph.on(kind).layers
    names = [name for name in own if name not in measured and own[name].may_run_on(kind)]
    return {
        name: OperationTimes(*(s * x for s, x in zip(times, scales, strict=True)))
        for name, times in _times(pipeline, kind, names).items()
    }


def _notes(row: StageTime) -> Iterator[str]:
    if row.spread > NOTICEABLE_SPREAD:
        slow = max(row.device_s, key=row.device_s.__getitem__)
        fast = min(row.device_s, key=row.device_s.__getitem__)
        yield (
            f"{row.kind} of stage {row.stage} takes {row.spread:.2f} times as long on {slow} as on "
            f"{fast}, both of type {row.device_type}; the median is used for the type: give the "
            "slow device its own type"
        )


def _short_notes(
    pipeline: PlacedPipeline, stage: int, kind: str, medians: Mapping[str, float]
) -> Iterator[str]:
    """Yield a note if a backward is shorter than the forward it should recompute."""
    rerun_s = _OfStage(pipeline, pipeline.stages[stage], kind, medians).rerun_s
    for name in ("B", "I"):
        if name in medians and medians[name] < rerun_s:
            yield (
                f"{name} of stage {stage} on {kind} took less than the forward that it runs again; "
                "its gradients count as 0 s"
            )
