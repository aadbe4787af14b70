"""The stage table's figures are those of placed stages, for random stages of random graphs."""

import random
from itertools import pairwise

import pytest
from builders import boundary, cluster, device_type, graph, layer, link, parameter

from planner import Job, Problem
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.model.layer_graph import LayerGraph

LAYERS = 12


def drawn_graph(rng: random.Random) -> LayerGraph:
    """Layers in blocks of two, tensors that skip layers, tied and frozen parameters."""
    names = ["first", *(f"h.{n // 2}.{n % 2}" for n in range(LAYERS - 2)), "last"]
    parameters = [parameter(f"p{n}", rng.randrange(9_000), rng.random() < 0.8) for n in range(15)]
    tensors = []
    for n, name in enumerate(names[:-1]):
        users = [names[n + 1], *(row for row in names[n + 2 :] if rng.random() < 0.15)]
        saver = rng.choice([None, *users, rng.choice(names[n + 1 :])])
        tensors.append(
            boundary(name, *users, bytes_=rng.randrange(10**6), saved_by=saver)
            | {"requires_grad": rng.random() < 0.8}
        )
    saved = dict.fromkeys(names, 0)
    for row in tensors:
        if row["saved_by"]:
            saved[row["saved_by"]] += row["bytes"]
    rows = [
        layer(
            name,
            rng.random(),
            rng.random(),
            stash_bytes=(stash := saved[name] + rng.choice([0, rng.randrange(10**7)])),
            weight_stash_bytes=rng.choice([None, rng.randrange(stash + 1)]),
            batch_bytes=rng.choice([0, rng.randrange(10**5)]),
            parameters=[f"p{rng.randrange(15)}" for _ in range(rng.randrange(4))],
            device_types=rng.choice([[], [], ["fast"]]),
        )
        for name in names
    ]
    return graph(rows, tensors, parameters)


def drawn_problem(seed: int) -> Problem:
    rng = random.Random(seed)
    types = {
        "slow": device_type(host_link_gb_per_s=3, operation_overhead_us=4),
        "fast": device_type(peak_tflop_per_s={"float32": 2.5}, host_link_gb_per_s=11),
    }
    names = {"d0": "slow", "d1": "fast", "d2": "fast", "d3": "slow", "d4": "fast"}
    machines = cluster(names, [link(*pair) for pair in pairwise(names)], types=types)
    zero = rng.choice([False, True])
    job = {
        "optimizer": rng.choice(["sgd", "adamw"]),
        "shard_optimizer": zero,
        "recompute": rng.choice([True, "blocks"]),
        "offload": not zero,
    }
    return Problem(drawn_graph(rng), machines, Job.model_validate(job))


def middle_stage(
    problem: Problem, rng: random.Random, devices: tuple[str, ...]
) -> tuple[PlacedPipeline, tuple[int, int, int, int]]:
    """A stage with random limits between two others, placed."""
    table = StageTable(problem)
    first, last = sorted(rng.sample(range(1, len(table.layers)), 2))
    limits = rng.randrange(len(table.layers)), rng.randrange(len(table.layers))
    specs = [
        StageSpec(table.layers[:first], ("d0",)),
        StageSpec(
            table.layers[first:last],
            devices,
            table.recomputed(first, last, limits[0]),
            table.offloaded(first, last, *limits) if problem.job.offload else (),
        ),
        StageSpec(table.layers[last:], ("d4",)),
    ]
    return place(problem, specs), (first, last, *limits)


@pytest.mark.parametrize("seed", range(40))
def test_figures_are_those_of_a_placed_stage(seed: int) -> None:
    problem, rng = drawn_problem(seed), random.Random(seed)
    devices = ("d1", "d2") if seed % 2 else ("d3",)
    placed, (first, last, rerun, offload) = middle_stage(problem, rng, devices)
    offload = offload if problem.job.offload else 0
    table, stage = StageTable(problem), placed.stages[1]
    arrays, kind = table.arrays, problem.cluster.type_of(devices[0])
    row = table.figures(kind, first, last, rerun=rerun, offload=offload, holders=len(devices))
    times = stage.times[devices[0]]
    assert [row[f"{k}_s"] for k in "BFIW"] == [times.seconds(k) for k in "BFIW"]
    for name in "workspace split_workspace stash weight_stash offload".split():
        assert row[f"{name}_bytes"] == getattr(stage, f"{name}_bytes"), name
    k = table.types.index(kind)
    assert arrays.crossing[k, first] == stage.input_bytes
    assert arrays.crossing[k, last] == stage.output_bytes
    assert arrays.crossing_gradient[k, first] == stage.input_gradient_bytes
    assert arrays.sent[k, last] == stage.sent_bytes
    assert arrays.returned[k, first] == stage.returned_bytes
    graph_layers = problem.graph.record.layers[first:last]
    assert row.may_run == all(layer.may_run_on(kind) for layer in graph_layers)
    held = {p for layer in graph_layers for p in layer.parameters}
    outside = {
        p
        for layer in (*problem.graph.record.layers[:first], *problem.graph.record.layers[last:])
        for p in layer.parameters
    }
    if not held & outside:
        assert row.static_bytes == stage.static_bytes
        step_s = row.step_traffic / (problem.cluster.device_types[kind].optimizer_gb_per_s * 1e9)
        assert step_s == pytest.approx(placed.optimizer_s[devices[0]], rel=1e-12)
        reduced = sum(row.bytes for row in placed.synchronisations if row.stages == (1,))
        assert len(devices) == 1 or row.gradient_bytes == reduced
