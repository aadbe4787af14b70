"""`benchmarks.testbed`: on paper anywhere, and for real where namespaces can be made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed, leftovers, network, why_not
from benchmarks.testbed.__main__ import main
from benchmarks.testbed.check import PairCheck, check, fitted_line
from benchmarks.testbed.commands import batches
from benchmarks.testbed.layout import lay_out
from benchmarks.testbed.measured import measured_cluster
from benchmarks.testbed.routing import hops
from benchmarks.testbed.scenario import Move
from benchmarks.testbed.shaping import HEADER_BYTES, bucket_bytes, mtu_bytes, tc_line, window_bytes
from benchmarks.testbed.transfer_rules import ends_by_the_rules
from planner import Cluster
from planner.errors import PipeplanError
from planner.records.document import read_toml

CLUSTERS = sorted((Path(__file__).parents[2] / "benchmarks/testbed/clusters").glob("*.toml"))
REASON = why_not()
real = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TYPE = {
    "memory_gib": 4.0,
    "memory_bandwidth_gb_per_s": 100.0,
    "peak_tflop_per_s": {"float32": 1.0},
}


def cluster_of(links: list[tuple[str, str, float]], switches: tuple[str, ...] = ()) -> Cluster:
    ends = dict.fromkeys(end for first, second, _ in links for end in (first, second))
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "device_types": {"t": TYPE},
            "devices": [{"name": name, "type": "t"} for name in ends if name not in switches],
            "switches": list(switches),
            "links": [
                {"between": [first, second], "bandwidth_gb_per_s": width, "latency_us": 100.0}
                for first, second, width in links
            ],
        }
    )


def three() -> Cluster:
    """Two on a switch, two joined directly."""
    links = [("a", "s", 0.02), ("b", "s", 0.01), ("b", "c", 0.02), ("b", "c", 0.04)]
    return cluster_of(links, ("s",))


def lines(cluster: Cluster, tool: str, vertex: str) -> list[str]:
    layout = lay_out(cluster, 7)
    name = layout.namespaces[vertex]
    return [
        line
        for batch in batches(layout)
        if batch.tool == tool and batch.namespace == name
        for line in batch.lines
    ]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_hops_use_the_links_of_the_route(path: Path) -> None:
    cluster = Cluster.load(path)
    assert 4 <= len(cluster.devices) <= 6
    joined = 0
    for source in cluster.device_names:
        for target in cluster.device_names:
            route = cluster.route(source, target)
            found = hops(cluster, source, target)
            if route is None:
                assert found is None
                continue
            assert found is not None
            assert [hop.link for hop in found] == [link for link, _ in route.links]
            assert all(hop.vertex in cluster.switches for hop in found[1:])
            joined += source != target
    assert joined >= 2 * (len(cluster.devices) - 1)


def test_six_topologies_come_with_it() -> None:
    assert len(CLUSTERS) == 6


def test_names_and_addresses_are_unique_and_short_enough() -> None:
    layout = lay_out(three(), 7)
    addresses = [*layout.data_addresses.values(), *layout.control_addresses.values()]
    assert len(set(addresses)) == len(addresses)
    assert len(set(layout.all_namespaces)) == 5
    ends = [end for wire in layout.wires.values() for end in wire.ends]
    assert len({end.mac for end in ends}) == len(ends)
    assert all(len(end.interface) <= 15 for end in ends)


def test_of_parallel_links_the_one_that_routes_use_is_built() -> None:
    assert sorted(lay_out(three(), 7).wires) == [0, 1, 3]


def test_devices_have_no_way_through_devices() -> None:
    routes = [line for line in lines(three(), "ip", "a") if line.startswith("route")]
    assert [line.split()[2:6] for line in routes] == [
        ["10.77.0.2/32", "via", "169.254.77.1", "dev"],
        # Only so that gloo can connect all with all: over the control network.
        ["10.77.0.3/32", "via", "10.78.0.3", "src"],
    ]
    assert "/proc/sys/net/ipv4/ip_forward=0" in lines(three(), "settings", "a")
    assert "/proc/sys/net/ipv4/ip_forward=1" in lines(three(), "settings", "s")


def test_a_switch_routes_by_source_and_target() -> None:
    found = [line for line in lines(three(), "ip", "s") if line.split()[0] in ("rule", "route")]
    assert sorted(found) == [
        "route add 10.77.0.1/32 via 169.254.77.1 dev link0 onlink table 101",
        "route add 10.77.0.2/32 via 169.254.77.1 dev link1 onlink table 100",
        "rule add from 10.77.0.1 lookup 100",
        "rule add from 10.77.0.2 lookup 101",
    ]


def test_both_ends_of_a_link_are_shaped_to_its_payload() -> None:
    for vertex in ("b", "c"):
        assert tc_line("link3", 0.04) in lines(three(), "tc", vertex)
    assert "rate 320000000bit" in tc_line("link3", 0.04)
    assert f"overhead -{HEADER_BYTES} " in tc_line("link3", 0.04)


@pytest.mark.parametrize("width", [0.001, 0.01, 0.1, 1.0, 100.0])
def test_a_bucket_holds_two_packets_and_a_window_sixteen(width: float) -> None:
    assert 1500 <= mtu_bytes(width) <= 65_000
    assert bucket_bytes(width) >= 2 * mtu_bytes(width)
    assert window_bytes(width) >= 16 * mtu_bytes(width)


@pytest.mark.parametrize(("field", "value"), [("duplex", "half"), ("shared", True)])
def test_links_that_cannot_be_made_real_are_refused(field: str, value: object) -> None:
    cluster = three()
    link = cluster.links[1].model_copy(update={field: value})
    links = (cluster.links[0], link, *cluster.links[2:])
    with pytest.raises(PipeplanError, match=rf"links\[1\], between 'b' and 's': {field}"):
        lay_out(cluster.model_copy(update={"links": links}), 7)


def test_no_root_is_a_clear_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    assert "run it as root" in str(why_not())
    with pytest.raises(PipeplanError, match="root"), Testbed(three()):
        pass


def test_another_system_is_a_clear_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in str(why_not())


def test_the_fitted_line_goes_through_exact_times() -> None:
    sizes = [10_000, 50_000, 1_000_000]
    latency_s, s_per_byte = fitted_line(sizes, [2e-4 + size * 1e-8 for size in sizes])
    assert latency_s == pytest.approx(2e-4)
    assert s_per_byte == pytest.approx(1e-8)


def test_a_latency_is_never_below_none() -> None:
    assert fitted_line([100, 1000, 2000], [1e-6, 2e-5, 4.1e-5])[0] == 0.0


def test_the_measured_file_gives_the_measured_routes_back(tmp_path: Path) -> None:
    cluster = cluster_of([("a", "s", 0.02), ("b", "s", 0.01), ("c", "s", 0.04)], ("s",))
    latencies_us = {"a": 60.0, "b": 110.0, "c": 200.0}
    widths = {"a": 0.021, "b": 0.0099, "c": 0.04}
    checks = [
        PairCheck(u, v, (), (), (latencies_us[u] + latencies_us[v]) / 1e6, width, 0.0)
        for u in "abc"
        for v in "abc"
        if u != v
        for width in [min(widths[u], widths[v])]
    ]
    path = tmp_path / "measured.toml"
    measured_cluster(cluster, checks).save(path)
    found = Cluster.load(path)
    assert found.device_names == cluster.device_names
    for check_ in checks:
        route = found.route(check_.source, check_.target)
        assert route is not None
        assert route.bandwidth_gb_per_s == pytest.approx(check_.bandwidth_gb_per_s)
        assert route.latency_s == pytest.approx(check_.latency_s, abs=1e-6)
    assert 'source = "measured"' in path.read_text()
    assert read_toml(path)["format"] == "pipeplan-cluster/1"


def test_by_the_rules_a_link_serves_one_message_at_a_time() -> None:
    cluster = cluster_of([("a", "s", 0.1), ("b", "s", 0.1), ("c", "s", 0.1)], ("s",))
    moves = [Move(0, 1, 1_000_000), Move(0, 2, 1_000_000), Move(1, 0, 1_000_000)]
    assert ends_by_the_rules(cluster, moves) == pytest.approx([0.0102, 0.0204, 0.0102])


def own_namespaces() -> list[str]:
    return [name for name in network._all_namespaces() if f"-{os.getpid()}-" in name]


@real
def test_routes_lead_over_the_links_and_nothing_stays_behind() -> None:
    with Testbed(three()) as testbed:
        names = testbed.layout.namespaces
        addresses = testbed.layout.data_addresses
        command = ["ip", "-n", names["b"], "route", "get", addresses["c"]]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "dev link3" in found
        assert f"src {addresses['b']}" in found
        command = ["ip", "-n", names["a"], "route", "get", addresses["c"]]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "dev control0" in found
        assert len(own_namespaces()) == 5
    assert own_namespaces() == []


@pytest.mark.extensive
@real
def test_links_carry_about_what_the_file_says() -> None:
    ends = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]
    widths = pytest.approx([0.01, 0.01, 0.04, 0.04], rel=0.15)
    found: list[list[float]] = []
    with Testbed(three()) as testbed:
        for _ in range(6):  # Other processes disturb a measurement, and never the links.
            checks = check(testbed, repeats=3)
            assert [(item.source, item.target) for item in checks] == ends
            found.append([item.bandwidth_gb_per_s for item in checks])
            if found[-1] == widths:
                return
    pytest.fail(f"no measurement found the bandwidths of the file: {found}")


@pytest.mark.extensive
@real
def test_ranks_meet_and_sum_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.ones(1)\n"
        "other = dist.get_rank() ^ 1\n"
        "dist.send(value, other) if other else dist.recv(value, other)\n"
        "print('rank', dist.get_rank(), 'done', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    with Testbed(three()) as testbed:
        outcome = testbed.run([str(script)], ["c", "b"], with_torchrun=True, timeout_s=1000)
    assert outcome.status == 0, outcome.outputs
    assert [f"rank {rank} done" in text for rank, text in enumerate(outcome.outputs)] == [True] * 2


@real
def test_the_first_failure_ends_the_run_with_its_status() -> None:
    code = "import os, sys, time; time.sleep(300 * (os.environ['RANK'] != '1')); sys.exit(7)"
    with Testbed(three()) as testbed:
        outcome = testbed.run([sys.executable, "-c", code], timeout_s=1000)
    assert outcome.status == 7
    assert own_namespaces() == []


@real
def test_an_error_inside_takes_everything_down() -> None:
    with pytest.raises(RuntimeError, match="of ours"), Testbed(three()):
        raise RuntimeError("of ours")
    assert own_namespaces() == []


def _waits_for(done: Callable[[], bool]) -> bool:
    return any(done() or time.sleep(0.05) for _ in range(400))


@real
def test_clean_removes_what_a_killed_run_left(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\n"
        "from benchmarks.testbed import Testbed\n"
        "from planner import Cluster\n"
        "with Testbed(Cluster.load(sys.argv[1])) as testbed:\n"
        "    testbed.run(['sh', '-c', 'echo ready; exec sleep 300'], echo=True)\n"
    )
    command = [sys.executable, "-c", code, str(CLUSTERS[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    mine = [name for name in leftovers() if f"-{process.pid}-" in name]
    assert mine
    pids = ["ip", "netns", "pids", mine[0]]
    assert _waits_for(lambda: subprocess.run(pids, capture_output=True).stdout == b"")
    before = signal.getsignal(signal.SIGTERM)
    assert main(["clean"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert mine[0] in capsys.readouterr().out
    assert not [name for name in leftovers() if f"-{process.pid}-" in name]
