"""A small world in virtual time that asks a scheduler for groups as pipelines would.

It keeps its own account of who waits, who is in which group and who is gone, and holds every
decision against that.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Event, Finished, Group, GroupRequest, Joined, Left, Tick
from planner.sync.groups.scheduler import Scheduler
from planner.sync.strategies import (
    AdPsgdOptions,
    Options,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
    WaveSynchronousOptions,
)

MANY = settings(max_examples=2 * settings().max_examples)
"""For a property of all schedulers, each of which has many ways to go wrong."""


@dataclass(frozen=True)
class Fate:
    """A worker stops without a word, is missed later, and may come back later still."""

    worker: int
    stops_s: float
    missed_after_s: float
    returns_after_s: float | None


@dataclass(frozen=True)
class Setting:
    """What a world is like.

    Attributes:
        strict: an iteration begins only with all answers of the one before; else each key needs
            only its own answer and that the worker has asked everywhere.
        slowness: of each worker, by which its computations take longer.
        stuck: who computes forever from its second iteration, and is not missed.
        repeats: share of messages that come twice.
    """

    workers: int
    keys: int
    iterations: int
    seed: int = 0
    strict: bool = True
    slowness: tuple[float, ...] = ()
    fates: tuple[Fate, ...] = ()
    stuck: int | None = None
    repeats: float = 0.0


@dataclass
class World:
    """One run; ``run`` ends when nothing can happen any more."""

    setting: Setting
    scheduler: Scheduler
    log: list[tuple[Event, float]] = field(default_factory=list)
    groups: list[tuple[Group, float]] = field(default_factory=list)
    answers: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Waiting time by worker, key and iteration; of the last time, if it did one twice."""

    def __post_init__(self) -> None:
        count, keys = self.setting.workers, range(self.setting.keys)
        self.random = Random(self.setting.seed)
        self.now_s = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.sent = 0
        self.life = [0] * count
        """Raised whenever a worker stops or starts: what belongs to an earlier life is void."""
        self.alive = [True] * count
        self.known = [True] * count
        self.done = [False] * count
        self.asked = [[0 for _ in keys] for _ in range(count)]
        self.answered = [[0 for _ in keys] for _ in range(count)]
        self.computing = [[False for _ in keys] for _ in range(count)]
        self.waits: dict[tuple[int, int], tuple[int, float]] = {}
        self.busy: dict[tuple[int, int], int] = {}
        self.free_s: dict[tuple[int, int], float] = {}
        self.tick_s: float | None = None

    def run(self) -> "World":
        for fate in self.setting.fates:
            self._at(fate.stops_s, lambda fate=fate: self._stop(fate))
        for worker in range(self.setting.workers):
            self._go_on(worker)
        while self.heap:
            self.now_s, _, action = heapq.heappop(self.heap)
            action()
        return self

    def is_finished(self, worker: int) -> bool:
        return self.done[worker] or not self.alive[worker]

    def _at(self, moment_s: float, action: Callable[[], None]) -> None:
        self.sent += 1
        heapq.heappush(self.heap, (moment_s, self.sent, action))

    def _soon(self, worker: int, seconds: float, action: Callable[[], None]) -> None:
        """Let a worker do something, unless it stops before."""
        life = self.life[worker]
        self._at(self.now_s + seconds, lambda: action() if self.life[worker] == life else None)

    def _tell(self, event: Event) -> None:
        self.log.append((event, self.now_s))
        for group in self.scheduler.handle(event, self.now_s):
            self._begin(group)
        deadline_s = self.scheduler.deadline_s
        if deadline_s is not None and deadline_s != self.tick_s:
            self.tick_s = deadline_s
            self._at(max(self.now_s, deadline_s), self._tick)
        if (
            isinstance(event, GroupRequest | Finished)
            and self.random.random() < self.setting.repeats
        ):
            seconds = self.random.choice([0, 1, 5])
            self._soon(event.worker, seconds, lambda: self._repeat(event))

    def _repeat(self, event: Event) -> None:
        self.log.append((event, self.now_s))
        assert self.scheduler.handle(event, self.now_s) == []

    def _tick(self) -> None:
        if self.tick_s is not None and self.tick_s <= self.now_s:
            self.tick_s = None
            self._tell(Tick())

    def _go_on(self, worker: int) -> None:
        """Begin to compute what a worker can; the last key first."""
        for key in reversed(range(self.setting.keys)):
            following = self.asked[worker][key] + 1
            if self.computing[worker][key] or not self._can_begin(worker, key, following):
                continue
            if self.setting.stuck == worker and following > 1:
                continue
            self.computing[worker][key] = True
            slowness = (self.setting.slowness or (1.0,) * (worker + 1))[worker]
            seconds = slowness * self.random.choice([0, 0.5, 1, 1, 2])
            self._soon(worker, seconds, lambda key=key: self._ask(worker, key))

    def _can_begin(self, worker: int, key: int, iteration: int) -> bool:
        if iteration > self.setting.iterations or self.done[worker]:
            return False
        asked, answered = self.asked[worker], self.answered[worker]
        if min(asked) < iteration - 1 or answered[key] < iteration - 1:
            return False
        if self.setting.strict and min(answered) < iteration - 1:
            return False
        return key + 1 == self.setting.keys or asked[key + 1] >= iteration

    def _ask(self, worker: int, key: int) -> None:
        self.computing[worker][key] = False
        self.asked[worker][key] += 1
        self.waits[worker, key] = self.asked[worker][key], self.now_s
        self._go_on(worker)
        self._tell(GroupRequest(worker, key, self.asked[worker][key]))

    def _begin(self, group: Group) -> None:
        assert group.number == len(self.groups)
        assert list(group.members) == sorted(set(group.members))
        assert group.members
        self.groups.append((group, self.now_s))
        for worker, iteration in zip(group.members, group.iterations, strict=True):
            place = worker, group.key
            asked, since_s = self.waits.pop(place)
            assert asked == iteration
            assert place not in self.busy, "a member is in another group of the key"
            since_s = max(since_s, self.free_s.get(place, 0.0))
            self.answers[worker, group.key, iteration] = self.now_s - since_s
            if len(group.members) > 1:
                self.busy[place] = group.number
            if not self.alive[worker]:
                continue
            self.answered[worker][group.key] = iteration
            seconds = self.random.choice([0, 0, 1, 3])
            self._soon(worker, seconds, lambda worker=worker: self._finish(worker, group))
            self._soon(worker, 0, lambda worker=worker: self._go_on(worker))

    def _finish(self, worker: int, group: Group) -> None:
        place = worker, group.key
        if self.busy.get(place) == group.number:
            del self.busy[place]
            self.free_s[place] = self.now_s
        self._tell(Finished(worker, group.number))
        busy = any((worker, key) in self.busy for key in range(self.setting.keys))
        if min(self.answered[worker]) == self.setting.iterations and not busy:
            self._soon(worker, 0, lambda: self._retire(worker))

    def _retire(self, worker: int) -> None:
        if not self.done[worker]:
            self.done[worker] = True
            self.known[worker] = False
            self._tell(Left(worker))

    def _stop(self, fate: Fate) -> None:
        worker = fate.worker
        if self.done[worker] or not self.alive[worker]:
            return
        self.alive[worker] = False
        self.life[worker] += 1
        self._soon(worker, fate.missed_after_s, lambda: self._miss(fate))

    def _miss(self, fate: Fate) -> None:
        worker = fate.worker
        back = fate.returns_after_s
        if back is None or self.random.random() < 0.7:  # Else it is back before it was missed.
            self._forget(worker)
            self._tell(Left(worker))
            # A message that was on its way when it was given up for lost.
            self._repeat(GroupRequest(worker, 0, max(1, self.asked[worker][0])))
        if back is not None:
            self._soon(worker, back, lambda: self._return(worker))

    def _forget(self, worker: int) -> None:
        self.known[worker] = False
        for key in range(self.setting.keys):
            self.waits.pop((worker, key), None)
            self.busy.pop((worker, key), None)
            self.computing[worker][key] = False

    def _return(self, worker: int) -> None:
        donors = [other for other in range(self.setting.workers) if self.known[other]]
        if donors:
            donor = self.random.choice(donors)
            iteration = min(self.answered[donor]) + 1
        else:
            iteration = min(self.answered[worker]) + 1
        if iteration > self.setting.iterations:
            if self.known[worker]:
                self._forget(worker)
                self._tell(Left(worker))
            return
        self._forget(worker)
        self.alive[worker] = self.known[worker] = True
        self.life[worker] += 1
        for key in range(self.setting.keys):
            self.asked[worker][key] = self.answered[worker][key] = iteration - 1
        self._tell(Joined(worker, iteration))
        self._go_on(worker)


def run(setting: Setting, options: Options, pipelines_per_node: int | None = None) -> World:
    """A world with the scheduler that the options ask for."""
    scheduler = scheduler_of(options, setting.workers, setting.keys, pipelines_per_node)
    return World(setting, scheduler).run()


@st.composite
def drawn_options(draw: st.DrawFn) -> PartialAllReduceOptions:
    """Options of the generator."""
    inter_intra = draw(st.booleans())
    division = inter_intra or draw(st.booleans())
    behind = draw(st.none() | st.integers(1, 5))
    between = st.sampled_from(["all", "initiator"])
    own = {"filter_between": draw(between)} if division and behind else {}
    return PartialAllReduceOptions(
        group_size=None if inter_intra else draw(st.none() | st.integers(2, 5)),
        pipelines_per_node=draw(st.none() | st.integers(1, 5)) if inter_intra else None,
        group_buffer=inter_intra or draw(st.booleans()),
        group_division=division,
        inter_intra=inter_intra,
        slowdown_filter=behind,
        **own,
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def readiness_options(draw: st.DrawFn) -> SemiDecentralizedOptions:
    """Options of readiness groups, in the seconds of this world."""
    return SemiDecentralizedOptions(
        first_wait_s=draw(st.sampled_from([0.25, 0.5, 1])),
        least_wait_s=draw(st.sampled_from([0, 0.125, 0.25])),
        most_wait_s=draw(st.sampled_from([1, 4])),
        most_members=draw(st.none() | st.integers(2, 5)),
        guarantee_period=draw(st.none() | st.integers(1, 4)),
    )


static_options = st.builds(
    PartialAllReduceOptions,
    schedule=st.just("static"),
    pipelines_per_node=st.none() | st.integers(1, 9),
)
wave_options = st.builds(WaveSynchronousOptions, distance=st.integers(0, 3))

any_options = st.one_of(
    static_options,
    drawn_options(),
    readiness_options(),
    st.just(AdPsgdOptions(pairs="matching")),
    wave_options,
)


@st.composite
def settings_of(
    draw: st.DrawFn, most_keys: int = 4, fates: bool = True, most_workers: int = 9
) -> Setting:
    """Worlds, if wanted with workers that stop and may return."""
    workers = draw(st.integers(1, most_workers))
    moments = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 12.0])
    fate = st.builds(
        Fate, st.integers(0, workers - 1), moments, moments, st.none() | st.sampled_from([0, 2, 9])
    )
    slowness = st.sampled_from([0.5, 1, 1, 1, 4])
    return Setting(
        workers,
        draw(st.integers(1, most_keys)),
        draw(st.integers(1, 8)),
        draw(st.integers(0, 10**6)),
        draw(st.booleans()),
        tuple(draw(st.lists(slowness, min_size=workers, max_size=workers))),
        tuple(draw(st.lists(fate, max_size=5))) if fates else (),
        repeats=draw(st.sampled_from([0, 0.3])),
    )
