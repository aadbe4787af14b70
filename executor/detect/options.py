"""The options of ``python -m executor.detect``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from executor.launch.rank_options import RankParser, add_rank_options, whole_number
from planner.errors import PipeplanError

SUFFIXES = (".toml", ".json")
TOLERANCE = 0.1
"""Share by which a topology may mispredict the bandwidth of a pair, beside the pair's spread."""


@dataclass(frozen=True)
class MeasurementOptions:
    """The options that the user typed; :func:`parser` documents each."""

    ranks: int | None
    output: Path
    name: str
    host: str | None
    most_mib: float
    longest_ms: float
    repeats: int
    busy: bool
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
    def most_bytes(self) -> int:
        """Bytes of the largest message, a multiple of 8."""
        return int(self.most_mib * 2**20) // 8 * 8

    @property
    def of_equal(self) -> Callable[[Sequence[float]], float]:
        """The statistic of the times of equal messages."""
        return min if self.busy else median


def parse_options(words: Sequence[str] | None = None) -> MeasurementOptions:
    """Read a command line; None: that of this process.

    Raises:
        WrongUsageError: for wrong usage among several ranks; alone it ends the process.
    """
    return MeasurementOptions(**vars(parser().parse_args(words)))


def parser() -> argparse.ArgumentParser:
    """Return the parser of every option, with its help."""
    found = RankParser(
        "executor.detect",
        "Measure how fast devices compute, how much ranks of a host slow each other, latency and "
        "bandwidth between ranks, and all-reduces, and write a cluster file for `pipeplan plan`. "
        "On one machine it starts a process for each device by itself; for several machines start "
        "torchrun ... -m executor.detect on each of them.",
    )
    if "RANK" not in os.environ:
        found.prog = "pipeplan detect"
    _add_cluster(found)
    _add_measurements(found)
    add_rank_options(found.add_argument)
    found.add_argument("--json", dest="as_json", action="store_true", help="print JSON, no tables")
    return found


def _add_cluster(found: argparse.ArgumentParser) -> None:
    """Add the options of the ranks and of the output."""
    add = found.add_argument
    add(
        "--ranks",
        type=whole_number(1, 4096),
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


def _add_measurements(found: argparse.ArgumentParser) -> None:
    """Add the options of what is measured, and how often."""

    def add_number(name: str, type_: Callable[[str], float], default: float, text: str) -> None:
        text = f"{text} (default {default:g})"
        found.add_argument(name, type=type_, default=default, metavar="N", help=text)

    def add_flag(name: str, field: str, text: str) -> None:
        kind = "store_false" if name.startswith("--no-") else "store_true"
        found.add_argument(name, dest=field, action=kind, help=text)

    add_number("--repeats", whole_number(3, 1000), 7, "how often each long message is sent")
    add_number("--most-mib", _within(0.25, 16384), 256, "MiB of the largest message")
    longest = "messages grow until one takes about so many milliseconds"
    add_number("--longest-ms", _within(1, 60_000), 20.0, longest)
    add_flag("--busy", "busy", "others use the machines: the fastest of equal messages counts")
    alone = "leave out flows at the same time; then what pairs share is only assumed"
    add_flag("--no-together", "together", alone)
    add_flag("--no-all-reduce", "reductions", "leave out all-reduces")
    presets = "leave out computation; devices then have the figures of presets"
    add_flag("--no-compute", "compute", presets)
    every = "measure every pair also of more than 16 ranks, not only some of each kind"
    add_flag("--all-pairs", "all_pairs", every)


def _cluster_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in .toml or .json")
    return path


def _within(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    return number
