"""Random instances: layers and clusters drawn from the same families as in the project's notes."""

from __future__ import annotations

import math
import random
from typing import Any

from planner import Cluster, Job, LayerGraph, Problem

SPEEDS = (1.0, 0.55, 0.35)
"""Relative speeds of the device types."""
LAYER_S = 6e-3
"""About what a layer takes, forward and backward, on the fastest type."""
MEGABYTE = 10**6


def layers(count: int, kind: str, types: int, seed: int) -> LayerGraph:
    """A chain of layers with measured times; forward takes a third.

    Args:
        count: of layers.
        kind: ``transformer`` (alike but for first and last) or ``cnn`` (log-normal).
        types: of devices, each slower by SPEEDS.
        seed: of everything drawn.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    parameters, boundaries = [], []
    for index in range(count):
        seconds, activation, state = _layer(rng, kind, index, count)
        times = {
            f"type{k}": dict.fromkeys(
                ("forward_s", "input_gradient_s", "weight_gradient_s"), seconds / SPEEDS[k] / 3
            )
            for k in range(types)
        }
        rows.append(_row(index, activation, times))
        parameters.append({"name": f"p{index}", "elements": state // 4, "bytes": state})
        if index + 1 < count:
            boundaries.append(_boundary(index, activation))
    return LayerGraph.parse(
        {
            "format": "pipeplan-graph/2",
            "name": f"{kind}-{count}",
            "samples_per_microbatch": 1,
            "precision": "float32",
            "layers": rows,
            "boundaries": boundaries,
            "parameters": parameters,
        }
    )


def _layer(rng: random.Random, kind: str, index: int, count: int) -> tuple[float, int, int]:
    """Seconds, activation bytes, parameter bytes."""
    if kind == "transformer":
        share = {0: 0.4, count - 1: 1.8}.get(index, 1.0)
        activation = 50 * MEGABYTE * rng.choice([1, 1, 1, 1.5])
        return LAYER_S * rng.uniform(0.9, 1.1) * share, int(activation), 100 * MEGABYTE
    return (
        LAYER_S * math.exp(rng.gauss(0, 0.6)),
        int(40 * MEGABYTE * math.exp(rng.gauss(0, 0.9))),
        int(100 * MEGABYTE * math.exp(rng.gauss(0, 1))) // 4 * 4,
    )


def _row(index: int, activation: int, times: dict[str, Any]) -> dict[str, Any]:
    counts = ("forward", "input_gradient", "weight_gradient")
    return {
        "name": f"layer{index}",
        **{f"{count}_flops": 0 for count in counts},
        **{f"{count}_traffic_bytes": 0 for count in counts},
        "stash_bytes": activation,
        "parameters": [f"p{index}"],
        "measured": times,
    }


def _boundary(index: int, bytes_: int) -> dict[str, Any]:
    return {
        "name": f"a{index}",
        "producer": f"layer{index}",
        "users": [f"layer{index + 1}"],
        "bytes": bytes_,
        "shape": [bytes_ // 4],
        "dtype": "float32",
        "requires_grad": True,
    }


def random_matrix(devices: int, types: int, seed: int) -> Cluster:
    """Every pair joined by a link of its own, 3 to 60 GB/s (log-uniform); types in runs of 4."""
    rng = random.Random(seed)
    names = [f"d{index}" for index in range(devices)]
    links = [
        {
            "between": [names[u], names[v]],
            "bandwidth_gb_per_s": math.exp(rng.uniform(math.log(3), math.log(60))),
            "latency_us": 5,
        }
        for u in range(devices)
        for v in range(u + 1, devices)
    ]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": f"random-{devices}",
            "device_types": _types(types),
            "devices": [
                {"name": name, "type": f"type{index // 4 % types}"}
                for index, name in enumerate(names)
            ],
            "links": links,
        }
    )


def two_level(counts: tuple[int, ...], node: int, width_gb_per_s: float = 300) -> Cluster:
    """Nodes on one switch; slower types have slower network cards.

    Args:
        counts: nodes of each type.
        node: devices in a node.
        width_gb_per_s: of the links inside.
    """
    cards = (25,) if len(counts) == 1 else (50, 25, 12)
    nodes, links = [], []
    for kind, count in enumerate(counts):
        for _ in range(count):
            name = f"n{len(nodes)}"
            inside = {"bandwidth_gb_per_s": width_gb_per_s, "latency_us": 2}
            nodes.append({"name": name, "devices": node, "type": f"type{kind}", "link": inside})
            outside = {"bandwidth_gb_per_s": cards[kind], "latency_us": 5}
            links.append({"between": [name, "network"], **outside})
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": f"two-level-{sum(counts) * node}",
            "device_types": _types(len(counts)),
            "nodes": nodes,
            "switches": ["network"],
            "links": links,
        }
    )


def _types(count: int) -> dict[str, Any]:
    return {
        f"type{k}": {
            "memory_gib": 80,
            "memory_bandwidth_gb_per_s": 2000 * SPEEDS[k],
            "peak_tflop_per_s": {"float32": 100 * SPEEDS[k]},
        }
        for k in range(count)
    }


def problem(graph: LayerGraph, cluster: Cluster, microbatches: int, replication: bool) -> Problem:
    """One iteration of AdamW in float32."""
    return Problem(graph, cluster, Job(microbatches=microbatches, replication=replication))


def random_cluster(seed: int) -> Cluster:
    """A cluster of presets: 4 to 16 GPUs of one to three types, wired in one of three ways."""
    rng = random.Random(seed)
    count = rng.choice([4, 6, 8, 8, 12, 16])
    kinds = rng.sample(["V100-32GB", "A100-40GB", "A10", "RTX-4090", "L40S"], rng.choice([1, 2, 3]))
    names = [f"d{index}" for index in range(count)]
    data: dict[str, Any] = {
        "format": "pipeplan-cluster/1",
        "name": f"random-{seed}",
        "devices": [{"name": name, "type": rng.choice(kinds)} for name in names],
        "switches": [],
        "links": [],
    }
    wiring = rng.choice(["mesh", "mesh", "switches", "tree"])
    if wiring == "mesh":
        pairs = [(u, v) for index, u in enumerate(names) for v in names[index + 1 :]]
    else:
        data["switches"] = [f"s{index}" for index in range(max(2, count // 4))]
        hubs = data["switches"]
        pairs = [(name, rng.choice(hubs)) for name in names]
        pairs += [
            (hub, hubs[0 if wiring == "switches" else index // 2])
            for index, hub in enumerate(hubs)
            if index
        ]
    for pair in pairs:
        width = math.exp(rng.uniform(math.log(1), math.log(50)))
        data["links"].append({"between": list(pair), "bandwidth_gb_per_s": width, "latency_us": 10})
    return Cluster.from_data(data)
