"""What Ripples' Group Generator and AD-PSGD's pairs draw."""

from collections import Counter
from random import Random

import networkx as nx
import pytest
from group_world import Setting, drawn_options, run, settings_of
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Finished, GroupRequest
from planner.sync.groups.generator import Division, RandomGroups, equal_groups, inter_intra
from planner.sync.groups.levels import Levels, nodes_of
from planner.sync.groups.matching import bipartition, passive_partner
from planner.sync.strategies import AdPsgdOptions, PartialAllReduceOptions, group_size_of

reached = st.dictionaries(st.integers(1, 30), st.integers(0, 12), max_size=20)
thresholds = st.none() | st.integers(1, 6)
INITIATOR = 0


def levels_of(iterations: dict[int, int]) -> Levels:
    levels = Levels()
    for worker, iteration in iterations.items():
        levels.put(worker, iteration)
    return levels


@given(
    reached, thresholds, st.booleans(), st.integers(1, 14), st.integers(2, 5), st.integers(0, 99)
)
def test_a_division_draws_all_who_are_near_at_most_once(
    others: dict[int, int],
    threshold: int | None,
    one_band: bool,
    iteration: int,
    size: int,
    seed: int,
) -> None:
    division = Division(equal_groups(size), threshold, one_band, Random(seed))
    groups = list(division.draw(INITIATOR, iteration, levels_of(others)))
    drawn = Counter(worker for group in groups for worker in group)
    assert max(drawn.values()) == 1
    assert INITIATOR in drawn
    assert all(2 <= len(group) <= size for group in groups if group != [INITIATOR])
    near = [w for w, last in others.items() if threshold is None or iteration - last < threshold]
    assert set(drawn) <= {INITIATOR, *near}
    if threshold is None or one_band:
        # Ripples' own filter divides all that the initiator does not leave out.
        left = len(near) + 1 - len(drawn)
        assert left == 0 or (left == 1 and (len(near) + 1) % size == 1)


@given(reached, st.integers(1, 6), st.integers(1, 14), st.integers(0, 99))
def test_nobody_is_drawn_by_or_beside_someone_far_ahead(
    others: dict[int, int], threshold: int, iteration: int, seed: int
) -> None:
    drawers = [
        Division(equal_groups(3), threshold, False, Random(seed)),
        Division(inter_intra(nodes_of(31, 4)), threshold, False, Random(seed)),
    ]
    for drawer in drawers:
        for group in drawer.draw(INITIATOR, iteration, levels_of(others)):
            last = [others[worker] for worker in group if worker != INITIATOR]
            assert all(iteration - other < threshold for other in last)
            assert not last or max(last) - min(last) < threshold
    random_groups = RandomGroups(3, threshold, True, Random(seed))
    (group,) = random_groups.draw(INITIATOR, iteration, levels_of(others))
    assert group[0] == INITIATOR
    assert all(iteration - others[worker] < threshold for worker in group[1:])


@given(reached, st.integers(0, 99), st.integers(1, 6))
def test_inter_intra_takes_one_of_each_node_across_and_then_whole_nodes(
    others: dict[int, int], seed: int, per_node: int
) -> None:
    assume(others)
    nodes = nodes_of(31, per_node)
    drawer = Division(inter_intra(nodes), None, False, Random(seed))
    heads, *rest = drawer.draw(INITIATOR, 1, levels_of(others))
    everyone = {INITIATOR, *others}
    of_node = [everyone & set(node) for node in nodes if everyone & set(node)]
    assert sorted(len(set(heads) & node) for node in of_node) == [1] * len(of_node)
    large = [node for node in of_node if len(node) > 1]
    assert sorted(map(sorted, rest)) == sorted(
        [sorted(node - set(heads)) for node in large] + [sorted(node) for node in large]
    )


@given(settings_of(fates=False, most_workers=6), drawn_options())
def test_a_group_is_no_larger_than_asked_for(
    setting: Setting, options: PartialAllReduceOptions
) -> None:
    assume(not options.inter_intra)
    size = group_size_of(options, setting.workers)
    assert all(len(group.members) <= size for group, _ in run(setting, options).groups)


@pytest.mark.parametrize(
    "options",
    [
        PartialAllReduceOptions(),
        PartialAllReduceOptions(group_division=False),
        PartialAllReduceOptions(group_division=False, group_buffer=False),
        PartialAllReduceOptions(inter_intra=True, pipelines_per_node=4),
        AdPsgdOptions(pairs="matching"),
    ],
)
def test_drawn_groups_soon_connect_everyone(
    options: PartialAllReduceOptions | AdPsgdOptions,
) -> None:
    graph = nx.Graph()
    graph.add_nodes_from(range(16))
    for group, _ in run(Setting(16, 1, 12), options).groups:
        nx.add_path(graph, group.members)
    assert nx.is_connected(graph)


def test_the_slow_still_meet_the_fast() -> None:
    """The slow wait for the fast, who never wait for them."""
    setting = Setting(12, 1, 60, slowness=(1.0,) * 6 + (4.0,) * 6)
    world = run(setting, PartialAllReduceOptions())
    meetings = [
        (group, now_s)
        for group, now_s in world.groups
        if min(group.members) < 6 <= max(group.members)
    ]
    late = [group for group, _ in meetings if max(group.iterations) > 30]
    assert len(late) > 5


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 5)), max_size=60))
def test_levels_know_who_is_where(steps: list[tuple[int, int | None]]) -> None:
    levels, plain = Levels(), dict[int, int]()
    for worker, level in steps:
        if level is None:
            levels.discard(worker)
            plain.pop(worker, None)
        else:
            levels.put(worker, level)
            plain[worker] = level
    for lowest in range(-1, 7):
        found = {level: sorted(workers) for level, workers in levels.from_above(lowest)}
        assert list(found) == sorted(found, reverse=True)
        assert {w: level for level, workers in found.items() for w in workers} == {
            w: level for w, level in plain.items() if level >= lowest
        }
        sample = levels.sample(4, lowest, Random(0))
        above = {w for w, level in plain.items() if level >= lowest}
        assert set(sample) <= above
        assert len(set(sample)) == len(sample) == min(4, len(above))


@given(st.integers(2, 30), st.integers(1, 9), st.integers(0, 9))
def test_the_passive_partner_is_of_the_other_half(workers: int, iteration: int, seed: int) -> None:
    active, passive = bipartition(workers)
    assert sorted(active + passive) == list(range(workers))
    for worker in active:
        partner = passive_partner(worker, iteration, workers, seed)
        assert partner in passive
        assert partner == passive_partner(worker, iteration, workers, seed)


def test_passive_partners_are_drawn_evenly() -> None:
    drawn = Counter(passive_partner(0, iteration, 8) for iteration in range(4000))
    assert set(drawn) == {1, 3, 5, 7}
    assert min(drawn.values()) > 900  # Of 1000 expected each; three standard deviations are 82.


def test_there_may_be_no_partner() -> None:
    assert passive_partner(0, 1, 1) is None
    with pytest.raises(ValueError, match="answers"):
        passive_partner(1, 1, 4)


@pytest.mark.parametrize("seed", range(10))
def test_who_is_drawn_for_a_second_phase_is_not_drawn_before_it(seed: int) -> None:
    options = PartialAllReduceOptions(inter_intra=True, pipelines_per_node=2, seed=seed)
    scheduler = scheduler_of(options, 4, 1)
    for iteration, workers in ((1, range(4)), (2, (0, 1))):
        for worker in workers:
            for group in scheduler.handle(GroupRequest(worker, 0, iteration), 0):
                for member in group.members:
                    scheduler.handle(Finished(member, group.number), 0)
    # Workers 2 and 3 have their node's group before them, so 0 has nobody on another node.
    (group,) = scheduler.handle(GroupRequest(0, 0, 3), 0)
    assert group.members == (0,)
