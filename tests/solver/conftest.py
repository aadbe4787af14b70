"""Tiny problems, and brute force over everything a plan can be."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations, product

import pytest

from planner import Cluster, Job, LayerGraph, Problem
from planner.artifacts.layer_graph import (
    Boundary,
    GraphRecord,
    Layer,
    MeasuredTimes,
    Parameter,
)
from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline, StageSpec, is_connected, place
from planner.errors import DeadlockError
from planner.schedule.heuristic import fits_memory
from planner.simulator import simulate

MIB = 2**20


def tiny_problem(
    seed: int,
    *,
    layers: int,
    devices: int,
    microbatches: int,
    types: int = 1,
    replication: bool = True,
    memory_mib: float = 1000.0,
    link_scale: float = 1.0,
) -> Problem:
    """Random layers with measured times of milliseconds, and a random full mesh of links."""
    rng = random.Random(seed)
    names = [f"layer{i}" for i in range(layers)]
    kinds = [f"type{k}" for k in range(types)]
    rows = []
    for i, name in enumerate(names):
        base = rng.randint(2, 20) * 1e-3
        measured = {
            kind: MeasuredTimes(
                forward_s=base * (1 + k * rng.uniform(0.5, 2)),
                input_gradient_s=base * (1 + k),
                weight_gradient_s=base * rng.uniform(0.5, 1.5),
            )
            for k, kind in enumerate(kinds)
        }
        rows.append(_layer(name, measured, stash_bytes=rng.randint(1, 20) * MIB, index=i))
    boundaries = [
        Boundary(
            name=f"x{i}",
            producer=names[i],
            users=(names[i + 1],),
            bytes=rng.randint(1, 30) * MIB // 4,
            shape=(1,),
            dtype="float32",
            requires_grad=True,
            saved_by=names[i + 1],
        )
        for i in range(layers - 1)
    ]
    record = GraphRecord(
        name="tiny",
        samples_per_microbatch=1,
        precision="float32",
        layers=tuple(rows),
        boundaries=tuple(boundaries),
        parameters=tuple(
            Parameter(name=f"p{i}", elements=(n := rng.randint(1, 8) * MIB // 4), bytes=4 * n)
            for i in range(layers)
        ),
    )
    links = [
        {
            "between": [f"d{u}", f"d{v}"],
            "bandwidth_gb_per_s": link_scale * rng.choice([0.5, 1.0, 4.0, 10.0]),
            "latency_us": rng.choice([0.0, 50.0]),
        }
        for u, v in combinations(range(devices), 2)
    ]
    cluster = Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "device_types": {
                kind: {
                    "memory_gib": memory_mib / 1024,
                    "memory_bandwidth_gb_per_s": 1000.0,
                    "peak_tflop_per_s": {"float32": 1.0},
                    "reserved_gib": 0.0,
                }
                for kind in kinds
            },
            "devices": [{"name": f"d{i}", "type": kinds[i % types]} for i in range(devices)],
            "links": links,
        }
    )
    job = Job(microbatches=microbatches, replication=replication)
    return Problem(LayerGraph.from_record(record), cluster, job)


def _layer(name: str, measured: dict[str, MeasuredTimes], *, stash_bytes: int, index: int) -> Layer:
    return Layer(
        name=name,
        forward_flops=0,
        input_gradient_flops=0,
        weight_gradient_flops=0,
        forward_traffic_bytes=0,
        input_gradient_traffic_bytes=0,
        weight_gradient_traffic_bytes=0,
        stash_bytes=stash_bytes + 8 * MIB,  # A layer keeps at least its input.
        parameters=(f"p{index}",),
        measured=measured,
    )


def all_partitions(problem: Problem) -> Iterator[tuple[StageSpec, ...]]:
    """Every cut of the chain, with every choice of disjoint device sets."""
    names = list(problem.graph.layers)
    devices = problem.cluster.device_names
    for count in range(1, min(len(names), len(devices)) + 1):
        for cuts in combinations(range(1, len(names)), count - 1):
            edges = [0, *cuts, len(names)]
            for sets in _disjoint_sets(devices, count, problem.job.replication):
                yield tuple(
                    StageSpec(tuple(names[edges[j] : edges[j + 1]]), sets[j]) for j in range(count)
                )


def _disjoint_sets(
    devices: tuple[str, ...], count: int, replication: bool
) -> Iterator[tuple[tuple[str, ...], ...]]:
    if not replication:
        for chosen in permutations(devices, count):
            yield tuple((device,) for device in chosen)
        return
    for stage_of in product(range(-1, count), repeat=len(devices)):
        sets = tuple(
            tuple(d for d, s in zip(devices, stage_of, strict=True) if s == j) for j in range(count)
        )
        if all(sets):
            yield sets


def all_orders(
    pipeline: PlacedPipeline,
) -> Iterator[dict[str, tuple[Operation, ...]]]:
    """Every assignment of microbatches to replicas with every order on every device."""
    pairs = [(s, m) for s in range(len(pipeline.stages)) for m in range(pipeline.microbatches)]
    choices = [pipeline.stages[s].spec.devices for s, _ in pairs]
    for owners in product(*choices):
        per_device: list[list[tuple[Operation, ...]]] = []
        for device in pipeline.devices:
            held = [pair for pair, owner in zip(pairs, owners, strict=True) if owner == device]
            per_device.append(list(_interleavings(tuple((s, m, 0) for s, m in held))))
        for orders in product(*per_device):
            yield dict(zip(pipeline.devices, orders, strict=True))


def _interleavings(held: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[Operation, ...]]:
    """All orders with each forward before its backward; state 0: nothing ran, 1: forward ran."""
    if not held:
        yield ()
    for position, (stage, microbatch, state) in enumerate(held):
        rest = held[:position] + held[position + 1 :]
        if state == 0:
            rest = (*held[:position], (stage, microbatch, 1), *held[position + 1 :])
        operation = Operation(stage, "FB"[state], microbatch)  # type: ignore[arg-type]
        for tail in _interleavings(rest):
            yield (operation, *tail)


@dataclass
class BruteForce:
    """The best of everything."""

    time_s: float = float("inf")
    partitions: int = 0
    schedules: int = 0


def brute_force(problem: Problem) -> BruteForce:
    """The fastest plan by trying every plan."""
    best = BruteForce()
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        if not is_connected(pipeline):
            continue
        best.partitions += 1
        for orders in all_orders(pipeline):
            best.schedules += 1
            try:
                timeline = simulate(pipeline, orders)
            except DeadlockError:
                continue
            if timeline.iteration_time_s < best.time_s and fits_memory(timeline):
                best.time_s = timeline.iteration_time_s
    return best


@pytest.fixture
def make_tiny_problem() -> Callable[..., Problem]:
    return tiny_problem


@pytest.fixture
def try_every_plan() -> Callable[[Problem], BruteForce]:
    return brute_force


@pytest.fixture
def every_partition() -> Callable[[Problem], Iterator[tuple[StageSpec, ...]]]:
    return all_partitions
