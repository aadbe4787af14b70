"""Someone who stops within an average keeps nobody waiting but those of its own group."""

from __future__ import annotations

import pytest

from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Finished, Group, GroupRequest
from planner.sync.groups.scheduler import Scheduler
from planner.sync.strategies import options_of, parse_sync

SYNCS = ("partial_all_reduce:group_size=2", "ad_psgd:pairs=matching", "partial_all_reduce")


class World:
    """Workers that ask for the next iteration as soon as they have averaged, but for one."""

    def __init__(self, scheduler: Scheduler, workers: int) -> None:
        self.scheduler = scheduler
        self.iteration = [0] * workers
        self.groups: list[Group] = []

    def ask(self, worker: int) -> None:
        self.iteration[worker] += 1
        self.groups += self.scheduler.handle(GroupRequest(worker, 0, self.iteration[worker]), 0.0)

    def finish(self, group: Group, worker: int) -> None:
        if len(group.members) > 1:
            self.groups += self.scheduler.handle(Finished(worker, group.number), 0.0)


@pytest.mark.extensive
@pytest.mark.parametrize("sync", SYNCS)
def test_who_is_in_no_group_with_it_goes_on(sync: str) -> None:
    workers = 5
    world = World(scheduler_of(options_of(parse_sync(sync)), workers, 1, None), workers)
    for worker in range(workers):
        world.ask(worker)
    stuck = next(group for group in world.groups if len(group.members) > 1)
    free = [worker for worker in range(workers) if worker not in stuck.members]
    handled = [stuck]
    for _ in range(200):
        todo = [group for group in world.groups if group not in handled]
        assert todo, f"{free} wait for {stuck.members}"
        for group in todo:
            handled.append(group)
            for worker in group.members:
                world.finish(group, worker)
                world.ask(worker)
    assert min(world.iteration[worker] for worker in free) > 20
