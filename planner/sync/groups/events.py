"""What a scheduler of groups is told and what it decides.

A scheduler is a pure state machine: events in, decisions out. It has no clock, socket or thread;
the same code decides behind the control channel of real workers, in the simulator, and under the
property tests. A worker is a pipeline, numbered from 0. A key is a place in the pipeline whose
ranks form groups of their own: the ranks that hold the same stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Request:
    """A worker has done its local step and waits at a key for a group.

    A worker asks once an iteration and key, with iterations 1, 2, … in order, and asks again only
    after it has read its answer; it may do so before it has told that its group has ended. A
    request that comes twice is not answered twice: whoever drives the scheduler keeps the answer.
    One of a worker that has left is not answered at all: it has to join first.
    """

    worker: int
    key: int
    iteration: int


@dataclass(frozen=True)
class Finished:
    """A member is done with a group, whether its reduction succeeded or not.

    Of a group of one, none is needed.
    """

    worker: int
    group: int


@dataclass(frozen=True)
class Left:
    """A worker is gone, or finished: no group waits for it any more.

    One that finishes has read its last answers before. One that has left already may leave again.
    """

    worker: int


@dataclass(frozen=True)
class Joined:
    """A worker is there (again); its next request is for ``iteration``, at all keys.

    That is its donor's next iteration, but any other does. One that is back before it was missed
    need not leave first.
    """

    worker: int
    iteration: int


@dataclass(frozen=True)
class Tick:
    """The moment that :attr:`Scheduler.deadline_s` named has come."""


Event = Request | Finished | Left | Joined | Tick


@dataclass(frozen=True)
class Group:
    """A decision: these workers, which all wait at the key, average what they hold there.

    Attributes:
        number: in the one global order of groups, from 0.
        key: where.
        members: ascending. A group of one has nothing to do but to go on.
        iterations: of each member's request.
    """

    number: int
    key: int
    members: tuple[int, ...]
    iterations: tuple[int, ...]


class Scheduler(Protocol):
    """Decides which workers average with which.

    Every worker is there from the beginning, with iteration 1 next, until it leaves.
    """

    @property
    def deadline_s(self) -> float | None:
        """When it wants a :class:`Tick`, if nothing else happens before."""

    def handle(self, event: Event, now_s: float) -> list[Group]:
        """Take in an event.

        Args:
            event: what happened; events come in order of time.
            now_s: when, on any clock that never goes back.

        Returns:
            The groups that begin now, in their global order. All members of a group wait for it,
            and none is in another group of the same key whose end it has not told.

        Raises:
            PipeplanError: if a worker or key does not exist, or a request comes before its turn;
                the scheduler is as before.
        """
