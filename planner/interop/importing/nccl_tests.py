"""Reader of the logs of nccl-tests: ``all_reduce_perf`` and ``sendrecv_perf``.

A log names the ranks and has a table with a row a size: bytes, and for buffers apart (out-of-place)
and the same (in-place) the time, the bandwidth of the algorithm (bytes over time) and that of the
bus. What they mean: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

Launchers and collectors of logs put ranks, hosts or times before each line, so lines are recognised
by what they hold, wherever it begins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Literal

from planner.errors import PipeplanError, shorten
from planner.interop.importing.captured import captured_lines

Test = Literal["all_reduce", "sendrecv"]
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
_READ: tuple[Test, ...] = ("all_reduce", "sendrecv")
_COLUMNS = ("time", "algbw", "busbw")
_NEAR, _PRECISE_GB_PER_S = 0.02, 1.0
"""Bandwidths are printed with two decimals."""


@dataclass(frozen=True)
class Rank:
    """A process of the test: its host, device number there, and what the device is called."""

    host: str
    device: int
    called: str


@dataclass(frozen=True)
class NcclRow:
    """A size of the table, with buffers apart."""

    bytes_: int
    seconds: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float


@dataclass(frozen=True)
class NcclLog:
    """A log.

    Attributes:
        test: which it is, if the log tells.
        ranks: in order.
        rows: of all sizes above 0, the smallest first; the median of equal sizes.
        notes: what could not be read.
    """

    test: Test | None
    ranks: tuple[Rank, ...]
    rows: tuple[NcclRow, ...]
    notes: tuple[str, ...]


def looks_like_nccl_tests(head: str) -> bool:
    """Return whether a file begins as such a log."""
    return _header(head.splitlines()) is not None


def read_log(path: Path) -> NcclLog:
    """Read a log.

    Raises:
        PipeplanError: if it has no ranks or no table, is cut off, is of another test, or of
            processes without a common job.
    """
    lines = captured_lines(path)
    header = _header(lines)
    if header is None:
        raise PipeplanError(
            f"{path}: has no table of nccl-tests, whose columns are size, count, type, …, time, "
            "algbw, busbw"
        )
    ranks = _ranks(path, lines)
    notes: list[str] = []
    rows = _merged(list(_rows(path, lines, header, notes)))
    if not rows:
        raise PipeplanError(
            f"{path}: the table has no row with bytes, time and bandwidths; it may be cut off"
        )
    if not any(_END.search(line) for line in lines):
        raise PipeplanError(
            f"{path}: no line such as `# Avg bus bandwidth` follows the table, so it is cut off; "
            "its largest sizes, which show the bandwidth, may be missing; give the whole log"
        )
    test = _test(path, lines) or _by_ratio(path, rows, len(ranks))
    return NcclLog(test, ranks, rows, tuple(notes))


def _header(lines: Sequence[str]) -> list[str] | None:
    for line in lines:
        if (found := _HEADER.search(line)) is not None:
            return found[0].split()
    return None


def _ranks(path: Path, lines: Sequence[str]) -> tuple[Rank, ...]:
    found = [match for line in lines if (match := _RANK.search(line)) is not None]
    numbers = Counter(int(match[1]) for match in found)
    twice = [number for number, count in numbers.items() if count > 1]
    if twice:
        raise PipeplanError(
            f"{path}: rank {twice[0]} appears {numbers[twice[0]]} times: several logs in one file, "
            "or processes without a common job (build nccl-tests with MPI=1); give the "
            "log of one test"
        )
    if len(found) < 2 or sorted(numbers) != list(range(len(numbers))):
        raise PipeplanError(
            f"{path}: names {len(found)} ranks (lines such as `# Rank 0 Group 0 Pid 1 on HOST "
            "device 0 [0x00] NAME`); a link joins two or more, numbered from 0: give the log of "
            "such a run from its first line"
        )
    ordered = sorted(found, key=lambda match: int(match[1]))
    return tuple(Rank(match[2], int(match[3]), match[4]) for match in ordered)


def _rows(
    path: Path, lines: Sequence[str], header: Sequence[str], notes: list[str]
) -> Iterator[NcclRow]:
    places = [header.index(name) for name in _COLUMNS]
    for number, line in enumerate(lines, 1):
        if (found := _ROW.search(line)) is None:
            continue
        words = found[0].split()
        try:
            time_us, algbw, busbw = (float(words[place]) for place in places)
        except (ValueError, IndexError):
            notes.append(f"line {number} could not be read: {shorten(line.strip())}")
            continue
        if _is_wrong(words, places[-1] + 1):
            raise PipeplanError(
                f"{path}: line {number}: the test found wrong values (#wrong is "
                f"{words[places[-1] + 1]}); its times are not valid"
            )
        if int(words[0]) and not 0 < time_us < inf:
            notes.append(f"line {number} has no time above 0: {shorten(line.strip())}")
        elif int(words[0]):
            yield NcclRow(int(words[0]), time_us * 1e-6, algbw, busbw)


def _is_wrong(words: Sequence[str], place: int) -> bool:
    """Newer versions count wrong values, older ones tell the largest error."""
    return len(words) > place and words[place].isdecimal() and int(words[place]) > 0


def _merged(rows: Sequence[NcclRow]) -> tuple[NcclRow, ...]:
    by_size: dict[int, list[NcclRow]] = {}
    for row in rows:
        by_size.setdefault(row.bytes_, []).append(row)
    return tuple(
        NcclRow(
            size,
            median(row.seconds for row in found),
            median(row.algbw_gb_per_s for row in found),
            median(row.busbw_gb_per_s for row in found),
        )
        for size, found in sorted(by_size.items())
    )


def _test(path: Path, lines: Sequence[str]) -> Test | None:
    """Return the test that the log or the file's name shows."""
    named = dict.fromkeys(
        match[1] for line in (*lines, path.name) for match in _PERF.finditer(line)
    )
    known = [test for test in _READ if test in named]
    if len(known) > 1:
        raise PipeplanError(
            f"{path}: names both {' and '.join(f'{test}_perf' for test in known)}; give the log of "
            "one test"
        )
    if named and not known:
        raise PipeplanError(
            f"{path}: is of {next(iter(named))}_perf; those that can be read are "
            f"{' and '.join(f'{test}_perf' for test in _READ)}"
        )
    return known[0] if known else None


def _by_ratio(path: Path, rows: Sequence[NcclRow], count: int) -> Test | None:
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
        raise PipeplanError(
            f"{path}: bus bandwidth is {ratio:.3g} of the algorithm's, in all_reduce_perf of "
            f"{count} ranks {factors['all_reduce']:.3g} and in sendrecv_perf 1; give a log of one "
            "of these"
        )
    return near[0] if near else None


@dataclass(frozen=True)
class FittedLine:
    """Seconds by bytes: what the shortest take, and what each byte adds at last.

    Attributes:
        short_s: of messages so short that their size does not matter; None if all are long.
        s_per_byte: of the longest ones.
    """

    short_s: float | None
    s_per_byte: float


SHORT = 1.5
"""Messages within this factor of the quickest are short: their size does not matter."""
LONG = 32
"""Messages down to this fraction of the largest tell bandwidth."""


def line_of(rows: Sequence[NcclRow]) -> FittedLine:
    """Latency and bandwidth are read off both ends: protocols change in between.

    The seconds a byte are the median slope over neighbours among the largest sizes, or those of
    the largest size where there is no other.
    """
    quickest = min(row.seconds for row in rows)
    short = [row for row in rows if row.seconds <= SHORT * quickest]
    long = [row for row in rows if row.bytes_ * LONG >= rows[-1].bytes_]
    is_flat = len(short) > 1 and short[-1].bytes_ >= 2 * short[0].bytes_
    short_s = median(row.seconds for row in short) if is_flat else None
    slopes = [(b.seconds - a.seconds) / (b.bytes_ - a.bytes_) for a, b in pairwise(long)]
    rising = [slope for slope in slopes if slope > 0]
    last = rows[-1]
    return FittedLine(short_s, median(rising) if rising else last.seconds / last.bytes_)
