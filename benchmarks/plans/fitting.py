"""Problems with little memory, made so that a plan fits: its stages, and slack of half a percent.

Layers have log-normal weights and activations. A plan is drawn, and each device gets the memory
that its stages take with one microbatch in flight and their messages, and a little more.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

from benchmarks.plans import drawn
from benchmarks.plans.drawn import GIB, PHASES, Data

SHAPES = (
    *((layers, devices, 1, 0.01) for layers, devices in ((24, 6), (28, 8), (30, 9))),
    *((3 * devices, devices, 1, 0.005) for devices in (10, 11, 12, 13, 14, 15, 16, 17, 18)),
    *((24, 6, 2, 0.02), (28, 7, 2, 0.01), (30, 8, 2, 0.01), (36, 9, 2, 0.01), (40, 10, 2, 0.005)),
    *((50, 11, 2, 0.005), (60, 12, 2, 0.005), (40, 8, 3, 0.01)),
)
"""Layers, devices, stages a device, and share of memory beyond what the plan takes."""
ADAM = 4
"""Weights, gradients and two moments in float32, in bytes of the weights."""


def problem(layers: int, devices: int, stages: int, slack: float, seed: int) -> Data:
    """Return a problem and, as ``planted``, a plan that fits: (first layer, end, device) each."""
    rng = random.Random(f"fits {seed}")
    rows, sent, held = [], [], []
    for number in range(layers):
        seconds = 6e-3 * math.exp(rng.gauss(0, 0.4))
        sent.append(int(20e6 * math.exp(rng.gauss(0, 0.8))) // 4 * 4)
        held.append(int(100e6 * math.exp(rng.gauss(0, 0.8))) // 4 * 4)
        times = dict.fromkeys((f"{phase}_s" for phase in PHASES), seconds / 3)
        measured = {f"t{device}": times for device in range(devices)}
        rows.append({"name": f"layer{number}", "stash_bytes": sent[-1], "measured": measured})
    planted = _planted(rng, layers, devices, stages)
    need = _need(planted, sent, held)
    types = {
        f"t{device}": {
            "memory_gib": bytes_ * (1 + slack * rng.uniform(0.5, 1.5)) / GIB,
            "memory_bandwidth_gb_per_s": 1000,
            "peak_tflop_per_s": {"float32": 50},
            "reserved_gib": 0,
        }
        for device, bytes_ in need.items()
    }
    names = [f"d{device}" for device in range(devices)]
    cluster = drawn.cluster(
        "little-memory",
        types,
        devices=[{"name": name, "type": f"t{number}"} for number, name in enumerate(names)],
        switches=["s"],
        links=[
            {"between": [name, "s"], "bandwidth_gb_per_s": 20, "latency_us": 5} for name in names
        ],
    )
    job = {"microbatches": 4, "max_stages_per_device": stages, "replication": False}
    return {
        "graph": drawn.graph("little-memory", rows, sent, held),
        "cluster": cluster,
        "job": {"format": "pipeplan-job/1", **job},
        "planted": planted,
    }


def _planted(
    rng: random.Random, layers: int, devices: int, stages: int
) -> list[tuple[int, int, int]]:
    """Return stages whose neighbours are on different devices."""
    edges = [0, *sorted(rng.sample(range(1, layers), devices * stages - 1)), layers]
    holds = [device for device in range(devices) for _ in range(stages)]
    while True:
        rng.shuffle(holds)
        if all(one != other for one, other in pairwise(holds)):
            return [(*edge, device) for edge, device in zip(pairwise(edges), holds, strict=True)]


def _need(planted: list[tuple[int, int, int]], sent: list[int], held: list[int]) -> dict[int, int]:
    """Return the bytes of each device with one microbatch in flight in each of its stages.

    These are weights with gradients and moments, what the layers keep, the messages of a stage in
    both directions, and, once a device, what the largest layer takes while its backward runs.
    """
    before = [0, *sent[:-1]]
    after = [*sent[:-1], 0]
    need, largest = Counter[int](), dict.fromkeys(row[2] for row in planted)
    for first, end, device in planted:
        need[device] += ADAM * sum(held[first:end]) + sum(sent[first:end]) + before[first]
        need[device] += 2 * (before[first] + after[end - 1])
        runs = max(held[layer] + before[layer] + 2 * after[layer] for layer in range(first, end))
        largest[device] = max(largest[device] or 0, runs)
    return {device: need[device] + (largest[device] or 0) for device in sorted(need)}
