"""Slowdowns of iterations by worker and over time, independent of the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError, shorten
from planner.sync.simulation.world import World

BLOCK = 64
"""Iterations drawn at once."""
LEAST_FACTOR, MOST_FACTOR = 0.01, 1000.0
MOST_S = 1e6
_FORMS = {
    "steady": "steady",
    "slow": "slow:WORKERxFACTOR,…",
    "sleep": "sleep:PROBABILITY:SECONDS",
    "drift": "drift[:SPREAD]",
    "fault": "fault:WORKER:LEAVES_S[:RETURNS_S]",
}
Block = tuple[FloatArray, FloatArray]
"""A factor and extra seconds for each (worker, iteration) of a block."""


class Trace(Protocol):
    """Slowdowns of iterations: a function of seed, worker and iteration alone."""

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Yield endless blocks of :data:`BLOCK` iterations each, from iteration 1."""


@dataclass(frozen=True)
class Steady:
    """No slowdown."""

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Yield factors 1 and no extra seconds."""
        shape = (world.workers, BLOCK)
        while True:
            yield np.ones(shape), np.zeros(shape)


@dataclass(frozen=True)
class SlowWorker:
    """Workers that are always slow.

    Attributes:
        factors: factors of their iterations, by worker.
    """

    factors: tuple[tuple[int, float], ...]

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Yield the factors.

        Raises:
            PipeplanError: if there is no such worker.
        """
        shape = (world.workers, BLOCK)
        for worker, factor in self.factors:
            if not (0 <= worker < world.workers and LEAST_FACTOR <= factor <= MOST_FACTOR):
                raise PipeplanError(
                    f"slowness: slow: worker {worker} by {factor:g}: workers are 0 to "
                    f"{world.workers - 1}, factors {LEAST_FACTOR:g} to {MOST_FACTOR:g}; write "
                    "slow:0x2"
                )
        while True:
            factors = np.ones(shape)
            for worker, factor in self.factors:
                factors[worker] *= factor
            yield factors, np.zeros(shape)


@dataclass(frozen=True)
class Sleep:
    """SDPipe's test (Miao et al., VLDB 2023): random delays of single operations.

    Forwards and backwards of different pipeline ranks that sleep at the same time are counted one
    after the other, along the slots of the pipeline's critical path (:attr:`World.slots`).

    Attributes:
        probability: probability that a forward or backward is delayed.
        seconds: length of the delay.
    """

    probability: float
    seconds: float

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Yield binomial numbers of delays per iteration."""
        draw = np.random.default_rng((seed, 1))
        shape = (world.workers, BLOCK)
        while True:
            sleeps = draw.binomial(world.slots, self.probability, shape)
            yield np.ones(shape), np.asarray(sleeps * self.seconds, dtype=float)


@dataclass(frozen=True)
class Drift:
    """Speeds that drift, as those of shared cloud machines.

    The logarithm of the factor is an Ornstein-Uhlenbeck walk (standard deviation ``spread``, a
    memory of 50 iterations) around a level that occasionally (0.2 % of the iterations) jumps to
    another one, drawn with twice that spread and limited to a third to three times.

    Attributes:
        spread: standard deviation of the walk, as a fraction of the iteration.
    """

    spread: float = 0.1

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Yield blocks; the walk continues from block to block."""
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
class CombinedSlowness:
    """Several slowdowns at once: factors multiply, extra seconds add up."""

    traces: tuple[Trace, ...]

    def blocks(self, world: World, seed: int) -> Iterator[Block]:
        """Yield the combined blocks."""
        rows = zip(*(trace.blocks(world, seed) for trace in self.traces), strict=True)
        for row in rows:
            factors, extra_s = zip(*row, strict=True)
            yield np.prod(factors, axis=0), np.sum(extra_s, axis=0)


@dataclass(frozen=True)
class SimulatedFault:
    """A worker that is absent for a while.

    Attributes:
        worker: its number.
        leaves_s, returns_s: virtual times; infinity: it does not return.
    """

    worker: int
    leaves_s: float
    returns_s: float


class Slowdowns:
    """The slowdown of each iteration as one factor, from the world's and the trace's."""

    def __init__(self, world: World, trace: Trace, seed: int) -> None:
        self._world = world
        self._source = trace.blocks(world, seed)
        self._slowdown = np.array(world.slowdown or (1.0,) * world.workers)[:, None]
        self._draw = np.random.default_rng((seed, 4))
        self._columns: list[FloatArray] = []
        self._rows: list[list[list[float]]] = []

    def at(self, worker: int, iteration: int) -> float:
        """Return the factor of a worker's iteration; iterations count from 1."""
        block, rank = divmod(iteration - 1, BLOCK)
        while block >= len(self._rows):
            self._extend()
        return self._rows[block][worker][rank]

    def of_all(self, iteration: int) -> FloatArray:
        """Return the factors of one iteration, by worker."""
        block, rank = divmod(iteration - 1, BLOCK)
        while block >= len(self._columns):
            self._extend()
        return self._columns[block][:, rank]

    def _extend(self) -> None:
        factors, extra_s = next(self._source)
        if self._world.jitter_s:
            extra_s = extra_s + self._draw.normal(0.0, self._world.jitter_s, extra_s.shape)
        found = factors * self._slowdown + extra_s / self._world.iteration_s
        found = np.maximum(found, LEAST_FACTOR)
        self._columns.append(found)
        self._rows.append(found.tolist())


def parse_slowness(text: str) -> tuple[Trace, tuple[SimulatedFault, ...]]:
    """Parse ``slow:0x2,3x1.5+sleep:0.1:0.3+drift:0.1+fault:2:10:20``.

    Raises:
        PipeplanError: naming what cannot be read, or a value and its range.
    """
    parts = [_part(part.strip(), text) for part in text.split("+")]
    faults = tuple(part for part in parts if isinstance(part, SimulatedFault))
    traces = tuple(part for part in parts if not isinstance(part, SimulatedFault))
    _require_slow_once(traces)
    if not traces:
        return Steady(), faults
    return (traces[0] if len(traces) == 1 else CombinedSlowness(traces)), faults


def _require_slow_once(traces: Sequence[Trace]) -> None:
    """Refuse several factors of one worker, which would be ambiguous."""
    given: dict[int, float] = {}
    rows = (row for trace in traces if isinstance(trace, SlowWorker) for row in trace.factors)
    for worker, factor in rows:
        if worker in given:
            raise PipeplanError(
                f"slowness: slow: worker {worker} is given twice, {given[worker]:g} and "
                f"{factor:g} times as slow; give it one factor"
            )
        given[worker] = factor


def _part(text: str, whole: str) -> Trace | SimulatedFault:
    name, *values = text.split(":")
    if name not in _FORMS:
        found = shorten(text)
        if not text:
            found = f"the empty part of {shorten(whole)}" if "+" in whole else "''"
        raise PipeplanError(
            f"slowness: {found} cannot be read; expected {', '.join(_FORMS.values())}, joined by +"
        )
    match [name, *values]:
        case ["steady"]:
            return Steady()
        case ["slow", workers]:
            return SlowWorker(tuple(_slow_worker(item, text) for item in workers.split(",")))
        case ["sleep", probability, seconds]:
            share = _number("probability", probability, text, 0, 1)
            return Sleep(share, _number("seconds", seconds, text, 0, MOST_S))
        case ["drift", *spread] if len(spread) < 2:
            return Drift(*(_number("spread", value, text, 0, 1) for value in spread))
        case ["fault", worker, leaves, *returns] if len(returns) < 2:
            return _fault(text, worker, leaves, *returns)
    raise PipeplanError(
        f"slowness: {shorten(text)} has {len(values)} values; write it as {_FORMS[name]}"
    )


def _slow_worker(item: str, text: str) -> tuple[int, float]:
    worker, x, factor = item.partition("x")
    if not x:
        raise PipeplanError(
            f"slowness: {shorten(item)} in {shorten(text)} is not WORKERxFACTOR; write it as "
            "slow:0x2"
        )
    return _worker(worker, text), _number("factor", factor, text, LEAST_FACTOR, MOST_FACTOR)


def _fault(text: str, worker: str, leaves: str, returns: str = "inf") -> SimulatedFault:
    leaves_s = _number("leaves_s", leaves, text, 0, MOST_S)
    returns_s = _number("returns_s", returns, text, 0, float("inf"))
    if returns_s <= leaves_s:
        raise PipeplanError(
            f"slowness: returns_s {returns} of {shorten(text)} is not after leaves_s {leaves}; "
            "give a later one, or none for a worker that stays away"
        )
    return SimulatedFault(_worker(worker, text), leaves_s, returns_s)


def _worker(value: str, text: str) -> int:
    if not value.strip().isdecimal() or len(value) > 9:
        raise PipeplanError(
            f"slowness: worker {shorten(value)} of {shorten(text)} is not a whole number from 0"
        )
    return int(value)


def _number(name: str, value: str, text: str, least: float, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        upwards = f"from {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
        raise PipeplanError(
            f"slowness: {name} {shorten(value)} of {shorten(text)} is not a number {upwards}"
        )
    return number
