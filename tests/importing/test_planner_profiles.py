"""Profiles of Sailor, Metis and Galvatron: what is read, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planner_profiles import (
    SIZES,
    TIMES,
    galvatron_folder,
    metis_profile,
    sailor_folder,
    sailor_links,
    sailor_profile,
    sailor_sizes,
    sailor_times,
    write,
)

from planner import Problem, adopt
from planner.cluster.cluster import Cluster
from planner.cluster.presets import DEVICES
from planner.errors import PipeplanError
from planner.interop.importing.formats import format_of, import_cluster_file, import_file
from planner.interop.importing.imported import Imported, ImportOptions
from planner.model.layer_graph import LayerGraph

GPU = "A100-80GB"
MIB = 2**20


def options(samples: int | None = None, **given: object) -> ImportOptions:
    return ImportOptions(GPU, samples, given={name: str(value) for name, value in given.items()})


def read(path: Path, samples: int | None = None, **given: object) -> Imported:
    return import_file(path, options=options(samples, **given))[1]


def cluster(path: Path, kind: str, **given: object) -> Cluster:
    return import_cluster_file(path, kind, options(**given)).cluster


def seconds(graph: LayerGraph, kind: str) -> list[tuple[float, float]]:
    rows = [layer.measured[kind] for layer in graph.record.layers]
    return [(row.forward_s, row.whole_backward_s) for row in rows]


def parameter_bytes(graph: LayerGraph) -> list[int]:
    return [graph.nodes[name]["parameter_bytes"] for name in graph.layers]


# --- Sailor ---------------------------------------------------------------------------------------


def test_a_profile_of_sailor_has_the_times_of_its_microbatch_and_the_bytes_of_its_samples(
    tmp_path: Path,
) -> None:
    imported = read(sailor_folder(tmp_path), samples=4)
    record = imported.graph.record
    assert (record.name, record.samples_per_microbatch) == ("TINY", 4)
    assert seconds(imported.graph, "X-80") == [(row[0], row[1]) for row in TIMES]
    assert parameter_bytes(imported.graph) == [row[0] for row in SIZES]
    assert [row.bytes for row in record.boundaries] == [4 * row[1] for row in SIZES[:-1]]
    assert [row.stash_bytes for row in record.layers] == [4 * row[2] for row in SIZES]
    assert imported.job.samples_per_microbatch == 4
    assert any("degree 2 are not imported" in note for note in imported.notes)
    assert any("optimizer's step of the profiled model took" in note for note in imported.notes)


def test_a_tensor_parallel_group_of_sailor_is_one_device_with_the_bytes_of_all_members(
    tmp_path: Path,
) -> None:
    path = sailor_folder(tmp_path)
    group = read(path, samples=4, tensor_parallel=2).graph
    alone = read(path, samples=4).graph
    assert seconds(group, "2xX-80") == [(0.6 * row[0], 0.6 * row[1]) for row in TIMES]
    assert parameter_bytes(group) == parameter_bytes(alone)
    assert group.record.boundaries == alone.record.boundaries


def test_a_model_and_gpu_are_chosen_from_a_file_of_many(tmp_path: Path) -> None:
    write(tmp_path / "llm_info.json", sailor_sizes())
    many = {"TINY": {"X-80": sailor_profile(), "Y-8": {"1": {"1": sailor_times(9.0)}}}}
    path = write(tmp_path / "simulations/profiles_tmp.json", many)
    found = read(path, model="TINY", gpu="Y-8").graph
    assert found.record.samples_per_microbatch == 1
    assert seconds(found, "Y-8") == [(9.0 * row[0], 9.0 * row[1]) for row in TIMES]
    for given, message in (
        ({}, "model: the file does not say it; add --given model=MODEL"),
        ({"model": "BIG"}, "has no 'BIG', only TINY; --given model=NAME chooses one"),
        ({"model": "TINY", "gpu": "Z"}, "has no 'Z', only X-80, Y-8; --given gpu=NAME"),
    ):
        with pytest.raises(PipeplanError, match=message):
            read(path, **given)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    profile = sailor_profile()
    change(profile["4"]["1"])
    return profile


@pytest.mark.parametrize(
    ("profile", "samples", "given", "message"),
    [
        (None, None, {}, r"has microbatches of 1, 4; choose .* by --samples-per-microbatch"),
        (None, 8, {}, r"has no '8', only 4, 1; choose a profiled microbatch size"),
        (None, 1, {"tensor_parallel": 2}, r"microbatches of 1: has no '2', only 1"),
        (None, 4, {"tensor_parallel": 0}, r"tensor_parallel='0': expected a whole number"),
        (None, 4, {"layers": 3}, r"--given 'layers': unknown to sailor; it takes model, gpu"),
        (None, 4, {"model": "BIG"}, r"llm_info.json: has no 'BIG', only TINY"),
        (changed(lambda t: t.pop("2")), 4, {}, r"layers are missing or not in .*: 2; both must"),
        (changed(lambda t: t.update({"9": t["1"]})), 4, {}, r"not in llm_info.json: 9"),
        (changed(lambda t: t.update({"1": [0.1, -0.2, 0]})), 4, {}, r"layer 1: .* least 0, found"),
        (changed(lambda t: t.update({"1": [0.1, 0.2]})), 4, {}, r"layer 1: expected seconds of"),
        (changed(lambda t: t.update({"3": ["a", 0, 0]})), 4, {}, r"layer 3: expected a number"),
    ],
)
def test_a_wrong_profile_of_sailor_is_refused(
    tmp_path: Path, profile: dict[str, Any] | None, samples: int | None, given: Any, message: str
) -> None:
    with pytest.raises(PipeplanError, match=message):
        read(sailor_folder(tmp_path, profile), samples, **given)


def test_sizes_of_sailor_must_lie_above_the_profile(tmp_path: Path) -> None:
    with pytest.raises(PipeplanError, match=r"llm_info\.json, which is in no folder above"):
        read(write(tmp_path / "profile.json", sailor_profile()), samples=4, model="TINY")


def test_the_preset_of_figures_that_a_profile_lacks_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(PipeplanError, match="add --device-type PRESET"):
        import_file(sailor_folder(tmp_path), options=ImportOptions(samples_per_microbatch=4))


def test_hosts_of_sailor_exchange_data_at_the_bandwidth_of_the_slower_one(tmp_path: Path) -> None:
    path = write(tmp_path / "network_coeffs_all_homo.json", sailor_links())
    assert format_of(path) == "sailor-links"
    found = cluster(path, "sailor-links", hosts="X-80*2,Y-8", gpus_per_host=1)
    assert found.device_names == ("host0/gpu0", "host1/gpu0", "host2/gpu0")
    for pair, gb_per_s in ((("host0/gpu0", "host1/gpu0"), 10), (("host1/gpu0", "host2/gpu0"), 2)):
        route = found.route(*pair)
        assert route is not None
        assert route.seconds(64e6) == pytest.approx(64e6 / (gb_per_s * 1e9), rel=1e-3)


def test_two_gpus_of_sailor_that_send_at_once_take_as_long_as_one_that_sends_half(
    tmp_path: Path,
) -> None:
    grows = {"1": [[1.0, 3.0], 0.0], "2": [[2.0, 6.0], 0.0]}  # GB/s by log2 of MB of each GPU
    path = write(tmp_path / "links.json", sailor_links(grows))
    alone = cluster(path, "sailor-links", hosts="X-80*2", gpus_per_host=1)
    both = cluster(path, "sailor-links", hosts="X-80*2", gpus_per_host=2, tensor_parallel=2)
    for bytes_ in (10**6, 10**8):
        one, two = (found.route("host0/gpu0", "host1/gpu0") for found in (alone, both))
        assert one is not None
        assert two is not None
        assert two.seconds(2 * bytes_) == pytest.approx(one.seconds(bytes_), rel=1e-4)


def test_a_group_of_sailor_has_the_links_of_all_its_gpus(tmp_path: Path) -> None:
    path = write(tmp_path / "links.json", sailor_links())
    found = cluster(path, "sailor-links", hosts="X-80*2", gpus_per_host=4, tensor_parallel=2)
    assert {device.type for device in found.devices} == {"2xX-80"}
    assert found.device_types["2xX-80"].memory_gib == 2 * DEVICES[GPU].memory_gib
    inside = found.route("host0/gpu0", "host0/gpu1")
    between = found.route("host0/gpu0", "host1/gpu1")
    assert inside is not None
    assert between is not None
    assert inside.bandwidth_gb_per_s == pytest.approx(200, rel=1e-3)
    assert between.bandwidth_gb_per_s == pytest.approx(20, rel=1e-3)


def test_latency_and_bandwidth_stand_for_a_polynomial_within_what_the_note_says(
    tmp_path: Path,
) -> None:
    # 5 GB/s at 1 MB, one more with every doubling: 15 GB/s at 1 GB.
    links = sailor_links({"1": [[1.0, 5.0], 1.5e10]})
    path = write(tmp_path / "links.json", links)
    imported = import_cluster_file(path, "sailor-links", options(hosts="X-80*2", gpus_per_host=1))
    route = imported.cluster.route("host0/gpu0", "host1/gpu0")
    assert route is not None
    errors = [
        route.seconds(2**power * 1e6) / (2**power * 1e6 / ((5 + power) * 1e9)) - 1
        for power in range(11)
    ]
    worst = max(map(abs, errors))
    assert 0.01 < worst < 0.25
    assert f"at most {worst:.0%} off" in imported.notes[0]


@pytest.mark.parametrize(
    ("inter", "given", "message"),
    [
        (None, {"hosts": "X-80*2"}, "add --given gpus_per_host=GPUS_PER_HOST"),
        (None, {"hosts": "Z*2", "gpus_per_host": 1}, "inter: has no 'Z', only X-80, Y-8"),
        (None, {"hosts": "X-80*0", "gpus_per_host": 1}, r"expected GPU\*COUNT"),
        (None, {"hosts": "X-80", "gpus_per_host": 8, "tensor_parallel": 8}, "X-80: has no '8'"),
        (
            None,
            {"hosts": "X-80", "gpus_per_host": 3, "tensor_parallel": 2},
            "is no multiple of tensor_parallel=2",
        ),
        ({"1": [[0.0, -1.0], 1e9]}, {"hosts": "X-80", "gpus_per_host": 1}, "no positive bandwidth"),
        ({"1": [3.0]}, {"hosts": "X-80", "gpus_per_host": 1}, "expected coefficients"),
    ],
)
def test_wrong_links_of_sailor_are_refused(
    tmp_path: Path, inter: object, given: dict[str, object], message: str
) -> None:
    path = write(tmp_path / "links.json", sailor_links(inter))
    with pytest.raises(PipeplanError, match=message):
        cluster(path, "sailor-links", **given)


def test_a_layout_of_sailor_is_predicted_from_its_profile_and_links(tmp_path: Path) -> None:
    """1F1B on two stages: (M - 1) rounds of the slower one, and both once with their messages."""
    imported = read(sailor_folder(tmp_path), samples=4)
    path = write(tmp_path / "links.json", sailor_links())
    machines = cluster(path, "sailor-links", hosts="X-80*2", gpus_per_host=1)
    job = imported.job.model_copy(update={"microbatches": 6})
    stages = [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    plan = adopt(Problem(imported.graph, machines, job), stages)
    first, second = 0.001 + 0.004 + 0.010, 0.004 + 0.012 + 0.002 + 0.006
    assert plan.predicted.iteration_time_s == pytest.approx(first + 6 * second, rel=1e-3)


# --- Metis ----------------------------------------------------------------------------------------


def test_a_profile_of_metis_divides_each_layer_into_forward_and_backward(tmp_path: Path) -> None:
    path = write(tmp_path / "DeviceType.A100_tp1_bs2.json", metis_profile())
    assert format_of(path) == "metis"
    imported = read(path, boundary_bytes=512)
    assert imported.graph.record.samples_per_microbatch == 2
    expected = [(0.001, 0.002), (0.006, 0.012), (0.002, 0.004)]
    for found, row in zip(seconds(imported.graph, "A100"), expected, strict=True):
        assert found == pytest.approx(row)
    assert parameter_bytes(imported.graph) == [4000, 8000, 6000]
    assert {row.bytes for row in imported.graph.record.boundaries} == {512}


@pytest.mark.parametrize(
    ("name", "execution", "samples", "given", "message"),
    [
        ("A100_tp1_bs2", {}, None, {}, "boundary_bytes: the file does not say it"),
        ("A100_tp1_bs2", {}, 4, {}, "is of a batch of 2, not 4; give the file of bs4"),
        ("A100_tp2_bs2", {}, None, {}, "is of tensor-parallel degree 2, not 1"),
        ("A100", {}, None, {}, "in the file's name, DeviceType.GPU_tpN_bsM.json"),
        (
            "A100_tp1_bs2",
            {"layer_compute_total_ms": [1.0, 2.0]},
            None,
            {"boundary_bytes": 8},
            "expected 3 numbers, one for each of num_layers, found 2; profile the missing layers",
        ),
        (
            "A100_tp1_bs2",
            {"layer_compute_total_ms": [1.0, -2.0, 1.0]},
            None,
            {"boundary_bytes": 8},
            r"layer_compute_total_ms\[1\]: expected a number of at least 0, found -2.0",
        ),
    ],
)
def test_a_wrong_profile_of_metis_is_refused(
    tmp_path: Path, name: str, execution: Any, samples: int | None, given: Any, message: str
) -> None:
    path = write(tmp_path / f"DeviceType.{name}.json", metis_profile(**execution))
    with pytest.raises(PipeplanError, match=message):
        read(path, samples, **given)


def metis_host(**fields: object) -> dict[str, object]:
    return {
        "instance_type": "V100",
        "inter_bandwidth": 1.25e9,
        "intra_bandwidth": 5e9,
        "memory": 16,
        **fields,
    }


def test_a_cluster_of_metis_has_its_bandwidths_in_bytes_per_second(tmp_path: Path) -> None:
    path = write(tmp_path / "clusterfile.json", {"IP1": metis_host(), "IP2": metis_host()})
    assert format_of(path) == "metis-cluster"
    found = cluster(path, "metis-cluster", gpus_per_host=2)
    inside, between = found.route("IP1/gpu0", "IP1/gpu1"), found.route("IP1/gpu0", "IP2/gpu1")
    assert inside is not None
    assert between is not None
    assert (inside.bandwidth_gb_per_s, between.bandwidth_gb_per_s) == (5.0, 1.25)
    assert found.device_types["V100"].memory_gib == 16


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (metis_host(inter_bandwidth=-1), "IP2: inter_bandwidth: expected a number of at least 1"),
        (metis_host(memory=32), "IP2: memory: V100 has another memory on another host"),
        (metis_host(instance_type=3), "IP2: instance_type: expected a name, found 3"),
    ],
)
def test_a_wrong_cluster_of_metis_is_refused(
    tmp_path: Path, host: dict[str, object], message: str
) -> None:
    path = write(tmp_path / "clusterfile.json", {"IP1": metis_host(), "IP2": host})
    with pytest.raises(PipeplanError, match=message):
        cluster(path, "metis-cluster", gpus_per_host=2)


# --- Galvatron ------------------------------------------------------------------------------------


def test_a_profile_of_galvatron_times_one_sample_and_its_backward_twice_as_long(
    tmp_path: Path,
) -> None:
    path = galvatron_folder(tmp_path)
    assert format_of(path) == "galvatron"
    imported = read(path, samples=2, layers=3, boundary_bytes=512)
    graph = imported.graph
    assert list(graph.layers) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    expected = [(0.0, 0.0), *[(0.008, 0.016)] * 3, (0.006, 0.012)]
    for found, row in zip(seconds(graph, GPU), expected, strict=True):
        assert found == pytest.approx(row)
    # 8 MiB of float32 are 4 in bfloat16; 160 MiB of states are 10 Mi elements, half at each end.
    assert parameter_bytes(graph) == [10 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 10 * MIB]
    assert [row.stash_bytes for row in graph.record.layers] == [
        0,
        *[2 * 5 * MIB] * 3,
        2 * 7 * MIB,
    ]


@pytest.mark.parametrize(
    ("times", "samples", "given", "message"),
    [
        ({}, None, {}, "batches of 2, 8, not None; choose one by --samples-per-microbatch"),
        ({}, 4, {}, "sequences of 64 were profiled in batches of 2, 8, not 4"),
        ({}, 2, {"sequence": 128}, "sequences of 128 were profiled in batches of no size"),
        ({}, 2, {"boundary_bytes": 8}, "layers: the file does not say it; add --given layers="),
        ({"layertype_0_bsz2_seq64": -1.0}, 2, {"layers": 1, "boundary_bytes": 8}, "found -1.0"),
        (
            {"layertype_other_bsz2_seq64": None},
            2,
            {"layers": 1, "boundary_bytes": 8},
            "has no 'layertype_other_bsz2_seq64'",
        ),
    ],
)
def test_a_wrong_profile_of_galvatron_is_refused(
    tmp_path: Path, times: Any, samples: int | None, given: Any, message: str
) -> None:
    with pytest.raises(PipeplanError, match=message):
        read(galvatron_folder(tmp_path, **times), samples, **given)


def test_an_old_or_unfinished_profile_of_galvatron_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "computation_profiling_bf16_tiny.json"
    write(path, {"layertype_0": 4.0, "layertype_other": 3.0})
    with pytest.raises(PipeplanError, match=r"older or unfinished profile; run .* version 2"):
        import_file(path, "galvatron", options(2, layers=1, boundary_bytes=8))
    write(path, {"layernum[2]_bsz1_seq64": 4.0})
    with pytest.raises(PipeplanError, match="it is of an unfinished profile"):
        read(path)


def test_memory_of_galvatron_must_lie_beside_the_times(tmp_path: Path) -> None:
    path = galvatron_folder(tmp_path)
    (tmp_path / "memory_profiling_bf16_tiny_all.json").unlink()
    with pytest.raises(PipeplanError, match=r"sizes lie in memory_profiling_bf16_tiny_all\.json"):
        read(path, 2, layers=1, boundary_bytes=8)


def test_links_of_galvatron_carry_a_pipeline_for_every_gpu_of_a_host(tmp_path: Path) -> None:
    write(tmp_path / "p2p_bandwidth_1nodes_4gpus_per_node.json", {"pp_size_4": 100.0})
    path = write(tmp_path / "p2p_bandwidth_2nodes_4gpus_per_node.json", {"pp_size_2": 10.0})
    assert format_of(path) == "galvatron-links"
    found = cluster(path, "galvatron-links")
    assert len(found.devices) == 8
    inside, between = (found.route("host0/gpu0", f"host{host}/gpu3") for host in (0, 1))
    assert inside is not None
    assert between is not None
    # MiB per millisecond; four messages at once share what the uplink carries.
    assert inside.bandwidth_gb_per_s == pytest.approx(104.86, rel=1e-3)
    assert between.bandwidth_gb_per_s == pytest.approx(4 * 10.486, rel=1e-3)


def test_links_inside_hosts_of_galvatron_must_lie_beside_those_between(tmp_path: Path) -> None:
    path = write(tmp_path / "p2p_bandwidth_2nodes_4gpus_per_node.json", {"pp_size_2": 10.0})
    with pytest.raises(PipeplanError, match=r"lie in p2p_bandwidth_1nodes_4gpus_per_node\.json"):
        cluster(path, "galvatron-links")
