"""Problems drawn at random, as plain data of files; the same seed gives the same problem."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

Data = dict[str, Any]
SPEEDS = (1.0, 0.55, 0.35)
"""Relative speeds of the device types."""
LAYER_S = 6e-3
"""About what a layer takes, forward and backward, on the fastest type."""
PHASES = ("forward", "input_gradient", "weight_gradient")
MEGABYTE, MIB, GIB = 10**6, 2**20, 2**30


def graph(name: str, layers: list[Data], sent: Sequence[int], held: Sequence[int]) -> Data:
    """Return a chain of layers.

    Args:
        name: of the graph.
        layers: their fields but the parameters and what was not measured.
        sent: bytes between neighbours.
        held: bytes of the parameters of each layer.
    """
    names = [row["name"] for row in layers]
    nothing = [f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes")]
    return {
        "format": "pipeplan-graph/2",
        "name": name,
        "samples_per_microbatch": 1,
        "precision": "float32",
        "layers": [
            {**dict.fromkeys(nothing, 0), "parameters": [f"p{number}"] if held else [], **row}
            for number, row in enumerate(layers)
        ],
        "boundaries": [
            {
                "name": f"x{number}",
                "producer": first,
                "users": [second],
                "bytes": sent[number],
                "shape": [max(1, sent[number] // 4)],
                "dtype": "float32",
                "requires_grad": True,
            }
            for number, (first, second) in enumerate(pairwise(names))
        ],
        "parameters": [
            {"name": f"p{number}", "elements": bytes_ // 4, "bytes": bytes_}
            for number, bytes_ in enumerate(held)
        ],
    }


def cluster(name: str, types: Data, **rows: Any) -> Data:
    """Return a cluster of devices or nodes, switches and links."""
    head = {"format": "pipeplan-cluster/1", "name": name, "device_types": types}
    return {**head, "switches": [], "links": [], **rows}


def types(count: int) -> Data:
    """Return so many device types with 80 GiB, each slower than the one before."""
    return {
        f"type{k}": {
            "memory_gib": 80,
            "memory_bandwidth_gb_per_s": 2000 * SPEEDS[k],
            "peak_tflop_per_s": {"float32": 100 * SPEEDS[k]},
        }
        for k in range(count)
    }


def chain(layers: int, kind: str, types: int, seed: int) -> Data:
    """Return a chain of layers with measured times; forward takes a third.

    Args:
        layers: their number.
        kind: ``transformer`` (alike but for first and last) or ``cnn`` (log-normal).
        types: number of device types.
        seed: of everything drawn.
    """
    rng = random.Random(seed)
    rows, sent, held = [], [], []
    for number in range(layers):
        seconds, activation, state = _layer(rng, kind, number, layers)
        times = {
            f"type{k}": dict.fromkeys((f"{phase}_s" for phase in PHASES), seconds / SPEEDS[k] / 3)
            for k in range(types)
        }
        rows.append({"name": f"layer{number}", "stash_bytes": activation, "measured": times})
        sent.append(activation)
        held.append(state)
    return graph(f"{kind}-{layers}", rows, sent, held)


def _layer(rng: random.Random, kind: str, number: int, count: int) -> tuple[float, int, int]:
    """Return seconds, bytes of activations and bytes of parameters."""
    if kind == "transformer":
        share = {0: 0.4, count - 1: 1.8}.get(number, 1.0)
        activation = 50 * MEGABYTE * rng.choice([1, 1, 1, 1.5])
        return LAYER_S * rng.uniform(0.9, 1.1) * share, int(activation), 100 * MEGABYTE
    return (
        LAYER_S * math.exp(rng.gauss(0, 0.6)),
        int(40 * MEGABYTE * math.exp(rng.gauss(0, 0.9))),
        int(100 * MEGABYTE * math.exp(rng.gauss(0, 1))) // 4 * 4,
    )


def random_matrix(devices: int, kinds: int, seed: int, run: int = 4) -> Data:
    """Return a cluster with a link for each pair, of 3 to 60 GB/s (log-uniform).

    Args:
        devices: their number.
        kinds: number of device types.
        seed: of the bandwidths.
        run: devices of a type before the next type follows.
    """
    rng = random.Random(seed)
    names = [f"d{number}" for number in range(devices)]
    links = [
        {
            "between": list(pair),
            "bandwidth_gb_per_s": math.exp(rng.uniform(math.log(3), math.log(60))),
            "latency_us": 5,
        }
        for pair in combinations(names, 2)
    ]
    rows = [
        {"name": name, "type": f"type{number // run % kinds}"} for number, name in enumerate(names)
    ]
    return cluster(f"random-{devices}", types(kinds), devices=rows, links=links)


def two_level(counts: Sequence[int], node: int) -> Data:
    """Return nodes on one switch; slower types have slower network cards.

    Args:
        counts: nodes of each type.
        node: devices in a node.
    """
    cards = (25,) if len(counts) == 1 else (50, 25, 12)
    inside = {"bandwidth_gb_per_s": 300, "latency_us": 2}
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    return cluster(
        f"two-level-{sum(counts) * node}",
        types(len(counts)),
        nodes=[
            {"name": f"n{number}", "devices": node, "type": f"type{kind}", "link": inside}
            for number, kind in enumerate(kinds)
        ],
        switches=["network"],
        links=[
            {
                "between": [f"n{number}", "network"],
                "bandwidth_gb_per_s": cards[kind],
                "latency_us": 5,
            }
            for number, kind in enumerate(kinds)
        ],
    )


def random_cluster(seed: int) -> Data:
    """Return a cluster of presets: 4 to 16 GPUs of one to three types, wired in one of 3 ways."""
    rng = random.Random(seed)
    count = rng.choice([4, 6, 8, 8, 12, 16])
    kinds = rng.sample(["V100-32GB", "A100-40GB", "A10", "RTX-4090", "L40S"], rng.choice([1, 2, 3]))
    names = [f"d{number}" for number in range(count)]
    devices = [{"name": name, "type": rng.choice(kinds)} for name in names]
    wiring = rng.choice(["mesh", "mesh", "switches", "tree"])
    hubs = [] if wiring == "mesh" else [f"s{number}" for number in range(max(2, count // 4))]
    pairs = list(combinations(names, 2))
    if hubs:
        pairs = [(name, rng.choice(hubs)) for name in names]
        pairs += [
            (hub, hubs[0 if wiring == "switches" else number // 2])
            for number, hub in enumerate(hubs)
            if number
        ]
    links = [
        {
            "between": list(pair),
            "bandwidth_gb_per_s": math.exp(rng.uniform(math.log(1), math.log(50))),
            "latency_us": 10,
        }
        for pair in pairs
    ]
    return cluster(f"random-{seed}", {}, devices=devices, switches=hubs, links=links)


# --- tiny problems, whose best plans are known ----------------------------------------------------


def tiny_problems(count: int, seed: int = 0) -> Iterator[Data]:
    """Yield random problems of up to 6 layers, 3 devices and 4 microbatches, in all spaces."""
    for number in range(count):
        yield tiny_problem(random.Random(f"{seed}.{number}"))


def tiny_problem(rng: random.Random) -> Data:
    """Return a random problem whose plans can be enumerated."""
    backward = rng.choice(["whole", "split", "any"])
    twice = rng.random() < 0.3
    job = {
        # With two stages a device there are many more plans to try.
        "microbatches": rng.randint(2, 3 if twice else 4),
        "backward": backward,
        "max_stages_per_device": 2 if twice else 1,
        "replication": not twice and rng.random() < 0.6,
        "recompute": False,
        "overlap_reduction": True,
    }
    layers = rng.randint(2, 4 if twice else 6)
    devices = rng.randint(2, 2 if twice else 3)
    kinds = [f"type{k}" for k in range(rng.randint(1, devices))]
    # With large parameters a stage has several buckets.
    largest_mib = rng.choice([8, 60]) if job["replication"] else 8
    return {
        "graph": _tiny_graph(rng, layers, kinds, largest_mib),
        "cluster": _tiny_cluster(rng, devices, kinds),
        "job": {"format": "pipeplan-job/1", **job},
    }


def _tiny_cluster(rng: random.Random, count: int, kinds: list[str]) -> Data:
    names = [f"d{i}" for i in range(count)]
    links = [
        {
            "between": list(pair),
            "bandwidth_gb_per_s": rng.choice([0.5, 1.0, 4.0, 10.0]),
            "latency_us": rng.choice([0.0, 50.0]),
            "duplex": rng.choice(["full", "half"]),
        }
        for pair in combinations(names, 2)
    ]
    device_type = {
        "memory_gib": 64.0,
        "memory_bandwidth_gb_per_s": 50.0,
        "peak_tflop_per_s": {"float32": 1.0},
        "reserved_gib": 0.0,
    }
    rows = [{"name": name, "type": kinds[i % len(kinds)]} for i, name in enumerate(names)]
    return cluster("tiny", dict.fromkeys(kinds, device_type), devices=rows, links=links)


def _tiny_graph(rng: random.Random, count: int, kinds: list[str], largest_mib: int) -> Data:
    sent = [rng.randint(1, 40) * MIB // 4 for _ in range(count - 1)]
    rows = [_tiny_layer(rng, number, kinds) for number in range(count)]
    held = [4 * (rng.randint(1, largest_mib) * MIB // 4) for _ in range(count)]
    found = graph("tiny", rows, sent, held)
    for row in found["boundaries"]:
        row |= {"shape": [1], "saved_by": row["users"][0]}
    return found


def _tiny_layer(rng: random.Random, number: int, kinds: list[str]) -> Data:
    base = rng.randint(2, 20) * 1e-3
    times = {kind: _tiny_times(rng, base * (1 + k)) for k, kind in enumerate(kinds)}
    return {"name": f"layer{number}", "stash_bytes": 40 * MIB, "measured": times}


def _tiny_times(rng: random.Random, base: float) -> dict[str, float]:
    """Return measured times; a whole backward may be quicker than its parts."""
    gradient_s, weight_s = base * rng.uniform(0.7, 1.3), base * rng.uniform(0.5, 1.5)
    times = {"forward_s": base, "input_gradient_s": gradient_s, "weight_gradient_s": weight_s}
    if rng.random() < 0.3:
        times["backward_s"] = max(gradient_s, weight_s, 0.8 * (gradient_s + weight_s))
    return times
