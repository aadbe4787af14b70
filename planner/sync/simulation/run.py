"""The simulation of one strategy, from its options to the results of its run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.groups import scheduler_of
from planner.sync.simulation.averaging import (
    BipartitePairs,
    GroupAveraging,
    OverlappedGroupAveraging,
)
from planner.sync.simulation.engine import Engine, Strategy
from planner.sync.simulation.observing import OBSERVATIONS, Observation, Observer, spectral_gap
from planner.sync.simulation.rounds import (
    AllReduce,
    CrossIteration,
    Decoupled,
    Rounds,
    SynchronousServer,
)
from planner.sync.simulation.servers import AsynchronousServer, EagerServer, WaveServer
from planner.sync.simulation.slowness import SimulatedFault, Slowdowns, Steady, Trace
from planner.sync.simulation.training import Learning, Training
from planner.sync.simulation.world import World
from planner.sync.strategies import (
    AdPsgdOptions,
    AllReduceOptions,
    CrossIterationOptions,
    DecoupledOptions,
    EagerParameterServerOptions,
    FusedOptions,
    Options,
    ParameterServerOptions,
    WaveSynchronousOptions,
    options_of,
    overlaps_averages,
    require_fit,
)

MOST_ITERATIONS = 10**6


@dataclass(frozen=True)
class Scenario:
    """The conditions that are the same for every strategy.

    Attributes:
        world: pipelines and links.
        iterations: iterations per worker on average; a strategy runs until all workers together
            have done this many each.
        trace: slowdowns of iterations.
        faults: workers that leave.
        learning: the training problem, and the seed.

    Raises:
        PipeplanError: naming every field that is out of range.
    """

    world: World
    iterations: int = 200
    trace: Trace = field(default_factory=Steady)
    faults: tuple[SimulatedFault, ...] = ()
    learning: Learning = field(default_factory=Learning)

    def __post_init__(self) -> None:
        problems = [
            f"fault: there is no worker {fault.worker}; workers are 0 to {self.world.workers - 1}"
            for fault in self.faults
            if fault.worker >= self.world.workers
        ]
        stay_away = {fault.worker for fault in self.faults if fault.returns_s == float("inf")}
        if len(stay_away) == self.world.workers:
            problems.append("fault: all workers leave for good; let one return, or stay")
        if not 1 <= self.iterations <= MOST_ITERATIONS:
            problems.append(
                f"iterations: {self.iterations} is not a whole number from 1 to {MOST_ITERATIONS}"
            )
        if not 0 <= self.learning.seed < 2**31:
            problems.append(
                f"seed: {self.learning.seed} is not a whole number from 0 to {2**31 - 1}"
            )
        if problems:
            raise PipeplanError(problems)

    def with_seed(self, seed: int) -> Scenario:
        """Return the scenario with another seed of the trace, the data and the initial weights."""
        return replace(self, learning=replace(self.learning, seed=seed))


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a strategy, in virtual time.

    Attributes:
        sync: the strategy.
        time_s: time until all iterations were done.
        done: iterations of each worker.
        busy_s: seconds in which workers computed, all together.
        sent_bytes: bytes sent by all workers and servers.
        staleness: the largest: for strategies with groups in iterations, between the newest and the
            oldest member of a group; for servers in updates, between a read and the gradient
            computed from it.
        spectral_gap: of the groups (:func:`~planner.sync.simulation.observing.spectral_gap`); None
            if workers do not average.
        observations: states of the model, in order of time.
    """

    sync: Sync
    time_s: float
    done: tuple[int, ...]
    busy_s: float
    sent_bytes: float
    staleness: int
    spectral_gap: float | None
    observations: tuple[Observation, ...]

    @property
    def iterations_per_s(self) -> float:
        """Iterations per second of all workers together."""
        return sum(self.done) / self.time_s

    @property
    def idle_share(self) -> float:
        """Idle fraction of the workers' time."""
        return max(0.0, 1 - self.busy_s / (len(self.done) * self.time_s))

    @property
    def consensus_distance(self) -> float:
        """Mean distance over the second half of the observations."""
        half = self.observations[len(self.observations) // 2 :]
        return float(np.mean([observation.distance for observation in half]))

    def loss_after(self, iterations: float) -> float:
        """Return the loss after a number of iterations, interpolated between observations."""
        counts = [observation.iterations for observation in self.observations]
        return float(
            np.interp(iterations, counts, [observation.loss for observation in self.observations])
        )

    def time_to_s(self, loss: float) -> float | None:
        """Return when the loss was first reached, interpolated; None if it was not."""
        before = self.observations[0]
        for observation in self.observations:
            if observation.loss <= loss:
                fall = before.loss - observation.loss
                share = (before.loss - loss) / fall if fall > 0 else 1.0
                return before.at_s + (observation.at_s - before.at_s) * min(max(share, 0.0), 1.0)
            before = observation
        return None


def simulate_sync(scenario: Scenario, sync: Sync) -> SimulatedRun:
    """Run a strategy in virtual time.

    Raises:
        PipeplanError: if the strategy or an option is wrong.
    """
    world, learning = scenario.world, scenario.learning
    require_fit(sync, world.workers)
    training = Training(world.workers, learning)
    interval_s = world.iteration_s * scenario.iterations / min(OBSERVATIONS, scenario.iterations)
    observer = Observer(training.problem, interval_s)
    slowdowns = Slowdowns(world, scenario.trace, learning.seed)
    engine = Engine(world, slowdowns, training, observer, scenario.faults)
    strategy = strategy_of(options_of(sync), engine, learning.seed)
    time_s = engine.run(strategy, scenario.iterations * world.workers)
    gaps = [spectral_gap(groups, world.workers) for groups in strategy.groups]
    return SimulatedRun(
        sync,
        time_s,
        tuple(engine.done),
        engine.busy_s,
        engine.sent_bytes,
        strategy.staleness,
        1.0 if isinstance(strategy, Rounds) else min(gaps, default=None),
        tuple(observer.observations),
    )


def strategy_of(options: Options, engine: Engine, seed: int) -> Strategy:
    """Return the simulated strategy with these options; ``seed`` draws the pairs of ``ad_psgd``."""
    world = engine.world
    match options:
        case AllReduceOptions():
            return AllReduce(engine, options.bucket_mib, overlap=options.overlap)
        case FusedOptions():
            return AllReduce(engine, options.fusion_mib)
        case DecoupledOptions():
            return Decoupled(engine, options.bucket_mib)
        case CrossIterationOptions():
            return CrossIteration(engine, options)
        case ParameterServerOptions(mode="sync"):
            return SynchronousServer(engine, options.servers or 1)
        case ParameterServerOptions():
            return AsynchronousServer(engine, options.servers)
        case EagerParameterServerOptions():
            return EagerServer(engine, options)
        case AdPsgdOptions(pairs="bipartite"):
            return BipartitePairs(engine, seed)
    scheduler = scheduler_of(options, world.workers, len(world.ranks), world.pipelines_per_node)
    if isinstance(options, WaveSynchronousOptions):
        return WaveServer(engine, scheduler, options.distance, options.servers)
    if overlaps_averages(options):
        return OverlappedGroupAveraging(engine, scheduler)
    return GroupAveraging(engine, scheduler)
