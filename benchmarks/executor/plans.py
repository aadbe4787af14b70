"""Random plans for the executor: everything that a verified plan may ask of it, drawn at random."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import ceil

from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placement import PlacedPipeline, StageSpec, place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.model.tracing.factory import build, import_factory
from planner.model.tracing.trace import trace
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem

TINY = tuple(name for name in ZOO if name.endswith("_tiny"))
PARTLY_FROZEN = "benchmarks.executor.models:partly_frozen"
PRECISIONS = ("float32", "float64")
MIN_RANKS, MAX_RANKS = 2, 6
MAX_STAGES, MAX_REPLICAS, MAX_MICROBATCHES = 12, 3, 8

Owners = Mapping[tuple[int, int], str]


def random_plan(rng: random.Random, ranks: int) -> Plan:
    """A plan that holds, for that many ranks.

    Drawn are the model and its dropout, what of it is frozen, the precision, the optimizer, stages
    cut out of any order of the layers that the model allows, their replicas, who runs which
    microbatch, which backwards are split, what is recomputed, and the orders.
    """
    factory, arguments = _model(rng)
    job = Job(
        samples_per_microbatch=rng.randint(1, 3),
        microbatches=rng.randint(1, MAX_MICROBATCHES),
        precision=rng.choice(PRECISIONS),
        optimizer=rng.choice(("sgd", "sgd_momentum", "adamw")),
        learning_rate=0.01,
        max_stages_per_device=MAX_STAGES,
        model_arguments=arguments,
    )
    graph = _traced(factory, job.samples_per_microbatch, job.precision, json.dumps(arguments))
    problem = Problem(graph, star(ranks), job, ModelSource(factory, arguments))
    # Random numbers must be drawn in the model's order.
    in_order = "dropout" in arguments or rng.random() < 0.5
    pipeline = place(problem, _stages(graph, problem.cluster.device_names, in_order, rng))
    return plan_by_hand(pipeline, random_orders(pipeline, rng))


# --- model -----------------------------------------------------------------------------------


def _model(rng: random.Random) -> tuple[str, dict]:
    """A factory and its arguments."""
    name = rng.choice(TINY)
    has_dropout = "dropout" in inspect.signature(import_factory(ZOO[name])).parameters
    dropout = {"dropout": rng.choice((0.1, 0.5))} if has_dropout and rng.random() < 0.5 else {}
    if rng.random() < 0.7:
        return ZOO[name], dropout
    return PARTLY_FROZEN, {"name": name, "frozen": _frozen(name, rng), **dropout}


def _frozen(name: str, rng: random.Random) -> list[int]:
    """The numbers of the first parameters, as in fine-tuning, or of any; some always train."""
    count = _parameters(name)
    chosen = rng.randint(1, count // 2)
    return list(range(chosen)) if rng.random() < 0.6 else sorted(rng.sample(range(count), chosen))


@cache
def _parameters(name: str) -> int:
    return len(list(build(import_factory(ZOO[name]), {}).parameters()))


@cache
def _traced(factory: str, samples: int, precision: str, arguments: str) -> LayerGraph:
    job = {"samples_per_microbatch": samples, "precision": precision}
    return trace(factory, Job.model_validate({**job, "model_arguments": json.loads(arguments)}))


# --- stages ----------------------------------------------------------------------------------


@cache
def star(ranks: int) -> Cluster:
    """Equal devices around a switch, with memory for any order."""
    devices = [f"d{rank}" for rank in range(ranks)]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "star",
            "device_types": {
                "unit": {
                    "memory_gib": 1024,
                    "memory_bandwidth_gb_per_s": 1000,
                    "peak_tflop_per_s": dict.fromkeys(PRECISIONS, 1),
                }
            },
            "devices": [{"name": name, "type": "unit"} for name in devices],
            "switches": ["hub"],
            "links": [{"between": [name, "hub"], "bandwidth_gb_per_s": 1} for name in devices],
        }
    )


def _stages(
    graph: LayerGraph, devices: Sequence[str], in_order: bool, rng: random.Random
) -> list[StageSpec]:
    layers = list(graph.layers) if in_order else _order_of_layers(graph, rng)
    least = ceil(len(devices) / MAX_REPLICAS)
    count = rng.randint(least, min(MAX_STAGES, len(layers)))
    cuts = sorted(rng.sample(range(1, len(layers)), count - 1))
    parts = [tuple(layers[a:b]) for a, b in pairwise([0, *cuts, len(layers)])]
    share = rng.choice((0.0, 0.3, 1.0))
    return [
        StageSpec(part, on, tuple(name for name in part if rng.random() < share))
        for part, on in zip(parts, replicas(count, devices, rng), strict=True)
    ]


def _order_of_layers(graph: LayerGraph, rng: random.Random) -> list[str]:
    """Any order in which no tensor goes backwards."""
    edges = [(t.producer, user) for t in graph.record.boundaries for user in t.users]
    order: list[str] = []
    left = list(graph.layers)
    while left:
        ready = [name for name in left if not any(v == name and u in left for u, v in edges)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


def replicas(count: int, devices: Sequence[str], rng: random.Random) -> list[tuple[str, ...]]:
    """The devices of each stage: one to three, and no device without a stage."""
    places: list[list[str]] = [[] for _ in range(count)]
    for device in rng.sample(devices, len(devices)):
        rng.choice([held for held in places if len(held) < MAX_REPLICAS]).append(device)
    for held in places:
        others = [device for device in devices if device not in held]
        wanted = max(rng.choice((0, 0, 1, 2)), 0 if held else 1)
        held += rng.sample(others, min(wanted, MAX_REPLICAS - len(held), len(others)))
    return [tuple(held) for held in places]


# --- orders ----------------------------------------------------------------------------------


def random_orders(pipeline: PlacedPipeline, rng: random.Random) -> dict[str, list[Operation]]:
    """One random sequence of all operations that respects what each needs, device by device."""
    owners = _owners(pipeline, rng)
    share = rng.choice((0.0, 0.5, 1.0))
    split = {key for key in owners if rng.random() < share}
    orders: dict[str, list[Operation]] = {device: [] for device in pipeline.devices}
    ready = [Operation(0, "F", microbatch) for microbatch in range(pipeline.microbatches)]
    while ready:
        operation = ready.pop(rng.randrange(len(ready)))
        orders[owners[operation.stage, operation.microbatch]].append(operation)
        ready += _enabled(operation, len(pipeline.stages) - 1, split)
    return orders


def _owners(pipeline: PlacedPipeline, rng: random.Random) -> Owners:
    return {
        (index, microbatch): rng.choice(stage.spec.devices)
        for index, stage in enumerate(pipeline.stages)
        for microbatch in range(pipeline.microbatches)
    }


def _enabled(operation: Operation, last: int, split: set[tuple[int, int]]) -> list[Operation]:
    """Return the operations that can run once an operation has run."""
    stage, kind, microbatch = operation

    def backward(of: int) -> Operation:
        return Operation(of, "I" if (of, microbatch) in split else "B", microbatch)

    if kind == "F":
        return [Operation(stage + 1, "F", microbatch) if stage < last else backward(stage)]
    if kind == "W":
        return []
    second = [Operation(stage, "W", microbatch)] if kind == "I" else []
    return [*second, *([backward(stage - 1)] if stage else [])]
