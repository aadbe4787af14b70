"""Why no plan fits: which layer needs how much, what the devices have, and what would help."""

from planner.artifacts.problem import Problem
from planner.costs.placement import static_bytes, workspace_bytes
from planner.errors import InfeasibleError
from planner.partition.chain import Chain
from planner.units import format_bytes


def explain_infeasible(chain: Chain, *, is_proved: bool) -> InfeasibleError:
    """The constraint that binds, with its figures and remedies.

    Args:
        chain: the layers.
        is_proved: whether no plan exists; otherwise none was found.
    """
    problem = chain.problem
    capacity = {d.name: problem.cluster.device_type(d.name) for d in problem.cluster.devices}
    largest = max(capacity, key=lambda name: capacity[name].capacity_bytes)
    room = capacity[largest].capacity_bytes
    needs = {layer: _needed_bytes(problem, layer) for layer in chain.names}
    worst = max(needs, key=needs.__getitem__)
    if needs[worst] > room:
        return InfeasibleError(
            f"layer {worst!r} alone needs {format_bytes(needs[worst])} (weights, gradients, "
            f"optimizer state and one microbatch), the largest device {largest!r} has "
            f"{format_bytes(room)}; use smaller microbatches, a lighter optimizer or larger devices"
        )
    total = sum(static_bytes(problem, [p]) for p in problem.graph.record.parameters)
    have = sum(kind.capacity_bytes for kind in capacity.values())
    stages = "" if problem.job.max_stages is None else f" in {problem.job.max_stages} stages"
    verdict = "no plan fits" if is_proved else "no plan was found that fits"
    return InfeasibleError(
        f"{verdict}: weights, gradients and optimizer state need {format_bytes(total)}{stages}, "
        f"{len(capacity)} devices have {format_bytes(have)} in all, the largest layer {worst!r} "
        f"needs {format_bytes(needs[worst])} with one microbatch; use smaller microbatches, a "
        "lighter optimizer, more stages or more devices"
    )


def _needed_bytes(problem: Problem, layer: str) -> int:
    graph = problem.graph
    static = static_bytes(problem, graph.parameters_of([layer]))
    return static + workspace_bytes(graph, [layer]) + graph.layers[layer].stash_bytes
