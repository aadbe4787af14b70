"""Plans by hand for the tiny models: stages, owners of microbatches and orders as a test says."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice, pairwise

from builders import cluster, device_type, link

from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.tensor_groups import TensorGroup
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.schedules.best import best_schedule
from planner.tracing.sharding.record import record_of, routing_of
from planner.tracing.trace import trace, trace_step

TINY = tuple(name for name in ZOO if name.endswith("_tiny"))
DEVICES = ("d0", "d1", "d2", "d3")
PRECISIONS = {"float32": 1, "bfloat16": 1, "float16": 1, "float64": 1}


def joined(count: int) -> Cluster:
    """Equal devices around one switch."""
    names = [f"d{number}" for number in range(count)]
    kind = device_type(peak_tflop_per_s=PRECISIONS, host_link_gb_per_s=1.0)
    return cluster(names, [link(name, "hub") for name in names], ["hub"], {"unit": kind})


FOUR_DEVICES = joined(4)
Owners = Mapping[tuple[int, int], str]


@cache
def traced(name: str, precision: str = "float32") -> LayerGraph:
    return trace(ZOO[name], Job(samples_per_microbatch=2, precision=precision))


def pipeline_of(
    graph: LayerGraph, factory: str | None, stages: Sequence[tuple], **job: object
) -> PlacedPipeline:
    """Stages of layers, devices and what they recompute and offload, on four equal devices."""
    fields = {
        "samples_per_microbatch": graph.record.samples_per_microbatch,
        "optimizer": "sgd_momentum",
        "learning_rate": 0.01,
        "max_stages_per_device": 16,
        **job,
    }
    checked = Job.model_validate(fields)
    source = ModelSource(factory, checked.model_arguments)
    problem = Problem(graph, FOUR_DEVICES, checked, source)
    return place(problem, [StageSpec(*map(tuple, stage)) for stage in stages])


def zoo_pipeline(
    name: str, cuts: Sequence[int], devices: Sequence[str], microbatches: int, **job: object
) -> PlacedPipeline:
    """A tiny model cut as :func:`cut_pipeline` does."""
    graph = traced(name, str(job.get("precision", "float32")))
    return cut_pipeline(graph, ZOO[name], cuts, devices, microbatches=microbatches, **job)


def cut_pipeline(
    graph: LayerGraph,
    factory: str | None,
    cuts: Sequence[int],
    devices: Sequence[str],
    again: Sequence[int] = (),
    **job: object,
) -> PlacedPipeline:
    """A model cut before the layers with the indices ``cuts``, those of ``again`` recomputed.

    ``devices`` has a word a stage, such as ``"d1"`` or, for replicas, ``"d1 d2"``.
    """
    layers = list(graph.layers)
    rerun = {layers[index] for index in again}
    parts = [layers[a:b] for a, b in pairwise([0, *cuts, len(layers)])]
    stages = [
        (part, on.split(), [x for x in part if x in rerun])
        for part, on in zip(parts, devices, strict=True)
    ]
    return pipeline_of(graph, factory, stages, **job)


def on_groups(
    name: str,
    cuts: Sequence[int],
    groups: Sequence[str],
    schedule: Callable[[PlacedPipeline], Plan],
    degree: int | Sequence[int] = 2,
    *,
    sequence: bool = False,
    recompute: Sequence[int] = (),
    **job: object,
) -> Plan:
    """A tiny model on tensor-parallel groups of the devices: ``g0``, ``g1``, …

    ``groups`` has a word a stage, as devices of :func:`zoo_pipeline`; ``degree`` is the size of all
    groups or of each; ``recompute`` the indices of recomputed layers, ``schedule`` makes a plan of
    the stages on groups.
    """
    used = sorted({group for word in groups for group in word.split()})
    sizes = [degree] * len(used) if isinstance(degree, int) else list(degree)
    machines = joined(max(sum(sizes), len(DEVICES)))
    fields = {
        "samples_per_microbatch": 2,
        "optimizer": "sgd_momentum",
        "learning_rate": 0.01,
        "max_stages_per_device": 16,
        "tensor_parallel": sizes[0] if len({*sizes}) == 1 else "any",
        "sequence_parallel": sequence,
        **job,
    }
    checked = Job.model_validate(fields)
    step = trace_step(ZOO[name], checked)
    degrees = sorted({size for size in sizes if size > 1})
    splits = tuple(
        record_of(step, size, sequence=sequence, experts=routing_of(checked)) for size in degrees
    )
    graph = LayerGraph.from_record(step.graph.model_copy(update={"splits": splits}))
    single = Problem(graph, machines, checked, ModelSource(ZOO[name], checked.model_arguments))
    names = iter(machines.device_names)
    parallel = TensorParallel(
        sequence=sequence,
        groups=tuple(
            TensorGroup(name=group, devices=tuple(islice(names, size)))
            for group, size in zip(used, sizes, strict=True)
        ),
    )
    layers = list(graph.layers)
    again = {layers[index] for index in recompute}
    parts = [layers[a:b] for a, b in pairwise([0, *cuts, len(layers)])]
    specs = [
        StageSpec(tuple(part), tuple(on.split()), tuple(x for x in part if x in again))
        for part, on in zip(parts, groups, strict=True)
    ]
    plan = schedule(place(grouped_problem(single, parallel), specs))
    model = {"graph": graph.record, "graph_digest": graph.digest}
    return plan.model_copy(
        update={
            "model": plan.model.model_copy(update=model),
            "cluster": machines,
            "job": plan.job.model_copy(update={"cuts": None}),
            "tensor_parallel": parallel,
        }
    )


def scheduled(pipeline: PlacedPipeline) -> Plan:
    """With the best of the usual schedules."""
    schedule = best_schedule(pipeline, backward="whole")
    assert schedule is not None
    return plan_by_hand(pipeline, schedule.orders)


def shuffled(
    pipeline: PlacedPipeline, seed: int, owners: Owners | None = None, split: float = 0.0
) -> Plan:
    """With a random one of all orders that do not deadlock, and random owners if none are given.

    ``split`` is the share of backwards that run in two halves.
    """
    rng = random.Random(seed)
    owners = owners or random_owners(pipeline, rng)
    return plan_by_hand(pipeline, random_orders(pipeline, owners, rng, split))


def random_owners(pipeline: PlacedPipeline, rng: random.Random) -> Owners:
    return {
        (index, microbatch): rng.choice(stage.spec.devices)
        for index, stage in enumerate(pipeline.stages)
        for microbatch in range(pipeline.microbatches)
    }


def random_orders(
    pipeline: PlacedPipeline, owners: Owners, rng: random.Random, split: float = 0.0
) -> dict[str, list[Operation]]:
    """Device by device, one random sequence of all operations that respects what each needs."""
    orders: dict[str, list[Operation]] = {device: [] for device in pipeline.devices}
    last = len(pipeline.stages) - 1
    halves = {key for key in owners if rng.random() < split}
    ready = [Operation(0, "F", microbatch) for microbatch in range(pipeline.microbatches)]
    while ready:
        stage, kind, microbatch = operation = ready.pop(rng.randrange(len(ready)))
        orders[owners[stage, microbatch]].append(operation)
        if kind == "I":
            ready.append(Operation(stage, "W", microbatch))
        if kind == "F" and stage < last:
            ready.append(Operation(stage + 1, "F", microbatch))
        elif kind == "F" or (kind in "BI" and stage > 0):
            after = stage if kind == "F" else stage - 1
            half = "I" if (after, microbatch) in halves else "B"
            ready.append(Operation(after, half, microbatch))
    return orders


def by_counts(stage: int, counts: Mapping[str, int]) -> dict[tuple[int, int], str]:
    """Owners of one stage: each device takes that many microbatches, in turn while it can."""
    left = dict(counts)
    found: dict[tuple[int, int], str] = {}
    while any(left.values()):
        for device in counts:
            if left[device]:
                left[device] -= 1
                found[stage, len(found)] = device
    return found
