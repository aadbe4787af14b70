"""Random problems of up to 6 layers, 3 devices and 4 microbatches, in every kind of space."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

from planner import Cluster, Job, LayerGraph, Problem
from planner.space import Backward

MIB = 2**20
MOST_LAYERS, MOST_DEVICES, MOST_MICROBATCHES = 6, 3, 4
MEMORY_GIB = 64.0
"""More than any schedule of a tiny problem needs."""


def tiny_problems(count: int, seed: int = 0) -> Iterator[Problem]:
    """Yield random problems; the same seed gives the same problems.

    Args:
        count: how many.
        seed: of everything drawn.
    """
    for number in range(count):
        yield tiny_problem(random.Random(f"{seed}.{number}"))


def tiny_problem(rng: random.Random) -> Problem:
    """Return a random problem."""
    backward: Backward = rng.choice(["whole", "split", "any"])
    twice = rng.random() < 0.3
    job = Job(
        # With two stages a device there are many more plans to try.
        microbatches=rng.randint(2, 3 if twice else MOST_MICROBATCHES),
        backward=backward,
        max_stages_per_device=2 if twice else 1,
        replication=not twice and rng.random() < 0.6,
        recompute=False,
        overlap_reduction=True,
    )
    layers = rng.randint(2, 4 if twice else MOST_LAYERS)
    devices = rng.randint(2, 2 if twice else MOST_DEVICES)
    kinds = [f"type{k}" for k in range(rng.randint(1, devices))]
    # With large parameters a stage has several buckets.
    largest_mib = rng.choice([8, 60]) if job.replication else 8
    graph = _graph(rng, layers, kinds, largest_mib)
    return Problem(graph, _cluster(rng, devices, kinds), job)


def _cluster(rng: random.Random, count: int, kinds: list[str]) -> Cluster:
    names = [f"d{i}" for i in range(count)]
    links = [
        {
            "between": pair,
            "bandwidth_gb_per_s": rng.choice([0.5, 1.0, 4.0, 10.0]),
            "latency_us": rng.choice([0.0, 50.0]),
            "duplex": rng.choice(["full", "half"]),
        }
        for pair in combinations(names, 2)
    ]
    device_type = {
        "memory_gib": MEMORY_GIB,
        "memory_bandwidth_gb_per_s": 50.0,
        "peak_tflop_per_s": {"float32": 1.0},
        "reserved_gib": 0.0,
    }
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "device_types": dict.fromkeys(kinds, device_type),
            "devices": [
                {"name": name, "type": kinds[i % len(kinds)]} for i, name in enumerate(names)
            ],
            "links": links,
        }
    )


def _graph(rng: random.Random, count: int, kinds: list[str], largest_mib: int) -> LayerGraph:
    names = [f"layer{i}" for i in range(count)]
    boundaries = [
        {
            "name": f"x{i}",
            "producer": first,
            "users": [second],
            "bytes": rng.randint(1, 40) * MIB // 4,
            "shape": [1],
            "dtype": "float32",
            "requires_grad": True,
            "saved_by": second,
        }
        for i, (first, second) in enumerate(pairwise(names))
    ]
    return LayerGraph.parse(
        {
            "format": "pipeplan-graph/2",
            "name": "tiny",
            "samples_per_microbatch": 1,
            "precision": "float32",
            "layers": [_layer(rng, i, name, kinds) for i, name in enumerate(names)],
            "boundaries": boundaries,
            "parameters": [
                {
                    "name": f"p{i}",
                    "elements": (n := rng.randint(1, largest_mib) * MIB // 4),
                    "bytes": 4 * n,
                }
                for i in range(count)
            ],
        }
    )


def _layer(rng: random.Random, number: int, name: str, kinds: list[str]) -> dict[str, Any]:
    base = rng.randint(2, 20) * 1e-3
    nothing = [
        f"{phase}_{what}"
        for phase in ("forward", "input_gradient", "weight_gradient")
        for what in ("flops", "traffic_bytes")
    ]
    return {
        **dict.fromkeys(nothing, 0),
        "name": name,
        "stash_bytes": 40 * MIB,
        "parameters": [f"p{number}"],
        "measured": {kind: _times(rng, base * (1 + k)) for k, kind in enumerate(kinds)},
    }


def _times(rng: random.Random, base: float) -> dict[str, float]:
    """Return measured times; a whole backward may be quicker than its parts."""
    gradient_s, weight_s = base * rng.uniform(0.7, 1.3), base * rng.uniform(0.5, 1.5)
    times = {
        "forward_s": base,
        "input_gradient_s": gradient_s,
        "weight_gradient_s": weight_s,
    }
    if rng.random() < 0.3:
        times["backward_s"] = max(gradient_s, weight_s, 0.8 * (gradient_s + weight_s))
    return times
