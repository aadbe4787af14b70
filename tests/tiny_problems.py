"""Random problems small enough to try every plan of."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, Literal

import pytest
from builders import boundary, device_type, graph, layer, link
from builders import cluster as cluster_of

from planner import Cluster, Job, LayerGraph, Problem
from planner.space import Backward

MIB = 2**20


def seeds(quick: int, count: int) -> list:
    """So many seeds, all but the first of them for the extensive tests."""
    more = range(quick, count)
    return [*range(quick), *(pytest.param(n, marks=pytest.mark.extensive) for n in more)]


def tiny_problem(
    seed: int,
    *,
    layers: int,
    devices: int,
    microbatches: int,
    types: int = 1,
    replication: bool = True,
    max_stages_per_device: int = 1,
    tied: bool = False,
    topology: str = "mesh",
    memory_mib: float = 1000.0,
    cut_mib: float = 7.5,
    link_scale: float = 1.0,
    recompute: bool = False,
    backward: Backward = "whole",
    overlap: bool = False,
    largest_mib: int = 8,
    shard_optimizer: bool | Literal["if_needed"] = False,
) -> Problem:
    """Layers with measured times of milliseconds on devices joined in some way.

    Args:
        seed: of everything drawn.
        layers: in a chain.
        devices: how many.
        microbatches: of an iteration.
        types: of devices, in turn.
        replication: of the job.
        max_stages_per_device: of the job.
        tied: whether some layers share parameters.
        topology: mesh, chain, or switches (all links alike, two switches).
        memory_mib: of every device.
        cut_mib: the most one layer hands to the next.
        link_scale: multiplies bandwidths.
        recompute: of the job.
        backward: kinds of backward that the job allows.
        overlap: whether the job lets reductions overlap with backwards.
        largest_mib: size of the largest parameter; buckets hold 25 MiB.
        shard_optimizer: of the job.
    """
    rng = random.Random(seed)
    kinds = [f"type{k}" for k in range(types)]
    graph = _graph(rng, layers, kinds, cut_mib, tied, largest_mib)
    cluster = {
        "format": "pipeplan-cluster/1",
        "device_types": {kind: _device_type(memory_mib) for kind in kinds},
        "devices": [{"name": f"d{i}", "type": kinds[i % types]} for i in range(devices)],
        "switches": ["s0", "s1"] if topology == "switches" else [],
        "links": _links(rng, [f"d{i}" for i in range(devices)], topology, link_scale),
    }
    job = Job(
        microbatches=microbatches,
        replication=replication,
        max_stages_per_device=max_stages_per_device,
        recompute=recompute,
        backward=backward,
        overlap_reduction=overlap,
        shard_optimizer=shard_optimizer,
    )
    return Problem(LayerGraph.parse(graph), Cluster.from_data(cluster), job)


def two_stages_or_one() -> Problem:
    """1.99 s on two devices, 2.01 s on either; one microbatch, so nothing overlaps."""
    measured = {"a": {"early": 1.00, "late": 1.02}, "b": {"early": 1.01, "late": 0.99}}
    layers = [
        layer(
            name,
            measured={
                kind: {
                    "forward_s": time_s / 2,
                    "input_gradient_s": time_s / 4,
                    "weight_gradient_s": time_s / 4,
                }
                for kind, time_s in times.items()
            },
        )
        for name, times in measured.items()
    ]
    cluster = cluster_of(
        {"d0": "early", "d1": "late"},
        [link("d0", "d1")],
        [],
        {"early": device_type(), "late": device_type()},
    )
    job = Job(optimizer="sgd", microbatches=1, backward="whole")
    return Problem(graph(layers, [boundary("a", "b", bytes_=0)]), cluster, job)


def renamed(problem: Problem, names: Sequence[str]) -> Problem:
    """The same problem with other names of its layers."""
    text = json.dumps(problem.graph.record.model_dump(mode="json"))
    for number, name in enumerate(names):
        text = text.replace(f'"layer{number}"', json.dumps(name))
    return replace(problem, graph=LayerGraph.parse(json.loads(text)))


def _device_type(memory_mib: float) -> dict[str, Any]:
    return {
        "memory_gib": memory_mib / 1024,
        "memory_bandwidth_gb_per_s": 1000.0,
        "peak_tflop_per_s": {"float32": 1.0},
        "reserved_gib": 0.0,
    }


def _links(
    rng: random.Random, names: Sequence[str], topology: str, scale: float
) -> list[dict[str, Any]]:
    if topology == "switches":
        width = scale * rng.choice([0.3, 1.0])
        pairs = [(name, rng.choice(["s0", "s1"])) for name in names]
        duplex = rng.choice(["half", "full"])
        between = {"between": ["s0", "s1"], "bandwidth_gb_per_s": width, "duplex": duplex}
        return [between, *({"between": pair, "bandwidth_gb_per_s": width} for pair in pairs)]
    return [
        {
            "between": pair,
            "bandwidth_gb_per_s": scale * rng.choice([0.5, 1.0, 4.0, 10.0]),
            "latency_us": rng.choice([0.0, 50.0]),
        }
        for pair in (combinations(names, 2) if topology == "mesh" else pairwise(names))
    ]


def _graph(
    rng: random.Random,
    count: int,
    kinds: Sequence[str],
    cut_mib: float,
    tied: bool,
    largest_mib: int,
) -> dict[str, Any]:
    names = [f"layer{i}" for i in range(count)]
    held = [[f"p{i}"] for i in range(count)]
    if tied:
        for layer in rng.sample(range(count), rng.randint(2, count)):
            held[layer].append("tied")
    cuts = [rng.randint(1, int(4 * cut_mib)) * MIB // 4 for _ in names[1:]]
    boundaries = [
        {
            "name": f"x{i}",
            "producer": first,
            "users": [second],
            "bytes": bytes_,
            "shape": [1],
            "dtype": "float32",
            "requires_grad": True,
            "saved_by": second,
        }
        for i, (bytes_, (first, second)) in enumerate(zip(cuts, pairwise(names), strict=True))
    ]
    parameters = dict.fromkeys(name for row in held for name in row)
    return {
        "format": "pipeplan-graph/2",
        "name": "tiny",
        "samples_per_microbatch": 1,
        "precision": "float32",
        "layers": [
            _layer(rng, name, kinds, held[i], kept=cuts[i - 1] if i else 0)
            for i, name in enumerate(names)
        ],
        "boundaries": boundaries,
        "parameters": [
            {
                "name": name,
                "elements": (n := rng.randint(1, largest_mib) * MIB // 4),
                "bytes": 4 * n,
            }
            for name in parameters
        ],
    }


def _layer(
    rng: random.Random, name: str, kinds: Sequence[str], parameters: list[str], kept: int
) -> dict[str, Any]:
    base = rng.randint(2, 20) * 1e-3
    measured = {
        kind: {
            "forward_s": base * (1 + k * rng.uniform(0.5, 2)),
            "input_gradient_s": base * (1 + k),
            "weight_gradient_s": base * rng.uniform(0.5, 1.5),
        }
        for k, kind in enumerate(kinds)
    }
    nothing = dict.fromkeys(
        f"{step}_{what}"
        for step in ("forward", "input_gradient", "weight_gradient")
        for what in ("flops", "traffic_bytes")
    )
    return {
        **dict.fromkeys(nothing, 0),
        "name": name,
        "stash_bytes": rng.randint(1, 20) * MIB + kept,  # A layer keeps at least its input.
        "parameters": parameters,
        "measured": measured,
    }
