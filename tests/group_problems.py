"""Small models that split over tensor-parallel groups, with figures drawn or given by hand."""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from builders import boundary, cluster, device_type, graph, link, parameter

from planner import Job, Problem
from planner.model.figures import PHASES
from planner.model.graph_record import SHARED
from planner.model.layer_graph import LayerGraph

GFLOP = 10**9


def split(
    layers: Sequence[Mapping[str, Any]],
    boundaries: Sequence[Mapping[str, Any]],
    *,
    degree: int = 2,
    sequence: bool = False,
    shares: Mapping[str, float] | None = None,
    collectives: Mapping[str, Sequence[tuple[str, str, int]]] | None = None,
    placements: Mapping[str, str] | None = None,
    parameters: Sequence[str] = (),
    summed: Sequence[str] = (),
) -> dict[str, Any]:
    """The split of a graph.

    Args:
        layers: of the graph.
        boundaries: of the graph.
        degree: of the split.
        sequence: of the split.
        shares: what part of each layer is shared; all of it unless told.
        collectives: phase, kind and bytes, by layer.
        placements: of tensors; ``whole`` unless told.
        parameters: that are split.
        summed: parameters that are summed over the group.
    """
    shares, collectives, placements = shares or {}, collectives or {}, placements or {}
    rows = []
    for row in layers:
        part = shares.get(row["name"], 1.0)
        whole = {name: row.get(name) or 0 for name in SHARED}
        whole["weight_stash_bytes"] = row.get("weight_stash_bytes", row.get("stash_bytes", 0))
        rows.append(
            {
                "name": row["name"],
                **{name: int(part * value) for name, value in whole.items()},
                "regions": [0],
                "work": [],
                "parameter_bytes": 0,
                "collectives": [
                    {"phase": phase, "kind": kind, "tensor": "t", "bytes": bytes_}
                    for phase, kind, bytes_ in collectives.get(row["name"], ())
                ],
                "products": [],
                "unsplit": {},
            }
        )
    region = {
        "kind": "columns",
        "layers": [row["name"] for row in layers],
        "sizes": [degree],
        "parameters": [{"name": n, "dimension": 0, "parts": [degree]} for n in parameters],
    }
    return {
        "degree": degree,
        "sequence": sequence,
        "regions": [region],
        "layers": rows,
        "boundaries": [
            {"name": row["name"], "placement": placements.get(row["name"], "whole")}
            for row in boundaries
        ],
        "summed_parameters": list(summed),
    }


def tiny_graph(rng: random.Random, count: int, degrees: Sequence[int]) -> LayerGraph:
    """A chain of layers of milliseconds with splits, drawn."""
    names = [f"l{i}" for i in range(count)]
    layers = [
        {
            "name": name,
            **{f"{phase}_flops": rng.randint(1, 20) * GFLOP for phase in PHASES},
            **{f"{phase}_traffic_bytes": rng.randint(0, 10) * GFLOP // 100 for phase in PHASES},
            "stash_bytes": (stash := rng.randint(1, 100) * 1000),
            "weight_stash_bytes": rng.randint(1, stash),
            "parameters": [f"p{i}", f"q{i}"],
        }
        for i, name in enumerate(names)
    ]
    tensors = [boundary(*pair, bytes_=rng.randint(1, 80) * 100_000) for pair in pairwise(names)]
    parameters = [parameter(f"{k}{i}", rng.randint(1, 10**6)) for k in "pq" for i in range(count)]
    splits = []
    for degree in degrees:
        collectives = {
            name: [
                (phase, rng.choice(["all_reduce", "all_gather"]), rng.randint(0, 10) * 100_000)
                for phase in PHASES
            ]
            for name in names
        }
        placements = {
            row["name"]: rng.choice(["whole", "positions", "region"] if i else ["whole"])
            for i, row in enumerate(tensors)
        }
        splits.append(
            split(
                layers,
                tensors,
                degree=degree,
                shares={name: rng.choice([0.0, 0.5, 0.9, 1.0]) for name in names},
                collectives=collectives,
                placements=placements,
                parameters=[f"p{i}" for i in range(count)],
                summed=[f"q{i}" for i in range(count) if rng.random() < 0.5],
            )
        )
    return graph(layers, tensors, parameters, splits=splits)


def tiny_problem(
    seed: int, *, layers: int = 3, devices: int = 4, degrees: Sequence[int] = (2,), **job: Any
) -> Problem:
    """A problem of devices on one switch or on two, drawn."""
    rng = random.Random(seed)
    names = [f"d{i}" for i in range(devices)]
    hubs = ["a", "b"] if rng.random() < 0.5 else ["a"]
    wide = [
        link(n, hubs[i * len(hubs) // devices], rng.choice([1, 5])) for i, n in enumerate(names)
    ]
    links = [*wide, *([link("a", "b", 1, latency_us=20)] if len(hubs) > 1 else [])]
    types = {"unit": device_type(reserved_gib=0.5)}
    made = Job.parse({"format": "pipeplan-job/1", "recompute": False, **job}, "job")
    the_cluster = cluster(names, links, hubs, types)
    return Problem(tiny_graph(rng, layers, degrees), the_cluster, made)
