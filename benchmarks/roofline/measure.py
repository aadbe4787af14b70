"""Times of the zoo's layers on this machine, as the executor runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from executor.launch.model import build_model, export_planned_model
from executor.split.model_split import cut
from executor.stage.runner import StageRunner
from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.job import Job, JsonValue
from planner.model.graph_record import Layer
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.tracing.factory import example_batch, import_factory
from planner.tracing.trace import trace

Tensors = tuple[Tensor, ...]
Result = TypeVar("Result")
WHOLE, SPLIT = 0, 1
"""Microbatches: the backward of the first runs whole, that of the second in halves."""


@dataclass(frozen=True)
class Case:
    """A model to measure: a key of the zoo, samples of a microbatch, the factory's arguments."""

    model: str
    samples: int = 1
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    precision: str = "float32"

    @property
    def name(self) -> str:
        """The name in reports."""
        told = "".join(f", {name} {value}" for name, value in self.arguments.items())
        return f"{self.model}, batch {self.samples}{told}"


@dataclass(frozen=True)
class Sample:
    """A layer of a model and the median seconds of its operations F, B, I and W.

    ``alike`` layers of the model are the same; their times are in the median.
    """

    case: Case
    layer: Layer
    alike: int
    seconds: Mapping[str, float]


def measure(case: Case, device: torch.device, rounds: int) -> list[Sample]:
    """Run each layer as a stage of its own, forwards and backwards in turn.

    Gradients add up in the parameters from round to round, as they do over microbatches. On a CPU
    a time is the thread's own (``time.thread_time``): what else the machine does is left out. On a
    GPU it is between two events around the layer's launches.

    Args:
        case: the model.
        device: where.
        rounds: that count; one before them warms up.
    """
    plan = _a_stage_a_layer(case)
    model = build_model(plan, import_factory(ZOO[case.model]), seed=0).model
    exported, layers = export_planned_model(plan, model)
    stages = cut(exported, layers, plan, range(len(plan.stages)), device)
    for stage in stages:
        for tensor in (*stage.parameters.values(), *stage.buffers.values()):
            tensor.data = tensor.data.to(device)
    runners = [StageRunner(stage, 2, [SPLIT], device) for stage in stages]
    batch = {n: t.to(device) for n, t in example_batch(model, plan.job).items()}
    clock = _GpuClock() if device.type == "cuda" else _ThreadClock()
    for _ in range(rounds + 1):
        _round(runners, batch, clock)
        clock.end_round()
    return list(_samples(case, plan, clock.seconds))


def traced(case: Case) -> LayerGraph:
    """The model's layers."""
    return trace(ZOO[case.model], _job(case))


def _job(case: Case) -> Job:
    return Job(
        samples_per_microbatch=case.samples,
        microbatches=2,
        precision=case.precision,  # type: ignore[arg-type]
        model_arguments=dict(case.arguments),
    )


def _a_stage_a_layer(case: Case) -> Plan:
    graph, source = traced(case), ModelSource(ZOO[case.model], dict(case.arguments))
    problem = Problem(graph, _one_device(case.precision), _job(case), source)
    specs = [StageSpec((name,), ("d0",)) for name in graph.layers]
    last = len(specs) - 1
    order = [Operation(s, "F", m) for m in (WHOLE, SPLIT) for s in range(last + 1)]
    order += [Operation(s, "B", WHOLE) for s in range(last, -1, -1)]
    order += [Operation(s, kind, SPLIT) for kind in "IW" for s in range(last, -1, -1)]
    return plan_by_hand(place(problem, specs), {"d0": order})


def _one_device(precision: str) -> Cluster:
    """Return a cluster of one device with arbitrary figures, since the times are measured."""
    kind = {
        "memory_gib": 1e6,
        "memory_bandwidth_gb_per_s": 1,
        "peak_tflop_per_s": {precision: 1},
    }
    return Cluster.parse(
        {
            "format": "pipeplan-cluster/1",
            "name": "one",
            "device_types": {"any": kind},
            "devices": [{"name": "d0", "type": "any"}],
            "switches": [],
            "links": [],
        },
        "cluster",
    )


class _ThreadClock:
    """Seconds of the calling thread, by (stage, kind), one of each round."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], list[float]] = {}

    def time(self, stage: int, kind: str, run: Callable[[], Result]) -> Result:
        """Run and note how long it took."""
        start_s = time.thread_time()
        result = run()
        self.seconds.setdefault((stage, kind), []).append(time.thread_time() - start_s)
        return result

    def end_round(self) -> None:
        """Nothing is outstanding."""


class _GpuClock:
    """Seconds between events on the GPU's stream, by (stage, kind), one of each round."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], list[float]] = {}
        self._events: list[tuple[tuple[int, str], torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, stage: int, kind: str, run: Callable[[], Result]) -> Result:
        """Run between two events; they are read at the end of the round."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        result = run()
        after.record()
        self._events.append(((stage, kind), before, after))
        return result

    def end_round(self) -> None:
        """Wait for the GPU and read the events."""
        torch.cuda.synchronize()
        for key, before, after in self._events:
            self.seconds.setdefault(key, []).append(before.elapsed_time(after) * 1e-3)
        self._events.clear()


def _round(
    runners: Sequence[StageRunner], batch: Mapping[str, Tensor], clock: _ThreadClock | _GpuClock
) -> None:
    """Both microbatches through all layers and back."""
    for microbatch in (WHOLE, SPLIT):
        values: Tensors = ()
        for stage, runner in enumerate(runners):
            entries = {name: entry.clone() for name, entry in batch.items()}
            forward = partial(runner.forward, microbatch, values, entries)
            values = clock.time(stage, "F", forward)
    for microbatch, kind in ((WHOLE, "B"), (SPLIT, "I")):
        gradients: Tensors = ()
        for stage, runner in reversed(list(enumerate(runners))):
            backward = partial(runner.backward, microbatch, gradients)
            gradients = clock.time(stage, kind, backward)
            if kind == "I":
                clock.time(stage, "W", partial(runner.weight_gradients, SPLIT))
    for runner in runners:
        if runner.statistics is not None:
            runner.statistics.apply(runner.statistics.observed())


def _samples(
    case: Case, plan: Plan, seconds: Mapping[tuple[int, str], Sequence[float]]
) -> Iterator[Sample]:
    """A row for all layers that are alike: equal but for their names."""
    alike: dict[str, list[int]] = {}
    layers = plan.model.graph.layers
    for stage, layer in enumerate(layers):
        alike.setdefault(layer.model_dump_json(exclude={"name", "parameters"}), []).append(stage)
    for stages in alike.values():
        # A round forwards twice, and goes back once each way; the first round warms up.
        times = {
            kind: median(
                value
                for stage in stages
                for value in seconds[stage, kind][2 if kind == "F" else 1 :]
            )
            for kind in "FBIW"
        }
        yield Sample(case, layers[stages[0]], len(stages), times)
