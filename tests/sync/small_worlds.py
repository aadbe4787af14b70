"""Worlds with round figures: iterations of 0.1 s, links of 1 GB/s and 1 ms."""

from dataclasses import replace

from benchmarks.sync.uniform import uniform_world
from planner.sync.simulation.run import Scenario, SimulatedRun, simulate_sync
from planner.sync.simulation.slowness import parse_slowness
from planner.sync.simulation.training import Learning
from planner.sync.simulation.world import LinkCost, PipelineRank, World
from planner.sync.strategies import parse_sync

LINK = LinkCost(latency_s=1e-3, bandwidth_gb_per_s=1.0)
COMPUTE_S = 0.1
BYTES = 10_000_000
"""10 ms over a link."""


def small_world(workers: int = 8, **fields: object) -> World:
    world = uniform_world(workers, COMPUTE_S, BYTES, LINK)
    return replace(world, scheduler_round_trip_s=0.0, **fields)


def pipeline_world(workers: int = 4) -> World:
    """Pipelines of two places: the second begins later and ends sooner."""
    first = PipelineRank(0.0, 0.1, 0.01, 0.02, 0.0, BYTES, 0)
    second = PipelineRank(0.01, 0.08, 0.01, 0.02, 0.0, 3 * BYTES, 1)
    return replace(small_world(workers), ranks=(first, second))


def run_of(
    strategy: str,
    world: World | None = None,
    slowness: str = "steady",
    iterations: int = 50,
    seed: int = 0,
) -> SimulatedRun:
    trace, faults = parse_slowness(slowness)
    scenario = Scenario(world or small_world(), iterations, trace, faults, Learning(seed=seed))
    return simulate_sync(scenario, parse_sync(strategy))
