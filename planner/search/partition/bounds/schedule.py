"""Lower bounds on the iteration time that hold for every schedule of a partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.cluster.cluster import Cluster
from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.roofline import OperationTimes
from planner.search.partition.spans import ReplicaSpan, least_span_s


def schedule_bound_s(pipeline: PlacedPipeline, *, split: bool = False) -> float:
    """Return a time that no schedule of these stages on these devices beats.

    For each stage: the earliest its first forward can start, plus the longest span of its replicas
    (:mod:`planner.search.partition.spans`) under the best split of the microbatches, plus the way
    its last gradient still has to go to some earlier stage and that stage's reduction and
    optimizer step. For each channel
    between two single devices likewise. Where devices hold several stages: their own work, and the
    way of a single microbatch. Where messages block, the work of each device and what it waits for.

    The CP-SAT model of planner.search.partition minimises the same expression.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients may run apart.
    """
    ways, count = PathBounds(pipeline, split), pipeline.microbatches
    bound = _blocking_bound_s(ways) if pipeline.behaviour.blocks else 0.0
    if pipeline.shares_devices:
        return max(bound, _shared_device_bound_s(ways))
    for index in range(len(pipeline.stages)):
        through_s = balanced_span_s(ways, index, count) + ways.drain[index]
        all_s = balanced_span_s(ways, index, count, weights=True) + ways.tail[index]
        bound = max(bound, ways.head[index] + max(through_s, all_s))
    for index in range(len(pipeline.stages) - 1):
        bound = max(bound, _channel_bound(ways, index))
    return bound


def _shared_device_bound_s(ways: PathBounds) -> float:
    """Several stages a device: its own work, and the way of a single microbatch."""
    pipeline = ways.pipeline
    path = sum(ways.forward) + sum(ways.gradient)
    singles = [d for s in pipeline.stages if len(s.spec.devices) == 1 for d in s.spec.devices]
    loads = [
        pipeline.optimizer_s[device]
        + sum(
            pipeline.microbatches * (times.forward_s + _backward_s(ways, times, True))
            for stage in pipeline.stages_on[device]
            for times in (pipeline.stages[stage].times[device],)
            if len(pipeline.stages[stage].spec.devices) == 1
        )
        for device in singles
    ]
    return max([path, *loads])


def _blocking_bound_s(ways: PathBounds) -> float:
    """Return the longest time that a device computes and waits for its messages.

    From the start of its first forward to the end of its last backward, it waits for all it sends
    but after the last operation, and for all it receives but before the first.
    """
    pipeline, found = ways.pipeline, [0.0]
    for held in pipeline.stages_on.values():
        alone = [index for index in held if len(pipeline.stages[index].spec.devices) == 1]
        if not alone:
            continue
        work_s = sum(ways.forward[i] + ways.gradient[i] + ways.weight[i] for i in alone)
        begin_s = min(ways.head[index] for index in held)
        end_s = min(ways.tail[index] for index in held)
        waits_s = _waits_s(ways, alone)
        found.append(begin_s + pipeline.microbatches * work_s + waits_s + end_s)
    return max(found)


def _waits_s(ways: PathBounds, held: Sequence[int]) -> float:
    """Return the least seconds that the only device of some stages waits for messages."""
    behaviour, count = ways.pipeline.behaviour, ways.pipeline.microbatches
    back_to = [ways.send_back[index - 1] if index else 0.0 for index in held]
    from_before = [ways.send[index - 1] if index else 0.0 for index in held]
    to_next, from_next = ([row[i] for i in held] for row in (ways.send, ways.send_back))
    sent = (count * sum(to_next), count * sum(back_to) - max(back_to))
    received = (count * sum(from_before) - max(from_before), count * sum(from_next))
    if behaviour.exchange == "pairs":  # A forward's with a backward's.
        return max(*sent, *received[:1], received[1] - max(from_next))
    sent_s = sum(sent) if behaviour.send == "blocking" else 0.0
    received_s = sum(received) if behaviour.receive == "blocking" else 0.0
    return sent_s + received_s if behaviour.exchange == "single" else max(sent_s, received_s)


def balanced_span_s(ways: PathBounds, index: int, count: int, *, weights: bool = False) -> float:
    """Return the longest span of the replicas under the best split of the microbatches.

    Args:
        ways: of the pipeline.
        index: of the stage.
        count: of the microbatches.
        weights: count weight gradients that run apart as well.
    """
    replicas = Counter(
        ReplicaSpan(times.forward_s, _backward_s(ways, times, weights), ways.beyond[index])
        for times in ways.pipeline.stages[index].times.values()
    )
    return least_span_s(replicas, count)


def _backward_s(ways: PathBounds, times: OperationTimes, weights: bool) -> float:
    gradient_s = ways.gradient_s(times)
    return gradient_s + ways.weight_s(times) if weights else gradient_s


def _channel_bound(ways: PathBounds, index: int) -> float:
    """A channel between two single devices carries every microbatch, one after the other."""
    pipeline = ways.pipeline
    first, second = pipeline.stages[index], pipeline.stages[index + 1]
    if len(first.spec.devices) > 1 or len(second.spec.devices) > 1:
        return 0.0
    if not _is_exclusive(pipeline, index):
        return 0.0
    send, back, count = ways.send, ways.send_back, pipeline.microbatches
    head = sum(ways.forward[: index + 1]) + sum(send[:index])
    there = sum(ways.forward[index + 1 :]) + sum(send[index + 1 :])
    again = sum(ways.gradient[index + 1 :]) + sum(back[index + 1 :])
    last = back[index] + ways.gradient[index] + ways.drain[index]
    forwards = head + count * send[index] + there + again + last
    first_back = head + send[index] + there + again
    backwards = first_back + count * back[index] + last - back[index]
    return max(forwards, backwards)


def _is_exclusive(pipeline: PlacedPipeline, index: int) -> bool:
    """Whether transfers of this channel wait for each other: shared links carry them at once."""
    (u,), (v,) = (pipeline.stages[i].spec.devices for i in (index, index + 1))
    return bool(pipeline.forward_transfer(index, u, v).links) and bool(
        pipeline.backward_transfer(index + 1, v, u).links
    )


STEPS = 10**9
"""Units of the total capacity that flows are counted in; rounded up, so that bounds hold."""


def link_load_bound_s(pipeline: PlacedPipeline) -> float:
    """Return a time that no schedule beats, as every channel carries all microbatches.

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
        sent = pipeline.microbatches * here.sent_bytes
        back = pipeline.microbatches * there.returned_bytes
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
        """Return the flow from any source to any target; links carry all they can each way."""
        edges = self._edges(sources, targets)
        if edges is None:
            return float("inf")
        return _maximum_flow(edges) * 1e9

    def _edges(
        self, sources: Sequence[str], targets: Sequence[str]
    ) -> dict[tuple[str, str], float] | None:
        """Return capacities in GB/s by vertices; None where a shared link carries any number."""
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
