"""A bound from what the links between neighbouring stages can carry, whichever way it goes."""

from __future__ import annotations

from collections.abc import Sequence

from planner.artifacts.cluster import Cluster
from planner.costs.placement import PlacedPipeline

STEPS = 10**9
"""Units of the total capacity that flows are counted in; rounded up, so that bounds hold."""


def link_load_bound_s(pipeline: PlacedPipeline) -> float:
    """No schedule of these stages is faster: every channel carries all microbatches.

    What crosses from one stage to the next in one direction is at most a maximum flow between
    their devices; before it a microbatch has to arrive, after it the last one has to go on.
    """
    flows = Flows(pipeline.problem.cluster)
    forward = [stage.least_s("F") for stage in pipeline.stages]
    bound, head = 0.0, 0.0
    for index in range(len(pipeline.stages) - 1):
        here, there = (pipeline.stages[i] for i in (index, index + 1))
        head += forward[index]
        if set(here.spec.devices) & set(there.spec.devices):
            continue
        ends = here.spec.devices, there.spec.devices
        sent = pipeline.microbatches * here.output_bytes
        back = pipeline.microbatches * here.output_gradient_bytes
        if sent:
            bound = max(bound, head + sent / flows.bytes_per_s(*ends) + forward[index + 1])
        if back:
            bound = max(bound, head + back / flows.bytes_per_s(*reversed(ends)))
    return bound


class Flows:
    """Maximum flows over a cluster's links; all sources are one, all targets are one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def bytes_per_s(self, sources: Sequence[str], targets: Sequence[str]) -> float:
        """From any of the sources to any of the targets; links carry all they can each way."""
        edges = self._edges(sources, targets)
        if edges is None:
            return float("inf")
        return _maximum_flow(edges) * 1e9

    def _edges(
        self, sources: Sequence[str], targets: Sequence[str]
    ) -> dict[tuple[str, str], float] | None:
        """Capacities in GB/s by vertices; None where a shared link carries any number."""
        give, take = set(sources), set(targets)
        edges: dict[tuple[str, str], float] = {}
        for link in self._cluster.links:
            for u, v in (link.between, link.between[::-1]):
                if not self._may_carry(u, v, give, take):
                    continue
                if link.shared:
                    return None
                first = "source" if u in give else f"at {u}"
                second = "target" if v in take else f"at {v}"
                edges[first, second] = edges.get((first, second), 0.0) + link.bandwidth_gb_per_s
        return edges

    def _may_carry(self, u: str, v: str, give: set[str], take: set[str]) -> bool:
        """Out of a source or a switch, into a target or a switch: devices do not forward."""
        from_switch, to_switch = (x not in self._cluster.numbers for x in (u, v))
        return (from_switch or u in give) and (to_switch or v in take)


def _maximum_flow(edges: dict[tuple[str, str], float]) -> float:
    from ortools.graph.python import max_flow

    unit = max(sum(edges.values()), 1e-12) / STEPS
    numbers: dict[str, int] = {"source": 0, "target": 1}
    solver = max_flow.SimpleMaxFlow()
    for (u, v), width in edges.items():
        tail, head = (numbers.setdefault(x, len(numbers)) for x in (u, v))
        solver.add_arc_with_capacity(tail, head, int(float(width) / unit) + 1)
    solver.solve(0, 1)
    return float(solver.optimal_flow()) * unit
