"""What the simulator foretells: worlds that are larger, or slower, than one machine can be."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context

from benchmarks.sync.figures import Look, Measured, Runs
from benchmarks.sync.settings import best_of
from benchmarks.sync.uniform import uniform_world
from planner.sync.simulation.run import Scenario, SimulatedRun, simulate_sync
from planner.sync.simulation.slowness import parse_slowness
from planner.sync.simulation.training import Learning
from planner.sync.simulation.world import LinkCost, PipelineRank, World
from planner.sync.strategies import parse_sync

COMPUTE_S, BACKWARD_SHARE = 0.1, 2 / 3
PARAMETER_BYTES = 100_000_000
WITHIN = LinkCost(1e-5, 10.0)
LATENCY_S = 5e-5
ITERATIONS = 400
"""Steps of each pipeline: enough that the first ten, in which momentum has yet to grow, hardly
count. A server that steps on every gradient passes them sooner, and few iterations flatter it."""


@dataclass(frozen=True)
class Simulated:
    """A world and what happens in it.

    Attributes:
        name: of the setting.
        regime: in words.
        world: pipelines and links.
        slowness: as the simulator reads it.
        iterations: of each pipeline.
        learning_rate: of stochastic gradient descent with momentum 0.9.
    """

    name: str
    regime: str
    world: World
    slowness: str = "steady"
    iterations: int = ITERATIONS
    learning_rate: float = 0.05

    def scenario(self, seed: int) -> Scenario:
        """Return the scenario with a seed."""
        trace, faults = parse_slowness(self.slowness)
        learning = Learning(learning_rate=self.learning_rate, seed=seed)
        return Scenario(self.world, self.iterations, trace, faults, learning)


def flat_world(
    workers: int, communication: float, per_node: int = 1, latency_s: float = LATENCY_S
) -> World:
    """Pipelines of one place.

    Args:
        workers: how many.
        communication: seconds of all bytes in an all-reduce over those of computation; it goes
            over the links between nodes, those within are fast.
        per_node: workers that share a node's card.
        latency_s: of a message between nodes.
    """
    gb_per_s = 2 * PARAMETER_BYTES / (communication * COMPUTE_S) / 1e9
    link = LinkCost(latency_s, gb_per_s)
    world = uniform_world(
        *(workers, COMPUTE_S, PARAMETER_BYTES, link),
        backward_share=BACKWARD_SHARE,
        pipelines_per_node=per_node,
    )
    return replace(world, within=WITHIN) if per_node > 1 else world


def pipeline_world(workers: int, places: int, microbatches: int, communication: float) -> World:
    """Pipelines of equal places, 1F1B, a forward half as long as a backward.

    Args:
        workers: how many.
        places: of each.
        microbatches: of each in an iteration.
        communication: seconds of a place's bytes in an all-reduce over those of an iteration.
    """
    slots = microbatches + places - 1
    forward_s, backward_s = COMPUTE_S / slots / 3, 2 * COMPUTE_S / slots / 3
    rows = tuple(
        PipelineRank(
            first_forward_s=place * forward_s,
            last_backward_s=COMPUTE_S - place * backward_s,
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=0.0,
            parameter_bytes=PARAMETER_BYTES // places,
            network_card=place,
        )
        for place in range(places)
    )
    gb_per_s = 2 * PARAMETER_BYTES / places / (communication * COMPUTE_S) / 1e9
    link = LinkCost(LATENCY_S, gb_per_s)
    return World(workers, rows, link, link, slots=2 * slots)


def measured_of(run: SimulatedRun, scenario: Scenario) -> Measured:
    """A simulated run's figures."""
    looks = [Look(look.at_s, look.iterations, look.loss) for look in run.observations]
    final = run.loss_after(scenario.iterations * scenario.world.workers)
    return Measured(run.iterations_per_s, looks, final)


_Task = tuple[Simulated, str, int]


def tuned_rates(
    settings: Sequence[Simulated], strategies: Sequence[str], rates: Sequence[float], seed: int
) -> dict[str, dict[str, float]]:
    """Return the learning rate of the least held-out loss, by setting and strategy.

    Args:
        settings: the settings.
        strategies: all of which have the same rates to choose from.
        rates: the learning rates.
        seed: which counts for nothing else.
    """
    losses: dict[str, dict[tuple[str, float], float]] = {}
    for rate in rates:
        at_rate = [replace(setting, learning_rate=rate) for setting in settings]
        for name, runs in simulate_all(at_rate, strategies, 1, first_seed=seed).items():
            for strategy, (run,) in runs.items():
                losses.setdefault(name, {})[strategy, rate] = run.final_loss
    return {name: best_of(row) for name, row in losses.items()}


def simulate_all(
    settings: Iterable[Simulated],
    strategies: Sequence[str],
    seeds: int,
    *,
    first_seed: int = 0,
    rates: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, Runs]:
    """Return every strategy in every setting, by the setting's name; a process for each core.

    Args:
        settings: the settings.
        strategies: names of the strategies.
        seeds: how many.
        first_seed: the first of them.
        rates: learning rates by setting and strategy; None: those of the settings.
    """
    tasks = [
        (replace(s, learning_rate=rates[s.name][name]) if rates else s, name, seed)
        for s in settings
        for name in strategies
        for seed in range(first_seed, first_seed + seeds)
    ]
    found: dict[str, dict[str, list[Measured]]] = {}
    begin_s = time.monotonic()
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for (setting, strategy, _), run in zip(tasks, pool.imap(_simulate, tasks), strict=True):
            found.setdefault(setting.name, {}).setdefault(strategy, []).append(run)
    took_s = time.monotonic() - begin_s
    print(f"{len(tasks)} simulated runs in {took_s:.0f} s", file=sys.stderr, flush=True)
    return {name: dict(runs) for name, runs in found.items()}


def _simulate(task: _Task) -> Measured:
    setting, strategy, seed = task
    scenario = setting.scenario(seed)
    return measured_of(simulate_sync(scenario, parse_sync(strategy)), scenario)
