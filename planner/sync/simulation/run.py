"""Simulating one strategy: from its options to what became of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from planner.artifacts.plan import Sync
from planner.artifacts.sync_trace import SyncTrace
from planner.errors import PipeplanError
from planner.sync.groups import scheduler_of
from planner.sync.simulation.course import Course
from planner.sync.simulation.engine import Behaviour, Engine
from planner.sync.simulation.groups import GroupAveraging
from planner.sync.simulation.groups_behind import GroupAveragingBehind
from planner.sync.simulation.mixing import spectral_gap
from planner.sync.simulation.observer import LOOKS, Look, Observer
from planner.sync.simulation.pairs import BipartitePairs
from planner.sync.simulation.recording import Recorder
from planner.sync.simulation.rounds import Rounds, Timing, Update
from planner.sync.simulation.servers import AsynchronousServer, EagerServer
from planner.sync.simulation.slowness import Fault, Steady, Stretches, Trace
from planner.sync.simulation.timings import (
    AllReduceTiming,
    CrossIterationTiming,
    DecoupledTiming,
    SynchronousServerTiming,
)
from planner.sync.simulation.training import Learning, Training
from planner.sync.simulation.updates import CrossIterationUpdate, ExactUpdate
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
    SemiDecentralizedOptions,
    options_of,
    require_fit,
)

MOST_ITERATIONS = 10**6


@dataclass(frozen=True)
class Scenario:
    """What happens to every strategy alike.

    Attributes:
        world: pipelines and links.
        iterations: of a worker on average; a strategy runs until all workers together have done so
            many each.
        trace: how iterations vary.
        faults: workers that leave.
        learning: what is learned, and the seed.

    Raises:
        PipeplanError: naming every field that is out of range.
    """

    world: World
    iterations: int = 200
    trace: Trace = field(default_factory=Steady)
    faults: tuple[Fault, ...] = ()
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
        """The same with another seed of the trace, the data and the initial weights."""
        return replace(self, learning=replace(self.learning, seed=seed))


@dataclass(frozen=True)
class Run:
    """What became of a strategy, in virtual time.

    Attributes:
        sync: the strategy.
        time_s: until all iterations were done.
        done: iterations of each worker.
        busy_s: seconds in which workers computed, all together.
        sent_bytes: by all workers and servers.
        staleness: the largest: of strategies with groups in iterations, between the newest and the
            oldest member of a group; of servers in updates, between a read and the gradient of
            what was read.
        spectral_gap: of the groups (:func:`planner.sync.simulation.mixing.spectral_gap`); None
            where workers average with nobody.
        looks: at the model, in order of time.
    """

    sync: Sync
    time_s: float
    done: tuple[int, ...]
    busy_s: float
    sent_bytes: float
    staleness: int
    spectral_gap: float | None
    looks: tuple[Look, ...]

    @property
    def iterations_per_s(self) -> float:
        """Of all workers together."""
        return sum(self.done) / self.time_s

    @property
    def idle_share(self) -> float:
        """Of the workers' time."""
        return max(0.0, 1 - self.busy_s / (len(self.done) * self.time_s))

    @property
    def consensus_distance(self) -> float:
        """Mean over the second half of the looks."""
        half = self.looks[len(self.looks) // 2 :]
        return float(np.mean([look.distance for look in half]))

    def loss_after(self, iterations: float) -> float:
        """Between two looks, by their numbers of iterations."""
        counts = [look.iterations for look in self.looks]
        return float(np.interp(iterations, counts, [look.loss for look in self.looks]))

    def time_to_s(self, loss: float) -> float | None:
        """When the loss was first reached, between two looks; None: it was not."""
        before = self.looks[0]
        for look in self.looks:
            if look.loss <= loss:
                fall = before.loss - look.loss
                share = (before.loss - loss) / fall if fall > 0 else 1.0
                return before.at_s + (look.at_s - before.at_s) * min(max(share, 0.0), 1.0)
            before = look
        return None


def simulate_sync(scenario: Scenario, sync: Sync) -> Run:
    """Run a strategy in virtual time.

    Raises:
        PipeplanError: if the strategy or an option of it is wrong.
    """
    return _simulate(scenario, sync, None)


def trace_sync(scenario: Scenario, sync: Sync) -> tuple[Run, SyncTrace]:
    """The same, with every iteration as a real run would have measured it."""
    recorder = Recorder(scenario.world.workers)
    run = _simulate(scenario, sync, recorder)
    world = scenario.world
    return run, SyncTrace(
        sync=sync,
        pipelines_per_node=world.pipelines_per_node,
        parameter_bytes=tuple(place.parameter_bytes for place in world.places),
        workers=tuple(map(tuple, recorder.rows)),
    )


def _simulate(scenario: Scenario, sync: Sync, recorder: Recorder | None) -> Run:
    require_fit(sync, scenario.world.workers)
    options = options_of(sync)
    course = _course(scenario, recorder)
    together = _in_step(options, scenario.world, course.training)
    if together is not None:
        return _run_rounds(course, sync, together)
    return _run_events(course, sync, _behaviour(options, scenario))


def _course(scenario: Scenario, recorder: Recorder | None) -> Course:
    world = scenario.world
    training = Training(world.workers, scenario.learning)
    length_s = world.iteration_s * scenario.iterations
    return Course(
        world,
        Stretches(world, scenario.trace, scenario.learning.seed),
        training,
        Observer(training.problem, length_s / min(LOOKS, scenario.iterations)),
        scenario.iterations * world.workers,
        scenario.faults,
        recorder,
    )


def _run_rounds(course: Course, sync: Sync, together: tuple[Timing, Update]) -> Run:
    run = Rounds(course).run(*together)
    looks, staleness = tuple(course.observer.looks), together[1].staleness
    return Run(sync, run.time_s, tuple(run.done), run.busy_s, run.sent_bytes, staleness, 1.0, looks)


def _run_events(course: Course, sync: Sync, behaviour_of: Callable[[Engine], Behaviour]) -> Run:
    engine = Engine(course)
    behaviour = behaviour_of(engine)
    time_s = engine.run(behaviour)
    gaps = [spectral_gap(groups, course.world.workers) for groups in behaviour.memberships()]
    return Run(
        sync,
        time_s,
        tuple(engine.done),
        engine.busy_s,
        behaviour.sent_bytes,
        behaviour.staleness,
        min(gaps, default=None),
        tuple(course.observer.looks),
    )


def _in_step(options: Options, world: World, training: Training) -> tuple[Timing, Update] | None:
    """What plays strategies whose workers march in step; None for any other."""
    match options:
        case AllReduceOptions():
            timing: Timing = AllReduceTiming(world, options.bucket_mib, overlap=options.overlap)
        case FusedOptions():
            timing = AllReduceTiming(world, options.fusion_mib)
        case DecoupledOptions():
            timing = DecoupledTiming(world, options.bucket_mib)
        case ParameterServerOptions(mode="sync"):
            timing = SynchronousServerTiming(world, options.servers or 1)
        case CrossIterationOptions():
            update = CrossIterationUpdate(training, options)
            return CrossIterationTiming(world, options.fusion_mib), update
        case _:
            return None
    return timing, ExactUpdate(training)


def _behaviour(options: Options, scenario: Scenario) -> Callable[[Engine], Behaviour]:
    """What plays any other strategy."""
    world, seed = scenario.world, scenario.learning.seed
    match options:
        case ParameterServerOptions():
            servers = options.servers or 1
            return lambda engine: AsynchronousServer(engine, servers)
        case EagerParameterServerOptions():
            eager = options
            return lambda engine: EagerServer(engine, eager)
        case AdPsgdOptions(pairs="bipartite"):
            return lambda engine: BipartitePairs(engine, seed)
    scheduler = scheduler_of(options, world.workers, len(world.places), world.pipelines_per_node)
    if isinstance(options, SemiDecentralizedOptions) and options.overlap:
        return lambda engine: GroupAveragingBehind(engine, scheduler)
    return lambda engine: GroupAveraging(engine, scheduler)
