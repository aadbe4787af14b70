"""Plans whose pipelines take a time that is asked for, on clusters that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from executor.elastic.setup import pipeline_replica_plan
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.schedules.best import best_schedule
from planner.simulation.simulator import simulate_plan
from planner.sync.pipeline_replicas import pipeline_replicas_of
from planner.tracing.trace import trace

FACTORY = "benchmarks.sync.model:student"
SAMPLES_PER_SHARE = 32
LOOPBACK_GB_PER_S, LOOPBACK_LATENCY_US = 1.0, 100.0

_Links = tuple[float, float, float]
"""Bandwidths within nodes, of their links to the others, and of the last one's."""


@cache
def pipelines_plan(
    pipelines: int,
    iteration_s: float,
    *,
    stages: int = 1,
    microbatches: int = 1,
    per_node: int = 1,
    within_gb_per_s: float = LOOPBACK_GB_PER_S,
    between_gb_per_s: float = LOOPBACK_GB_PER_S,
    slow_leg_gb_per_s: float | None = None,
) -> Plan:
    """Pipelines side by side, each with microbatches of its own.

    Args:
        pipelines: how many.
        iteration_s: that one takes by itself, without its optimizer step.
        stages: of a pipeline, one a device.
        microbatches: of a pipeline.
        per_node: pipelines that share a node, and its link to the others.
        within_gb_per_s: of links inside a node.
        between_gb_per_s: of a node's link to the others.
        slow_leg_gb_per_s: of the last node's link to the others, if it is slower.
    """
    links = (within_gb_per_s, between_gb_per_s, slow_leg_gb_per_s or between_gb_per_s)
    shape = (pipelines, stages, microbatches, per_node, links)
    trial = _plan(shape, 1e-3)
    compute_s = _alone_s(trial)
    return _plan(shape, 1e-3 * compute_s / iteration_s)


def _alone_s(plan: Plan) -> float:
    """Seconds of an iteration of the first pipeline, by its operations."""
    events = simulate_plan(pipeline_replica_plan(plan, pipeline_replicas_of(plan)[0])).operations
    return max(event.end_s for event in events) - min(event.start_s for event in events)


def _plan(shape: tuple[int, int, int, int, _Links], tflop_per_s: float) -> Plan:
    pipelines, stages, microbatches, per_node, links = shape
    depth = max(1, stages - 1)
    arguments = {"depth": depth, "width": 256 if stages == 1 else 128}
    job = Job(
        samples_per_microbatch=SAMPLES_PER_SHARE // microbatches,
        microbatches=pipelines * microbatches,
        optimizer="sgd_momentum",
        learning_rate=0.01,
        model_arguments=arguments,
    )
    graph = trace(FACTORY, job)
    cluster = _cluster(pipelines, stages, per_node, links, tflop_per_s)
    problem = Problem(graph, cluster, job, ModelSource(FACTORY, arguments))
    names = cluster.device_names
    rows = [names[stage::stages] for stage in range(stages)]
    parts = _parts(list(graph.layers), stages)
    specs = [StageSpec(tuple(part), tuple(row)) for part, row in zip(parts, rows, strict=True)]
    return _scheduled(place(problem, specs))


def _parts(layers: Sequence[str], stages: int) -> list[Sequence[str]]:
    """A block a stage; the last one has the head and the loss too."""
    return [layers[k : k + 1] for k in range(stages - 1)] + [layers[stages - 1 :]]


def _scheduled(pipeline: PlacedPipeline) -> Plan:
    schedule = best_schedule(pipeline, backward="whole")
    if schedule is None:
        raise PipeplanError("no schedule for the benchmark's plan")
    return plan_by_hand(pipeline, schedule.orders)


def _cluster(
    pipelines: int,
    stages: int,
    per_node: int,
    links: _Links,
    tflop_per_s: float,
) -> Cluster:
    """Devices by node; those of a node share one link to the others."""
    within, between, slow_leg = links
    nodes = [f"n{number}" for number in range(pipelines // per_node)]
    devices, wires = [], []
    for pipeline in range(pipelines):
        node = nodes[pipeline // per_node]
        for stage in range(stages):
            name = f"{node}/d{pipeline % per_node * stages + stage}"
            devices.append({"name": name, "type": "device"})
            wires.append(_link(name, f"{node}/switch", within))
    wires += [_link(f"{node}/switch", "core", between) for node in nodes[:-1]]
    wires.append(_link(f"{nodes[-1]}/switch", "core", slow_leg))
    kind = {
        "memory_gib": 16,
        "memory_bandwidth_gb_per_s": 1e6,
        "peak_tflop_per_s": {"float32": tflop_per_s},
        "efficiency": 1,
    }
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "sync",
            "device_types": {"device": kind},
            "devices": devices,
            "switches": [*(f"{node}/switch" for node in nodes), "core"],
            "links": wires,
        }
    )


def _link(first: str, second: str, gb_per_s: float) -> dict[str, object]:
    latency_us = LOOPBACK_LATENCY_US / 4
    return {"between": [first, second], "bandwidth_gb_per_s": gb_per_s, "latency_us": latency_us}
