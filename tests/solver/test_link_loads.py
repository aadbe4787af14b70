"""What links can carry bounds every schedule; flows agree with networkx."""

from typing import Any

import networkx as nx
import pytest
from builders import cluster, graph, layer, link, pipeline
from hypothesis import given
from hypothesis import strategies as st
from strategies import orders_for, partitions, problems

from planner.cluster.cluster import Cluster
from planner.costs.placement import place
from planner.plan.problem import Problem
from planner.search.partition.bounds.schedule import Flows, link_load_bound_s
from planner.simulation.simulator import simulate

pytestmark = pytest.mark.extensive

ROUNDING = 1 + 1e-6


@given(st.data())
def test_no_schedule_beats_what_links_can_carry(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems())
    placed = place(problem, data.draw(partitions(problem, recompute=False)))
    orders = data.draw(orders_for(placed, split_backwards=False))
    time_s = simulate(placed, orders).iteration_time_s
    assert link_load_bound_s(placed) <= time_s * ROUNDING


def test_replicas_behind_one_card_share_it() -> None:
    """Two replicas on each side, 1 GB a microbatch, one 1 GB/s link between the two switches."""
    links = [link("d0", "left", 100), link("d1", "left", 100), link("left", "right", 1)]
    links += [link("d2", "right", 100), link("d3", "right", 100)]
    wired = cluster(["d0", "d1", "d2", "d3"], links, ["left", "right"])
    layers = graph([layer("a", 0.001, 0.002), layer("b", 0.001, 0.002)])
    placed = pipeline(layers, wired, [(["a"], ["d0", "d1"]), (["b"], ["d2", "d3"])], microbatches=8)
    assert link_load_bound_s(placed) == pytest.approx(8.0, abs=0.01)


@given(st.data())
def test_flows_are_those_of_networkx(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems(min_devices=2, shared=False))
    names = problem.cluster.device_names
    split = data.draw(st.integers(1, len(names) - 1))
    sources, targets = names[:split], names[split:]
    found = Flows(problem.cluster).bytes_per_s(sources, targets)
    assert found == pytest.approx(_networkx_flow(problem.cluster, sources, targets), rel=1e-6)


def _networkx_flow(wired: Cluster, sources: Any, targets: Any) -> float:
    flow = nx.DiGraph()
    flow.add_nodes_from(["begin", "end"])
    for name in sources:
        flow.add_edge("begin", name)
    for name in targets:
        flow.add_edge(name, "end")
    for row in wired.links:
        for u, v in (row.between, row.between[::-1]):
            if u in targets or v in sources:
                continue
            old = flow.get_edge_data(u, v, {"capacity": 0.0})["capacity"]
            flow.add_edge(u, v, capacity=old + row.bandwidth_gb_per_s)
    value: float = nx.maximum_flow_value(flow, "begin", "end")
    return value * 1e9
