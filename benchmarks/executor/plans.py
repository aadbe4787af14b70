"""Random trainings for the executor: all that verified plans may ask of it, drawn at random."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, TypeVar

from benchmarks.executor.orders import random_orders
from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.tensor_groups import TensorGroup
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Orders
from planner.plan.plan import Plan, Sync
from planner.plan.problem import ModelSource, Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.space import WITH_SHARDED_PARAMETERS
from planner.tracing.factory import build, import_factory
from planner.tracing.sharding.record import routing_of, with_splits
from planner.tracing.trace import TracedStep, trace_step

TINY = tuple(name for name in ZOO if name.endswith("_tiny"))
WITH_ATTENTION = ("gpt_tiny", "llama_tiny", "mixtral_tiny", "bert_tiny", "t5_tiny", "vit_tiny")
"""Models with parts that split over a group; ``mixtral_tiny`` has experts."""
UNTIED = ("llama_tiny", "mixtral_tiny", "vit_tiny")
"""Those whose stages share no parameter, so that each may be on groups of another size."""
PARTLY_FROZEN = "benchmarks.executor.models:partly_frozen"
PRECISIONS = ("float32", "float64")
SIZES = (1, 2, 4)
"""Devices of a group; 1: a device by itself."""
PACKINGS = {"single devices": 3, "one size": 4, "several sizes": 3}
"""Ways to pack devices in groups, with how often each is drawn beside the others."""
RANKS = (2, 3, 4, 4, 4, 5, 6, 6)
MAX_STAGES, MAX_REPLICAS, MAX_MICROBATCHES = 8, 3, 6
SMALL_MIB = 0.02
"""Size of buckets of which the gradients of a tiny model fill several."""

Sizes = tuple[int, ...]
T = TypeVar("T")


def random_training(rng: random.Random, ranks: int, precision: str) -> tuple[Plan, ...]:
    """Return the plans of a training: one, or one and another that resumes its checkpoint.

    Drawn are the model with its dropout and what of it is frozen, the microbatches, the optimizer,
    and for each plan: tensor-parallel groups of one size, of several, or none; what these share;
    what replicas share of weights, gradients and optimizer state; stages (several on a device, with
    up to three replicas and uneven microbatches); which backwards are split, what is recomputed,
    the orders, and when gradients are reduced. Another precision changes nothing else.

    Args:
        rng: what all is drawn from.
        ranks: of each plan.
        precision: of the weights.
    """
    packings = [_packing(ranks, rng) for _ in range(rng.choice((1, 1, 2)))]
    model = _model(packings, rng)
    job = Job(
        samples_per_microbatch=rng.randint(1, 2),
        microbatches=rng.randint(1, MAX_MICROBATCHES),
        precision=precision,
        optimizer=rng.choice(("sgd", "sgd_momentum", "adamw")),
        learning_rate=0.01,
        max_stages_per_device=MAX_STAGES,
        model_arguments=model.arguments,
    )
    return tuple(_random_plan(model, job, sizes, rng) for sizes in packings)


def _random_plan(model: _Model, job: Job, sizes: Sizes, rng: random.Random) -> Plan:
    has_groups = max(sizes) > 1
    pipelines = 1 if has_groups else _pipelines(len(sizes), job.microbatches, rng)
    layout: dict[str, Any] = {
        "tensor_parallel": sizes[0] if len({*sizes}) == 1 else "any",
        "sequence_parallel": has_groups and rng.random() < 0.5,
        "expert_parallel": has_groups and model.name == "mixtral_tiny" and rng.random() < 0.5,
        "shard_optimizer": rng.random() < 0.5,
        "recompute_attention": model.name in WITH_ATTENTION and rng.random() < 0.3,
    }
    if pipelines > 1:
        layout |= {**WITH_SHARDED_PARAMETERS, "shard_parameters": True}
    job = Job.model_validate({**job.model_dump(), **layout})
    # Random numbers must be drawn in the model's order; groups split parts of a chain of layers.
    in_order = has_groups or "dropout" in model.arguments or rng.random() < 0.5
    return plan_on(
        model.factory,
        job,
        sizes,
        lambda problem: _stages(problem, sizes, pipelines, in_order, rng),
        lambda pipeline: random_orders(pipeline, rng),
        _sync(job, rng),
    )


def plan_on(
    factory: str,
    job: Job,
    sizes: Sizes,
    stages: Callable[[Problem], Sequence[StageSpec]],
    orders: Callable[[PlacedPipeline], Orders],
    sync: Sync | None = None,
) -> Plan:
    """Return a plan of equal devices, or of tensor-parallel groups ``g0``, ``g1``, … of them.

    Args:
        factory: of the model.
        job: that allows groups of these sizes.
        sizes: devices of each group; 1 of all for none.
        stages: chooses them for the problem whose devices are groups.
        orders: of these stages.
        sync: the strategy of synchronisation; None: the default.
    """
    cluster = star(sum(sizes))
    arguments = dict(job.model_arguments)
    graph = _graph(factory, job, sizes)
    single = Problem(graph, cluster, job, ModelSource(factory, arguments))
    parallel = _groups(cluster.device_names, job.sequence_parallel, sizes)
    problem = single if parallel is None else grouped_problem(single, parallel)
    pipeline = place(problem, stages(problem), sync)
    plan = plan_by_hand(pipeline, orders(pipeline))
    return plan if parallel is None else plan.of_problem(single, parallel)


# --- model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """A model of the zoo.

    Attributes:
        name: in the zoo.
        factory: of the model, with some parameters frozen perhaps.
        arguments: of the factory.
    """

    name: str
    factory: str
    arguments: Mapping[str, Any]


def _model(packings: Sequence[Sizes], rng: random.Random) -> _Model:
    """Return a model that all these packings can run."""
    largest = max(map(max, packings))
    is_mixed = any(len({*sizes}) > 1 for sizes in packings)
    names = UNTIED if is_mixed else WITH_ATTENTION if largest > 1 else TINY
    name = rng.choice(names)
    known = inspect.signature(import_factory(ZOO[name])).parameters
    arguments: dict[str, Any] = {"kv_heads": 4} if largest == 4 and "kv_heads" in known else {}
    if "dropout" in known and rng.random() < 0.5:
        arguments["dropout"] = 0.1
    if rng.random() < 0.7:
        return _Model(name, ZOO[name], arguments)
    frozen = {"name": name, "frozen": _frozen(name, rng)}
    return _Model(name, PARTLY_FROZEN, {**frozen, **arguments})


def _frozen(name: str, rng: random.Random) -> list[int]:
    """The numbers of the first parameters, as in fine-tuning, or of any; some always train."""
    count = _parameters(name)
    chosen = rng.randint(1, count // 2)
    return list(range(chosen)) if rng.random() < 0.6 else sorted(rng.sample(range(count), chosen))


@cache
def _parameters(name: str) -> int:
    return len(list(build(import_factory(ZOO[name]), {}).parameters()))


def _graph(factory: str, job: Job, sizes: Sizes) -> LayerGraph:
    """Return the layer graph with its splits over groups of these sizes."""
    names = ("samples_per_microbatch", "precision", "recompute_attention", "model_arguments")
    step = _traced(factory, json.dumps({name: getattr(job, name) for name in names}))
    degrees = sorted({size for size in sizes if size > 1})
    sequence, experts = job.sequence_parallel, routing_of(job)
    return LayerGraph.from_record(with_splits(step, degrees, sequence=sequence, experts=experts))


@cache
def _traced(factory: str, fields: str) -> TracedStep:
    return trace_step(factory, Job.parse(json.loads(fields), factory))


# --- devices and stages ----------------------------------------------------------------------


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


def _packing(devices: int, rng: random.Random) -> Sizes:
    """Return the devices of each group, all of them together."""
    found: dict[str, list[Sizes]] = {}
    for sizes in _packings(devices):
        kind = "several sizes" if len({*sizes}) > 1 else "one size"
        found.setdefault("single devices" if max(sizes) == 1 else kind, []).append(sizes)
    (kind,) = rng.choices(list(found), [PACKINGS[kind] for kind in found])
    return rng.choice(found[kind])


def _packings(devices: int) -> list[Sizes]:
    if not devices:
        return [()]
    sizes = [size for size in SIZES if size <= devices]
    return [(size, *rest) for size in sizes for rest in _packings(devices - size)]


def _groups(devices: Sequence[str], sequence: bool, sizes: Sizes) -> TensorParallel | None:
    if max(sizes) == 1:
        return None
    ends = accumulate(sizes)
    groups = tuple(
        TensorGroup(name=f"g{number}", devices=tuple(devices[end - size : end]))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )
    return TensorParallel(sequence=sequence, groups=groups)


def _pipelines(devices: int, microbatches: int, rng: random.Random) -> int:
    """Return of how many equal pipelines replicas divide their weights; 1: of none."""
    counts = [n for n in (2, 3) if devices % n == 0 and microbatches % n == 0]
    return rng.choice(counts) if counts and rng.random() < 0.7 else 1


def _stages(
    problem: Problem, sizes: Sizes, pipelines: int, in_order: bool, rng: random.Random
) -> list[StageSpec]:
    layers = list(problem.graph.layers) if in_order else _order_of_layers(problem.graph, rng)
    allowed = set(layers if problem.job.cuts is None else problem.job.cuts)
    places = [k for k, layer in enumerate(layers) if k and layer in allowed]
    on = _devices(problem.cluster.device_names, sizes, pipelines, len(places) + 1, rng)
    cuts = sorted(rng.sample(places, len(on) - 1))
    parts = [tuple(layers[a:b]) for a, b in pairwise([0, *cuts, len(layers)])]
    share = rng.choice((0.0, 0.0, 0.3, 1.0))
    return [
        StageSpec(part, devices, tuple(name for name in part if rng.random() < share))
        for part, devices in zip(parts, on, strict=True)
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


def _devices(
    names: Sequence[str], sizes: Sizes, pipelines: int, most: int, rng: random.Random
) -> list[tuple[str, ...]]:
    """Return the devices of each stage, of one size; no device is without a stage."""
    if pipelines > 1:
        rows = [tuple(names[k : k + pipelines]) for k in range(0, len(names), pipelines)]
        return _with_all(rows, most, rng)
    of_size: dict[int, list[str]] = {}
    for name, size in zip(names, sizes, strict=True):
        of_size.setdefault(size, []).append(name)
    least = [size for size, held in of_size.items() for _ in range(ceil(len(held) / MAX_REPLICAS))]
    drawn = _with_all(least, most, rng)
    held = {size: iter(_replicas(drawn.count(size), of_size[size], rng)) for size in of_size}
    return [next(held[size]) for size in drawn]


def _with_all(needed: Sequence[T], most: int, rng: random.Random) -> list[T]:
    """Return one for each stage, in any order: all that are needed, and more of them."""
    count = rng.randint(len(needed), min(MAX_STAGES, most))
    drawn = [*needed, *rng.choices(needed, k=count - len(needed))]
    rng.shuffle(drawn)
    return drawn


def _replicas(count: int, devices: Sequence[str], rng: random.Random) -> list[tuple[str, ...]]:
    """The devices of each stage: one to three, and no device without a stage."""
    places: list[list[str]] = [[] for _ in range(count)]
    for device in rng.sample(devices, len(devices)):
        rng.choice([held for held in places if len(held) < MAX_REPLICAS]).append(device)
    for held in places:
        others = [device for device in devices if device not in held]
        wanted = max(rng.choice((0, 0, 1, 2)), 0 if held else 1)
        held += rng.sample(others, min(wanted, MAX_REPLICAS - len(held), len(others)))
    return [tuple(held) for held in places]


def _sync(job: Job, rng: random.Random) -> Sync:
    """When replicas reduce gradients: in many buckets or few, during the last backwards or after.

    What they share needs the default strategy.
    """
    if not job.shards_state and rng.random() < 0.3:
        return Sync(strategy="fused", options={"fusion_mib": rng.choice((SMALL_MIB, 64.0))})
    mib = rng.choice((SMALL_MIB, 25.0))
    return Sync(options={"bucket_mib": mib, "overlap": rng.random() < 0.7})
