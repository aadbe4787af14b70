"""How iterations differ from worker to worker and from time to time, whatever the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.artifacts.link_table import FloatArray
from planner.errors import PipeplanError, shorten
from planner.sync.simulation.world import World

BLOCK = 64
"""Iterations drawn at once."""
LEAST_FACTOR, MOST_FACTOR = 0.01, 1000.0
Block = tuple[FloatArray, FloatArray]
"""A factor and extra seconds for each (worker, iteration) of a block."""


class Trace(Protocol):
    """By what iterations take longer: a function of seed, worker and iteration alone."""

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Endless blocks of :data:`BLOCK` iterations each, from iteration 1."""


@dataclass(frozen=True)
class Steady:
    """Every iteration as the world says."""

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Factors 1, no extra seconds."""
        shape = (world.workers, BLOCK)
        while True:
            yield np.ones(shape), np.zeros(shape)


@dataclass(frozen=True)
class Slow:
    """Workers that are slow all the time.

    Attributes:
        factors: of their iterations, by worker.
    """

    factors: tuple[tuple[int, float], ...]

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Raises PipeplanError if there is no such worker."""
        shape = (world.workers, BLOCK)
        for worker, factor in self.factors:
            if not (0 <= worker < world.workers and LEAST_FACTOR <= factor <= MOST_FACTOR):
                raise PipeplanError(
                    f"slow: worker {worker} by {factor:g}: workers are 0 to {world.workers - 1}, "
                    f"factors {LEAST_FACTOR:g} to {MOST_FACTOR:g}; write slow:0x2"
                )
        while True:
            factors = np.ones(shape)
            for worker, factor in self.factors:
                factors[worker] *= factor
            yield factors, np.zeros(shape)


@dataclass(frozen=True)
class Sleep:
    """SDPipe's test (Miao et al., VLDB 2023): now and then a slot begins late.

    Forwards and backwards of different places that sleep at the same time are counted one after
    the other, along the slots of the pipeline's critical path (:attr:`World.slots`).

    Attributes:
        probability: that a forward or backward sleeps before.
        seconds: for which it does.
    """

    probability: float
    seconds: float

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Binomial numbers of sleeps an iteration."""
        draw = np.random.default_rng((seed, 1))
        shape = (world.workers, BLOCK)
        while True:
            sleeps = draw.binomial(world.slots, self.probability, shape)
            yield np.ones(shape), np.asarray(sleeps * self.seconds, dtype=float)


@dataclass(frozen=True)
class Drift:
    """Speeds that wander, as those of shared cloud machines.

    The logarithm of the factor is an Ornstein-Uhlenbeck walk (standard deviation ``spread``, a
    memory of 50 iterations) around a level that now and then (0.2 % of the iterations) jumps to
    another one, drawn with twice that spread and kept from a third to three times.

    Attributes:
        spread: standard deviation of the walk, as a share of the iteration.
    """

    spread: float = 0.1

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """The walk goes on from block to block."""
        draw = np.random.default_rng((seed, 2))
        level = np.zeros(world.workers)
        walk = draw.normal(0, self.spread, world.workers)
        while True:
            rows = []
            for _ in range(BLOCK):
                jumps = draw.random(world.workers) < 0.002
                levels = draw.normal(0, 2 * self.spread, world.workers)
                level = np.where(jumps, levels.clip(-np.log(3), np.log(3)), level)
                push = draw.normal(0, 1, world.workers)
                walk = 0.98 * walk + self.spread * np.sqrt(1 - 0.98**2) * push
                rows.append(np.exp((level + walk).clip(-np.log(4), np.log(4))))
            yield np.stack(rows, axis=1), np.zeros((world.workers, BLOCK))


@dataclass(frozen=True)
class Together:
    """Several at once: factors multiply, extra seconds add up."""

    traces: tuple[Trace, ...]

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Of all of them."""
        rows = zip(*(trace.blocks(world, seed) for trace in self.traces), strict=True)
        for row in rows:
            factors, extra_s = zip(*row, strict=True)
            yield np.prod(factors, axis=0), np.sum(extra_s, axis=0)


@dataclass(frozen=True)
class Fault:
    """A worker that is gone for a while.

    Attributes:
        worker: its number.
        leaves_s, returns_s: virtual times; infinity: it stays away.
    """

    worker: int
    leaves_s: float
    returns_s: float


class Stretches:
    """How much longer than the world says each iteration takes, as one factor."""

    def __init__(self, world: World, trace: Trace, seed: int) -> None:
        self._world = world
        self._source = trace.blocks(world, seed)
        self._slowdown = np.array(world.slowdown or (1.0,) * world.workers)[:, None]
        self._columns: list[FloatArray] = []
        self._rows: list[list[list[float]]] = []

    def at(self, worker: int, iteration: int) -> float:
        """Of a worker's iteration; iterations count from 1."""
        block, place = divmod(iteration - 1, BLOCK)
        while block >= len(self._rows):
            self._extend()
        return self._rows[block][worker][place]

    def of_all(self, iteration: int) -> FloatArray:
        """Of one iteration, by worker."""
        block, place = divmod(iteration - 1, BLOCK)
        while block >= len(self._columns):
            self._extend()
        return self._columns[block][:, place]

    def _extend(self) -> None:
        factors, extra_s = next(self._source)
        found = factors * self._slowdown + extra_s / self._world.iteration_s
        self._columns.append(found)
        self._rows.append(found.tolist())


def parse_slowness(text: str) -> tuple[Trace, tuple[Fault, ...]]:
    """Read ``slow:0x2,3x1.5+sleep:0.1:0.3+drift:0.1+fault:2:10:20``.

    Raises:
        PipeplanError: naming what cannot be read.
    """
    traces: list[Trace] = []
    faults: list[Fault] = []
    for part in text.split("+"):
        found = _part(part.strip())
        if isinstance(found, Fault):
            faults.append(found)
        else:
            traces.append(found)
    trace = traces[0] if len(traces) == 1 else Together(tuple(traces))
    return (trace if traces else Steady()), tuple(faults)


def _part(text: str) -> Trace | Fault:
    name, *values = text.split(":")
    try:
        if name == "slow" and len(values) == 1:
            return Slow(tuple(_slow_worker(item) for item in values[0].split(",")))
        numbers = [float(value) for value in values]
        return _of_numbers(name, numbers)
    except (ValueError, TypeError):
        raise PipeplanError(
            f"slowness: {shorten(text)} cannot be read; expected steady, slow:WORKERxFACTOR,…, "
            "sleep:PROBABILITY:SECONDS, drift[:SPREAD] or fault:WORKER:LEAVES_S[:RETURNS_S], "
            "joined by +"
        ) from None


def _slow_worker(text: str) -> tuple[int, float]:
    worker, _, factor = text.partition("x")
    return int(worker), float(factor)


def _of_numbers(name: str, numbers: Sequence[float]) -> Trace | Fault:
    match name, tuple(numbers):
        case "steady", ():
            return Steady()
        case "sleep", (probability, seconds) if 0 <= probability <= 1 and 0 <= seconds < 1e6:
            return Sleep(probability, seconds)
        case "drift", ():
            return Drift()
        case "drift", (spread,) if 0 <= spread <= 1:
            return Drift(spread)
        case "fault", (worker, leaves_s):
            return _fault(worker, leaves_s, float("inf"))
        case "fault", (worker, leaves_s, returns_s):
            return _fault(worker, leaves_s, returns_s)
    raise ValueError


def _fault(worker: float, leaves_s: float, returns_s: float) -> Fault:
    if not (0 <= leaves_s < returns_s and 0 <= worker == int(worker)):
        raise ValueError
    return Fault(int(worker), leaves_s, returns_s)
