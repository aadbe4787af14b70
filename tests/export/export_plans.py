"""Plans of a small chain with torchtitan's names, placed and ordered as a test says."""

import os
import random
import signal
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise

from builders import GIGA, ROOT, boundary, cluster, device_type, graph, layer, link, parameter
from warm_python import warm_python

from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.schedules.assignment import Assignment
from planner.schedules.whole import one_by_one

PEAKS = {"float32": 1, "float64": 1}
NAMES = ("tok_embeddings", *(f"layers.{i}" for i in range(5)), "norm", "lm_head", "loss")
"""Nine layers, the loss among them."""


def titan_graph(
    names: Sequence[str] = NAMES, *skips: tuple[str, str], tied: bool = False
) -> LayerGraph:
    """A chain of layers of equal times, each but the loss with a weight of its own."""
    weight = {name: f"{name}.weight" for name in names if name != "loss"}
    if tied:
        weight["lm_head"] = weight["tok_embeddings"]
    rows = [
        layer(name, stash_bytes=GIGA, parameters=[weight[name]] if name in weight else [])
        for name in names
    ]
    edges = [boundary(a, b, bytes_=10**6) for a, b in (*pairwise(names), *skips)]
    return graph(rows, edges, [parameter(name) for name in dict.fromkeys(weight.values())])


def placed(
    the_graph: LayerGraph,
    cuts: Sequence[int],
    devices: Sequence[str],
    recompute: Mapping[int, Sequence[str]] | None = None,
    memory_gib: float = 1024,
    **job: object,
) -> PlacedPipeline:
    """A chain cut before the layers with indices ``cuts``; ``devices`` has a word a stage."""
    names = list(the_graph.layers)
    bounds = [0, *cuts, len(names)]
    rerun = recompute or {}
    specs = [
        StageSpec(tuple(names[a:b]), tuple(on.split()), tuple(rerun.get(i, ())))
        for i, ((a, b), on) in enumerate(zip(pairwise(bounds), devices, strict=True))
    ]
    count = 1 + max(int(name[1:]) for spec in specs for name in spec.devices)
    machines = [f"d{index}" for index in range(count)]
    the_cluster = cluster(
        machines,
        [link(name, "hub") for name in machines],
        ["hub"],
        {"unit": device_type(memory_gib=memory_gib, peak_tflop_per_s=PEAKS)},
    )
    fields = {"microbatches": 4, "optimizer": "sgd", "max_stages_per_device": 4, **job}
    return place(Problem(the_graph, the_cluster, Job.model_validate(fields)), specs)


def in_order(pipeline: PlacedPipeline, owner: Assignment | None = None) -> Plan:
    """One microbatch after the other; microbatch m on the m-th replica, in turn."""
    owner = owner or {
        (index, m): stage.spec.devices[m % len(stage.spec.devices)]
        for index, stage in enumerate(pipeline.stages)
        for m in range(pipeline.microbatches)
    }
    return plan_by_hand(pipeline, one_by_one(pipeline, owner))


def shuffled(pipeline: PlacedPipeline, seed: int, *, split: bool = True) -> Plan:
    """A random order without deadlock; forwards of the last stage in order of microbatches.

    With ``split`` about half of the backwards are input and weight gradients apart.
    """
    draw = random.Random(seed)
    last = len(pipeline.stages) - 1
    orders: dict[str, list[Operation]] = {device: [] for device in pipeline.devices}
    ready = [Operation(0, "F", m) for m in range(pipeline.microbatches)]
    next_loss = 0
    while ready:
        free = [row for row in ready if row[:2] != (last, "F") or row.microbatch == next_loss]
        stage, kind, microbatch = operation = draw.choice(free)
        ready.remove(operation)
        orders[pipeline.stages[stage].spec.devices[0]].append(operation)
        next_loss += (stage, kind) == (last, "F")
        below = stage if stage == last else None
        if kind == "F" and stage < last:
            ready.append(Operation(stage + 1, "F", microbatch))
        if kind == "I":
            ready.append(Operation(stage, "W", microbatch))
        if kind != "F":
            below = stage - 1 if kind in "BI" and stage else None
        if below is not None:
            apart = split and draw.random() < 0.5
            ready.append(Operation(below, "I" if apart else "B", microbatch))
    return plan_by_hand(pipeline, orders)


def torchrun(ranks: int, *arguments: object, **extra: str) -> str:
    """Run a script on several ranks of this machine; its output, if it succeeds."""
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": command[0]}
    running = subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks), *map(str, arguments)],
        env={**os.environ, **environment, **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = running.communicate()
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    assert running.returncode == 0, out[-4000:]
    return out


def on_pipelines(alone: Plan, count: int, **job: object) -> Plan:
    """A plan of one pipeline run by ``count`` of them, with as many times the microbatches.

    Device dI of the one is d(I * count) and those that follow; microbatch m of pipeline p is
    number m * count + p.
    """
    orders = {
        f"d{int(device[1:]) * count + p}": [
            Operation(stage, kind, m * count + p) for stage, kind, m in order
        ]
        for device, order in alone.parsed_orders().items()
        for p in range(count)
    }
    names = list(alone.problem.graph.layers)
    devices = [
        " ".join(f"d{int(stage.devices[0][1:]) * count + p}" for p in range(count))
        for stage in alone.stages
    ]
    cuts = [names.index(stage.layers[0]) for stage in alone.stages[1:]]
    microbatches = count * alone.microbatches
    again = {stage.index: stage.recompute for stage in alone.stages}
    pipeline = placed(alone.problem.graph, cuts, devices, again, microbatches=microbatches, **job)
    return plan_by_hand(pipeline, {device: orders[device] for device in pipeline.devices})
