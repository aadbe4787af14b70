"""Groups that are drawn before their members wait, in one order for all keys.

Ripples' Group Generator (Luo et al. 2019; Prague, ASPLOS 2020), without its clocks and sockets.
The first request of a worker for an iteration, at whatever key, decides: if a group has been drawn
for it before, that one, else groups are drawn now. Everybody takes part in the groups drawn for it
in the order in which they were drawn, one an iteration, and the same at all keys. Of the groups
that have not begun everywhere, the members of the first drawn wait for nothing else, so nobody
waits in a circle. AD-PSGD's pairs, each decided by itself, do: A for B, B for C, C for A.

A worker's lock bit is set from when a group is drawn for it until it is done with that group at
some key, and not only until it asks itself: who waits for someone slow, or for someone who stops
within their average, is not drawn by others, which would then wait for both. So a slow worker keeps
nobody waiting but those of its own group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.sync.groups.events import Group
from planner.sync.groups.levels import Levels
from planner.sync.groups.machine import WaitingRoom

_BEGUN = -1


class Drawer(Protocol):
    """Draws groups when somebody needs one.

    Attributes:
        takes_promised: it draws those too whose lock bit is set; the group then queues behind the
            one they are locked for.
    """

    takes_promised: bool

    def draw(self, initiator: int, iteration: int, eligible: Levels) -> Iterable[Sequence[int]]:
        """Groups in the order in which they take place, of which the initiator is in one or more.

        Args:
            initiator: who has asked and has no group.
            iteration: that it asks for.
            eligible: whom else it may draw, by the iteration that they have asked for last.
        """


@dataclass(slots=True)
class _Draw:
    """A group that has not begun at all keys.

    Attributes:
        iterations: of each member that has not left; members ascend.
        present: by key, how many members wait there for it; :data:`_BEGUN` once it has begun.
        keys_left: at how many keys it has not begun.
    """

    iterations: dict[int, int]
    present: list[int]
    keys_left: int


class Draws:
    """Rules under which a drawn group begins at a key as soon as all its members wait there."""

    deadline_s: float | None = None

    def __init__(self, room: WaitingRoom, drawer: Drawer) -> None:
        self._room = room
        self._drawer = drawer
        self._asked = [0] * room.workers
        """The last iteration that a worker has asked for at any key."""
        self._promised = [0] * room.workers
        """The last iteration of a worker for which a group is drawn."""
        self._draws: list[dict[int, _Draw]] = [{} for _ in range(room.workers)]
        self._running: dict[int, int] = {}
        """Of workers whose lock bit falls once they are done with a group: its iteration."""
        self._eligible = Levels()
        for worker in range(room.workers):
            self._eligible.put(worker, 0)

    def wait(self, worker: int, key: int, iteration: int, now_s: float) -> list[Group]:
        """Draw groups if there is none for the worker; begin its group if it was the last."""
        if iteration > self._asked[worker]:
            self._advance(worker, iteration)
        draw = self._draws[worker][iteration]
        draw.present[key] += 1
        return [self._begin(draw, key)] if draw.present[key] == len(draw.iterations) else []

    def finish(self, worker: int) -> None:
        """Let the worker be drawn again, if this was the last group drawn for it."""
        iteration = self._running.pop(worker, None)
        if iteration is not None and self._promised[worker] == iteration:
            self._eligible.put(worker, iteration)

    def leave(self, worker: int, waited: Mapping[int, int]) -> list[Group]:
        """Take the worker out of its groups, and begin those that only waited for it."""
        self._eligible.discard(worker)
        self._running.pop(worker, None)
        draws = self._draws[worker]
        self._draws[worker] = {}
        for key, iteration in waited.items():
            draws[iteration].present[key] -= 1
        return [group for draw in draws.values() for group in self._without(worker, draw)]

    def join(self, worker: int, iteration: int) -> None:
        """Nothing drawn before concerns the worker any more."""
        self._asked[worker] = self._promised[worker] = iteration - 1
        self._eligible.put(worker, iteration - 1)

    def tick(self, now_s: float) -> list[Group]:
        """Nothing here depends on time."""
        return []

    def _advance(self, worker: int, iteration: int) -> None:
        """A worker has come to an iteration: draw if it has no group."""
        self._asked[worker] = iteration
        if iteration > self._promised[worker]:
            self._eligible.discard(worker)
            for members in self._drawer.draw(worker, iteration, self._eligible):
                self._promise(members)
        if self._drawer.takes_promised:
            self._eligible.put(worker, iteration)

    def _promise(self, members: Sequence[int]) -> None:
        iterations = {}
        for member in sorted(members):
            self._promised[member] += 1
            iterations[member] = self._promised[member]
        keys = len(self._room.keys)
        draw = _Draw(iterations, [0] * keys, keys)
        for member, iteration in iterations.items():
            self._draws[member][iteration] = draw
            if not self._drawer.takes_promised:
                self._eligible.discard(member)

    def _without(self, worker: int, draw: _Draw) -> list[Group]:
        del draw.iterations[worker]
        if not draw.iterations:
            return []
        complete = [key for key in self._room.keys if draw.present[key] == len(draw.iterations)]
        return [self._begin(draw, key) for key in complete]

    def _begin(self, draw: _Draw, key: int) -> Group:
        draw.present[key] = _BEGUN
        if draw.keys_left == len(draw.present) and not self._drawer.takes_promised:
            self._unlock(draw)
        draw.keys_left -= 1
        if not draw.keys_left:
            for member, iteration in draw.iterations.items():
                del self._draws[member][iteration]
        return self._room.begin(key, tuple(draw.iterations))

    def _unlock(self, draw: _Draw) -> None:
        """Let those be drawn again for whom this was the last group, once they are done with it."""
        for member, iteration in draw.iterations.items():
            if len(draw.iterations) > 1:
                self._running[member] = iteration
            elif self._promised[member] == iteration:
                self._eligible.put(member, iteration)
