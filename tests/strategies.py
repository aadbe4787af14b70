"""Random small artifacts: layer graphs, clusters, problems, partitions and schedules.

Figures lie on coarse grids, so that equal times and full links are common. Strategies that need
no argument are made once: making one costs more than drawing from it several times.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import Operation
from planner.plan.plan import Plan, Sync
from planner.plan.problem import ModelSource, Problem
from planner.plan.runtime_rules import RuntimeBehaviour, RuntimeRules
from planner.schedules.pipelines import spread_orders

MEGA = 10**6
MAX_MICROBATCHES = 5

flops = st.integers(0, 30).map(lambda n: n * 10**10)
sizes = st.integers(0, 40).map(lambda n: n * 5 * MEGA)
_perhaps_sizes = st.none() | sizes
_often = st.integers(0, 4).map(bool)
json_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
)
json_values = st.recursive(
    json_scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def _boundaries(draw: st.DrawFn, names: list[str]) -> tuple[list[dict], dict[str, int]]:
    """Tensors from each layer to the next, random skips, and the bytes of them each layer saves."""
    count = len(names)
    users = [{index + 1} for index in range(count - 1)]
    rows = [(index, found) for index, found in enumerate(users)]
    if count > 2:
        for index in draw(st.lists(st.integers(0, count - 3), max_size=3)):
            later = draw(st.sets(st.integers(index + 2, count - 1), min_size=1, max_size=2))
            if draw(st.booleans()):
                users[index].update(later)  # One tensor with several users.
            else:
                rows.append((index, later))
    boundaries = []
    saved = dict.fromkeys(names, 0)
    for number, (producer, found) in enumerate(rows):
        bytes_ = draw(sizes)
        savers = [None, names[producer], *(names[user] for user in sorted(found))]
        saved_by = draw(st.sampled_from(savers))
        if saved_by is not None:
            saved[saved_by] += bytes_
        boundaries.append(
            {
                "name": f"t{number}",
                "producer": names[producer],
                "users": [names[user] for user in sorted(found)],
                "bytes": bytes_,
                "shape": [bytes_],
                "dtype": "int8",
                "requires_grad": draw(_often),
                "saved_by": saved_by,
            }
        )
    return boundaries, saved


@st.composite
def layer_graphs(
    draw: st.DrawFn, min_layers: int = 1, max_layers: int = 6, precision: str = "float32"
) -> LayerGraph:
    """A chain of layers with random skips; parameters may be tied, frozen or missing."""
    count = draw(st.integers(min_layers, max_layers))
    names = [f"l{index}" for index in range(count)]
    boundaries, saved = _boundaries(draw, names)
    parameters = [
        {
            "name": f"p{number}",
            "elements": draw(st.integers(0, 40)) * MEGA,
            "trainable": draw(_often),
        }
        for number in range(draw(st.integers(0, count + 1)))
    ]
    holders = [
        draw(st.sets(st.integers(0, count - 1), max_size=2 if draw(st.booleans()) else 1))
        for _ in parameters
    ]
    width = 4 if precision == "float32" else 2
    layers = [
        {
            "name": name,
            "forward_flops": draw(flops),
            "input_gradient_flops": draw(flops),
            "weight_gradient_flops": draw(flops),
            "forward_traffic_bytes": draw(sizes),
            "input_gradient_traffic_bytes": draw(sizes),
            "weight_gradient_traffic_bytes": draw(sizes),
            "stash_bytes": saved[name] + draw(sizes),
            "batch_bytes": draw(st.just(0) | sizes),
            "weight_stash_bytes": draw(_perhaps_sizes),
            "peak_bytes": draw(_perhaps_sizes),
            "parameters": [f"p{n}" for n, held in enumerate(holders) if index in held],
        }
        for index, name in enumerate(names)
    ]
    return LayerGraph.parse(
        {
            "format": "pipeplan-graph/2",
            "name": "random",
            "samples_per_microbatch": 1,
            "precision": precision,
            "layers": layers,
            "boundaries": boundaries,
            "parameters": [{**row, "bytes": width * row["elements"]} for row in parameters],
        }
    )


_bandwidths = st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0, 10.0])
_latencies = st.sampled_from([0.0, 0.0, 10.0, 10_000.0])
_duplexes = st.sampled_from(["full", "full", "half"])
_sources = st.sampled_from(["measured", "datasheet", "assumed"])


def _link(draw: st.DrawFn, first: str, second: str, shared: bool | None) -> dict:
    return {
        "between": draw(st.permutations([first, second])),
        "bandwidth_gb_per_s": draw(_bandwidths),
        "latency_us": draw(_latencies),
        "duplex": draw(_duplexes),
        "shared": draw(st.integers(0, 5)) == 0 if shared is None else shared,
        "source": draw(_sources),
    }


_memory_bandwidths = st.sampled_from([1.0, 50.0, 1000.0])
_efficiencies = st.sampled_from([0.5, 1.0])


@st.composite
def clusters(
    draw: st.DrawFn,
    min_devices: int = 1,
    max_devices: int = 5,
    *,
    connected: bool = True,
    shared: bool | None = None,
    slowed: bool = False,
) -> Cluster:
    """Devices of one or two types behind no, one or two switches, with some extra links.

    With ``slowed`` some of them may slow each other, or be slowed by what they send and receive.
    """
    count = draw(st.integers(min_devices, max_devices))
    devices = [f"d{index}" for index in range(count)]
    switches = [f"s{index}" for index in range(draw(st.integers(0, 2)))]
    if switches:
        pairs = [(device, draw(st.sampled_from(switches))) for device in devices]
        pairs += list(pairwise(switches))
    else:
        pairs = [(u, v) for index, u in enumerate(devices) for v in devices[index + 1 :]]
    vertices = devices + switches
    if len(vertices) > 1:
        for _ in range(draw(st.integers(0, 3))):
            pairs.append(tuple(draw(st.permutations(vertices))[:2]))
    if not connected:
        pairs = [pair for pair in pairs if draw(st.integers(0, 3)) > 0]
    kinds = {
        name: {
            "memory_gib": 512,
            "memory_bandwidth_gb_per_s": draw(_memory_bandwidths),
            "peak_tflop_per_s": {"float32": peak, "bfloat16": 2 * peak},
            "efficiency": draw(_efficiencies),
            "reserved_gib": 1,
            "host_link_gb_per_s": draw(st.sampled_from([None, None, 0.5, 2.0])),
            "loader_gb_per_s": draw(st.sampled_from([None, None, 0.25, 4.0])),
            "compute_slowdown_while_communicating": draw(
                st.sampled_from([1.0, 1.0, 1.25, 1.5, 3.0] if slowed else [1.0])
            ),
            "communication_slowdown_while_computing": draw(
                st.sampled_from([1.0, 1.0, 1.5, 4.0] if slowed else [1.0])
            ),
        }
        for name, peak in (("fast", 2.0), ("slow", 1.0))
    }
    types = [draw(st.sampled_from(sorted(kinds))) for _ in devices]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "random",
            "device_types": {name: kinds[name] for name in sorted(set(types))},
            "devices": [
                {"name": name, "type": kind} for name, kind in zip(devices, types, strict=True)
            ],
            "switches": switches,
            "links": [_link(draw, *pair, shared) for pair in pairs],
            "hosts": draw(_hosts(devices)) if slowed else [],
        }
    )


@st.composite
def _hosts(draw: st.DrawFn, devices: list[str]) -> list[dict]:
    """No host, one, or two, whose devices slow each other."""
    found, left = [], list(devices)
    for _ in range(draw(st.integers(0, 2))):
        held, left = left[: (size := draw(st.integers(0, len(left))))], left[size:]
        more = draw(st.lists(st.sampled_from([0.0, 0.25, 0.7, 1.0]), min_size=size, max_size=size))
        if held:
            slowdown = list(accumulate([0.0, *more[1:]], initial=1.0))[1:]
            found.append({"devices": held, "slowdown": slowdown})
    return found


_arguments = st.dictionaries(st.sampled_from(["width", "layers", "name"]), json_scalars, max_size=2)
_optimizers = st.sampled_from(["adamw", "sgd", "sgd_momentum"])
_precisions = st.sampled_from(["float32", "bfloat16"])


@st.composite
def jobs(draw: st.DrawFn, precision: str = "float32", *, shards: bool = False) -> Job:
    """Up to five microbatches, any optimizer, up to two stages a device.

    With ``shards`` replicas share the optimizer's state or not.
    """
    arguments = draw(_arguments)
    return Job(
        microbatches=draw(st.integers(1, MAX_MICROBATCHES)),
        precision=precision,
        gradient_precision=draw(st.sampled_from([None, "float32", "weights"])),
        optimizer=draw(_optimizers),
        max_stages_per_device=2,
        overlap_reduction=draw(st.booleans()),
        shard_optimizer=shards and draw(st.booleans()),
        model_arguments=arguments,
    )


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    shared: bool | None = None,
    min_devices: int = 1,
    slowed: bool = False,
    shards: bool = False,
) -> Problem:
    """A model, a connected cluster and a job that fit together."""
    precision = draw(_precisions)
    job = draw(jobs(precision, shards=shards))
    return Problem(
        draw(layer_graphs(precision=precision)),
        draw(clusters(min_devices, shared=shared, slowed=slowed)),
        job,
        ModelSource("no_such_module:factory", dict(job.model_arguments)),
    )


@st.composite
def partitions(
    draw: st.DrawFn, problem: Problem, *, replicas: bool = True, recompute: bool = True
) -> list[StageSpec]:
    """Any cut of the layers; a device holds at most two stages, a stage has some replicas."""
    names = tuple(problem.graph.layers)
    devices = draw(st.permutations(problem.cluster.device_names))
    count = draw(st.integers(1, min(len(names), 2 * len(devices))))
    cuts = sorted(draw(st.permutations(range(1, len(names))))[: count - 1])
    ends = [0, *cuts, len(names)]
    # With fewer devices than stages the stages go round the devices twice.
    used = draw(st.integers(-(-count // 2), min(count, len(devices))))
    held = [[devices[index % used]] for index in range(count)]
    if replicas:
        for device in devices[used:]:
            if draw(st.booleans()):
                held[draw(st.integers(0, count - 1))].append(device)
    specs = []
    for index in range(count):
        layers = names[ends[index] : ends[index + 1]]
        rerun = draw(st.sets(st.sampled_from(layers))) if recompute and draw(st.booleans()) else ()
        specs.append(StageSpec(layers, tuple(held[index]), tuple(sorted(rerun))))
    return specs


@dataclass(frozen=True)
class Scheduled:
    """A placed pipeline with orders that never deadlock."""

    pipeline: PlacedPipeline
    orders: dict[str, list[Operation]]


_randoms = st.randoms(use_true_random=False)


@st.composite
def orders_for(
    draw: st.DrawFn, pipeline: PlacedPipeline, *, split_backwards: bool = True
) -> dict[str, list[Operation]]:
    """Orders from a random topological interleaving; replicas and split backwards at random."""
    random = draw(_randoms)
    last = len(pipeline.stages) - 1
    owner = {
        (stage, microbatch): random.choice(placed.spec.devices)
        for stage, placed in enumerate(pipeline.stages)
        for microbatch in range(pipeline.microbatches)
    }
    split = {key for key in owner if split_backwards and random.random() < 0.3}
    orders: dict[str, list[Operation]] = {device: [] for device in pipeline.devices}
    ready = [Operation(0, "F", microbatch) for microbatch in range(pipeline.microbatches)]
    while ready:
        stage, kind, microbatch = operation = ready.pop(random.randrange(len(ready)))
        orders[owner[stage, microbatch]].append(operation)
        if kind == "F" and stage < last:
            ready.append(Operation(stage + 1, "F", microbatch))
        backward = stage if kind == "F" and stage == last else None
        if kind in "BI" and stage > 0:
            backward = stage - 1
        if backward is not None:
            half = (backward, microbatch) in split
            ready.append(Operation(backward, "I" if half else "B", microbatch))
        if kind == "I":
            ready.append(Operation(stage, "W", microbatch))
    return orders


@st.composite
def behaviours(draw: st.DrawFn) -> RuntimeBehaviour:
    """Any rules of a runtime; host times like those of operations and messages, or none."""
    ways = st.sampled_from(["overlapped", "blocking"])
    send, receive = draw(ways), draw(ways)
    kinds = ["single", "neighbour", "together", "pairs"] if send == receive == "blocking" else []
    return RuntimeBehaviour(
        send=send,
        receive=receive,
        exchange=draw(st.sampled_from(kinds or ["single"])),
        streams=draw(st.sampled_from(["one", "several"])),
        reduction=draw(st.sampled_from(["bucket", "stage", "device", "flush"])),
        computation_us=draw(st.sampled_from([0.0, 0.0, 10_000.0])),
        message_us=draw(st.sampled_from([0.0, 0.0, 10_000.0])),
        message_copy_gb_per_s=draw(st.sampled_from([None, None, 0.5])),
    )


@st.composite
def runtimes(draw: st.DrawFn) -> RuntimeRules:
    """Any rules, others where devices hold several stages, or the same."""
    return RuntimeRules(
        name="random",
        behaviour=draw(behaviours()),
        interleaved=draw(st.none() | behaviours()),
        tied=draw(st.sampled_from(["at_once", "in_turn"])),
    )


SYNCS = st.sampled_from(
    [
        Sync(),
        Sync(options={"bucket_mib": 1e-6}),
        Sync(options={"bucket_mib": 80}),
        Sync(options={"overlap": False}),
        Sync(strategy="fused"),
    ]
)
"""Strategies that do or do not overlap, with buckets of a gradient, of some, of all."""


@st.composite
def scheduled(
    draw: st.DrawFn,
    *,
    shared: bool | None = None,
    replicas: bool = True,
    min_devices: int = 1,
    slowed: bool = False,
    shards: bool = False,
) -> Scheduled:
    """A random pipeline with random valid orders."""
    problem = draw(problems(shared=shared, min_devices=min_devices, slowed=slowed, shards=shards))
    sync = draw(SYNCS)
    if problem.job.shards_state and sync.strategy != "all_reduce":
        sync = Sync()
    pipeline = place(problem, draw(partitions(problem, replicas=replicas)), sync)
    return Scheduled(pipeline, draw(orders_for(pipeline)))


@st.composite
def divided(draw: st.DrawFn, *, slowed: bool = True) -> Scheduled:
    """Equal pipelines whose replicas divide weights, all in one random order of operations."""
    problem = draw(problems(min_devices=2, slowed=slowed))
    names, machines = tuple(problem.graph.layers), problem.cluster.device_names
    count = draw(st.integers(2, min(3, len(machines))))
    fields = {
        "microbatches": count * draw(st.integers(1, 3)),
        "shard_parameters": True,
        "equal_pipelines": True,
        "backward": "whole",
    }
    problem = replace(problem, job=problem.job.model_copy(update=fields))
    rows = draw(st.permutations(machines))
    each = draw(st.integers(1, len(machines) // count))
    pipelines = [rows[k * each : (k + 1) * each] for k in range(count)]
    stages = draw(st.integers(1, min(len(names), 2 * each)))
    cuts = sorted(draw(st.permutations(range(1, len(names))))[: stages - 1])
    parts = [names[a:b] for a, b in pairwise([0, *cuts, len(names)])]
    specs = []
    for index, layers in enumerate(parts):
        rerun = draw(st.sets(st.sampled_from(layers)))
        held = draw(st.permutations([row[index % each] for row in pipelines]))
        specs.append(StageSpec(layers, tuple(held), tuple(sorted(rerun))))
    sync = draw(SYNCS.filter(lambda sync: sync.strategy == "all_reduce"))
    pipeline = place(problem, specs, sync)
    first = [replace(s, devices=(pipelines[0][k % each],)) for k, s in enumerate(specs)]
    share = pipeline.microbatches // count
    one = replace(problem, job=problem.job.model_copy(update={"microbatches": share}))
    orders = draw(orders_for(place(one, first), split_backwards=False))
    counterparts = [dict(zip(pipelines[0], row, strict=True)) for row in pipelines]
    rows = {name: tuple(order) for name, order in orders.items()}
    spread = spread_orders(rows, counterparts, pipeline.microbatches)
    return Scheduled(pipeline, {name: list(order) for name, order in spread.items()})


@st.composite
def plans(draw: st.DrawFn, *, shards: bool = False) -> Plan:
    """A plan that holds."""
    case = draw(scheduled(slowed=True, shards=shards))
    return plan_by_hand(case.pipeline, case.orders)
