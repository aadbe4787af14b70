"""``python -m executor.detect``: turns on paper, real runs, and testbeds measured back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import start, torchrun
from warm_python import warm_python

from benchmarks.testbed import Testbed, why_not
from executor.detect.compute import slowdowns
from executor.detect.record import MeasurementRecord, members_of
from executor.detect.turns import (
    Turn,
    all_turns,
    compute_turns,
    groups,
    pairs_of_each_kind,
)
from planner import Cluster

MODULE = "executor.detect"
REASON = why_not()
QUICK = ("--no-compute", "--busy", "--most-mib", "1", "--longest-ms", "2", "--repeats", "3")
LONG = ("--repeats", "300", "--most-mib", "4")
hosts = st.lists(st.sampled_from("abc"), min_size=2, max_size=9)


# --- turns ----------------------------------------------------------------------------------------


@given(hosts)
def test_pairs_come_first_and_all_turns_are_of_ranks_there_are(of_ranks: list[str]) -> None:
    turns = all_turns(of_ranks, together=True, reductions=True)
    order = ["pair", "together", "all-reduce"]
    kinds = [order.index(turn.kind) for turn in turns]
    assert all(first <= second for first, second in pairwise(kinds))
    for turn in turns:
        assert len(turn.ranks) > 1
        assert set(turn.ranks) <= set(range(len(of_ranks)))
        assert all(source != target for source, target in turn.flows)


@given(hosts)
def test_flows_between_hosts_leave_each_host_by_devices_of_their_own(of_ranks: list[str]) -> None:
    for turn in all_turns(of_ranks, together=True, reductions=False):
        if turn.shows in ("from host to host", "pairs of a host"):
            assert max(Counter(rank for flow in turn.flows for rank in flow).values()) == 1
            same = {of_ranks[a] == of_ranks[b] for a, b in turn.flows}
            assert same == {turn.shows == "pairs of a host"}


def test_groups_are_first_ranks_of_every_size_one_a_host_and_all() -> None:
    assert list(groups(["a", "a", "b", "b"])) == [(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2)]
    sizes = [len(group) for group in groups([f"h{n // 8}" for n in range(24)])]
    assert sizes == [2, 3, 4, 5, 6, 7, 8, 16, 24, 3]


def test_ranks_of_a_host_compute_alone_and_then_more_and_more() -> None:
    turns = list(compute_turns(["a", "b", "a", "a"], share_cores=True))
    assert [turn.group for turn in turns] == [(0,), (0, 2), (0, 2, 3), (1,)]
    alone = list(compute_turns(["a", "b", "a"], share_cores=False))
    assert [turn.group for turn in alone] == [(0,), (1,)]
    sizes = [len(turn.group) for turn in compute_turns(["a"] * 20, share_cores=True)]
    assert sizes == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]


def test_of_many_ranks_some_pairs_of_each_kind_are_measured() -> None:
    of_ranks = [f"h{n // 8}" for n in range(64)]
    pairs = list(pairs_of_each_kind(of_ranks))
    assert len(pairs) == len(set(pairs)) < 64 * 63 // 2 / 10
    inside = {of_ranks[a] for a, b in pairs if of_ranks[a] == of_ranks[b]}
    across = {(of_ranks[a], of_ranks[b]) for a, b in pairs if of_ranks[a] != of_ranks[b]}
    assert inside == set(of_ranks)
    assert across == set(combinations(sorted(set(of_ranks)), 2))
    every = all_turns(of_ranks[:16], together=False, reductions=False)
    assert len(every) == 16 * 15 // 2


def test_slowdowns_are_interpolated_and_never_fall() -> None:
    assert slowdowns({1: 1.0, 2: 1.2, 3: 1.1, 5: 2.0}, 5) == (1.0, 1.2, 1.2, 1.55, 2.0)


def test_one_rank_of_each_host_computes_beside_messages() -> None:
    turns = [turn for turn in all_turns("aab", together=True, reductions=True,
                                        compute=True) if turn.kind == "beside"]  # fmt: skip
    assert [(turn.group, turn.flows) for turn in turns] == [((0,), ((0, 1),)), ((2,), ((2, 0),))]
    alone = all_turns("a", together=True, reductions=True, compute=True)
    assert [turn.kind for turn in alone] == ["compute"]


@pytest.mark.parametrize(
    ("ratios", "factor", "words"),
    [
        ([1.2, 1.25, 1.3, 1.25, 9.0], 1.25, "1.25 times as long (spread 3%)"),
        ([0.9, 0.95, 1.1, 1.2, 0.98], 1.0, "0.98 times as long"),
        ([0.9, 1.6, 1.17, 0.8, 1.9], 1.0, "1.17 times as long"),
        ([0.7, 0.72, 0.71, 0.69, 0.7], None, "something else used the machine"),
    ],
)
def test_messages_and_computation_slow_each_other_or_are_not_believed(
    ratios: list[float], factor: float | None, words: str
) -> None:
    members, types = members_of([about("here"), about("here")])
    turn = Turn("beside", ((0, 1),), (0,))
    others = [3.0] * len(ratios)
    for blocks, messages in ((ratios, others), (others, ratios)):
        record = MeasurementRecord(members, types)
        rounds = [list(row) for row in zip(blocks, messages, strict=True)]
        assert words in record.add(turn, {0: rounds, 1: []})
        found = record.measurements
        kind, row = found.types["CPU-core"], found.beside["CPU-core"]
        factors = (factor, 3.0) if blocks is ratios else (3.0, factor)
        assert (row.computation.factor, row.messages.factor) == factors
        assert kind.compute_slowdown_while_communicating == (factors[0] or 1.0)
        assert kind.communication_slowdown_while_computing == (factors[1] or 1.0)


def test_messages_that_take_longer_than_a_round_tell_nothing() -> None:
    record = MeasurementRecord(*members_of([about("here"), about("here")]))
    said = record.add(Turn("beside", ((0, 1),), (0,)), {0: [[1.5, 2.0]] * 3, 1: []})
    assert "is not known" in said
    assert record.measurements.beside == {}
    kind = record.measurements.types["CPU-core"]
    assert kind.communication_slowdown_while_computing == 1.0


def test_hosts_of_other_speed_have_a_type_of_their_own() -> None:
    members, types = members_of([about("fast"), about("slow"), about("like-fast"), about("fast")])
    record = MeasurementRecord(members, types)
    figures = types["CPU-core"].figures.model_dump(mode="json")
    for rank, block_s in ((0, 1.0), (1, 2.0), (2, 1.05)):
        found = {rank: {"block_s": block_s, "figures": figures}}
        record.add(Turn("compute", group=(rank,)), found)
    # A machine that slows down for one round, which the first rank alone was spared.
    of_first = {"alone_s": [2.0, 2.0, 2.0], "block_s": [2.8, 9.0, 2.8]}
    said = record.add(
        Turn("compute", group=(0, 3)), {0: of_first, 3: {"alone_s": [], "block_s": [3.2, 9.0, 3.2]}}
    )
    assert (
        said
        == "fast: 2 ranks computing: a block takes 1.500 times as long as alone (1.500 to 4.500)"
    )
    measured = record.measurements
    assert [m.type for m in measured.members] == ["CPU-core", "CPU-core-2", "CPU-core", "CPU-core"]
    (host,) = measured.hosts.values()
    assert (host.devices, host.slowdown) == (("fast/cpu0", "fast/cpu1"), (1.0, 1.5))


# --- names ----------------------------------------------------------------------------------------


def about(host: str, boot: str = "1", gpu: str | None = None) -> dict:
    return {"host": host, "boot": boot, "gpu": gpu, "memory_gib": 79.2}


def test_devices_are_named_by_host_and_place() -> None:
    a100 = "NVIDIA A100-SXM4-80GB"
    members, types = members_of([about("n0", gpu=a100), about("n0", gpu=a100), about("n1")])
    assert [member.name for member in members] == ["n0/gpu0", "n0/gpu1", "n1/cpu0"]
    assert [member.type for member in members] == ["A100-80GB", "A100-80GB", "CPU-core"]
    assert set(types) == {"A100-80GB", "CPU-core"}


def test_two_machines_of_one_name_are_two_hosts() -> None:
    members, _ = members_of([about("localhost", "1"), about("localhost", "2")])
    assert [member.name for member in members] == ["localhost/cpu0", "localhost-2/cpu0"]


def test_names_that_a_cluster_file_refuses_are_changed() -> None:
    members, _ = members_of([about("a b\n"), about("network"), about("ü" * 200)])
    assert [member.host for member in members] == ["a-b", "network-2", "host"]


# --- runs -----------------------------------------------------------------------------------------


def test_ranks_of_this_machine_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    done = torchrun(3, "-m", MODULE, "-o", str(path), "--host", "box", "--json", *QUICK)
    assert done.returncode == 0, done.stderr
    cluster, report = Cluster.load(path), json.loads(done.stdout)
    names = ("box/cpu0", "box/cpu1", "box/cpu2")
    assert cluster.device_names == names
    assert {link.source for link in cluster.links} == {"measured"}
    assert all(cluster.route(a, b) is not None for a, b in combinations(names, 2))
    assert sorted((way["source"], way["target"]) for way in report["ways"]) == sorted(
        (a, b) for a in names for b in names if a != b
    )
    assert all(0 < way["latency_s"] < 10 for way in report["ways"])
    assert [tuple(row["devices"]) for row in report["all_reduces"]][::3] == [names[:2], names]
    assert all(row["predicted_s"] > 0 and row["seconds"] > 0 for row in report["all_reduces"])
    assert len(report["together"]) == 6
    assert report["missing_pairs"] == []
    assert "[1/11] box/cpu0 > box/cpu1: " in done.stderr


@pytest.mark.extensive
def test_a_device_alone_has_measured_figures_and_no_links(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    words = ["planner.cli", "detect", "--ranks", "1", "-o", str(path), "--host", "box"]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(path)
    (kind,) = cluster.device_types.values()
    assert kind.source == "measured"
    # Any core does between 0.1 GFLOP/s and 10 TFLOP/s, and moves 0.1 to 1000 GB/s.
    assert 1e-4 < kind.peak_tflop_per_s["float32"] < 10
    assert 0.1 < kind.memory_bandwidth_gb_per_s < 1000
    assert cluster.device_names == ("box/cpu0",)
    assert (cluster.links, cluster.hosts) == ((), ())


@pytest.mark.extensive
def test_ranks_that_share_cores_slow_each_other(tmp_path: Path) -> None:
    """Three ranks on one core take longer than one alone, whatever else the core does."""
    path, cores, ranks = tmp_path / "c.toml", os.sched_getaffinity(0), 3
    options = ["--no-together", "--no-all-reduce", "--longest-ms", "1"]
    os.sched_setaffinity(0, [min(cores)])
    try:
        running = start(ranks, "-m", MODULE, "-o", str(path), "--host", "box", *options)
    finally:
        os.sched_setaffinity(0, cores)
    _, error = running.communicate()
    assert running.returncode == 0, error
    (host,) = Cluster.load(path).hosts
    assert host.devices == tuple(f"box/cpu{number}" for number in range(ranks))
    assert host.slowdown[0] == 1
    assert host.slowdown[-1] > 1.1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--ranks", "1", "--no-compute"], 1, "--nproc-per-node 4 -m executor.detect"),
        (["--ranks", "0"], 2, "argument --ranks: 0 is not at least 1"),
        (["--device", "gpu"], 2, "invalid choice: 'gpu'"),
        (["-o", "missing/c.toml"], 1, "there is no folder"),
        (["-o", "c.yaml"], 2, "'c.yaml': expected a name that ends in .toml or .json"),
        (["--frob"], 2, "unrecognized arguments: --frob"),
    ],
)
def test_one_process_refuses_what_it_can(
    words: list[str], status: int, message: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [warm_python(), "-m", MODULE, "-o", str(tmp_path / "c.toml"), *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def _await_turns(process: subprocess.Popen[str], turns: int) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"[{turns}/"):
            return
    pytest.fail(f"it ended before {turns} turns")


def _rank_pid(parent: int, rank: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


@pytest.mark.extensive
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    # Long enough to be interrupted within the fourth of six pairs.
    process = start(4, "-m", MODULE, "-o", str(path), "--no-compute", *LONG)
    _await_turns(process, 3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode != 0
    cluster = Cluster.load(path)
    assert len(cluster.devices) == 4
    assert cluster.links
    assert "pairs of devices not measured" in path.read_text()
    assert "note: interrupted: not measured are 3 pair turns, 9 together turns" in out


@pytest.mark.extensive
def test_a_rank_that_is_killed_ends_all_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    # It starts its ranks itself, and adds no traceback to what they say.
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, "--ranks", "3", "-o", str(path), "--no-compute", *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _await_turns(process, 1)
    os.kill(_rank_pid(process.pid, 2), signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in error
    said = [line for line in error.splitlines() if line.startswith("error: ")]
    assert any("lost rank 2: killed, stopped, or its host is gone" in line for line in said)
    assert not path.exists()


# --- testbeds measured back -----------------------------------------------------------------------

NODES = """
format = "pipeplan-cluster/1"
[device_types.unit]
memory_gib = 4
memory_bandwidth_gb_per_s = 100
peak_tflop_per_s = { float32 = 0.05 }
[[nodes]]
name = "left"
devices = 2
type = "unit"
link = { bandwidth_gb_per_s = 0.02 }
[[nodes]]
name = "right"
devices = 2
type = "unit"
link = { bandwidth_gb_per_s = 0.02 }
[[links]]
between = ["left", "right"]
bandwidth_gb_per_s = 0.008
"""
HOST = "$(if [ $RANK -lt 2 ]; then echo left; else echo right; fi)"


def _measured_on_a_testbed(tmp_path: Path, host: str) -> tuple[Cluster, Cluster]:
    """The cluster made real, and what it was measured to be."""
    (tmp_path / "real.toml").write_text(NODES)
    real, path = Cluster.load(tmp_path / "real.toml"), tmp_path / "measured.toml"
    # Few cores carry the packets of all, and tests run beside it.
    options = f"--no-compute --busy --repeats 15 --longest-ms 40 --host {host} --no-all-reduce"
    command = f"exec {sys.executable} -m {MODULE} -o {path} {options}"
    with Testbed(real) as testbed:
        outcome = testbed.run(["sh", "-c", command], timeout_s=1000)
    assert outcome.status == 0, outcome.outputs
    return real, Cluster.load(path)


def _same_bandwidths(real: Cluster, found: Cluster, say: Callable[[str], str]) -> None:
    for a, b in combinations(real.device_names, 2):
        known, measured = real.route(a, b), found.route(say(a), say(b))
        assert known is not None
        assert measured is not None
        assert measured.bandwidth_gb_per_s == pytest.approx(known.bandwidth_gb_per_s, rel=0.1)


@pytest.mark.extensive
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_nodes_of_a_testbed_are_measured_back(tmp_path: Path) -> None:
    real, found = _measured_on_a_testbed(tmp_path, HOST)
    assert found.device_names == ("left/cpu0", "left/cpu1", "right/cpu0", "right/cpu1")
    _same_bandwidths(real, found, lambda name: name.replace("gpu", "cpu"))
