"""The options of ``python -m executor.detect``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from executor.launch.rank_options import Add, RankParser, add_rank_options
from planner.errors import PipeplanError

SUFFIXES = (".toml", ".json")
DEFAULT_MOST_MIB = 256
DEFAULT_LONGEST_MS = 20.0
DEFAULT_REPEATS = 7
DEFAULT_TOLERANCE = 0.1


@dataclass(frozen=True)
class MeasurementOptions:
    """The options that the user typed.

    Attributes:
        ranks: to start on this machine; None: one for each GPU, or for each core without GPUs.
        output: the cluster file to write.
        name: of the cluster.
        host: of this rank; None for the machine's own name.
        most_bytes: the largest message.
        longest_ms: what the longest message should take, if it may be that large.
        repeats: how often a long message is sent.
        busy: whether the fastest of equal messages counts instead of their median.
        tolerance: share by which a wiring's bandwidth may be off for a pair.
        at_once: whether pairs that share no rank are measured at the same time.
        together: whether flows at the same time are measured, to see what they share.
        reductions: whether all-reduces are measured.
        compute: whether computation is measured.
        all_pairs: whether every pair is measured, however many there are.
        device, backend: as of ``python -m executor``.
        timeout_s: a rank that lets others wait for so long counts as lost.
        as_json: print JSON instead of tables.
    """

    ranks: int | None
    output: Path
    name: str
    host: str | None
    most_bytes: int
    longest_ms: float
    repeats: int
    busy: bool
    tolerance: float
    at_once: bool
    together: bool
    reductions: bool
    compute: bool
    all_pairs: bool
    device: str | None
    backend: str | None
    timeout_s: float
    as_json: bool

    def require_ranks(self, count: int) -> None:
        """Refuse a single rank where only links are to be measured.

        Raises:
            PipeplanError: saying how to start more.
        """
        if count < 2 and not self.compute:
            raise PipeplanError(
                "there is one process, and links join two or more; give --ranks, or start one a "
                "device, such as torchrun --nproc-per-node 4 -m executor.detect"
            )

    @property
    def of_equal(self) -> Callable[[Sequence[float]], float]:
        """The statistic of the times of equal messages."""
        return min if self.busy else median


def parse_options(words: Sequence[str] | None = None) -> MeasurementOptions:
    """Read a command line.

    Args:
        words: of it; None: those of this process.

    Raises:
        WrongUsageError: for wrong usage among several ranks; alone it ends the process.
    """
    typed = vars(parser().parse_args(words))
    most_mib = typed.pop("most_mib")
    return MeasurementOptions(**typed, most_bytes=int(most_mib * 2**20) // 8 * 8)


def parser() -> argparse.ArgumentParser:
    """Every option with its help."""
    parser = RankParser(
        "executor.detect",
        "Measure how fast devices compute, how much ranks of a host slow each other, latency and "
        "bandwidth between ranks, and all-reduces, and write a cluster file for `pipeplan plan`. "
        "On one machine it starts a process for each device by itself; for several machines start "
        "torchrun ... -m executor.detect on each of them.",
    )
    if "RANK" not in os.environ:
        parser.prog = "pipeplan detect"
    add = parser.add_argument
    _add_cluster(add)
    _add_messages(add)
    _add_turns(add)
    add_rank_options(add)
    add("--json", dest="as_json", action="store_true", help="print JSON instead of tables")
    return parser


def _add_cluster(add: Add) -> None:
    """The options of the ranks and of the output."""
    add(
        "--ranks",
        type=_ranks,
        metavar="N",
        help="processes to start on this machine (default one for each GPU, or for each core "
        "without GPUs); torchrun has --nproc-per-node",
    )
    add(
        "-o",
        "--output",
        type=_cluster_path,
        default=Path("cluster.toml"),
        metavar="FILE",
        help="cluster file to write, .toml or .json (default cluster.toml)",
    )
    add("--name", default="measured", help="name of the cluster (default: measured)")
    add(
        "--host",
        metavar="NAME",
        help="the machine this rank is on (default its own name); ranks of one NAME are a node",
    )
    add(
        "--tolerance",
        type=_share,
        default=DEFAULT_TOLERANCE,
        metavar="SHARE",
        help="nodes with switches are written if they tell each pair's bandwidth within this "
        "share, beside its own spread, else a link for every pair (default 0.1)",
    )


def _add_messages(add: Add) -> None:
    """The options of the number and size of messages."""
    add(
        "--repeats",
        type=_repeats,
        default=DEFAULT_REPEATS,
        metavar="N",
        help="how often each long message is sent (default 7)",
    )
    add(
        "--most-mib",
        type=_mebibytes,
        default=DEFAULT_MOST_MIB,
        metavar="MIB",
        help="the largest message (default 256)",
    )
    add(
        "--longest-ms",
        type=_milliseconds,
        default=DEFAULT_LONGEST_MS,
        metavar="MS",
        help="messages grow until one takes about so long (default 20)",
    )
    add(
        "--busy",
        action="store_true",
        help="others use the machines meanwhile: the fastest of equal messages counts, not their "
        "median",
    )


def _add_turns(add: Add) -> None:
    """The options of what is measured together, and what is left out."""
    add(
        "--at-once",
        action="store_true",
        help="measure pairs that share no rank at the same time: sooner done, and wrong where "
        "they share a link",
    )
    add(
        "--no-together",
        dest="together",
        action="store_false",
        help="leave out flows at the same time; then what pairs share is only assumed",
    )
    add("--no-all-reduce", dest="reductions", action="store_false", help="leave out all-reduces")
    add(
        "--no-compute",
        dest="compute",
        action="store_false",
        help="leave out computation; devices then have the figures of presets",
    )
    add(
        "--all-pairs",
        action="store_true",
        help="measure every pair also of more than 16 ranks, not only some of each kind",
    )


def _cluster_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in .toml or .json")
    return path


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not {what}")
    return value


def _share(text: str) -> float:
    return _number(text, 0, 1, "a share from 0 to 1")


def _mebibytes(text: str) -> float:
    return _number(text, 0.25, 16384, "from 0.25 to 16384 MiB")


def _milliseconds(text: str) -> float:
    return _number(text, 1, 60_000, "from 1 to 60000 ms")


def _ranks(text: str) -> int:
    return _whole(text, 1, 4096)


def _repeats(text: str) -> int:
    return _whole(text, 3, 1000)


def _whole(text: str, least: int, most: int) -> int:
    value = _number(text, least, most, f"from {least} to {most}")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return int(value)
