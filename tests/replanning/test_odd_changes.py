"""Changes of machines that are odd and valid, and plans that are odd and not."""

import numpy as np
import pytest
from builders import cluster, device_type, link
from trained import QUICK, model, nodes, plan_of, two_nodes

from planner import PipeplanError, verify
from planner.cluster.cluster import Cluster
from planner.plan.plan import Plan, Sync
from planner.replanning import replan


def without_link(the_cluster: Cluster, *between: str) -> Cluster:
    links = tuple(row for row in the_cluster.links if set(row.between) != set(between))
    return the_cluster.model_copy(update={"links": links})


def test_a_node_whose_uplink_is_down_is_no_place_to_keep_state_in() -> None:
    stages = [(3, "n0/gpu0"), (3, "n1/gpu0")]
    old = plan_of(model(), nodes(1, 1, 1), stages, replication=False)
    found = replan(old, cluster=without_link(old.cluster, "n1", "network"), slack=0, **QUICK)
    assert verify(found.plan) == []
    assert "n1/gpu0" not in {d for stage in found.plan.stages for d in stage.devices}


def nested() -> Cluster:
    """Racks ``r0``, ``r1`` with a node each, whose switches bear the rack's name."""
    devices = [f"r{r}/n{r}/gpu{i}" for r in range(2) for i in range(2)]
    links = [link(name, name.rpartition("/")[0], 100) for name in devices]
    links += [link(f"r{r}/n{r}", "network", 1) for r in range(2)]
    return cluster(devices, links, ["r0/n0", "r1/n1", "network"], {"unit": device_type()})


def test_a_lost_rack_takes_the_switches_inside_it_and_may_come_back() -> None:
    stages = [(3, "r0/n0/gpu0 r0/n0/gpu1"), (3, "r1/n1/gpu0 r1/n1/gpu1")]
    old = plan_of(model(), nested(), stages)
    assert replan(old, lost=["r1"], **QUICK).plan.cluster.switches == ("r0/n0", "network")
    back = replan(old, lost=["r1"], added=["r1=r0"], **QUICK).plan.cluster
    assert set(back.device_names) == {f"r{r}/n0/gpu{i}" for r in range(2) for i in range(2)}


def test_factors_are_numbers_of_any_kind_and_in_range() -> None:
    found = replan(two_nodes(), slow={"n0/gpu0": np.float64(1.5)}, **QUICK)
    assert any("slowed x1.5" in name for name in found.plan.cluster.device_types)
    for factor in (0, 0.5, 1, -3, float("nan"), float("inf"), 1e9):
        with pytest.raises(PipeplanError, match="slow: "):
            replan(two_nodes(), slow={"n0/gpu0": factor})


def test_a_plan_of_impossible_sizes_is_refused() -> None:
    old = two_nodes()
    graph = old.model.graph
    huge = tuple(
        row.model_copy(update={"elements": 2**62, "bytes": 2**62}) for row in graph.parameters
    )
    record = graph.model_copy(update={"parameters": huge})
    wrong = old.model_copy(update={"model": old.model.model_copy(update={"graph": record})})
    with pytest.raises(PipeplanError, match=r"model\.graph\.parameters"):
        replan(wrong, lost=["n1/gpu0"], **QUICK)


def test_options_of_synchronisation_that_cannot_be_are_refused_before_the_search() -> None:
    sync = Sync(strategy="fused", options={"fusion_mib": -1})
    wrong: Plan = two_nodes().model_copy(update={"sync": sync})
    with pytest.raises(PipeplanError, match="fusion_mib"):
        replan(wrong, lost=["n1/gpu0"], **QUICK)


def test_devices_that_came_without_links_are_told() -> None:
    old = two_nodes()
    devices = [*old.cluster.device_names, "lone"]
    rows = [row.model_dump(mode="json") for row in old.cluster.links]
    now = cluster(devices, rows, list(old.cluster.switches), {"unit": device_type()})
    (note,) = replan(old, cluster=now, **QUICK).notes
    assert "lone" in note
