"""Events and decisions of group schedulers.

A scheduler is a pure state machine from events to decisions. It has no clock, socket or thread; the
same code runs behind the control channel of real workers, in the simulator, and in the property
tests. A worker is a pipeline, numbered from 0. A key is a pipeline rank: the ranks of all pipelines
that hold the same stages form groups of their own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupRequest:
    """A worker has done its local step and waits at a key for a group.

    A worker asks once per iteration and key, with iterations 1, 2, … in order, and asks again only
    after it has read its answer; it may do so before it has reported the end of its group. A
    repeated request is not answered again: the caller keeps the answer. A request of a worker that
    has left is not answered: it has to join first.
    """

    worker: int
    key: int
    iteration: int


@dataclass(frozen=True)
class Finished:
    """A member is done with a group, whether its reduction succeeded or not.

    Groups of one need no such event.
    """

    worker: int
    group: int


@dataclass(frozen=True)
class Left:
    """A worker has failed or finished: no group waits for it any more.

    A worker that finishes has read its last answers before. A worker that has left may leave again.
    """

    worker: int


@dataclass(frozen=True)
class Joined:
    """A worker is present (again); its next request is for ``iteration``, at all keys.

    That is its donor's next iteration, but any other is allowed. A worker that returns before it
    was missed need not leave first.
    """

    worker: int
    iteration: int


@dataclass(frozen=True)
class Tick:
    """The time :attr:`~planner.sync.groups.scheduler.Scheduler.deadline_s` has come."""


Event = GroupRequest | Finished | Left | Joined | Tick


@dataclass(frozen=True)
class Group:
    """A decision: these workers, which all wait at the key, average their weights of this key.

    Attributes:
        number: number in the one global order of groups, from 0.
        key: the pipeline rank.
        members: the workers, ascending. A group of one just continues.
        iterations: iteration of each member's request.
    """

    number: int
    key: int
    members: tuple[int, ...]
    iterations: tuple[int, ...]
