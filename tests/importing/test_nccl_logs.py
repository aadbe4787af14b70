"""Logs of nccl-tests: the figures that made them are found again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_files import nccl_log

from planner.costs.collectives import all_reduce_s
from planner.errors import PipeplanError
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportedCluster, ImportOptions
from planner.interop.nccl_tests import NcclRow, Test, line_of

A100 = "NVIDIA A100-SXM4-80GB"
SIZES = [8 * 4**n for n in range(14)]


def ranks(*hosts: int) -> list[tuple[str, int, str]]:
    """So many GPUs in each host."""
    return [(f"n{h}", d, A100) for h, count in enumerate(hosts) for d in range(count)]


def read(
    tmp_path: Path, text: str, kind: str | None = None, test: Test | None = None
) -> ImportedCluster:
    path = tmp_path / "log.txt"
    path.write_text(text)
    name = "nccl-tests" if test is None else f"nccl-{test.replace('_', '-')}"
    return import_cluster(path, name, ImportOptions(kind))[1]


def ring_s(count: int, latency_s: float, gb_per_s: float):
    """Short ones by a tree, long ones by a ring, whichever is quicker."""

    def seconds(bytes_: int) -> float:
        ring = 2 * (count - 1) * (latency_s + bytes_ / count / (gb_per_s * 1e9))
        levels = (count - 1).bit_length()
        return min(ring, 2 * levels * (latency_s + bytes_ / (gb_per_s * 1e9)))

    return seconds


@pytest.mark.parametrize("mark", ["#", ""])
def test_messages_between_two_machines(tmp_path: Path, mark: str) -> None:
    log = nccl_log(ranks(1, 1), lambda n: 30e-6 + n / 12e9, SIZES, test="sendrecv", mark=mark)
    found = read(tmp_path, log)
    (link,) = found.cluster.links
    assert link.between == ("n0/gpu0", "n1/gpu0")
    assert link.source == "measured"
    assert link.latency_us == pytest.approx(30, rel=0.02)
    assert link.bandwidth_gb_per_s == pytest.approx(12, rel=0.01)
    assert found.cluster.type_of("n0/gpu0") == "A100-80GB"
    assert found.notes == ()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_all_reduces_inside_a_host_are_predicted_as_they_were(tmp_path: Path, count: int) -> None:
    seconds = ring_s(count, 8e-6, 200)
    log = nccl_log(ranks(count), seconds, SIZES, 2 * (count - 1) / count)
    cluster = read(tmp_path, log).cluster
    names = cluster.device_names
    route = cluster.route(names[0], names[-1])
    assert route is not None
    assert route.bandwidth_gb_per_s == pytest.approx(200, rel=0.02)
    assert route.latency_s == pytest.approx(8e-6, rel=0.05)
    for size in (SIZES[0], SIZES[-1]):
        assert all_reduce_s(cluster, names, size) == pytest.approx(seconds(size), rel=0.05)


def test_several_hosts_have_the_bandwidth_between_them(tmp_path: Path) -> None:
    log = nccl_log(ranks(2, 2, 2), ring_s(6, 2e-5, 20), SIZES, 10 / 6)
    found = read(tmp_path, log)
    assert found.cluster.switches == ("n0", "n1", "n2", "network")
    sources = {link.between: link.source for link in found.cluster.links}
    assert sources["n0", "network"] == "measured"
    assert sources["n0/gpu0", "n0"] == "assumed"
    route = found.cluster.route("n0/gpu0", "n2/gpu1")
    assert route is not None
    assert route.bandwidth_gb_per_s == pytest.approx(20, rel=0.02)
    assert any("are assumed to be no faster" in note for note in found.notes)


def test_a_log_that_names_no_test_is_told_by_the_bus(tmp_path: Path) -> None:
    log = nccl_log(ranks(4), ring_s(4, 8e-6, 100), SIZES, 1.5, test=None)
    route = read(tmp_path, log).cluster.route("n0/gpu0", "n0/gpu3")
    assert route is not None
    assert route.bandwidth_gb_per_s == pytest.approx(100, rel=0.02)
    log = nccl_log(ranks(4), lambda n: 1e-5 + n / 50e9, SIZES, 1.0, test=None)
    route = read(tmp_path, log).cluster.route("n0/gpu0", "n0/gpu3")
    assert route is not None
    assert route.bandwidth_gb_per_s == pytest.approx(50, rel=0.02)


def test_two_ranks_do_not_tell_the_test(tmp_path: Path) -> None:
    log = nccl_log(ranks(2), lambda n: 1e-5 + n / 50e9, SIZES, test=None)
    with pytest.raises(PipeplanError, match="say --from nccl-all-reduce or --from nccl-sendrecv"):
        read(tmp_path, log)
    assert read(tmp_path, log, test="sendrecv").cluster.links[0].latency_us == pytest.approx(
        10, rel=0.1
    )
    # Two steps of half the bytes each: the same bytes, half the latency.
    assert read(tmp_path, log, test="all_reduce").cluster.links[0].latency_us == pytest.approx(
        5, rel=0.1
    )


def test_one_size_and_long_sizes_leave_the_latency_open(tmp_path: Path) -> None:
    def seconds(bytes_: int) -> float:
        return 1e-5 + bytes_ / 50e9

    one = read(tmp_path, nccl_log(ranks(2), seconds, [2**28], test="sendrecv"))
    assert one.cluster.links[0].bandwidth_gb_per_s == pytest.approx(50, rel=0.01)
    assert one.cluster.links[0].latency_us == 0
    assert any("there is one size" in note for note in one.notes)
    long = read(tmp_path, nccl_log(ranks(2), seconds, [2**27, 2**28, 2**29], test="sendrecv"))
    assert long.cluster.links[0].latency_us == 0
    assert any("run the test from 8 bytes on" in note for note in long.notes)


def test_the_older_form_is_read(tmp_path: Path) -> None:
    """Without redop, root and group, with the largest error instead of a count."""
    lines = [
        "# nThread 1 nGpus 2 minBytes 8 maxBytes 268435456 step: 2(factor) warmup iters: 5",
        "# Using devices",
        "#   Rank  0 Pid   5897 on         x0 device  0 [0x05] NVIDIA L40S",
        "#   Rank  1 Pid   5897 on         x0 device  1 [0x06] NVIDIA L40S",
        "#       size         count      type     time   algbw   busbw  error     time   algbw",
        "           8             8     uint8    10.00    0.00    0.00  0e+00    10.00    0.00",
        "          16            16     uint8    10.00    0.00    0.00  0e+00    10.00    0.00",
        "   100000000     100000000     uint8  10010.0    9.99    9.99  0e+00  10010.0    9.99",
        "   200000000     200000000     uint8  20010.0    9.99    9.99  3e+02  20010.0    9.99",
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 4.995",
    ]
    found = read(tmp_path, "\n".join(lines), test="sendrecv")
    assert found.cluster.links[0].bandwidth_gb_per_s == pytest.approx(10)
    assert found.cluster.links[0].latency_us == pytest.approx(10)
    assert found.cluster.type_of("x0/gpu1") == "L40S"


def test_a_row_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    log = nccl_log(ranks(2), lambda n: 1e-5 + n / 50e9, SIZES, test="sendrecv")
    lines = log.splitlines()
    last = next(n for n, line in enumerate(lines) if line.split()[:1] == [str(SIZES[-1])])
    lines[last] = lines[last][:60]
    found = read(tmp_path, "\n".join(lines))
    assert [note.partition(" could")[0] for note in found.notes] == [f"line {last + 1}"]


def log_of(called: str = A100, **options: object) -> str:
    rows = [("n0", 0, called), ("n0", 1, called)]
    settings = {"test": "sendrecv", **options}
    return nccl_log(rows, lambda n: 1e-5 + n / 50e9, SIZES, **settings)


def test_a_row_without_a_time_is_told(tmp_path: Path) -> None:
    text = log_of()
    row = next(line for line in text.splitlines() if line.split()[:1] == [str(SIZES[-1])])
    time = row.split()[row_places(text)]
    found = read(tmp_path, text.replace(row, row.replace(time, "-" + time, 1)))
    assert any("has no time above 0" in note for note in found.notes)


def row_places(text: str) -> int:
    header = next(line for line in text.splitlines() if "algbw" in line)
    return header.lstrip("# ").split().index("time")


def test_a_type_may_be_told(tmp_path: Path) -> None:
    found = read(tmp_path, log_of("Tesla P4"), "V100-16GB")
    assert found.cluster.type_of("n0/gpu1") == "V100-16GB"


def test_another_test_than_the_log_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipeplanError, match="is of sendrecv_perf, not of all_reduce_perf"):
        read(tmp_path, log_of(), test="all_reduce")


@given(st.floats(1e-6, 1e-3), st.floats(0.1, 500), st.integers(20, 34))
def test_a_line_is_found_from_its_ends(latency_s: float, gb_per_s: float, last: int) -> None:
    rows = []
    for power in range(3, last):
        seconds = latency_s + 2**power / (gb_per_s * 1e9)
        rows.append(NcclRow(2**power, seconds, 2**power / seconds, 2**power / seconds))
    short_s, s_per_byte = line_of(rows)
    assert s_per_byte == pytest.approx(1e-9 / gb_per_s, rel=1e-3)
    if short_s is not None:
        assert latency_s <= short_s <= 1.5 * (latency_s + 8 / (gb_per_s * 1e9))


@pytest.mark.parametrize("places", ["size", "rank"])
def test_numbers_of_thousands_of_digits_are_refused_in_every_format(
    tmp_path: Path, places: str
) -> None:
    log = nccl_log(ranks(1, 1), lambda n: 30e-6 + n / 12e9, SIZES, test="sendrecv")
    old = f"{SIZES[3]} " if places == "size" else "Rank  1"
    assert old in log
    path = tmp_path / "log.txt"
    path.write_text(log.replace(old, old.rstrip() + "0" * 5000 + " ", 1))
    with pytest.raises(PipeplanError, match=r"log\.txt: line \d+: a number of 500\d digits"):
        import_cluster(path)
