"""Small artifacts with round figures, for examples worked out by hand.

A device does 1 TFLOP/s and moves 1000 GB/s, a link carries 1 GB/s without latency: 10**12 FLOPs
are a second, 10**9 bytes over a link are a second.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation, parse_order
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtime_rules import PIPEPLAN, RuntimeRules
from planner.verification.claims import Claims
from planner.verification.costs import PlanCosts
from planner.verification.memory import held_bytes
from planner.verification.tasks import PlanTasks
from planner.verification.times import CheckedTimes

ROOT = Path(__file__).resolve().parent.parent
TERA = 10**12
GIGA = 10**9


def layer(name: str, forward_s: float = 1, backward_s: float = 2, **fields: object) -> dict:
    """A layer by its seconds on a device of 1 TFLOP/s; both gradients take the same time."""
    row = {
        "name": name,
        "forward_flops": round(forward_s * TERA),
        "input_gradient_flops": round(backward_s * TERA / 2),
        "weight_gradient_flops": round(backward_s * TERA / 2),
        "forward_traffic_bytes": 0,
        "input_gradient_traffic_bytes": 0,
        "weight_gradient_traffic_bytes": 0,
        "stash_bytes": 0,
    }
    assert set(fields) <= {
        *row,
        "parameters",
        "batch_bytes",
        "measured",
        "device_types",
        "work",
        "peak_bytes",
        "weight_stash_bytes",
        "collectives",
        "products",
    }
    return {**row, **fields}


def boundary(
    producer: str, *users: str, bytes_: int = GIGA, name: str | None = None, **fields: object
) -> dict:
    """A tensor from one layer to others."""
    return {
        "name": name or f"{producer}-to-{'-'.join(users)}",
        "producer": producer,
        "users": list(users),
        "bytes": bytes_,
        "shape": [bytes_],
        "dtype": "int8",
        "requires_grad": True,
        **fields,
    }


def parameter(name: str, elements: int = 1000, trainable: bool = True) -> dict:
    """A float32 parameter."""
    return {"name": name, "elements": elements, "bytes": 4 * elements, "trainable": trainable}


def graph(
    layers: Sequence[dict],
    boundaries: Sequence[dict] | None = None,
    parameters: Sequence[dict] = (),
    **fields: object,
) -> LayerGraph:
    """A layer graph; without ``boundaries`` each layer hands 10**9 bytes to the next."""
    names = [row["name"] for row in layers]
    if boundaries is None:
        boundaries = [boundary(u, v) for u, v in pairwise(names)]
    data = {
        "format": "pipeplan-graph/2",
        "name": "by-hand",
        "samples_per_microbatch": 1,
        "precision": "float32",
        "layers": list(layers),
        "boundaries": list(boundaries),
        "parameters": list(parameters),
        **fields,
    }
    return LayerGraph.parse(data)


def device_type(**fields: object) -> dict:
    """A device of 1 TFLOP/s with plenty of memory."""
    return {
        "memory_gib": 1024,
        "memory_bandwidth_gb_per_s": 1000,
        "peak_tflop_per_s": {"float32": 1},
        "efficiency": 1,
        "reserved_gib": 0,
        **fields,
    }


def link(first: str, second: str, gb_per_s: float = 1, **fields: object) -> dict:
    """A link by its bandwidth."""
    return {"between": [first, second], "bandwidth_gb_per_s": gb_per_s, **fields}


def cluster(
    devices: Sequence[str] | Mapping[str, str],
    links: Sequence[dict],
    switches: Sequence[str] = (),
    types: Mapping[str, dict] | None = None,
) -> Cluster:
    """A cluster of devices by name (and type); all of type ``unit`` unless told."""
    type_of = devices if isinstance(devices, Mapping) else dict.fromkeys(devices, "unit")
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "by-hand",
            "device_types": dict(types or {"unit": device_type()}),
            "devices": [{"name": name, "type": kind} for name, kind in type_of.items()],
            "switches": list(switches),
            "links": list(links),
        }
    )


def star(count: int, gb_per_s: float = 1, **fields: object) -> Cluster:
    """Devices ``d0``, ``d1``, … around one switch."""
    names = [f"d{index}" for index in range(count)]
    return cluster(names, [link(name, "hub", gb_per_s, **fields) for name in names], ["hub"])


def pipeline(
    the_graph: LayerGraph,
    the_cluster: Cluster,
    stages: Sequence[tuple],
    runtime: RuntimeRules = PIPEPLAN,
    **job: object,
) -> PlacedPipeline:
    """Stages given as ``(layers, devices)`` or ``(layers, devices, recompute)``, placed.

    The job allows whole backwards only, unless told otherwise.
    """
    job = {"optimizer": "sgd", "microbatches": 2, "backward": "whole", **job}
    problem = Problem(the_graph, the_cluster, Job.model_validate(job), runtime=runtime)
    return place(problem, [StageSpec(*map(tuple, stage)) for stage in stages])


def checked(plan: Plan) -> CheckedTimes:
    """The simulation's times of a plan, which the verifier finds right."""
    seen = plan.on_groups
    tasks = PlanTasks(seen, seen.parsed_orders(), PlanCosts(seen))
    found = CheckedTimes(tasks, Claims(plan).times)
    assert list(found.problems()) == []
    return found


def peaks(found: CheckedTimes) -> dict[str, int]:
    """The most bytes that each device holds at those times."""
    held = held_bytes(found.plan_tasks, found.times)
    return {device: row.peak for device, row in held.items()}


def orders(**texts: str) -> dict[str, tuple[Operation, ...]]:
    """Orders by device, in the plan file's grammar."""
    return {device: parse_order(text, device) for device, text in texts.items()}
