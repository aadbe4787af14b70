"""Files of dnn-partitioning: read, refused with all that is wrong, converted, solved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.placement.loads_file import solve_file
from planner.errors import PipeplanError
from planner.interop.importing.dnn_partitioning import (
    load_instance,
    looks_like_dnn_partitioning,
    parse_record,
)
from planner.interop.importing.dnn_partitioning_graph import read_dnn_partitioning
from planner.plan.problem import Problem
from planner.search.budget import Settings


def node(id_: int, time: float, **other: Any) -> dict[str, Any]:
    return {
        "id": id_,
        "supportedOnFpga": True,
        "fpgaLatency": time,
        "cpuLatency": 10 * time,
        "isBackwardNode": False,
        "size": 1024.0,
        **other,
    }


def edge(source: int, target: int, cost: float = 0.5, **other: Any) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": cost, "size": 1000 * cost, **other}


def training(**other: Any) -> dict[str, Any]:
    """Two layers forward and back; half a millisecond for 500 bytes is 0.001 GB/s."""
    return {
        "maxSizePerFPGA": 4096.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            node(1, 2.0, colorClass=1, name="first"),
            node(2, 3.0, colorClass=2),
            node(12, 4.0, colorClass=2, isBackwardNode=1),
            node(11, 5.0, colorClass=1, isBackwardNode=True),
        ],
        "edges": [edge(1, 2), edge(2, 12), edge(12, 11)],
        **other,
    }


def written(folder: Path, data: Any) -> Path:
    path = folder / "small.json"
    path.write_text(json.dumps(data))
    return path


def test_the_figures_arrive_where_they_belong(tmp_path: Path) -> None:
    instance = load_instance(written(tmp_path, training()))
    first = instance.nodes[0]
    assert (first.id, first.name, first.color, first.is_backward) == (1, "first", 1, False)
    assert (first.times, first.memory_bytes, first.transfer_time) == ((2.0, 20.0), 1024.0, 0.5)
    assert [(kind.name, kind.count) for kind in instance.classes] == [
        ("accelerator", 2),
        ("cpu", 1),
    ]
    assert [kind.memory_bytes for kind in instance.classes] == [4096.0, None]
    assert [node.is_backward for node in instance.nodes] == [False, False, True, True]
    assert instance.edges == ((1, 2), (2, 12), (12, 11))


def test_numbers_and_truth_values_both_serve_as_flags() -> None:
    numbers = training(nodes=[node(1, 1.0, supportedOnFpga=0, isBackwardNode=0)], edges=[])
    truths = training(nodes=[node(1, 1.0, supportedOnFpga=False)], edges=[])
    assert parse_record(numbers, "file") == parse_record(truths, "file")


def test_size_and_color_may_be_missing() -> None:
    plain = {key: value for key, value in node(1, 1.0).items() if key != "size"}
    record = parse_record(training(nodes=[plain], edges=[]), "file")
    assert (record.nodes[0].size, record.nodes[0].colorClass) == (0.0, None)


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    data = training(
        maxSizePerFPGA=float("nan"),
        maxFPGAs=-1,
        nodes=[
            node(1, float("inf"), supportedOnFpga="False"),
            node(1, -2.0, isBackwardNode=2),
            node(3, 1.0, isBackwardNode=1, containedSubnodes=[8]),
            node(4, 1.0),
        ],
        edges=[edge(1, 9), edge(3, 4), edge(4, 1), edge(1, 3, 0.75), edge(4, 3, float("nan"))],
    )
    with pytest.raises(PipeplanError) as error:
        load_instance(written(tmp_path, data))
    for expected in (
        "maxSizePerFPGA: expected a finite number",
        "maxFPGAs: expected at least 0",
        "nodes[0].fpgaLatency: expected a finite number",
        "nodes[0].supportedOnFpga: expected true, false, 1 or 0",
        "nodes[1].fpgaLatency: expected at least 0",
        "nodes[1].isBackwardNode: expected true",
        "edges[4].cost: expected a finite number",
        "node 1: 2 nodes have this id",
        "edge 1 -> 9: there is no node 9",
        "edge 3 -> 4: it leads from a backward node to a forward node",
        "edges: they form a cycle",
        "edge 1 -> 3: cost 0.75, but another edge out of node 1 has 0.5",
        "node 3: it has containedSubnodes",
    ):
        assert any(expected in problem for problem in error.value.problems), expected
    assert all("small.json" in problem for problem in error.value.problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [], "edges": []}, "nodes: there are none"),
        ({"maxFPGAs": 0, "maxCPUs": 0}, "give at least one device"),
        ({"maxFPGAs": 2.5}, "maxFPGAs"),
        ({"nodes": [{"id": "one"}], "edges": []}, r"nodes\[0\].id"),
        ({"edges": [edge(1, 1)]}, "cycle"),
        ({"edges": 3}, "edges"),
    ],
)
def test_a_file_that_is_no_problem_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        parse_record(training(**change), "file")


@pytest.mark.parametrize("data", [[], 3, None, {"format": "pipeplan/1"}])
def test_another_kind_of_file_is_refused(data: Any) -> None:
    with pytest.raises(PipeplanError):
        parse_record(data, "file")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, training())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(PipeplanError, match="not valid JSON"):
        load_instance(path)


def test_the_beginning_of_a_file_tells_its_format() -> None:
    assert looks_like_dnn_partitioning(json.dumps(training())[:60])
    assert not looks_like_dnn_partitioning('{"format": "pipeplan-graph/2", "nodes": []}')


def test_ten_thousand_nodes_are_read(tmp_path: Path) -> None:
    nodes = [node(index, 1.0) for index in range(10_000)]
    edges = [edge(index, index + 1) for index in range(9_999)]
    instance = load_instance(written(tmp_path, training(nodes=nodes, edges=edges)))
    assert len(instance.nodes) == 10_000


def test_colour_classes_become_layers_with_measured_times(tmp_path: Path) -> None:
    imported = read_dnn_partitioning(written(tmp_path, training()))
    layers = imported.graph.layers
    assert list(layers) == ["1:first", "2"]
    times = {
        kind: (times.forward_s, times.input_gradient_s, times.weight_gradient_s)
        for kind, times in layers["1:first"].measured.items()
    }
    assert times == {
        "accelerator": pytest.approx((2e-3, 5e-3, 0.0)),
        "cpu": pytest.approx((2e-2, 5e-2, 0.0)),
    }
    assert [parameter.bytes for parameter in imported.graph.record.parameters] == [2048, 2048]
    (tensor,) = imported.graph.record.boundaries
    assert (tensor.producer, tensor.users, tensor.bytes) == ("1:first", ("2",), 500)
    assert tensor.requires_grad


def test_devices_memory_and_links_become_a_cluster(tmp_path: Path) -> None:
    cluster = read_dnn_partitioning(written(tmp_path, training())).cluster
    assert cluster is not None
    assert [device.type for device in cluster.devices] == ["accelerator", "accelerator", "cpu"]
    assert cluster.device_type("accelerator0").capacity_bytes == 4096
    route = cluster.route("accelerator0", "cpu0")
    assert route is not None
    assert route.seconds(500) == pytest.approx(0.5e-3)


def test_what_is_imported_is_a_problem(tmp_path: Path) -> None:
    imported = read_dnn_partitioning(written(tmp_path, training()))
    assert imported.cluster is not None
    Problem(imported.graph, imported.cluster, imported.job)
    assert not imported.job.replication
    assert any("milliseconds" in note for note in imported.notes)


def test_colours_that_need_each_other_become_one_layer_with_a_note(tmp_path: Path) -> None:
    nodes = [node(1, 1.0, colorClass=1), node(2, 1.0), node(3, 1.0, colorClass=1), node(4, 1.0)]
    data = training(nodes=nodes, edges=[edge(1, 2), edge(2, 3), edge(3, 4)])
    imported = read_dnn_partitioning(written(tmp_path, data))
    assert list(imported.graph.layers) == ["1", "4"]
    assert any("3 layers became 2" in note for note in imported.notes)


def test_a_colour_of_backward_nodes_alone_is_ordered_by_its_edges(tmp_path: Path) -> None:
    nodes = [
        node(1, 1.0, colorClass=1),
        node(2, 1.0, colorClass=2, isBackwardNode=1),
        node(3, 1.0, colorClass=1, isBackwardNode=1),
    ]
    data = training(nodes=nodes, edges=[edge(2, 3)])
    imported = read_dnn_partitioning(written(tmp_path, data))
    (tensor,) = imported.graph.record.boundaries
    assert (tensor.producer, tensor.users) == ("1", ("2",))


def test_a_node_no_accelerator_runs_binds_its_layer_to_cpus(tmp_path: Path) -> None:
    nodes = [node(1, 1.0, supportedOnFpga=0), node(2, 1.0)]
    imported = read_dnn_partitioning(written(tmp_path, training(nodes=nodes, edges=[edge(1, 2)])))
    rules = {name: layer.device_types for name, layer in imported.graph.layers.items()}
    assert rules == {"1": ("cpu",), "2": ()}
    assert any("CPUs only" in note for note in imported.notes)


def test_a_time_beyond_all_measure_is_no_traceback(tmp_path: Path) -> None:
    data = training(nodes=[node(1, 1e17)], edges=[])
    with pytest.raises(PipeplanError, match="too large"):
        read_dnn_partitioning(written(tmp_path, data))


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_file_is_solved_in_its_own_objective(tmp_path: Path, contiguous: bool) -> None:
    """Layers of 7 ms each; cut, 1's output and 12's gradient are paid: 7 + 2 * 0.5, or 14 uncut."""
    solved = solve_file(written(tmp_path, training()), contiguous, 20.0, Settings(workers=1))
    assert (solved["instance"], solved["status"]) == ("small", "optimal")
    assert solved["objective"] == solved["lower_bound"] == 8.0
    assert solved["seconds"] > 0
    assert 0 < solved["peak_memory_gib"] < 1000


def test_a_file_that_fits_nowhere_is_infeasible(tmp_path: Path) -> None:
    path = written(tmp_path, training(maxSizePerFPGA=100.0, maxCPUs=0))
    solved = solve_file(path, True, 20.0, Settings(workers=1))
    assert (solved["status"], solved["objective"], solved["lower_bound"]) == (
        "infeasible",
        None,
        None,
    )
