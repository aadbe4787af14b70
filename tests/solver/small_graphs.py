"""Random problems on graphs with branches, small enough to try every division into stages."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

from builders import boundary, cluster, device_type, graph, layer, link, parameter

from planner import Job, Problem
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.search.partition.bounds.schedule import schedule_bound_s

MIB = 2**20


def branching_problem(
    seed: int,
    *,
    layers: int,
    devices: int,
    microbatches: int = 4,
    memory_mib: float = 10_000.0,
    **job: object,
) -> Problem:
    """Layers with one to three inputs from any layers before; tensors with one user or several."""
    rng = random.Random(seed)
    names = [f"l{i}" for i in range(layers)]
    users: dict[int, set[int]] = {}
    for index in range(1, layers):
        for source in rng.sample(range(index), min(index, rng.choice([1, 1, 2, 3]))):
            users.setdefault(source, set()).add(index)
    tensors, saved = [], dict.fromkeys(names, 0)
    for source, held in users.items():
        groups = [held] if rng.random() < 0.6 else [{user} for user in held]
        for number, group in enumerate(groups):
            bytes_ = rng.randint(1, 40) * MIB // 4
            saver = rng.choice([None, source, *sorted(group), *sorted(group)])
            if saver is not None:
                saved[names[saver]] += bytes_
            tensors.append(
                boundary(
                    names[source],
                    *(names[user] for user in sorted(group)),
                    bytes_=bytes_,
                    name=f"t{source}-{number}",
                    saved_by=None if saver is None else names[saver],
                    requires_grad=rng.random() < 0.8,
                )
            )
    rows = [
        layer(
            name,
            rng.randint(1, 10) * 1e-3,
            rng.randint(1, 20) * 1e-3,
            stash_bytes=saved[name] + rng.randint(0, 10) * MIB,
            parameters=[f"p-{name}"],
        )
        for name in names
    ]
    parameters = [parameter(f"p-{name}", rng.randint(0, 4) * MIB // 4) for name in names]
    held_by = [f"d{i}" for i in range(devices)]
    pairs = [(u, v) for i, u in enumerate(held_by) for v in held_by[i + 1 :]]
    links = [link(u, v, rng.choice([0.5, 1, 4]), latency_us=rng.choice([0, 50])) for u, v in pairs]
    types = {"unit": device_type(memory_gib=memory_mib / 1024)}
    settings = {
        "backward": "whole",
        "replication": False,
        "recompute": False,
        "optimizer": "sgd",
        **job,
    }
    return Problem(
        graph(rows, tensors, parameters),
        cluster(held_by, links, types=types),
        Job(microbatches=microbatches, **settings),
    )


def interval_divisions(problem: Problem) -> Iterator[list[list[str]]]:
    """All ways to cut the file's order into stages."""
    names = list(problem.graph.layers)
    for count in range(1, min(len(names), len(problem.cluster.devices)) + 1):
        for cuts in combinations(range(1, len(names)), count - 1):
            edges = [0, *cuts, len(names)]
            yield [names[a:b] for a, b in pairwise(edges)]


def on_single_devices(
    problem: Problem, division: list[list[str]]
) -> Iterator[tuple[StageSpec, ...]]:
    for devices in permutations(problem.cluster.device_names, len(division)):
        yield tuple(
            StageSpec(tuple(layers), (device,))
            for layers, device in zip(division, devices, strict=True)
        )


def bound_within_memory_s(pipeline: PlacedPipeline) -> float:
    """The best over the microbatches in flight that fit of what is proved for so many.

    An oracle for stages on single devices: schedule_bound_s, and for every stage with at most
    k microbatches in flight full blocks of k, a round trip each, and the last block.
    """
    bound_s = schedule_bound_s(pipeline)
    stages, count = pipeline.stages, pipeline.microbatches
    names = [stage.spec.devices[0] for stage in stages]
    ends = [pipeline.tail_s(j, name) for j, name in enumerate(names)]
    head_s = home_s = 0.0
    for j, (stage, name) in enumerate(zip(stages, names, strict=True)):
        home_s = max(home_s, ends[j])
        held = max(stage.output_bytes, stage.input_gradient_bytes + stage.output_gradient_bytes)
        free = pipeline.capacity_bytes(name) - pipeline.static_bytes(name) - held
        most = min(count, free // stage.stash_bytes if stage.stash_bytes else count)
        if free < 0 or most < 1:
            return float("inf")
        trip_s = _trip_s(pipeline, names, j)
        work_s = stage.times[name].forward_s + stage.times[name].backward_s
        chosen = []
        for k in range(1, most + 1):
            blocks = -(-count // k) - 1
            if blocks:
                last_s = max(trip_s, (count - blocks * k) * work_s)
                chosen.append(head_s + blocks * trip_s + last_s + home_s)
            else:
                chosen.append(0.0)
        bound_s = max(bound_s, min(chosen))
        if j + 1 < len(stages):
            head_s += stage.times[name].forward_s
            head_s += pipeline.forward_transfer(j, name, names[j + 1]).seconds
            home_s += stage.times[name].backward_s
            home_s += pipeline.backward_transfer(j + 1, names[j + 1], name).seconds
    return bound_s


def _trip_s(pipeline: PlacedPipeline, names: list[str], first: int) -> float:
    trip_s = 0.0
    for j in range(first, len(names)):
        times = pipeline.stages[j].times[names[j]]
        trip_s += times.forward_s + times.backward_s
        if j + 1 < len(names):
            trip_s += pipeline.forward_transfer(j, names[j], names[j + 1]).seconds
            trip_s += pipeline.backward_transfer(j + 1, names[j + 1], names[j]).seconds
    return trip_s


def least_bound_s(problem: Problem, divisions: list[list[list[str]]]) -> float:
    """Over the divisions, all single devices for their stages and, if allowed, recomputations."""
    from brute_force import all_recomputations

    return min(
        bound_within_memory_s(place(problem, specs))
        for division in divisions
        for plain in on_single_devices(problem, division)
        for specs in all_recomputations(problem, plain)
    )
