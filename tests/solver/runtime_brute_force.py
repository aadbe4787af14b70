"""Every plan of equal pipelines in a space, and the time of the best."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

from solver.brute_force import all_orders, all_partitions, busiest_s

from planner import Problem
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import DeadlockError
from planner.model.blocks import block_count, first_blocks
from planner.plan.membership import outside
from planner.plan.operations import Orders, one_forward_one_backward
from planner.schedules.pipelines import spread_over
from planner.simulation.simulator import simulate
from planner.variants.problems import with_job


def best_in_space_s(problem: Problem) -> float:
    """The least iteration time of all plans in the space of the job; infinity if there is none."""
    best_s = math.inf
    for pipeline, orders in plans_of(problem):
        if busiest_s(pipeline, orders) <= best_s * (1 + 1e-12):
            best_s = min(best_s, simulated_s(pipeline, orders))
    return best_s


def simulated_s(pipeline: PlacedPipeline, orders: Orders) -> float:
    """The iteration time; infinity if the orders block each other or overflow memory."""
    try:
        timeline = simulate(pipeline, orders)
    except DeadlockError:
        return math.inf
    return timeline.iteration_time_s if not timeline.overflow_bytes else math.inf


def plans_of(problem: Problem) -> Iterator[tuple[PlacedPipeline, Orders]]:
    """Yield the plans of the job's space, every replica paired with every other in turn."""
    space, layers = problem.job.space, tuple(problem.graph.layers)
    for specs in _recomputed(problem):
        count = len(specs[0].devices)
        if any(outside(space, specs, {}, layers)) or problem.job.microbatches % count:
            continue
        pipeline = place(problem, specs)
        if is_connected(pipeline):
            for replicas in _pairings(specs):
                for orders in _orders(problem, specs, replicas):
                    merged = spread_over(replicas, list(orders.values()), pipeline.microbatches)
                    assert not any(outside(space, specs, merged, layers))
                    yield pipeline, merged


def _recomputed(problem: Problem) -> Iterator[tuple[StageSpec, ...]]:
    """Yield all partitions, with as many first blocks of every stage recomputed as there are."""
    for specs in all_partitions(problem):
        most = max(block_count(spec.layers) for spec in specs)
        for count in range(most + 1 if problem.job.recompute == "blocks" else 1):
            yield tuple(replace(spec, recompute=first_blocks(spec.layers, count)) for spec in specs)


def _pairings(specs: tuple[StageSpec, ...]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the device of each stage in each pipeline."""
    groups = list(dict.fromkeys(spec.devices for spec in specs))
    for rest in product(*(permutations(group) for group in groups[1:])):
        ranks = dict(zip(groups, [groups[0], *rest], strict=True))
        yield list(zip(*(ranks[spec.devices] for spec in specs), strict=True))


def _orders(
    problem: Problem, specs: tuple[StageSpec, ...], replicas: list[tuple[str, ...]]
) -> Iterator[Orders]:
    share = problem.job.microbatches // len(replicas)
    alone = [
        replace(spec, devices=(device,)) for spec, device in zip(specs, replicas[0], strict=True)
    ]
    if problem.job.order == "any":
        yield from all_orders(place(with_job(problem, microbatches=share), alone))
        return
    ranks = list(dict.fromkeys(replicas[0]))
    rows = {
        device: one_forward_one_backward(rank, len(ranks), len(specs), range(share))
        for rank, device in enumerate(ranks)
    }
    orders = {device: row for device, row in rows.items() if row is not None}
    if len(orders) == len(rows):
        yield orders
