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
from planner.replanning.choice import exchanges_for
from planner.replanning.recut import LOAD_FACTORS, Recut
from planner.replanning.state import State, moves_between
from planner.search.partition.chain import Chain, Partition, StageChoice

pytestmark = pytest.mark.extensive


def lacking(old: Plan, survivors: set[str], device: str, layers: list[str]) -> set[str]:
    """An oracle in sets of names: what a device must get for some layers."""
    uses = {row.name: set(row.parameters) for row in old.model.graph.layers}
    has = [n for s in old.stages if device in s.devices and device in survivors for n in s.layers]
    return set().union(*(uses[name] for name in layers)) - set().union(*(uses[n] for n in has))


def all_cuts(chain: Chain, groups: tuple[tuple[str, ...], ...]) -> Iterator[Partition]:
    for inner in combinations(range(1, chain.length), len(groups) - 1):
        bounds = [0, *inner, chain.length]
        yield tuple(
            StageChoice(a, b, group) for (a, b), group in zip(pairwise(bounds), groups, strict=True)
        )


def load_s(chain: Chain, partition: Partition) -> float:
    """Of equal replicas: whole microbatches each."""
    count = chain.problem.job.microbatches
    return max(
        3.0 * (stage.end - stage.begin) * -(-count // len(stage.devices)) for stage in partition
    )


@given(st.data())
def test_no_cuts_within_the_limit_move_fewer_bytes(data: st.DataObject) -> None:
    layers = data.draw(st.integers(3, 8))
    old_cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=2)))
    sizes = [b - a for a, b in pairwise([0, *old_cuts, layers])]
    names = ["n0/gpu0 n0/gpu1", "n1/gpu0", "n1/gpu1 n1/gpu2"][: len(sizes)]
    plan = plan_of(model(layers), nodes(3, 3), list(zip(sizes, names, strict=True)))
    devices = data.draw(st.permutations(plan.cluster.device_names))
    count = data.draw(st.integers(1, min(3, layers)))
    groups = tuple(tuple(devices[k::count]) for k in range(count))
    survivors = set(devices[: data.draw(st.integers(0, 6))])
    chain, state = Chain(plan.problem), State(plan, survivors)
    found = list(Recut(chain, state, np.arange(layers + 1)).partitions(groups))
    known = list(all_cuts(chain, groups))
    least_s = min(load_s(chain, partition) for partition in known)

    def moved(partition: Partition) -> int:
        return sum(
            STATE_BYTES * len(lacking(plan, survivors, device, list(chain.names[s.begin : s.end])))
            for s in partition
            for device in s.devices
        )

    assert all(state.moved_bytes(chain, partition) == moved(partition) for partition in found)
    assert moved(found[0]) == min(map(moved, known))
    for factor in LOAD_FACTORS:
        limit_s = factor * least_s * (1 + 1e-9)
        best = min(moved(partition) for partition in known if load_s(chain, partition) <= limit_s)
        assert best in [moved(p) for p in found if load_s(chain, p) <= limit_s]


@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(0, 6))
def test_devices_that_may_be_exchanged_get_what_they_hold(
    before: list[int], after: list[int], left: int
) -> None:
    """Against all exchanges of six devices on one switch."""
    names = nodes(6).device_names
    rows = [(2, " ".join(names[i] for i in sorted(before[k : k + 2]))) for k in (0, 2, 4)]
    plan = plan_of(model(), nodes(6), rows)
    state, chain = State(plan, names[:left]), Chain(plan.problem)
    partition = tuple(
        StageChoice(2 * k, 2 * k + 2, tuple(names[i] for i in sorted(after[2 * k : 2 * k + 2])))
        for k in range(3)
    )
    wanted = state.wanted(chain, partition)
    best = min(
        state.lacking_bytes(dict(zip(order, wanted.values(), strict=True)))
        for order in permutations(names)
    )
    assert exchanges_for(chain, state, partition)[0].moved_bytes == best


def test_nodes_are_exchanged_as_a_whole() -> None:
    plan = two_nodes()
    chain, state = Chain(plan.problem), State(plan, plan.cluster.device_names)
    there = tuple(
        StageChoice(3 * k, 3 * k + 3, (f"n{1 - k}/gpu0", f"n{1 - k}/gpu1")) for k in (0, 1)
    )
    first, *_, last = exchanges_for(chain, state, there)
    assert first.moved_bytes == 0
    assert {first.images[f"n0/gpu{i}"] for i in (0, 1)} == {"n1/gpu0", "n1/gpu1"}
    assert last.moved_bytes == 12 * STATE_BYTES
    assert last.images == {name: name for name in plan.cluster.device_names}


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
    assert state.missing_bytes([state.of_layers(["a", "b"])], ["n0/gpu0", "new"]).tolist() == [
        [4000, 5320]
    ]


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
