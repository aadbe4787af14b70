"""Random plans of tensor-parallel groups: all that the executor runs on them, drawn at random."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

from benchmarks.executor.plans import PRECISIONS, random_orders, replicas, star
from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.tensor_groups import TensorGroup
from planner.costs.placement import PlacedPipeline, StageSpec, place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.model.tracing.factory import import_factory
from planner.model.tracing.sharding.record import with_splits
from planner.model.tracing.sharding.routing import routing_of
from planner.model.tracing.trace import trace_step
from planner.plan.operations import Orders
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem

MODELS = ("gpt_tiny", "llama_tiny", "mixtral_tiny", "bert_tiny", "t5_tiny", "vit_tiny")
"""Of the zoo, with parts that split over a group; ``mixtral_tiny`` has experts."""
UNTIED = ("llama_tiny", "mixtral_tiny", "vit_tiny")
"""Those whose stages share no parameter, so that each may be on groups of another size."""
SIZES = (
    *((2,), (2, 2), (2, 2), (2, 2, 2), (4,), (4, 4)),
    *((1, 2), (2, 1, 2), (4, 1), (2, 4)),
)
"""Devices of each group."""
MOST_STAGES, MOST_MICROBATCHES = 6, 4


def random_sizes(rng: random.Random) -> tuple[int, ...]:
    """Return the devices of each group."""
    return rng.choice(SIZES)


def random_group_plan(rng: random.Random, sizes: Sequence[int]) -> Plan:
    """Return a plan that holds, of groups of given sizes.

    Drawn are the model and its dropout, sequence parallelism, whole experts, shared optimizer
    state, precision, optimizer, stages (several on a group, and replicas with uneven microbatches),
    what is recomputed, which backwards are split, and the orders.

    Args:
        rng: what it is drawn from.
        sizes: devices of each group.
    """
    is_mixed = len(set(sizes)) > 1
    name = rng.choice(UNTIED if is_mixed else MODELS)
    has_experts = name == "mixtral_tiny" and not is_mixed and rng.random() < 0.5
    job = Job(
        samples_per_microbatch=2,
        microbatches=rng.randint(1, MOST_MICROBATCHES),
        precision=rng.choice(PRECISIONS),
        optimizer=rng.choice(("sgd", "sgd_momentum", "adamw")),
        learning_rate=0.01,
        max_stages_per_device=MOST_STAGES,
        tensor_parallel="any" if is_mixed else sizes[0],
        sequence_parallel=rng.random() < 0.5,
        expert_parallel=has_experts,
        shard_optimizer=rng.random() < 0.5,
        model_arguments=_arguments(name, max(sizes), rng),
    )
    return group_plan(
        ZOO[name],
        job,
        sizes,
        lambda problem: _stages(problem, rng),
        lambda pipeline: random_orders(pipeline, rng),
    )


def group_plan(
    factory: str,
    job: Job,
    sizes: Sequence[int],
    stages: Callable[[Problem], Sequence[StageSpec]],
    orders: Callable[[PlacedPipeline], Orders],
) -> Plan:
    """Return a plan of tensor-parallel groups ``g0``, ``g1``, … of equal devices.

    Args:
        factory: of the model.
        job: that allows groups of these sizes.
        sizes: devices of each group.
        stages: chooses them for the problem whose devices are groups.
        orders: of these stages.
    """
    told = ("samples_per_microbatch", "precision", "tensor_parallel", "sequence_parallel")
    fields = {name: getattr(job, name) for name in (*told, "expert_parallel", "expert_load")}
    sequence = job.sequence_parallel
    degrees = tuple(sorted({size for size in sizes if size > 1}))
    graph = _traced(factory, json.dumps(fields), json.dumps(job.model_arguments), degrees)
    cluster = star(sum(sizes))
    single = Problem(graph, cluster, job, ModelSource(factory, dict(job.model_arguments)))
    parallel = _groups(cluster.device_names, sequence, sizes)
    problem = grouped_problem(single, parallel)
    pipeline = place(problem, stages(problem))
    return plan_by_hand(pipeline, orders(pipeline)).of_problem(single, parallel)


def _arguments(name: str, degree: int, rng: random.Random) -> dict:
    """Arguments with which heads split, and perhaps dropout."""
    known = inspect.signature(import_factory(ZOO[name])).parameters
    found: dict = {"kv_heads": 4} if degree == 4 and "kv_heads" in known else {}
    if "dropout" in known and rng.random() < 0.4:
        found["dropout"] = 0.1
    return found


@cache
def _traced(factory: str, fields: str, arguments: str, degrees: Sequence[int]) -> LayerGraph:
    job = Job.parse({**json.loads(fields), "model_arguments": json.loads(arguments)}, factory)
    record = with_splits(
        trace_step(factory, job),
        degrees,
        sequence=job.sequence_parallel,
        experts=routing_of(job),
    )
    return LayerGraph.from_record(record)


def _groups(devices: Sequence[str], sequence: bool, sizes: Sequence[int]) -> TensorParallel:
    ends = list(accumulate(sizes))
    groups = tuple(
        TensorGroup(name=f"g{number}", devices=tuple(devices[end - size : end]))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )
    return TensorParallel(sequence=sequence, groups=groups)


def _stages(problem: Problem, rng: random.Random) -> list[StageSpec]:
    layers, groups = list(problem.graph.layers), problem.cluster.device_names
    allowed = set(layers if problem.job.cuts is None else problem.job.cuts)
    places = [k for k, layer in enumerate(layers) if k and layer in allowed]
    of_size: dict[int, list[str]] = {}
    for name in groups:
        of_size.setdefault(problem.cluster.device_type(name).members, []).append(name)
    count = rng.randint(len(of_size), min(MOST_STAGES, len(places) + 1))
    cuts = sorted(rng.sample(places, count - 1))
    parts = [tuple(layers[a:b]) for a, b in pairwise([0, *cuts, len(layers)])]
    share = rng.choice((0.0, 0.0, 0.3, 1.0))
    # Every size holds a stage; the rest are drawn.
    drawn = [*of_size, *rng.choices(list(of_size), k=count - len(of_size))]
    rng.shuffle(drawn)
    held = {size: iter(replicas(drawn.count(size), of_size[size], rng)) for size in of_size}
    return [
        StageSpec(part, next(held[size]), tuple(name for name in part if rng.random() < share))
        for part, size in zip(parts, drawn, strict=True)
    ]
