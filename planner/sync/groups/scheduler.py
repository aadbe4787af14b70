"""The common part of all group schedulers: which workers are active, waiting or in a group.

A :class:`Scheduler` has the :class:`GroupRules` of its strategy. Its decisions are a
function of the events so far and nothing else, so handling a log of them again restores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.errors import PipeplanError
from planner.sync.groups.events import Event, Finished, Group, GroupRequest, Joined, Left, Tick


class WaitingRoom:
    """The workers that are active, that wait at each key, and that are in an unfinished group.

    Attributes:
        workers: largest number of workers; they are numbered from 0.
        keys: number of keys; they are numbered from 0.
        active: the workers that are present.
        waiting: by key, the iteration of every worker that waits there and is in no group.
        upcoming: by key and worker, the iteration of its next request there.
    """

    def __init__(self, workers: int, keys: int) -> None:
        self.workers = workers
        self.keys = range(keys)
        self.active = set(range(workers))
        self.waiting: list[dict[int, int]] = [{} for _ in self.keys]
        self.upcoming = [[1] * workers for _ in self.keys]
        self._early: list[dict[int, int]] = [{} for _ in self.keys]
        self._busy: list[dict[int, int]] = [{} for _ in self.keys]
        self._key_of: dict[tuple[int, int], int] = {}
        self._groups = 0

    def enter(self, request: GroupRequest) -> bool:
        """Handle a request; return whether its worker waits at the key from now on.

        A request of an absent worker, or a repeated one, changes nothing.

        Raises:
            PipeplanError: if an iteration was left out or is not answered yet, or there is no such
                worker or key; nothing has changed then.
        """
        worker, key, iteration = request.worker, request.key, request.iteration
        if worker not in self.active or key not in self.keys:
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

    def end(self, finished: Finished) -> GroupRequest | None:
        """Release a member of a group; return its request since then, which counts from now on."""
        key = self._key_of.pop((finished.worker, finished.group), None)
        if key is None:
            return None
        del self._busy[key][finished.worker]
        iteration = self._early[key].pop(finished.worker, None)
        if iteration is None:
            return None
        self._wait(finished.worker, key, iteration)
        return GroupRequest(finished.worker, key, iteration)

    def begin(self, key: int, members: Sequence[int]) -> Group:
        """Return the next group, of workers that wait at a key; ``members`` ascend."""
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
        """Remove a worker; return the iteration it waited for, by key."""
        self.active.discard(worker)
        waited = {}
        for key in self.keys:
            if worker in self.waiting[key]:
                waited[key] = self.waiting[key].pop(worker)
            self._early[key].pop(worker, None)
            if worker in self._busy[key]:
                del self._key_of[worker, self._busy[key].pop(worker)]
        return waited

    def join(self, worker: int, iteration: int) -> None:
        """Add a worker whose next request is for ``iteration``.

        Raises:
            PipeplanError: if there is no such worker.
        """
        self._check(worker)
        self.active.add(worker)
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


class GroupRules:
    """The rules of one scheduler; its :class:`WaitingRoom` is updated before each call.

    A rule that does not depend on an event inherits the method, which does nothing then.
    """

    @property
    def deadline_s(self) -> float | None:
        """Deadline, as :attr:`Scheduler.deadline_s`."""
        return None

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Handle a worker that begins to wait at a key."""
        raise NotImplementedError

    def finish(self, worker: int) -> None:
        """Handle a worker that is done with a group."""

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Handle a worker that has left; ``waited`` has the iteration it waited for, by key."""
        raise NotImplementedError

    def join(self, worker: int, iteration: int) -> None:
        """Handle a worker that has joined."""
        raise NotImplementedError

    def tick(self, now_s: float) -> list[Group]:
        """Handle the deadline."""
        return []


class Scheduler:
    """Decides which workers average with each other.

    All workers are present at the beginning, with iteration 1 next, until they leave.
    """

    def __init__(self, room: WaitingRoom, rules: GroupRules) -> None:
        self._room = room
        self._rules = rules

    @property
    def deadline_s(self) -> float | None:
        """Time of the next :class:`~planner.sync.groups.events.Tick`, if nothing happens before."""
        return self._rules.deadline_s

    def handle(self, event: Event, now_s: float) -> list[Group]:
        """Handle an event.

        Args:
            event: the event; events come in order of time.
            now_s: its time, on any clock that never goes back.

        Returns:
            The groups that begin now, in their global order. All members of a group wait for it,
            and none is in another group of the same key whose end it has not reported.

        Raises:
            PipeplanError: if a worker or key does not exist, or a request comes too early; the
                scheduler is unchanged.
        """
        room, rules = self._room, self._rules
        match event:
            case GroupRequest():
                if room.enter(event):
                    return rules.wait(event.worker, event.key, event.iteration, now_s)
            case Finished():
                early = room.end(event)
                rules.finish(event.worker)
                if early is not None:
                    return rules.wait(early.worker, early.key, early.iteration, now_s)
            case Left():
                return self._leave(event.worker)
            case Joined():
                groups = self._leave(event.worker)
                room.join(event.worker, event.iteration)
                rules.join(event.worker, event.iteration)
                return groups
            case Tick():
                return rules.tick(now_s)
        return []

    def _leave(self, worker: int) -> list[Group]:
        if worker not in self._room.active:
            return []
        return self._rules.leave(worker, self._room.leave(worker))
