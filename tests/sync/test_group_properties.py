"""What holds for every scheduler of groups, whatever its workers do."""

from dataclasses import replace
from itertools import pairwise

from group_world import (
    MANY,
    Setting,
    World,
    any_options,
    drawn_options,
    run,
    settings_of,
    wave_options,
)
from hypothesis import given
from hypothesis import strategies as st

from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Group, GroupRequest, Joined, Left
from planner.sync.strategies import (
    AdPsgdOptions,
    Options,
    PartialAllReduceOptions,
    WaveSynchronousOptions,
    group_size_of,
)

nodes = st.none() | st.integers(1, 5)


@MANY
@given(settings_of(), any_options, nodes)
def test_everybody_gets_on_and_nobody_waits_forever(
    setting: Setting, options: Options, per_node: int | None
) -> None:
    world = run(setting, options, per_node)  # It checks every group that begins.
    stuck = [worker for worker in range(setting.workers) if not world.is_finished(worker)]
    assert not stuck
    assert not {place for place in world.waits if world.known[place[0]]}


@given(settings_of(fates=False), any_options)
def test_every_request_is_answered_once(setting: Setting, options: Options) -> None:
    world = run(setting, options)
    answers = [
        (worker, group.key, iteration)
        for group, _ in world.groups
        for worker, iteration in zip(group.members, group.iterations, strict=True)
    ]
    assert len(answers) == len(set(answers))
    assert len(answers) == setting.workers * setting.keys * setting.iterations


@given(settings_of(), any_options)
def test_the_same_events_lead_to_the_same_groups(setting: Setting, options: Options) -> None:
    world = run(setting, options)
    scheduler = scheduler_of(options, setting.workers, setting.keys)
    again = [group for event, now_s in world.log for group in scheduler.handle(event, now_s)]
    assert again == [group for group, _ in world.groups]


def sequences(world: World) -> dict[tuple[int, int], list[Group]]:
    found: dict[tuple[int, int], list[Group]] = {}
    for group, _ in world.groups:
        for worker in group.members:
            found.setdefault((worker, group.key), []).append(group)
    return found


@given(settings_of(fates=False), any_options)
def test_everybody_sees_its_groups_in_one_order(setting: Setting, options: Options) -> None:
    for (worker, _), groups in sequences(run(setting, options)).items():
        assert all(a.number < b.number for a, b in pairwise(groups))
        iterations = [group.iterations[group.members.index(worker)] for group in groups]
        assert iterations == list(range(1, setting.iterations + 1))


@given(
    settings_of(fates=False, most_workers=7),
    drawn_options() | st.just(AdPsgdOptions(pairs="matching")),
)
def test_a_drawn_group_is_the_same_at_all_keys(setting: Setting, options: Options) -> None:
    # Of groups that were drawn for workers that finish earlier, not all members are left.
    setting = replace(setting, iterations=setting.iterations + 3)
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    world = run(setting, options)
    retired_s = min(now_s for event, now_s in world.log if type(event).__name__ == "Left")
    for group, now_s in world.groups:
        if now_s < retired_s:
            for worker, iteration in zip(group.members, group.iterations, strict=True):
                found.setdefault((worker, iteration), set()).add(group.members)
    assert all(len(groups) == 1 for groups in found.values())


@given(
    settings_of(fates=False),
    st.one_of(
        drawn_options().filter(lambda options: not options.inter_intra),
        st.just(AdPsgdOptions(pairs="matching")),
    ),
    st.data(),
)
def test_who_is_stuck_keeps_none_but_its_group_waiting(
    setting: Setting, options: PartialAllReduceOptions | AdPsgdOptions, data: st.DataObject
) -> None:
    if isinstance(options, PartialAllReduceOptions):
        size = group_size_of(options, setting.workers)
        queues = options.group_buffer and not options.group_division
    else:
        size, queues = 2, False
    stuck = data.draw(st.integers(0, setting.workers - 1))
    world = run(replace(setting, stuck=stuck), options)
    waiting = {worker for worker, _ in world.waits}
    assert queues or len(waiting - {stuck}) < size


@given(settings_of(), wave_options)
def test_nobody_goes_on_farther_ahead_of_the_slowest_than_the_distance(
    setting: Setting, options: WaveSynchronousOptions
) -> None:
    """And everybody does as soon as it may; by an account of the events alone."""
    scheduler = scheduler_of(options, setting.workers, setting.keys)
    done = {(w, k): 0 for w in range(setting.workers) for k in range(setting.keys)}
    waits: set[tuple[int, int]] = set()
    for event, now_s in run(setting, options).log:
        if isinstance(event, Left | Joined):
            done = {p: n for p, n in done.items() if p[0] != event.worker}
            waits = {place for place in waits if place[0] != event.worker}
        if isinstance(event, Joined):
            done |= {(event.worker, key): event.iteration - 1 for key in range(setting.keys)}
        if isinstance(event, GroupRequest) and (event.worker, event.key) in done:
            place = event.worker, event.key
            if event.iteration > done[place]:
                done[place] = event.iteration
                waits.add(place)
        for group in scheduler.handle(event, now_s):
            waits.remove((group.members[0], group.key))
        for place, wave in done.items():
            slowest = min(n for (_, key), n in done.items() if key == place[1])
            assert (place in waits) == (wave - slowest > options.distance), (place, wave)
