"""What must come before what, and what is held when: worked out anew from stages and orders."""

from collections.abc import Iterator
from itertools import pairwise

import networkx as nx

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders
from planner.simulation.timeline import Timeline


def owner_of(orders: Orders) -> dict[tuple[int, int], str]:
    return {(op.stage, op.microbatch): device for device, order in orders.items() for op in order}


def lag_s(pipeline: PlacedPipeline, bytes_: int, source: str, target: str) -> float:
    """Seconds of a transfer that waits for nobody."""
    if source == target or bytes_ == 0:
        return 0.0
    route = pipeline.problem.cluster.route(source, target)
    return route.latency_s + bytes_ / (route.bandwidth_gb_per_s * 1e9)


def inputs_of(
    pipeline: PlacedPipeline, orders: Orders, operation: Operation
) -> Iterator[tuple[Operation, float]]:
    """The operations an operation waits for, and how long their results travel."""
    stage, kind, microbatch = operation
    owner = owner_of(orders)
    device = owner[stage, microbatch]
    present = {op for order in orders.values() for op in order}
    if kind == "F" and stage > 0:
        source = owner[stage - 1, microbatch]
        size = pipeline.stages[stage - 1].output_bytes
        yield Operation(stage - 1, "F", microbatch), lag_s(pipeline, size, source, device)
    if kind in "BI":
        yield Operation(stage, "F", microbatch), 0.0
        if stage < len(pipeline.stages) - 1:
            split = Operation(stage + 1, "I", microbatch)
            source = owner[stage + 1, microbatch]
            size = pipeline.stages[stage].output_gradient_bytes
            producer = split if split in present else Operation(stage + 1, "B", microbatch)
            yield producer, lag_s(pipeline, size, source, device)
    if kind == "W":
        yield Operation(stage, "I", microbatch), 0.0


def waiting_graph(pipeline: PlacedPipeline, orders: Orders) -> nx.DiGraph:
    """Edges from every operation to those that wait for it, by seconds from start to start."""
    graph = nx.DiGraph()
    for device, order in orders.items():
        graph.add_nodes_from(order)
        for first, second in pairwise(order):
            graph.add_edge(first, second, weight=seconds(pipeline, first, device))
    owner = owner_of(orders)
    for order in orders.values():
        for operation in order:
            for producer, lag in inputs_of(pipeline, orders, operation):
                device = owner[producer.stage, producer.microbatch]
                weight = seconds(pipeline, producer, device) + lag
                old = graph.get_edge_data(producer, operation, {"weight": 0.0})["weight"]
                graph.add_edge(producer, operation, weight=max(weight, old))
    return graph


def seconds(pipeline: PlacedPipeline, operation: Operation, device: str) -> float:
    times = pipeline.stages[operation.stage].times[device]
    forward, inputs, weights, whole = times
    return {"F": forward, "B": whole, "I": inputs, "W": weights}[operation.kind]


def held_intervals(timeline: Timeline) -> Iterator[tuple[str, float, float, int]]:
    """Every tensor on every device: ``(device, from, until, bytes)``."""
    pipeline = timeline.pipeline
    event_of = {event.operation: event for event in timeline.operations}
    arrives, leaves = {}, {}
    for move in timeline.transfers:
        stage, kind, microbatch = move.operation
        leaves[stage, kind, microbatch] = move.end_s
        arrives[stage + (1 if kind == "F" else -1), kind, microbatch] = move.start_s
    for (stage, kind, microbatch), event in event_of.items():
        if kind != "F":
            continue
        placed = pipeline.stages[stage]
        backward = event_of.get(Operation(stage, "B", microbatch))
        inputs = backward or event_of[Operation(stage, "I", microbatch)]
        weights = backward or event_of[Operation(stage, "W", microbatch)]
        device = event.device
        if stage > 0:
            got = arrives[stage, "F", microbatch]
            yield device, got, event.start_s, placed.input_bytes
            gone = leaves[stage, "B", microbatch]
            yield device, inputs.start_s, gone, placed.input_gradient_bytes
        yield device, event.start_s, inputs.end_s, placed.stash_bytes
        if backward is None:
            counted = max(pipeline.stages[s].workspace_bytes for s in pipeline.stages_on[device])
            more = max(0, placed.split_workspace_bytes - counted)
            yield device, inputs.start_s, inputs.end_s, more
            yield device, inputs.end_s, weights.end_s, placed.weight_stash_bytes
        if stage < len(pipeline.stages) - 1:
            gone = leaves[stage, "F", microbatch]
            yield device, event.start_s, gone, placed.output_bytes
            got = arrives[stage, "B", microbatch]
            yield device, got, inputs.end_s, placed.output_gradient_bytes
