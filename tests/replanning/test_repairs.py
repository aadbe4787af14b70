"""Which groups of devices are tried for the stages of a plan whose machines changed."""

from hypothesis import given
from hypothesis import strategies as st
from trained import nodes

from planner.replanning.repair import OldStage, Repairs
from planner.variants.clusters import without

Named = tuple[tuple[str, ...], ...]
MACHINES = nodes(4, 4)
NAMES = MACHINES.device_names


def repaired(*stages: str, spares: str = "", slowed: str = "", most: int = 6) -> list[Named]:
    """Repairs on the devices of the stages and the spares alone, by name."""
    used = " ".join([*stages, spares]).split()
    the_cluster = without(MACHINES, set(NAMES).difference(used))
    number = the_cluster.numbers
    old = tuple(OldStage(tuple(number[d] for d in devices.split()), 1.0) for devices in stages)
    slow = [number[name] for name in slowed.split() if name in number]
    repairs = Repairs(old, len(number), slow, the_cluster.link_table, most, 1, True)
    names = the_cluster.device_names
    return [
        tuple(tuple(names[device] for device in group) for group in groups)
        for groups in repairs.groups()
    ]


def test_stages_that_lost_nothing_stay_first_of_all() -> None:
    assert repaired("n0/gpu0", "n0/gpu1 n0/gpu2")[0] == (("n0/gpu0",), ("n0/gpu1", "n0/gpu2"))


def test_a_stage_without_devices_gets_the_nearest_spare() -> None:
    """The stages beside it lie on n0, and so does one of the spares."""
    found = repaired("n0/gpu0", "", "n0/gpu1", spares="n1/gpu0 n0/gpu3")
    assert found[0] == (("n0/gpu0",), ("n0/gpu3",), ("n0/gpu1",))


def test_without_spares_a_stage_is_dropped_or_another_one_divided() -> None:
    found = repaired("n0/gpu0 n0/gpu1 n0/gpu2 n0/gpu3", "", "n1/gpu0", most=3)
    assert [tuple(map(len, groups)) for groups in found] == [(4, 1), (2, 2, 1)]


def test_replicas_may_become_two_stages_that_follow_each_other() -> None:
    found = repaired("n0/gpu0", "n0/gpu1 n0/gpu2 n0/gpu3")
    assert found[1:] == [(("n0/gpu0",), ("n0/gpu1",), ("n0/gpu2", "n0/gpu3"))]


def test_slow_devices_go_where_others_hold_the_stage() -> None:
    found = repaired("n0/gpu0 n0/gpu1", "n0/gpu2", slowed="n0/gpu1 n0/gpu2")
    assert (("n0/gpu0",), ("n0/gpu2",)) in found
    spare = repaired("n0/gpu0", "n0/gpu1", slowed="n0/gpu1", spares="n0/gpu3")
    assert (("n0/gpu0",), ("n0/gpu3",)) in spare


def test_new_devices_join_a_stage_or_become_one_at_every_place() -> None:
    found = repaired("n0/gpu0", "n0/gpu1 n0/gpu2", spares="n0/gpu3")
    assert (("n0/gpu0", "n0/gpu3"), ("n0/gpu1", "n0/gpu2")) in found
    for place in range(3):
        groups = [("n0/gpu0",), ("n0/gpu1", "n0/gpu2")]
        groups.insert(place, ("n0/gpu3",))
        assert tuple(groups) in found


@given(st.permutations(NAMES), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.data())
def test_every_choice_uses_devices_that_are_there_once_each(
    order: list[str], sizes: list[int], data: st.DataObject
) -> None:
    left, stages = list(order), []
    for size in sizes:
        stages.append(" ".join(sorted(left[:size])))
        left = left[size:]
    slowed = " ".join(data.draw(st.sets(st.sampled_from(NAMES), max_size=2)))
    most = data.draw(st.integers(1, 5))
    found = repaired(*stages, spares=" ".join(left), slowed=slowed, most=most)
    assert len(found) == len(set(found))
    for groups in found:
        used = [device for group in groups for device in group]
        assert 0 < len(groups) <= most
        assert all(groups)
        assert len(used) == len(set(used))
        assert set(used) <= set(order)


def test_what_has_no_devices_at_all_takes_spares() -> None:
    assert repaired("", spares="n1/gpu0") == [(("n1/gpu0",),)]
