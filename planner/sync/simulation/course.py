"""What a simulated run goes through, whichever loop plays it."""

from __future__ import annotations

from dataclasses import dataclass

from planner.sync.simulation.observer import Observer
from planner.sync.simulation.recording import Recorder
from planner.sync.simulation.slowness import Fault, Stretches
from planner.sync.simulation.training import Training
from planner.sync.simulation.world import World


@dataclass(frozen=True)
class Course:
    """One run of one strategy.

    Attributes:
        world: pipelines and links.
        stretches: of iterations.
        training: the problem and the weights.
        observer: looks at them.
        iterations: after how many, of all workers together, to end.
        faults: workers that leave.
        recorder: takes down what happens, if wanted.
    """

    world: World
    stretches: Stretches
    training: Training
    observer: Observer
    iterations: int
    faults: tuple[Fault, ...] = ()
    recorder: Recorder | None = None
