"""Everything a plan can be, and the best of it.

Microbatches are equal, so each of their numberings would have the same times: they are numbered by
the first stage, replica by replica and in the order of its forwards.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

from planner import Problem
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import DeadlockError
from planner.plan.operations import Operation
from planner.simulation.simulator import simulate


def all_partitions(problem: Problem) -> Iterator[tuple[StageSpec, ...]]:
    """Every cut of the chain that the job allows, with every choice of device sets."""
    names, allowed = list(problem.graph.layers), problem.job.cuts
    places = [p for p in range(1, len(names)) if allowed is None or names[p] in allowed]
    most = len(problem.cluster.devices) * problem.job.max_stages_per_device
    for count in range(1, min(len(names), most) + 1):
        for cuts in combinations(places, count - 1):
            edges = [0, *cuts, len(names)]
            for sets in _device_sets(problem, count):
                yield tuple(
                    StageSpec(tuple(names[edges[j] : edges[j + 1]]), sets[j]) for j in range(count)
                )


def _device_sets(problem: Problem, count: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    devices, job = problem.cluster.device_names, problem.job
    largest = len(devices) if job.replication else 1
    members = {name: problem.cluster.device_type(name).members for name in devices}
    sets = [
        chosen
        for n in range(1, largest + 1)
        for chosen in combinations(devices, n)
        # Replicas are single devices, or tensor-parallel groups of one size.
        if len({members[name] for name in chosen}) == 1
    ]
    for choice in product(sets, repeat=count):
        held = Counter(device for chosen in choice for device in chosen)
        if max(held.values()) <= job.max_stages_per_device:
            yield choice


def all_orders(pipeline: PlacedPipeline) -> Iterator[dict[str, tuple[Operation, ...]]]:
    """Every assignment of microbatches to replicas with every order on every device.

    One numbering of the microbatches is tried, for they are equal.
    """
    pairs = [(s, m) for s in range(len(pipeline.stages)) for m in range(pipeline.microbatches)]
    choices = [pipeline.stages[s].spec.devices for s, _ in pairs]
    for owners in product(*choices):
        if list(owners[: pipeline.microbatches]) != sorted(owners[: pipeline.microbatches]):
            continue
        per_device: list[list[tuple[Operation, ...]]] = []
        for device in pipeline.devices:
            held = [pair for pair, owner in zip(pairs, owners, strict=True) if owner == device]
            per_device.append(list(_interleavings(tuple((s, m, 0) for s, m in held))))
        for orders in product(*per_device):
            yield dict(zip(pipeline.devices, orders, strict=True))


def _interleavings(held: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[Operation, ...]]:
    """All orders with each forward before its backward; state 0: nothing ran, 1: forward ran.

    The first stage runs its forwards by number.
    """
    if not held:
        yield ()
    first = next((microbatch for stage, microbatch, state in held if stage == state == 0), None)
    for position, (stage, microbatch, state) in enumerate(held):
        if stage == state == 0 and microbatch != first:
            continue
        rest = held[:position] + held[position + 1 :]
        if state == 0:
            rest = (*held[:position], (stage, microbatch, 1), *held[position + 1 :])
        operation = Operation(stage, "FB"[state], microbatch)  # type: ignore[arg-type]
        for tail in _interleavings(rest):
            yield (operation, *tail)


@dataclass
class BruteForce:
    """The best of everything."""

    time_s: float = float("inf")
    partitions: int = 0
    schedules: int = 0


def all_recomputations(
    problem: Problem, specs: tuple[StageSpec, ...]
) -> Iterator[tuple[StageSpec, ...]]:
    """Every choice of recomputed layers of the stages that the job allows; none at first."""
    names = list(problem.graph.layers) if problem.job.recompute else []
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            yield tuple(
                replace(spec, recompute=tuple(n for n in spec.layers if n in chosen))
                for spec in specs
            )


def busiest_s(pipeline: PlacedPipeline, orders: Mapping[str, Sequence[Operation]]) -> float:
    """Return what the busiest device computes: no iteration takes less."""
    return max(
        sum(pipeline.seconds(row.stage, row.kind, device) for row in order)
        for device, order in orders.items()
    )


def brute_force(problem: Problem) -> BruteForce:
    """The fastest plan by trying every plan."""
    best = BruteForce()
    every = (all_recomputations(problem, specs) for specs in all_partitions(problem))
    for specs in chain.from_iterable(every):
        pipeline = place(problem, specs)
        if not is_connected(pipeline):
            continue
        best.partitions += 1
        for orders in all_orders(pipeline):
            best.schedules += 1
            if busiest_s(pipeline, orders) > best.time_s * (1 + 1e-12):
                continue
            try:
                timeline = simulate(pipeline, orders)
            except DeadlockError:
                continue
            if timeline.iteration_time_s < best.time_s and not timeline.overflow_bytes:
                best.time_s = timeline.iteration_time_s
    return best
