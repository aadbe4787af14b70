"""The evaluator says what the definition says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loads.load_instances import chain, load_instances
from loads.load_oracle import has_order, is_allowed, load_of

from benchmarks.placement.solver.evaluator import assignment_problems, device_loads, objective
from benchmarks.placement.solver.instance import LoadInstance
from planner.errors import PipeplanError


@given(st.data())
def test_loads_and_verdicts_equal_those_by_the_definition(data: st.DataObject) -> None:
    instance = data.draw(load_instances())
    device = st.integers(0, len(instance.devices) - 1)
    by_color = {node.color: data.draw(device) for node in instance.nodes}
    placement = [
        data.draw(device) if node.color is None else by_color[node.color] for node in instance.nodes
    ]
    loads = device_loads(instance, placement)
    assert loads == pytest.approx([load_of(instance, placement, d) for d in range(len(loads))])
    for contiguous in (False, True):
        expected = is_allowed(instance, placement) and (
            not contiguous or has_order(instance, placement)
        )
        problems = list(assignment_problems(instance, placement, contiguous=contiguous))
        assert (not problems) == expected, problems


def test_an_output_used_twice_elsewhere_is_paid_once_a_device() -> None:
    instance = replace(chain([1.0, 2.0, 4.0]), edges=((0, 1), (0, 2)))
    assert device_loads(instance, (0, 1, 1)) == (1.5, 6.5)


def test_a_cpu_pays_no_transfers() -> None:
    instance = chain([1.0, 2.0], accelerators=1, cpus=1)
    assert device_loads(instance, (1, 0)) == (2.5, 10.0)


def test_every_broken_rule_is_named() -> None:
    instance = chain([1.0, 1.0, 1.0])
    nodes = tuple(
        replace(node, color=7 if node.id != 1 else None, memory_bytes=2.0)
        for node in instance.nodes
    )
    classes = (replace(instance.classes[0], memory_bytes=3.0), instance.classes[1])
    instance = replace(instance, nodes=nodes, classes=classes)
    assert any("colour 7" in p for p in assignment_problems(instance, (0, 1, 1), contiguous=False))
    problems = list(assignment_problems(instance, (0, 1, 0), contiguous=True))
    assert any("4.0 bytes" in problem for problem in problems)
    assert any("circle" in problem for problem in problems)
    assert list(assignment_problems(instance, (0, 1), contiguous=False))
    assert list(assignment_problems(instance, (0, 5, 0), contiguous=False))


def test_the_objective_is_the_largest_load() -> None:
    assert objective(chain([1.0, 2.0, 4.0]), (0, 0, 1)) == 4.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": ()}, "no nodes"),
        ({"edges": ((0, 1), (1, 0))}, "cycle"),
        ({"edges": ((1, 1),)}, "cycle"),
        ({"edges": ((0, 9),)}, "no node 9"),
        ({"classes": ()}, "no devices"),
    ],
)
def test_a_graph_that_is_none_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        replace(chain([1.0, 2.0]), **change)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused(time: float) -> None:
    instance = chain([1.0, 2.0])
    node = replace(instance.nodes[0], times=(time, 1.0))
    with pytest.raises(PipeplanError, match="node 0"):
        LoadInstance("bad", instance.classes, (node, instance.nodes[1]), ())


def test_an_edge_from_backward_to_forward_is_refused() -> None:
    instance = chain([1.0, 2.0])
    backward = replace(instance.nodes[0], is_backward=True)
    with pytest.raises(PipeplanError, match="backward node to a forward"):
        replace(instance, nodes=(backward, instance.nodes[1]))
