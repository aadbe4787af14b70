"""Small plans that training ran by, with weights of 1000 bytes a layer and SGD with momentum.

A layer takes 1 s forward and 2 s backward; its state is 4000 bytes of weights and 4000 of momentum.
"""

from collections.abc import Sequence

from builders import boundary, cluster, device_type, graph, layer, link, parameter

from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.schedules.best import best_schedule

STATE_BYTES = 8000
"""Of one layer."""
QUICK = {"deterministic": True, "time_limit_s": 0.2}
JOB = {"microbatches": 4, "optimizer": "sgd_momentum", "recompute": False}


def model(layers: int = 6, **fields: object) -> LayerGraph:
    rows = [layer(f"l{i}", 1, 2, parameters=[f"w{i}"], **fields) for i in range(layers)]
    cuts = [boundary(f"l{i}", f"l{i + 1}", bytes_=1000) for i in range(layers - 1)]
    return graph(rows, cuts, [parameter(f"w{i}") for i in range(layers)])


def nodes(*sizes: int, **fields: object) -> Cluster:
    """Nodes ``n0``, ``n1``, … of so many devices: 100 GB/s inside, 1 GB/s between them."""
    names = [f"n{n}/gpu{i}" for n, size in enumerate(sizes) for i in range(size)]
    links = [link(name, name.partition("/")[0], 100) for name in names]
    inner = [f"n{n}" for n in range(len(sizes))]
    links += [link(name, "network", 1) for name in inner]
    return cluster(names, links, [*inner, "network"], {"unit": device_type(**fields)})


def plan_of(
    the_graph: LayerGraph, the_cluster: Cluster, stages: Sequence[tuple], **job: object
) -> Plan:
    """Stages ``(number of layers, devices)``, in the best quick schedule."""
    names, specs = list(the_graph.layers), []
    for count, devices in stages:
        specs.append(StageSpec(tuple(names[:count]), tuple(devices.split())))
        names = names[count:]
    problem = Problem(the_graph, the_cluster, Job.model_validate({**JOB, **job}))
    pipeline = place(problem, specs)
    schedule = best_schedule(pipeline, backward="whole")
    assert schedule is not None
    return plan_by_hand(pipeline, schedule.orders)


def two_nodes() -> Plan:
    """Two replicas of three layers on each of two nodes."""
    stages = [(3, "n0/gpu0 n0/gpu1"), (3, "n1/gpu0 n1/gpu1")]
    return plan_of(model(), nodes(2, 2), stages)
