"""Plans that between them use everything that costs something, made anew each time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from builders import (
    GIGA,
    TERA,
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)

from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import Host
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation, one_forward_one_backward
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RuntimeBehaviour, RuntimeRules

MIB = 2**20
NAMES = [f"l{index}" for index in range(8)]
HOSTS = (
    Host(devices=("a", "b", "d"), slowdown=(1, 1.5, 2.5)),
    Host(devices=("e", "f"), slowdown=(1, 1.25)),
)


def many_sided_plans() -> Iterator[Plan]:
    """Yield plans with replicas, several stages a device, recompute and split backwards.

    All but the fourth overlap reductions with backwards. One is on hosts whose devices slow each
    other, one on devices that communication slows; in three replicas share the optimizer's state,
    in two they reduce tied gradients before the stages do; others run by other rules than our own.
    """
    one_each = [(NAMES[:3], "abc", ["l1"]), (NAMES[3:5], "de", ["l4"]), (NAMES[5:], "f", [])]
    twice = [(NAMES[:2], "d", []), (NAMES[2:4], "a", ["l2", "l3"]), (NAMES[4:6], "e", [])]
    twice += [(NAMES[6:], "dc", ["l7"])]
    replicas = [(NAMES[:4], "ad", ["l1"]), (NAMES[4:], "be", [])]
    behind_shared = [(NAMES[:2], "c", []), (NAMES[2:], "ab", [])]
    yield _plan(one_each, "float32", "adamw", split=0.0, seed=1)
    yield _plan(twice, "bfloat16", "sgd_momentum", split=0.5, seed=2)
    yield _plan(replicas, "float32", "sgd", split=1.0, seed=3)
    late = {"seed": 4, "slow_us": 2_000_000}
    yield _plan(behind_shared, "bfloat16", "sgd", overlap=False, **late)
    yield _plan([(NAMES, "abd", [])], "float32", "adamw", seed=5, hosts=HOSTS)
    yield _plan(one_each, "float32", "adamw", seed=1, while_communicating=1.5)
    yield _plan(one_each, "float32", "adamw", seed=1, while_computing=2.5)
    yield _plan(replicas, "bfloat16", "adamw", split=0.5, seed=7, shards=True)
    yield _plan(one_each, "float32", "sgd_momentum", seed=8, shards=True, hosts=HOSTS)
    yield _plan(replicas, "float32", "adamw", seed=9, tied="in_turn")
    in_turn = {"seed": 10, "tied": "in_turn", "shards": True, "overlap": False}
    yield _plan(replicas, "bfloat16", "adamw", **in_turn)
    yield _reducing_while_sending()
    yield from _of_other_runtimes()


def _reducing_while_sending() -> Plan:
    """The last stage's reduction and the gradients on their way share half duplex links."""
    rows = [layer(name, parameters=[f"of {name}"]) for name in "xy"]
    held = [parameter(f"of {name}", 250 * 10**6) for name in "xy"]
    placed = pipeline(
        graph(rows, parameters=held),
        star(4, duplex="half"),
        [("x", ("d0", "d1")), ("y", ("d2", "d3"))],
        overlap_reduction=False,
    )
    return plan_by_hand(placed, orders(d0="0F0 0B0", d1="0F1 0B1", d2="1F0 1B0", d3="1F1 1B1"))


def _of_other_runtimes() -> Iterator[Plan]:
    """Yield plans whose messages block in every way; where both ends do, in the order of 1F1B."""
    both = {"send": "blocking", "receive": "blocking"}
    host = {"computation_us": 30_000.0, "message_us": 40_000.0, "message_copy_gb_per_s": 0.7}
    loose = (
        {"send": "blocking", "reduction": "device", **host},
        {"receive": "blocking", "streams": "one", "reduction": "flush"},
    )
    # Stage 0 ends last, the others reduce for long.
    replicas = [(NAMES[:1], "f", []), (NAMES[1:5], "ad", []), (NAMES[5:], "be", [])]
    for seed, rules in enumerate(loose):
        yield _plan(replicas, "float32", "sgd", split=0.5, seed=seed, rules=rules)
    # The middle one has most work, and a link that sends and receives at once.
    three = [(NAMES[:1], "a", []), (NAMES[1:7], "e", []), (NAMES[7:], "f", [])]
    six = [((name,), "adf"[number % 3], []) for number, name in enumerate(NAMES[:5])]
    six.append((NAMES[5:], "f", []))
    for stages, exchange, streams in (
        (three, "neighbour", "several"),
        (three, "together", "one"),
        (six, "pairs", "several"),
    ):
        rules = {**both, "exchange": exchange, "streams": streams, "reduction": "stage"}
        yield _plan(stages, "float32", "adamw", rules=rules)


def _plan(
    stages: Sequence[tuple],
    precision: str,
    optimizer: str,
    *,
    split: float = 0.0,
    seed: int | None = None,
    slow_us: int = 300_000,
    overlap: bool = True,
    rules: Mapping[str, object] | None = None,
    hosts: Sequence[Host] = (),
    while_communicating: float = 1.0,
    while_computing: float = 1.0,
    shards: bool = False,
    tied: Literal["at_once", "in_turn"] = "at_once",
) -> Plan:
    """A plan in random orders, or without a seed in the order of 1F1B."""
    job = Job(
        precision=precision,
        optimizer=optimizer,
        microbatches=8 if seed is not None else 6,
        max_stages_per_device=2,
        overlap_reduction=overlap,
        shard_optimizer=shards,
    )
    behaviour = RuntimeBehaviour.model_validate(rules or {})
    runtime = RuntimeRules(behaviour=behaviour, tied=tied)
    machines = _cluster(slow_us, while_communicating, while_computing)
    machines = machines.model_copy(update={"hosts": tuple(hosts)})
    problem = Problem(_graph(precision), machines, job, runtime=runtime)
    pipeline = place(problem, [StageSpec(*map(tuple, stage)) for stage in stages])
    if seed is not None:
        return plan_by_hand(pipeline, _random_orders(pipeline, split, random.Random(seed)))
    ranks, count = pipeline.devices, len(pipeline.stages)
    rows = [
        one_forward_one_backward(rank, len(ranks), count, range(pipeline.microbatches))
        for rank in range(len(ranks))
    ]
    return plan_by_hand(pipeline, dict(zip(ranks, rows, strict=True)))


def _cluster(slow_us: int, while_communicating: float, while_computing: float) -> Cluster:
    """Two switches with a narrow half duplex link between, and another way round it."""
    fast = device_type(
        peak_tflop_per_s={"float32": 1, "tf32": 3, "bfloat16": 2},
        efficiency=0.8,
        ramp_up_us=50_000,
        operation_overhead_us=20_000,
        bandwidth_efficiency=0.8,
        host_link_gb_per_s=0.5,
        loader_gb_per_s=3,
        tiles={"rows": 4, "columns": 4, "at_once": 3},
        by_class={"attention": {"efficiency": 0.3}, "memory": {"bandwidth_efficiency": 0.5}},
        compute_slowdown_while_communicating=while_communicating,
        communication_slowdown_while_computing=while_computing,
    )
    slow = device_type(
        peak_tflop_per_s={"float32": 0.5, "bfloat16": 0.6},
        memory_bandwidth_gb_per_s=200,
        compute_slowdown_while_communicating=while_communicating,
        communication_slowdown_while_computing=while_computing,
    )
    links = [
        link("a", "left", 2, latency_us=100_000),
        link("b", "left", 3, duplex="half", latency_us=30_000),
        link("c", "left", 4, latency_us=slow_us, shared=True, source="assumed"),
        link("d", "right", 2, latency_us=70_000, duplex="half"),
        link("e", "right", 5, latency_us=10_000),
        link("f", "right", 3, source="measured"),
        link("left", "right", 0.5, latency_us=200_000, duplex="half"),
        link("left", "round", 1.5, latency_us=150_000),
        link("round", "right", 1.5, latency_us=50_000),
    ]
    kinds = {name: "fast" if name in "abf" else "slow" for name in "abcdef"}
    return cluster(kinds, links, ["left", "right", "round"], {"fast": fast, "slow": slow})


def _graph(precision: str) -> LayerGraph:
    tensors = [boundary(u, v, bytes_=300 * MIB) for u, v in pairwise(NAMES)]
    tensors[0] |= {"saved_by": "l1"}
    tensors[2] |= {"saved_by": "l3"}
    tensors[4] |= {"saved_by": "l4"}
    tensors += [
        boundary("l0", "l5", "l6", bytes_=150 * MIB, name="skip"),
        boundary("l1", "l4", bytes_=90 * MIB, name="mask", requires_grad=False),
        boundary("l3", "l7", bytes_=70 * MIB, name="late", saved_by="l7"),
    ]
    rows = [_layer(index) for index in range(len(NAMES))]
    rows[0]["parameters"] = ["tied", "p0"]
    rows[7]["parameters"] = ["tied", "p7"]
    rows[0]["batch_bytes"] = rows[7]["batch_bytes"] = 40 * MIB
    rows[5]["parameters"] = ["tied_too", "frozen"]
    rows[2]["parameters"] = ["tied_too"]
    rows[1]["parameters"] = ["p1", "bias1"]
    rows[3]["parameters"] = ["p3"]
    rows[4]["parameters"] = ["p4"]
    size = 4 if precision == "float32" else 2
    sizes = {"tied": 40, "p0": 25, "p7": 60, "tied_too": 30, "frozen": 15}
    sizes |= {"p1": 5, "bias1": 1, "p3": 4, "p4": 35}
    parameters = [
        {**parameter(name, millions * 10**6, trainable=name != "frozen")}
        | {"bytes": size * millions * 10**6}
        for name, millions in sizes.items()
    ]
    return graph(rows, tensors, parameters, precision=precision)


def _layer(index: int) -> dict:
    """Plain ones, of operations by class, measured ones, and ones of memory alone."""
    row = layer(NAMES[index], 0.3 + index / 10, 0.7, stash_bytes=(400 + 10 * index) * MIB)
    if index in (1, 4):
        row |= {"weight_stash_bytes": 450 * MIB, "peak_bytes": (900 + index) * MIB}
    if index == 3:
        row["measured"] = {
            kind: {"forward_s": 0.4, "input_gradient_s": 0.5, "weight_gradient_s": 0.3}
            | ({"backward_s": 0.7} if kind == "slow" else {})
            for kind in ("fast", "slow")
        }
    if index in (2, 5, 6):
        row |= _work({2: "convolution", 5: "causal_attention", 6: "product"}[index])
    if index == 6:
        sizes = {"rows": 9, "inner": 5, "columns": 7}
        row["products"] = [
            {"operator": "linear", "batch": 1, **sizes},
            {"operator": "bmm", "batch": 3, **sizes, "rows": 4},
        ]
    return row


def _work(operation_class: str) -> dict:
    rows, totals = [], {}
    for phase in ("forward", "input_gradient", "weight_gradient"):
        flops, traffic = 4 * TERA // 10, 90 * GIGA
        rows.append((phase, operation_class, 2, flops, 4 * GIGA))
        rows.append((phase, "memory", 3, 0, traffic - 4 * GIGA))
        totals |= {f"{phase}_flops": flops, f"{phase}_traffic_bytes": traffic}
    fields = ("phase", "operation_class", "operations", "flops", "traffic_bytes")
    return totals | {"work": [dict(zip(fields, row, strict=True)) for row in rows]}


def _random_orders(
    pipeline: PlacedPipeline, split: float, rng: random.Random
) -> dict[str, list[Operation]]:
    """An interleaving that can run; replicas take microbatches in turn."""
    devices = [stage.spec.devices for stage in pipeline.stages]
    last, ready = len(devices) - 1, [Operation(0, "F", m) for m in range(pipeline.microbatches)]
    orders: dict[str, list[Operation]] = {device: [] for device in pipeline.devices}
    while ready:
        # Mostly the oldest, so that there are many at a time without a queue that grows on.
        operation = ready.pop(rng.randrange(min(3, len(ready))))
        stage, kind, microbatch = operation
        orders[devices[stage][microbatch % len(devices[stage])]].append(operation)
        if kind == "F" and stage < last:
            ready.append(Operation(stage + 1, "F", microbatch))
        if kind == "I":
            ready.append(Operation(stage, "W", microbatch))
        back = stage if (kind == "F" and stage == last) else stage - 1 if kind in "BI" else -1
        if back >= 0:
            half = rng.random() < split
            ready.append(Operation(back, "I" if half else "B", microbatch))
    return orders
