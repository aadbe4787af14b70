"""Ranks of pipelines in a virtual world, driven by random choices, around a real coordinator.

Messages may be told twice; pipelines die anywhere, and come back. A collective ends for a member
once all members are in it, or one of them has died. Where averages run behind the computation, a
rank asks for the next share beside its request for a group.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from executor.coordinator.messages import Address, Answer, Ask, Hello, Late, Lost, Message, Take
from executor.coordinator.state import Coordinator


@dataclass
class Rank:
    """One rank, and what it waits for: with its main thread, and with that of its averages."""

    pipeline: int
    place: int
    incarnation_id: str
    state: str = "new"
    average: str = "none"
    asked: int = 0
    step: int = 0
    incarnation: int = 0
    group: tuple[int, tuple[tuple[int, int], ...]] | None = None
    newest_group: int = -1
    inbox: deque[dict] = field(default_factory=deque)
    groups: deque[dict] = field(default_factory=deque)
    put_aside: set[int] = field(default_factory=set)
    reduced: bool = True


class World:
    """All ranks, and the choices of one seed.

    Attributes:
        trained: by share, the pipelines whose every place was done with it, in order.
    """

    def __init__(
        self, coordinator: Coordinator, pipelines: int, places: int, seed: int, deaths: int
    ) -> None:
        self.coordinator = coordinator
        self.places = places
        self.rng = random.Random(seed)
        self.deaths = deaths
        self.now_s = 0.0
        self.born = 0
        self.ranks: dict[Address, Rank] = {}
        self.dead: set[tuple[int, int]] = set()
        self.trained: list[tuple[int, int, int]] = []
        self.messages: list[tuple[Message, float]] = []
        self.refused = 0
        for pipeline in range(pipelines):
            self.give_birth(pipeline)

    def give_birth(self, pipeline: int) -> None:
        self.born += 1
        incarnation_id = f"n{self.born}"
        for place in range(self.places):
            rank = Rank(pipeline, place, incarnation_id)
            self.ranks[pipeline, place, incarnation_id] = rank

    def send(self, message: Message) -> None:
        for _ in range(1 + (self.rng.random() < 0.2)):
            self.messages.append((message, self.now_s))
            for answer in self.coordinator.handle(message, self.now_s):
                self.deliver(answer)

    def deliver(self, answer: Answer) -> None:
        rank = self.ranks.get(answer.to)
        if rank is not None:
            (rank.groups if answer.body["kind"] == "group" else rank.inbox).append(answer.body)

    def run(self, most: int = 100_000) -> None:
        """Until every rank has ended.

        Raises:
            AssertionError: if all wait for ever.
        """
        for _ in range(most):
            if all(rank.state == "ended" for rank in self.ranks.values()):
                return
            self.now_s += 0.001
            deadline_s = self.coordinator.deadline_s
            if deadline_s is not None and deadline_s <= self.now_s:
                self.send(Late())
            able = [rank for rank in self.ranks.values() if self.can_move(rank)]
            if self.deaths and self.rng.random() < 0.01:
                self.deaths -= 1
                self.kill(self.rng.choice(list(self.ranks.values())).pipeline)
            elif able:
                self.move(self.rng.choice(able))
            elif deadline_s is not None:
                self.now_s = max(self.now_s, deadline_s)
            else:
                raise AssertionError(f"all wait: {[(q, r.state) for q, r in self.ranks.items()]}")
        raise AssertionError("no end")

    def kill(self, pipeline: int) -> None:
        mine = {q: r for q, r in self.ranks.items() if r.pipeline == pipeline}
        if any(rank.state == "ended" for rank in mine.values()):
            return
        incarnation_id = next(iter(mine.values())).incarnation_id
        for queue, rank in mine.items():
            self.dead.add((pipeline, rank.incarnation))
            del self.ranks[queue]
        self.send(Lost(pipeline=pipeline, incarnation_id=incarnation_id))
        self.give_birth(pipeline)

    def can_move(self, rank: Rank) -> bool:
        return self.can_average(rank) or self.can_work(rank)

    def can_average(self, rank: Rank) -> bool:
        if rank.average == "in a group":
            return self.is_over(rank)
        return bool(rank.groups)

    def can_work(self, rank: Rank) -> bool:
        if rank.state == "computing":
            return rank.average == "none"
        if rank.state == "ending":
            return rank.average == "none"
        return rank.state == "new" or bool(rank.inbox)

    def is_over(self, rank: Rank) -> bool:
        assert rank.group is not None
        number, members = rank.group
        for pipeline, incarnation in members:
            if (pipeline, incarnation) in self.dead:
                return True
            other = next(
                r for r in self.ranks.values() if (r.pipeline, r.place) == (pipeline, rank.place)
            )
            has_been = other.incarnation == incarnation and other.newest_group >= number
            if not has_been:
                return False
        return True

    def move(self, rank: Rank) -> None:
        can = [do for do, able in self.moves(rank) if able]
        self.rng.choice(can)(rank)

    def moves(self, rank: Rank) -> list[tuple[Callable[[Rank], None], bool]]:
        return [(self.go_on_averaging, self.can_average(rank)), (self.work, self.can_work(rank))]

    def go_on_averaging(self, rank: Rank) -> None:
        if rank.average == "in a group":
            assert rank.group is not None
            rank.reduced = not any(member in self.dead for member in rank.group[1])
            rank.average = "none"
            if not self.coordinator.overlapped_averages:
                self.take(rank, rank.step + 1)
            return
        body = rank.groups.popleft()
        assert body["kind"] == "group"
        if rank.average == "asking" and body["step"] == rank.asked:
            members = tuple((n, incarnation) for n, incarnation in body["members"])
            rank.average = "in a group"
            rank.group = (body["number"] if members else -1, members)
            rank.newest_group = max(rank.newest_group, rank.group[0])

    def work(self, rank: Rank) -> None:
        names = {
            "pipeline": rank.pipeline,
            "place": rank.place,
            "incarnation_id": rank.incarnation_id,
        }
        if rank.state == "new":
            rank.state = "greeting"
            self.send(Hello(**names))
        elif rank.state == "ending":
            rank.state = "ended"
        elif rank.state == "computing":
            rank.average, rank.asked = "asking", rank.step
            ask = Ask(**names, step=rank.step, reduced=rank.reduced)
            if not self.coordinator.overlapped_averages:
                rank.state = "averaging"
                self.send(ask)
                return
            # Two threads: either message may come first.
            if self.rng.random() < 0.5:
                self.send(ask)
                self.take(rank, rank.step + 1)
            else:
                self.take(rank, rank.step + 1)
                self.send(ask)
        else:
            self.read(rank, rank.inbox.popleft())

    def take(self, rank: Rank, step: int) -> None:
        rank.step = step
        rank.state = "taking"
        self.send(
            Take(
                pipeline=rank.pipeline,
                place=rank.place,
                incarnation_id=rank.incarnation_id,
                step=step,
                reduced=rank.reduced or self.coordinator.overlapped_averages,
            )
        )

    def read(self, rank: Rank, body: dict) -> None:
        kind = body["kind"]
        assert kind != "fenced"
        if kind == "refused":
            self.refused += 1
            rank.state = "ended"
        elif kind == "welcome" and rank.state == "greeting":
            rank.incarnation = body["incarnation"]
            self.take(rank, body["step"])
        elif kind == "snapshot" and rank.state == "taking":
            rank.put_aside.add(rank.step)
        elif kind == "share" and rank.state == "taking" and body["step"] == rank.step:
            self.begin(rank, body)

    def begin(self, rank: Rank, body: dict) -> None:
        if body["snapshot"]:
            rank.put_aside.add(rank.step)
        if body["share"] is None:
            # What is under way is waited for.
            rank.state = "ending"
            return
        self.trained.append((body["share"], rank.pipeline, rank.place))
        rank.state = "computing"
