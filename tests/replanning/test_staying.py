"""What stays in place: cuts that move least, devices that hold most, and the moves themselves."""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from builders import boundary, cluster, device_type, graph, layer, link, parameter
from hypothesis import given
from hypothesis import strategies as st
from trained import STATE_BYTES, model, nodes, plan_of, two_nodes

from planner.plan.moves import Moves
from planner.plan.plan import Plan
from planner.replanning.choice import Exchanges, Images
from planner.replanning.recut import LOAD_FACTORS, Groups, Recut
from planner.replanning.state import State, moves_between
from planner.search.walk.starts import Needs, Start

pytestmark = pytest.mark.extensive


def lacking(old: Plan, survivors: set[str], device: str, layers: list[str]) -> set[str]:
    """An oracle in sets of names: what a device must get for some layers."""
    uses = {row.name: set(row.parameters) for row in old.model.graph.layers}
    has = [n for s in old.stages if device in s.devices and device in survivors for n in s.layers]
    return set().union(*(uses[name] for name in layers)) - set().union(*(uses[n] for n in has))


def all_cuts(layers: int, groups: Groups) -> Iterator[Start]:
    for inner in combinations(range(1, layers), len(groups) - 1):
        yield Start((*inner, layers), groups)


def load_s(plan: Plan, start: Start) -> float:
    """Of equal replicas: whole microbatches each."""
    sizes = [b - a for a, b in pairwise((0, *start.ends))]
    pairs = zip(sizes, start.devices, strict=True)
    return max(3.0 * size * -(-plan.microbatches // len(group)) for size, group in pairs)


@given(st.data())
def test_no_cuts_within_the_limit_move_fewer_bytes(data: st.DataObject) -> None:
    layers = data.draw(st.integers(3, 8))
    old_cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=2)))
    sizes = [b - a for a, b in pairwise([0, *old_cuts, layers])]
    names = ["n0/gpu0 n0/gpu1", "n1/gpu0", "n1/gpu1 n1/gpu2"][: len(sizes)]
    plan = plan_of(model(layers), nodes(3, 3), list(zip(sizes, names, strict=True)))
    devices = data.draw(st.permutations(range(6)))
    count = data.draw(st.integers(1, min(3, layers)))
    groups = tuple(tuple(devices[k::count]) for k in range(count))
    all_names = plan.cluster.device_names
    survivors = {all_names[d] for d in devices[: data.draw(st.integers(0, 6))]}
    state, starts = State(plan, survivors), list(all_cuts(layers, groups))
    seconds = np.full((6, 1, layers + 1, layers + 1), np.inf)
    for begin, end in combinations(range(layers + 1), 2):
        seconds[:, :, begin, end] = 3.0 * (end - begin)
    needs = Needs(seconds, np.zeros(seconds.shape, np.int64), np.zeros(6, np.int32), np.ones(1))
    recut = Recut(needs, np.ones(layers + 1, bool), state, plan.microbatches)
    found = list(recut.starts(groups))
    least_s = min(load_s(plan, start) for start in starts)

    def moved(start: Start) -> int:
        rows = zip(pairwise((0, *start.ends)), start.devices, strict=True)
        names = list(plan.problem.graph.layers)
        return sum(
            STATE_BYTES * len(lacking(plan, survivors, all_names[device], names[begin:end]))
            for (begin, end), group in rows
            for device in group
        )

    for longest_s, start in found:
        assert longest_s == pytest.approx(load_s(plan, start))
        assert state.lacking_bytes(state.needed(start)) == moved(start)
    assert moved(found[0][1]) == min(map(moved, starts))
    for factor in LOAD_FACTORS:
        limit_s = factor * least_s * (1 + 1e-9)
        best = min(moved(start) for start in starts if load_s(plan, start) <= limit_s)
        assert best in [moved(start) for _, start in found if load_s(plan, start) <= limit_s]


def least_moved(exchanges: Exchanges, start: Start) -> tuple[int, Images]:
    needed = exchanges.state.needed(start)
    rows = [(exchanges.moved_bytes(needed, images), images) for images in exchanges.of(needed)]
    return min(rows, key=lambda row: row[0])


@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(0, 6))
def test_devices_that_may_be_exchanged_get_what_they_hold(
    before: list[int], after: list[int], left: int
) -> None:
    """Against all exchanges of six devices on one switch."""
    names = nodes(6).device_names
    rows = [(2, " ".join(names[i] for i in sorted(before[k : k + 2]))) for k in (0, 2, 4)]
    plan = plan_of(model(), nodes(6), rows)
    state = State(plan, names[:left])
    start = Start((2, 4, 6), tuple(tuple(sorted(after[k : k + 2])) for k in (0, 2, 4)))
    needed = state.needed(start)
    best = min(state.lacking_bytes(needed[list(order)]) for order in permutations(range(6)))
    exchanges = Exchanges(state, plan.cluster)
    assert least_moved(exchanges, start)[0] == best
    assert exchanges.least_bytes(needed) <= best


def test_nodes_are_exchanged_as_a_whole() -> None:
    plan = two_nodes()
    state = State(plan, plan.cluster.device_names)
    there = Start((3, 6), ((2, 3), (0, 1)))
    moved, images = least_moved(Exchanges(state, plan.cluster), there)
    assert moved == 0
    assert {images[i] for i in (0, 1)} == {2, 3}
    assert state.lacking_bytes(state.needed(there)) == 12 * STATE_BYTES


def test_state_is_weights_moments_and_masters_of_what_is_trained() -> None:
    rows = [layer("a", parameters=["w", "tied"]), layer("b", parameters=["tied", "frozen"])]
    weights = [parameter("w", 10), parameter("tied", 100), parameter("frozen", 1000, False)]
    tied = graph(rows, [boundary("a", "b")], weights)
    plan = plan_of(tied, nodes(2), [(1, "n0/gpu0"), (1, "n0/gpu1")], optimizer="adamw")
    state = State(plan, plan.cluster.device_names)
    assert dict(zip(state.names, state.bytes.tolist(), strict=True)) == {
        "w": 120,
        "tied": 1200,
        "frozen": 4000,
    }
    assert state.size(state.of_layers(["a", "b"])) == 5320
    assert state.lacking_bytes(state.needed(Start((2,), ((0, 1),)))) == 4120


def moves(old: Plan, new: Plan, survivors: set[str]) -> Moves:
    return moves_between(old, new, State(old, survivors))


def test_state_comes_from_the_nearest_holder_else_from_the_checkpoint() -> None:
    """n1/gpu1 has a holder of l3 on its own node; of l2 only n0's, and nobody has l4 and l5."""
    three = nodes(2, 2)
    old = plan_of(model(), three, [(3, "n0/gpu0"), (1, "n1/gpu0"), (2, "n0/gpu1")])
    new = plan_of(model(), three, [(2, "n0/gpu0"), (4, "n1/gpu1")])
    found = moves(old, new, {"n0/gpu0", "n1/gpu0", "n1/gpu1"})
    rows = {row.source: (row.target, row.layers, row.parameters, row.bytes) for row in found.moves}
    assert rows == {
        "n0/gpu0": ("n1/gpu1", ("l2",), ("w2",), STATE_BYTES),
        "n1/gpu0": ("n1/gpu1", ("l3",), ("w3",), STATE_BYTES),
        None: ("n1/gpu1", ("l4", "l5"), ("w4", "w5"), 2 * STATE_BYTES),
    }
    assert found.bytes_between_devices == found.bytes_from_checkpoint == 2 * STATE_BYTES
    assert found.resume_bytes == 6 * STATE_BYTES
    # 16,000 bytes into n1/gpu1 over 100 GB/s, 8,000 of them between the nodes over 1 GB/s.
    assert found.seconds == pytest.approx(8e-6)


def test_holders_take_turns_to_send() -> None:
    old = plan_of(model(), nodes(4), [(6, "n0/gpu0 n0/gpu1")])
    new = plan_of(model(), nodes(4), [(6, "n0/gpu2 n0/gpu3")])
    found = moves(old, new, {"n0/gpu0", "n0/gpu1"})
    assert [(row.source, row.target) for row in found.moves] == [
        ("n0/gpu0", "n0/gpu2"),
        ("n0/gpu1", "n0/gpu3"),
    ]
    assert found.seconds == pytest.approx(6 * STATE_BYTES / 100e9)


def test_a_holder_without_a_way_is_no_source() -> None:
    apart = cluster(["a", "b", "c"], [link("b", "c")], types={"unit": device_type()})
    old = plan_of(model(), apart, [(6, "a")])
    new = plan_of(model(), apart, [(3, "b"), (3, "c")])
    assert [row.source for row in moves(old, new, {"a"}).moves] == [None, None]


@given(st.data())
def test_moves_are_exactly_what_devices_lack(data: st.DataObject) -> None:
    names = nodes(2, 2).device_names

    def drawn() -> Plan:
        order = data.draw(st.permutations(names))
        cut, split = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
        stages = [(cut, " ".join(order[:split])), (6 - cut, " ".join(order[split:]))]
        return plan_of(model(), nodes(2, 2), stages)

    old, new = drawn(), drawn()
    survivors = data.draw(st.sets(st.sampled_from(names)))
    found = moves(old, new, survivors)
    holders = {
        d: lacking(old, set(), d, [n for s in old.stages if d in s.devices for n in s.layers])
        for d in survivors
    }
    for stage in new.stages:
        for device in stage.devices:
            rows = [row for row in found.moves if row.target == device]
            wanted = lacking(old, survivors, device, list(stage.layers))
            assert sorted(name for row in rows for name in row.parameters) == sorted(wanted)
            for row in rows:
                assert row.bytes == STATE_BYTES * len(row.parameters)
                if row.source is None:
                    assert not any(holders[d] & set(row.parameters) for d in survivors)
                else:
                    assert set(row.parameters) <= holders[row.source]
    assert found.bytes == sum(row.bytes for row in found.moves)
