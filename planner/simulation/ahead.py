"""A small problem, with which a search compiles what it runs before its clock starts."""

from __future__ import annotations

from planner.cluster.cluster import Cluster
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem


def two_layers() -> Problem:
    """Return a problem of two layers and two devices."""
    figures = {
        f"{phase}_{what}": 1
        for phase in ("forward", "input_gradient", "weight_gradient")
        for what in ("flops", "traffic_bytes")
    }
    layers = [{"name": name, "stash_bytes": 1, **figures} for name in "ab"]
    tensor = {"name": "t", "producer": "a", "users": ["b"], "bytes": 1, "shape": [1]}
    graph = LayerGraph.parse(
        {
            "format": "pipeplan-graph/2",
            "name": "two layers",
            "samples_per_microbatch": 1,
            "precision": "float32",
            "layers": layers,
            "boundaries": [{**tensor, "dtype": "int8", "requires_grad": True}],
            "parameters": [],
        }
    )
    kind = {"memory_gib": 8, "memory_bandwidth_gb_per_s": 1, "peak_tflop_per_s": {"float32": 1}}
    cluster = Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "device_types": {"unit": kind},
            "devices": [{"name": name, "type": "unit"} for name in ("d0", "d1")],
            "links": [{"between": ["d0", "d1"], "bandwidth_gb_per_s": 1}],
        }
    )
    return Problem(graph, cluster, Job(microbatches=1))
