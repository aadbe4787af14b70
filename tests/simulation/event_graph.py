"""What waits for what in a timeline, as a graph of all its events, worked out from their times."""

from collections import defaultdict
from itertools import combinations, pairwise

import networkx as nx

from planner.plan.operations import Operation
from planner.simulation.timeline import Timeline


def name_of(event: object) -> tuple:
    """A name for an event of a path or a timeline."""
    if hasattr(event, "synchronisation"):
        return "reduction", event.synchronisation.stages, event.synchronisation.bucket
    if hasattr(event, "source"):
        return "transfer", event.operation
    if hasattr(event, "operation"):
        return "operation", event.operation
    return "optimizer", event.device


def event_graph(timeline: Timeline) -> nx.DiGraph:
    """Events with their seconds; an edge from each to those that may not start before it ends.

    Reductions may start ``ahead`` seconds before the end of a last backward.
    """
    graph = nx.DiGraph()
    for event in (*timeline.operations, *timeline.transfers, *timeline.synchronisations):
        graph.add_node(name_of(event), seconds=event.end_s - event.start_s)
    for device, seconds in timeline.pipeline.optimizer_s.items():
        graph.add_node(("optimizer", device), seconds=seconds)
    _add_operations(graph, timeline)
    _add_transfers(graph, timeline)
    _add_reductions(graph, timeline)
    return graph


def _add_operations(graph: nx.DiGraph, timeline: Timeline) -> None:
    orders = defaultdict(list)
    for event in timeline.operations:
        orders[event.device].append(name_of(event))
    for device, order in orders.items():
        graph.add_edges_from(pairwise([*order, ("optimizer", device)]))


def _add_transfers(graph: nx.DiGraph, timeline: Timeline) -> None:
    queues = defaultdict(list)
    for move in timeline.transfers:
        stage, kind, microbatch = move.operation
        for letter in "BI" if kind == "B" else "F":
            made = ("operation", Operation(stage, letter, microbatch))
            used = Operation(stage + (1 if kind == "F" else -1), letter, microbatch)
            if made in graph:
                graph.add_edge(made, name_of(move))
            if ("operation", used) in graph:
                graph.add_edge(name_of(move), ("operation", used))
        for link in move.occupied:
            queues[link].append(move)
    for queue in queues.values():
        queue.sort(key=lambda move: move.start_s)
        graph.add_edges_from((name_of(u), name_of(v)) for u, v in pairwise(queue))


def _add_reductions(graph: nx.DiGraph, timeline: Timeline) -> None:
    for event in timeline.synchronisations:
        members, last = event.synchronisation, {}
        for run in timeline.operations:
            if run.operation.stage in members.stages and run.operation.kind in "BW":
                last[run.operation.stage, run.device] = run
        for run in last.values():
            ahead = members.ahead_s(run.operation.kind, run.operation.stage, run.device)
            graph.add_edge(name_of(run), name_of(event), ahead=ahead)
        for device in members.devices:
            graph.add_edge(name_of(event), ("optimizer", device))
    for first, second in combinations(timeline.synchronisations, 2):
        if {*first.synchronisation.devices} & {*second.synchronisation.devices}:
            graph.add_edge(name_of(first), name_of(second))


def longest_path_s(graph: nx.DiGraph) -> float:
    """Seconds of the longest chain of events."""
    ends, starts = {}, {}
    for node in nx.topological_sort(graph):
        ready = (
            max(starts[before], ends[before] - graph.edges[before, node].get("ahead", 0.0))
            for before in graph.predecessors(node)
        )
        starts[node] = max(ready, default=0.0)
        ends[node] = starts[node] + graph.nodes[node]["seconds"]
    return max(ends.values())
