"""Plans of a soak: small pipelines side by side, whose iterations take the time they are told."""

from __future__ import annotations

import itertools

from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.schedules.best import best_schedule
from planner.tracing.trace import trace

_MODEL = "gpt_tiny"
_MICROBATCHES = 2


def soak_plan(pipelines: int, places: int, iteration_s: float) -> Plan:
    """Return a plan with the given numbers of pipelines and ranks per pipeline.

    Args:
        pipelines: how many.
        places: of each.
        iteration_s: that an iteration takes with ``--emulate-speed``, roughly.
    """
    peak = 1e-3
    for _ in range(2):
        pipeline = _placed(pipelines, places, peak)
        schedule = best_schedule(pipeline, backward="whole")
        assert schedule is not None
        plan = plan_by_hand(pipeline, schedule.orders)
        peak *= plan.predicted.iteration_time_s / iteration_s
    return plan


def _placed(pipelines: int, places: int, peak_tflop_per_s: float) -> PlacedPipeline:
    job = Job(
        samples_per_microbatch=1,
        microbatches=_MICROBATCHES * pipelines,
        optimizer="sgd_momentum",
        learning_rate=0.001,
    )
    graph = trace(ZOO[_MODEL], job)
    cluster = _cluster(pipelines * places, peak_tflop_per_s)
    problem = Problem(graph, cluster, job, ModelSource(ZOO[_MODEL], {}))
    layers, names = list(graph.layers), cluster.device_names
    cuts = [len(layers) * k // places for k in range(places + 1)]
    # Pipeline i has the devices i * places, i * places + 1, ...
    stages = [
        StageSpec(tuple(layers[a:b]), tuple(names[k::places]), ())
        for k, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    return place(problem, stages)


def _cluster(devices: int, peak_tflop_per_s: float) -> Cluster:
    """Equal devices around a switch."""
    names = [f"d{rank}" for rank in range(devices)]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "soak",
            "device_types": {
                "slow": {
                    "memory_gib": 16,
                    "memory_bandwidth_gb_per_s": 1e6,
                    "peak_tflop_per_s": {"float32": peak_tflop_per_s},
                }
            },
            "devices": [{"name": name, "type": "slow"} for name in names],
            "switches": ["hub"],
            "links": [{"between": [name, "hub"], "bandwidth_gb_per_s": 10} for name in names],
        }
    )
