"""The core of the dynamic programs: can a sequence of stages keep a limit on the iteration time?

A state is a cut of the chain together with the devices used so far. Its value is the least sum of
the next stage's head and tail: the head is what passes from the start of the iteration to the
stage's first forward, the tail what passes from its last backward to the end. A stage keeps the
limit if its head, load and tail together do. What the states are, by which stages they can be
extended and what that costs is the business of a :class:`StateSpace`; the forward pass, the test of
a limit, the bisection for the least limit and the reconstruction of the stages are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeVar

from planner.search.partition.chain import Chain, FloatArray

ROUNDING = 1 + 1e-9
"""Relaxations keep limits up to this factor, so that rounding makes no bound too high."""
MOST_STEPS = 50
"""Where nothing takes any time no relative tolerance is ever met."""

Program = Literal["through", "head"]
"""What a program counts of a stage.

``through``: on its devices all forwards and gradients on their way, after which the last gradient
goes on to earlier stages, or the stage's own last weight gradient, reduction and optimizer step
follow. ``head``: all work on its devices, weight gradients included, and its own reduction and
step, after the least head; the way back does not count.

With whole backwards the first one counts all of that. With split ones weight gradients may run
after gradients on their way have left, so that each counts something the other does not; a limit
that either rules out cannot be kept.
"""


def programs(chain: Chain) -> tuple[Program, ...]:
    """Return the programs that bound all plans of a chain together."""
    return ("through", "head") if chain.splits else ("through",)


Frontier = TypeVar("Frontier")
Option = TypeVar("Option")
State = TypeVar("State")
Stage = TypeVar("Stage", covariant=True)


class StateSpace(Protocol[Frontier, Option]):
    """The states of a program for one limit, in steps, and the stages that extend them.

    Tables have the steps as their first axis; a state that is not reached is infinite.
    """

    @property
    def limit_s(self) -> float:
        """The limit on the iteration time, in seconds."""

    def first_table(self) -> FloatArray:
        """Return a table in which the start is reached."""

    def passes(self) -> Iterable[tuple[int, Iterable[Option]]]:
        """Yield steps and the options by which to extend their states.

        A step comes after everything that leads to it, perhaps several times.
        """

    def frontier(self, table: FloatArray, step: int) -> Frontier | None:
        """Return the states of a step that may still lead to the end within the limit.

        They have to leave room for the work after their cut. None if there are none.
        """

    def extend(self, table: FloatArray, frontier: Frontier, option: Option) -> None:
        """Add a stage to the states of a frontier and note what is reached by it."""

    def least_s(self, table: FloatArray) -> float:
        """Return the least value of a state with all layers in stages."""


class TraceableSpace(StateSpace[Frontier, Option], Protocol[Frontier, Option, State, Stage]):
    """A state space in which the way to a state can be found again."""

    def best(self, table: FloatArray) -> State:
        """Return the state with all layers in stages whose value is least."""

    def is_start(self, state: State) -> bool:
        """Return whether no stage leads to a state."""

    def passes_to(self, state: State) -> Iterable[tuple[int, Iterable[Option]]]:
        """Yield steps and options that may have led to a state, in the order of preference."""

    def last_stage(
        self, table: FloatArray, frontier: Frontier, option: Option, state: State
    ) -> tuple[Stage, State] | None:
        """Return the stage by which an option led to a state, and the state before; or None."""


def filled_table(space: StateSpace[Frontier, Option]) -> FloatArray:
    """Return the table of all that can be reached within the limit: the forward pass."""
    table = space.first_table()
    for step, options in space.passes():
        frontier = space.frontier(table, step)
        if frontier is not None:
            for option in options:
                space.extend(table, frontier, option)
    return table


def keeps_limit(space: StateSpace[Frontier, Option]) -> bool:
    """Return whether some sequence of stages keeps the limit."""
    return space.least_s(filled_table(space)) <= space.limit_s


def stages_within_limit(
    space: TraceableSpace[Frontier, Option, State, Stage],
) -> list[Stage] | None:
    """Return the stages of least value that keep the limit, the first one first; None if none do.

    Each stage is found again by comparing what the options lead to with the table.
    """
    table = filled_table(space)
    if space.least_s(table) > space.limit_s:
        return None
    state, stages = space.best(table), []
    while not space.is_start(state):
        stage, state = _last_stage(space, table, state)
        stages.append(stage)
    return stages[::-1]


def _last_stage(
    space: TraceableSpace[Frontier, Option, State, Stage], table: FloatArray, state: State
) -> tuple[Stage, State]:
    for step, options in space.passes_to(state):
        frontier = space.frontier(table, step)
        if frontier is None:
            continue
        for option in options:
            found = space.last_stage(table, frontier, option, state)
            if found is not None:
                return found
    raise AssertionError("the dynamic program reached a state by no stage")


def least_limit_s(
    spaces: Sequence[Callable[[float], StateSpace[Frontier, Option]]],
    low_s: float,
    high_s: float,
    tolerance: float,
    may_go_on: Callable[[], bool] = lambda: True,
) -> tuple[float, float] | None:
    """Return the ends of a range that contains the least limit; None if ``high_s`` is not kept.

    Args:
        spaces: the states of each program for a limit in seconds; all have to keep it.
        low_s: at most the least limit.
        high_s: the largest limit of interest; it is tried first.
        tolerance: width of the range at which to stop, as a share of its lower end.
        may_go_on: whether there is time for another step.
    """

    def keeps(limit_s: float) -> bool:
        return all(keeps_limit(space_at(limit_s)) for space_at in spaces)

    if not keeps(high_s):
        return None
    return narrowed_s(keeps, low_s, high_s, tolerance, may_go_on)


def narrowed_s(
    keeps: Callable[[float], bool],
    low_s: float,
    high_s: float,
    tolerance: float,
    may_go_on: Callable[[], bool] = lambda: True,
) -> tuple[float, float]:
    """Halve the range of the least limit until its ends are near each other.

    Args:
        keeps: whether a limit, in seconds, can be kept.
        low_s: at most the least limit.
        high_s: a limit that can be kept; it is not tried.
        tolerance: width of the range at which to stop, as a share of its lower end.
        may_go_on: whether there is time for another step.

    Returns:
        The lower end, tried and not kept unless it is still ``low_s``, and the upper end, kept.
    """
    for _ in range(MOST_STEPS):
        if high_s - low_s <= tolerance * low_s or not may_go_on():
            break
        middle_s = (low_s + high_s) / 2
        if keeps(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s, high_s


def ruled_out_s(
    keeps: Callable[[float], bool],
    low_s: float,
    known_s: float,
    tolerance: float,
    may_go_on: Callable[[], bool] = lambda: True,
) -> float:
    """Return a limit that no plan beats, not more than a known one, which is tried first.

    Args:
        keeps: whether a limit, in seconds, may be kept.
        low_s: at most the least limit.
        known_s: iteration time of any plan, or any valid limit.
        tolerance: of the bisection, relative.
        may_go_on: whether there is time for another step.
    """
    if low_s >= known_s or not keeps(known_s):
        return known_s
    return narrowed_s(keeps, low_s, known_s, tolerance, may_go_on)[0]
