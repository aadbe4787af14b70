"""A cluster from a log of nccl-tests, ``all_reduce_perf`` or ``sendrecv_perf``.

A log names the ranks and has a table with a row a size: bytes, and for buffers apart (out-of-place)
and the same (in-place) the time, the bandwidth of the algorithm (bytes over time) and that of the
bus. What they mean: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

Launchers and collectors of logs put ranks, hosts or times before each line, so lines are recognised
by what they hold, wherever it begins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from statistics import median
from typing import Literal, NamedTuple

from planner.cluster.device_types import KnownType, named_type
from planner.cluster.hardware import LinkType
from planner.cluster.merge import NETWORK
from planner.costs.collectives import fewest_steps
from planner.errors import shorten
from planner.interop.machines import Capture, ImportedCluster, ImportOptions, Wire, imported
from planner.units import MEASURED_DIGITS, significant

Test = Literal["all_reduce", "sendrecv"]
_READ: tuple[Test, ...] = ("all_reduce", "sendrecv")
_RANK = re.compile(
    r"\bRank\s+(\d+)(?:\s+Group\s+\d+)?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s+"
    r"\[[^\]]*\]\s+(\S.*?)\s*$"
)
_PERF = re.compile(r"\b([a-z_]+)_perf\b")
_HEADER = re.compile(r"\bsize\s+count\s.*\btime\b.*\bbusbw\b.*")
_ROW = re.compile(r"(?<![\w.])\d+\s+\d+\s+[a-z]\w*\s.*")
"""Bytes, elements and their type begin a row."""
_END = re.compile(r"(Out of bounds values|Avg bus bandwidth|Collective test concluded)")
"""One of these lines follows a table that is whole."""
_NEAR, _PRECISE_GB_PER_S = 0.02, 1.0
"""Bandwidths are printed with two decimals."""
SHORT = 1.5
"""Messages within this factor of the quickest are short: their size does not matter."""
LONG = 32
"""Messages down to this fraction of the largest tell bandwidth."""
_ONE_SWITCH = (
    "the test shows the slowest link of a ring; all GPUs of the host are assumed to share a switch "
    "of that speed"
)
_INNER = (
    "the links between hosts determine the times; links inside hosts are at least as fast and are "
    "assumed to be no faster; a test inside one host measures them"
)


class _Rank(NamedTuple):
    """A process of the test: its host, device number there, and what the device is called."""

    host: str
    device: int
    called: str


class NcclRow(NamedTuple):
    """A size of the table, with buffers apart."""

    bytes_: int
    seconds: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float


def is_nccl_tests(head: str) -> bool:
    """Return whether a file begins as such a log."""
    return _HEADER.search(head) is not None


def read_nccl_tests(
    found: Capture, options: ImportOptions, test: Test | None = None
) -> ImportedCluster:
    """Read a log into a cluster of the hosts and GPUs that it names.

    ``sendrecv_perf``: every rank sends to the next one and receives from the one before, so that a
    message takes latency + bytes / bandwidth of the slowest link between neighbours.
    ``all_reduce_perf``: a ring of r ranks moves 2(r-1)/r of the bytes over each link (Patarasuk and
    Yuan 2009), which bandwidth is worked out from; short ones take the fewest steps that the
    planner's own all-reduces have, so that it predicts what was measured.

    The slowest links are those between hosts where there are several. Links inside hosts carry as
    much at least; that they carry no more is assumed.

    Args:
        found: the log.
        options: the type of all GPUs, if it is not the one that the log names.
        test: which test it is; None if the log tells.

    Raises:
        PipeplanError: if it has no ranks or no table, is cut off, is of another test, of processes
            without a common job, or does not tell which test it is.
    """
    notes: list[str] = []
    header = next((match[0] for line in found.lines if (match := _HEADER.search(line))), None)
    if header is None:
        raise found.wrong(
            "has no table of nccl-tests, whose columns are size, count, type, …, time, algbw, busbw"
        )
    ranks = _ranks(found)
    rows = _table(found, header.split(), notes)
    told = _named_test(found) or _test_by_ratio(found, rows, len(ranks))
    if test is not None and told not in (None, test):
        raise found.wrong(f"is of {told}_perf, not of {test}_perf")
    if (kind := test or told) is None:
        raise found.wrong(
            "does not show whether it is of all_reduce_perf or sendrecv_perf; say --from "
            "nccl-all-reduce or --from nccl-sendrecv"
        )
    link = _link(rows, len(ranks), kind, notes)
    devices: dict[str, KnownType] = {}
    hosts: dict[str, list[str]] = {}
    for number, rank in enumerate(ranks):
        name = f"{rank.host}/gpu{rank.device}"
        if name in devices:
            raise found.wrong(
                f"two ranks share device {rank.device} of {rank.host}; run one rank per device"
            )
        where = f"{found.path}: rank {number}"
        devices[name] = options.known_type or named_type(rank.called, where)
        hosts.setdefault(rank.host, []).append(name)
    wires, assumed = _wires(hosts, link)
    of_types = dict.fromkeys(known.note for known in devices.values() if known.note)
    return imported(found.path.stem, devices, wires, (*notes, *assumed, *of_types))


# --- the log --------------------------------------------------------------------------------------


def _ranks(found: Capture) -> list[_Rank]:
    matches = [match for line in found.lines if (match := _RANK.search(line)) is not None]
    numbers = Counter(int(match[1]) for match in matches)
    if twice := [number for number, count in numbers.items() if count > 1]:
        raise found.wrong(
            f"rank {twice[0]} appears {numbers[twice[0]]} times: several logs in one file, or "
            "processes without a common job (build nccl-tests with MPI=1); give the log of one "
            "test"
        )
    if len(matches) < 2 or sorted(numbers) != list(range(len(numbers))):
        raise found.wrong(
            f"names {len(matches)} ranks (lines such as `# Rank 0 Group 0 Pid 1 on HOST device 0 "
            "[0x00] NAME`); a link joins two or more, numbered from 0: give the log of such a run "
            "from its first line"
        )
    ordered = sorted(matches, key=lambda match: int(match[1]))
    return [_Rank(match[2], int(match[3]), match[4]) for match in ordered]


def _table(found: Capture, header: Sequence[str], notes: list[str]) -> list[NcclRow]:
    """Return the rows of all sizes above 0, the smallest first; the median of equal sizes."""
    by_size: dict[int, list[NcclRow]] = {}
    for row in _rows(found, header, notes):
        by_size.setdefault(row.bytes_, []).append(row)
    if not by_size:
        raise found.wrong("the table has no row with bytes, time and bandwidths; it may be cut off")
    if not any(_END.search(line) for line in found.lines):
        raise found.wrong(
            "no line such as `# Avg bus bandwidth` follows the table, so it is cut off; its "
            "largest sizes, which show the bandwidth, may be missing; give the whole log"
        )
    return [
        NcclRow(size, *(median(column) for column in list(zip(*rows, strict=True))[1:]))
        for size, rows in sorted(by_size.items())
    ]


def _rows(found: Capture, header: Sequence[str], notes: list[str]) -> Iterator[NcclRow]:
    places = [header.index(name) for name in ("time", "algbw", "busbw")]
    for number, line in enumerate(found.lines, 1):
        if (match := _ROW.search(line)) is None:
            continue
        words = match[0].split()
        try:
            time_us, algbw, busbw = (float(words[place]) for place in places)
        except (ValueError, IndexError):
            notes.append(f"line {number} could not be read: {shorten(line.strip())}")
            continue
        # Newer versions count wrong values, older ones tell the largest error.
        wrong = words[places[-1] + 1] if len(words) > places[-1] + 1 else ""
        if wrong.isdecimal() and int(wrong) > 0:
            raise found.wrong(
                f"the test found wrong values (#wrong is {wrong}); its times are not valid", number
            )
        if int(words[0]) and not 0 < time_us < inf:
            notes.append(f"line {number} has no time above 0: {shorten(line.strip())}")
        elif int(words[0]):
            yield NcclRow(int(words[0]), time_us * 1e-6, algbw, busbw)


def _named_test(found: Capture) -> Test | None:
    """Return the test that the log or the file's name shows."""
    lines = (*found.lines, found.path.name)
    named = dict.fromkeys(match[1] for line in lines for match in _PERF.finditer(line))
    known = [test for test in _READ if test in named]
    if len(known) > 1:
        raise found.wrong(
            f"names both {' and '.join(f'{test}_perf' for test in known)}; give the log of one test"
        )
    if named and not known:
        raise found.wrong(
            f"is of {next(iter(named))}_perf; those that can be read are "
            f"{' and '.join(f'{test}_perf' for test in _READ)}"
        )
    return known[0] if known else None


def _test_by_ratio(found: Capture, rows: Sequence[NcclRow], count: int) -> Test | None:
    """Tell the test by the bandwidth ratio bus / algorithm: 2(n-1)/n in an all-reduce, else 1.

    Two ranks do not tell the two tests apart.

    Raises:
        PipeplanError: if it is neither of them, as in an all-gather.
    """
    row = max(rows, key=lambda row: row.algbw_gb_per_s)
    if count < 3 or not row.algbw_gb_per_s:
        return None
    ratio = row.busbw_gb_per_s / row.algbw_gb_per_s
    factors: dict[Test, float] = {"all_reduce": 2 * (count - 1) / count, "sendrecv": 1.0}
    near = [test for test, factor in factors.items() if abs(ratio / factor - 1) < _NEAR]
    if not near and row.algbw_gb_per_s > _PRECISE_GB_PER_S:
        raise found.wrong(
            f"bus bandwidth is {ratio:.3g} of the algorithm's, in all_reduce_perf of {count} ranks "
            f"{factors['all_reduce']:.3g} and in sendrecv_perf 1; give a log of one of these"
        )
    return near[0] if near else None


# --- the cluster ----------------------------------------------------------------------------------


def line_of(rows: Sequence[NcclRow]) -> tuple[float | None, float]:
    """Return the seconds of the shortest messages, None if all are long, and seconds a byte.

    Both are read off their end of the sizes: protocols change in between. Seconds a byte are the
    median slope over neighbours among the largest, or those of the largest where there is no other.
    """
    quickest = min(row.seconds for row in rows)
    short = [row for row in rows if row.seconds <= SHORT * quickest]
    is_flat = len(short) > 1 and short[-1].bytes_ >= 2 * short[0].bytes_
    short_s = median(row.seconds for row in short) if is_flat else None
    last = rows[-1]
    long = [row for row in rows if row.bytes_ * LONG >= last.bytes_]
    slopes = [(b.seconds - a.seconds) / (b.bytes_ - a.bytes_) for a, b in pairwise(long)]
    rising = [slope for slope in slopes if slope > 0]
    return short_s, median(rising) if rising else last.seconds / last.bytes_


def _link(rows: Sequence[NcclRow], count: int, test: Test, notes: list[str]) -> LinkType:
    """Return the link that joins neighbours, for both directions."""
    short_s, s_per_byte = line_of(rows)
    moved, steps = 1.0, 1
    if test == "all_reduce":
        moved, steps = 2 * (count - 1) / count, fewest_steps(count)
    if len(rows) == 1:
        notes.append(
            "there is one size: bandwidth is its bytes over its time, latency is left at 0; run "
            "the test with several sizes, such as -b 8 -e 1G -f 2"
        )
    elif short_s is None:
        notes.append(
            "no messages are so short that they all take about the same time, so that latency is "
            "left at 0; run the test from 8 bytes on, such as -b 8 -e 1G -f 2"
        )
    return LinkType(
        bandwidth_gb_per_s=significant(moved / s_per_byte * 1e-9, MEASURED_DIGITS),
        latency_us=significant((short_s or 0.0) / steps * 1e6, MEASURED_DIGITS),
        source="measured",
    )


def _wires(hosts: Mapping[str, list[str]], link: LinkType) -> tuple[list[Wire], list[str]]:
    """Return links and what they assume: a switch inside a host, hosts in pairs or by a network.

    A way through several links has the latency measured once.
    """
    half = link.model_copy(update={"latency_us": link.latency_us / 2})
    if len(hosts) == 1:
        ((host, names),) = hosts.items()
        if len(names) == 2:
            return [Wire((names[0], names[1]), link)], []
        return [Wire((name, host), half) for name in names], [_ONE_SWITCH]
    inner = link.model_copy(update={"latency_us": 0.0, "source": "assumed"})
    large = {host: names for host, names in hosts.items() if len(names) > 1}
    wires = [Wire((name, host), inner) for host, names in large.items() for name in names]
    ends = [host if host in large else names[0] for host, names in hosts.items()]
    if len(ends) == 2:
        wires.append(Wire((ends[0], ends[1]), link))
    else:
        wires += [Wire((end, NETWORK), half) for end in ends]
    return wires, [_INNER] if large else []
