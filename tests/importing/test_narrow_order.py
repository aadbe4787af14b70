"""Orders are executable, as narrow as brute force finds on small graphs, and the same each time."""

from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.interop.importing.imported import ImportedTensor
from planner.interop.importing.narrow_order import NarrowOrder, OrderMoves


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> NarrowOrder:
    """Any acyclic tensors among nodes named in any order."""
    names = draw(st.permutations([f"n{i}" for i in range(draw(st.integers(1, most)))]))
    tensors = []
    for index, name in enumerate(names[:-1]):
        users = draw(st.sets(st.sampled_from(names[index + 1 :]), max_size=3))
        if users:
            tensors.append(ImportedTensor(name, tuple(sorted(users)), draw(st.integers(0, 20))))
    return NarrowOrder(sorted(names), tensors)


def is_executable(order: tuple[str, ...], tensors: list[ImportedTensor]) -> bool:
    return all(order.index(t.producer) < order.index(user) for t in tensors for user in t.users)


def width(order: tuple[str, ...], tensors: list[ImportedTensor]) -> int:
    """Bytes alive at each cut, counted one cut and one tensor at a time."""
    cuts = range(1, len(order))
    return sum(
        tensor.bytes
        for cut, tensor in product(cuts, tensors)
        if tensor.producer in order[:cut] and set(tensor.users) & set(order[cut:])
    )


@given(graphs())
def test_every_node_comes_once_and_after_what_it_reads(graph: NarrowOrder) -> None:
    order = graph.find()
    assert sorted(order) == sorted(graph.nodes)
    assert is_executable(order, list(graph.tensors))
    assert graph.find() == order


@given(graphs())
def test_cut_bytes_are_those_counted_one_by_one(graph: NarrowOrder) -> None:
    order = graph.find()
    assert sum(graph.cut_bytes(order)) == width(order, list(graph.tensors))


@given(graphs(6))
def test_no_move_of_one_node_makes_the_order_narrower(graph: NarrowOrder) -> None:
    tensors = list(graph.tensors)
    order = graph.find()
    found = width(order, tensors)
    for name, place in product(order, range(len(order))):
        rest = [other for other in order if other != name]
        moved = (*rest[:place], name, *rest[place:])
        assert not is_executable(moved, tensors) or width(moved, tensors) >= found


def narrowest(graph: NarrowOrder) -> int:
    tensors = list(graph.tensors)
    orders = (o for o in permutations(graph.nodes) if is_executable(o, tensors))
    return min(width(order, tensors) for order in orders)


def test_branches_are_walked_one_after_the_other() -> None:
    """Two blocks with a skip and a wide branch, named so that their names mislead."""
    edges = ["a>z", "z>c", "c>y", "a>y", "y>b", "b>x", "x>d", "y>d"]
    users: dict[str, list[str]] = {}
    for edge in edges:
        users.setdefault(edge[0], []).append(edge[2])
    sizes = {"a": 5, "z": 9, "c": 5, "y": 5, "b": 7, "x": 4}
    tensors = [ImportedTensor(name, tuple(read), sizes[name]) for name, read in users.items()]
    graph = NarrowOrder(sorted({*sizes, "d"}), tensors)
    assert width(graph.find(), tensors) == narrowest(graph)


def test_an_input_that_is_used_late_comes_late() -> None:
    tensors = [
        ImportedTensor("mask", ("last",), 50),
        ImportedTensor("ids", ("first",), 1),
        ImportedTensor("first", ("middle",), 2),
        ImportedTensor("middle", ("last",), 2),
    ]
    graph = NarrowOrder(("mask", "ids", "first", "middle", "last"), tensors)
    assert graph.find() == ("ids", "first", "middle", "mask", "last")
    assert width(graph.find(), tensors) == narrowest(graph)


def test_an_order_that_is_narrow_already_stays() -> None:
    names = tuple("dbca")
    tensors = [ImportedTensor(a, (b,), 1) for a, b in pairwise(names)]
    assert NarrowOrder(names, tensors).find() == names


@given(graphs(), st.integers(0, 12))
def test_a_search_cut_short_leaves_an_executable_order(graph: NarrowOrder, budget: int) -> None:
    tensors = list(graph.tensors)
    start = next(o for o in permutations(graph.nodes) if is_executable(o, tensors))
    order = OrderMoves(start, tensors, budget).improve()
    assert is_executable(order, tensors)
    assert sorted(order) == sorted(start)
    assert width(order, tensors) <= width(start, tensors)


@pytest.mark.extensive
def test_ten_thousand_nodes_side_by_side_are_ordered() -> None:
    names = [f"n{index}" for index in range(10**4)]
    tensors = [ImportedTensor("n0", tuple(names[1:-1]), 8)]
    tensors += [
        ImportedTensor(name, (names[-1],), index % 7) for index, name in enumerate(names[1:-1])
    ]
    order = NarrowOrder(names, tensors).find()
    assert len(set(order)) == 10**4
    assert (order[0], order[-1]) == ("n0", "n9999")
