"""What all schedulers of groups have in common: who is there, who waits where, who is busy.

A scheduler is a :class:`Machine` with :class:`Rules` of its own. What it decides is a function of
the events so far and nothing else, so a log of them, handled again, brings it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from planner.errors import PipeplanError
from planner.sync.groups.events import Event, Finished, Group, Joined, Left, Request


class WaitingRoom:
    """Who is there, who waits at which key, and who is in a group that has not ended for it.

    Attributes:
        workers: how many there are at most; they are numbered from 0.
        keys: how many there are; they are numbered from 0.
        there: the workers that are there.
        waiting: by key, the iteration of everyone who waits there and is in no group.
        upcoming: by key and worker, the iteration that it waits at the key for next.
    """

    def __init__(self, workers: int, keys: int) -> None:
        self.workers = workers
        self.keys = range(keys)
        self.there = set(range(workers))
        self.waiting: list[dict[int, int]] = [{} for _ in self.keys]
        self.upcoming = [[1] * workers for _ in self.keys]
        self._early: list[dict[int, int]] = [{} for _ in self.keys]
        self._busy: list[dict[int, int]] = [{} for _ in self.keys]
        self._key_of: dict[tuple[int, int], int] = {}
        self._groups = 0

    def enter(self, request: Request) -> bool:
        """Take in a request; whether its worker waits at the key from now on.

        A request of someone who is not there, or that has come before, changes nothing.

        Raises:
            PipeplanError: if an iteration was left out or is not answered yet, or there is no such
                worker or key; nothing has changed then.
        """
        worker, key, iteration = request.worker, request.key, request.iteration
        if worker not in self.there or key not in self.keys:
            self._check(worker, key)
            return False
        expected = self.upcoming[key][worker]
        if iteration < expected:
            return False
        if iteration > expected or worker in self.waiting[key]:
            raise PipeplanError(
                f"request: worker {worker} asks at key {key} for iteration {iteration}, where it "
                f"still waits for, or has left out, an earlier one; let it join again before it "
                "goes on elsewhere"
            )
        if worker in self._busy[key]:
            self._early[key][worker] = iteration
            return False
        self._wait(worker, key, iteration)
        return True

    def end(self, finished: Finished) -> Request | None:
        """Free a member of a group; the request it has sent meanwhile, which counts from now on."""
        key = self._key_of.pop((finished.worker, finished.group), None)
        if key is None:
            return None
        del self._busy[key][finished.worker]
        iteration = self._early[key].pop(finished.worker, None)
        if iteration is None:
            return None
        self._wait(finished.worker, key, iteration)
        return Request(finished.worker, key, iteration)

    def begin(self, key: int, members: Sequence[int]) -> Group:
        """The next group, of workers that wait at a key; ``members`` ascend."""
        number = self._groups
        self._groups += 1
        waiting = self.waiting[key]
        iterations = tuple([waiting.pop(worker) for worker in members])
        if len(members) > 1:
            busy = self._busy[key]
            for worker in members:
                busy[worker] = number
                self._key_of[worker, number] = key
        return Group(number, key, tuple(members), iterations)

    def leave(self, worker: int) -> dict[int, int]:
        """Forget a worker; by key, the iteration it waited for."""
        self.there.discard(worker)
        waited = {}
        for key in self.keys:
            if worker in self.waiting[key]:
                waited[key] = self.waiting[key].pop(worker)
            self._early[key].pop(worker, None)
            if worker in self._busy[key]:
                del self._key_of[worker, self._busy[key].pop(worker)]
        return waited

    def join(self, worker: int, iteration: int) -> None:
        """Take in a worker whose next request is for ``iteration``.

        Raises:
            PipeplanError: if there is no such worker.
        """
        self._check(worker)
        self.there.add(worker)
        for key in self.keys:
            self.upcoming[key][worker] = iteration

    def _check(self, worker: int, key: int = 0) -> None:
        if not 0 <= worker < self.workers:
            raise PipeplanError(f"worker: {worker} is not one of 0 to {self.workers - 1}")
        if key not in self.keys:
            raise PipeplanError(f"key: {key} is not one of 0 to {len(self.keys) - 1}")

    def _wait(self, worker: int, key: int, iteration: int) -> None:
        self.waiting[key][worker] = iteration
        self.upcoming[key][worker] = iteration + 1


class Rules(Protocol):
    """What one scheduler does differently from another; its :class:`WaitingRoom` is up to date."""

    @property
    def deadline_s(self) -> float | None:
        """As :attr:`planner.sync.groups.events.Scheduler.deadline_s`."""

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Someone waits at a key from now on."""

    def finish(self, worker: int) -> None:
        """Someone is done with a group."""

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Someone who was there has left; by key, the iteration it waited for."""

    def join(self, worker: int, iteration: int) -> None:
        """Someone who was not there is."""

    def tick(self, now_s: float) -> list[Group]:
        """The deadline has come."""


class Machine:
    """A scheduler: see :class:`planner.sync.groups.events.Scheduler`."""

    def __init__(self, room: WaitingRoom, rules: Rules) -> None:
        self.room = room
        self.rules = rules

    @property
    def deadline_s(self) -> float | None:
        """When it wants a tick, if nothing else happens before."""
        return self.rules.deadline_s

    def handle(self, event: Event, now_s: float) -> list[Group]:
        """Take in an event; the groups that begin now."""
        room = self.room
        if isinstance(event, Request):
            if not room.enter(event):
                return []
            return self.rules.wait(event.worker, event.key, event.iteration, now_s)
        if isinstance(event, Finished):
            early = room.end(event)
            self.rules.finish(event.worker)
            if early is None:
                return []
            return self.rules.wait(early.worker, early.key, early.iteration, now_s)
        if isinstance(event, Left):
            return self._leave(event.worker)
        if isinstance(event, Joined):
            groups = self._leave(event.worker)
            room.join(event.worker, event.iteration)
            self.rules.join(event.worker, event.iteration)
            return groups
        return self.rules.tick(now_s)

    def _leave(self, worker: int) -> list[Group]:
        if worker not in self.room.there:
            return []
        return self.rules.leave(worker, self.room.leave(worker))
