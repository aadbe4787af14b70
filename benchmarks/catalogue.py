"""The benchmarks, as data: what each asks, how its short form runs, where its full report is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOM = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A row of the page.

    Attributes:
        name: for ``--rows``.
        asks: the question that it answers.
        command: after ``python -m``, of the full form.
        short: after ``python -m``, of the short form; ``--claims FILE`` is added.
        report: what the full form wrote, a file beside this one.
        limit_s: after which the short form is stopped: several times what it takes.
        takes_data: whether some of its rows need the public instances.
    """

    name: str
    asks: str
    command: str
    short: str
    report: str
    limit_s: float = 900.0
    takes_data: bool = False


BENCHMARKS = (
    Benchmark(
        "partition",
        "How near the best are stages and devices, and how much faster than other planners'?",
        "benchmarks.partition --data DATA",
        "benchmarks.partition --short",
        "PARTITION.md",
        takes_data=True,
    ),
    Benchmark(
        "schedule",
        "How near the best are microbatch orders, and how much faster than published ones?",
        "benchmarks.schedule --data DATA",
        "benchmarks.schedule --short",
        "SCHEDULE.md",
        takes_data=True,
    ),
    Benchmark(
        "end_to_end",
        "How long does it take from a torch model to a plan that holds?",
        "benchmarks.end_to_end",
        "benchmarks.end_to_end --short",
        "END_TO_END.md",
        limit_s=600.0,
    ),
    Benchmark(
        "replan",
        "How long does a new plan take when machines were lost, and how much has to move?",
        "benchmarks.replan",
        "benchmarks.replan --short",
        "REPLAN.md",
        limit_s=600.0,
    ),
    Benchmark(
        "executor",
        "Do plans train as one process does, as fast as torch's runtime and as predicted?",
        "benchmarks.executor",
        "benchmarks.executor --short",
        "EXECUTOR.md",
    ),
    Benchmark(
        "prediction",
        "How far off are predicted times and memory of real training?",
        "benchmarks.prediction",
        "benchmarks.prediction --short",
        "PREDICTION.md",
    ),
    Benchmark(
        "roofline",
        "How far off are costs where nothing was measured?",
        "benchmarks.roofline",
        "benchmarks.roofline --short",
        "ROOFLINE.md",
        limit_s=600.0,
    ),
    Benchmark(
        "sync",
        "What do strategies of synchronisation gain, against what their papers say?",
        "benchmarks.sync",
        "benchmarks.sync --short --rows loopback accuracy slow overlap scale "
        "--settings homogeneous one_4x_slow",
        "SYNC.md",
        limit_s=1200.0,
    ),
    Benchmark(
        "soak",
        "Does training go on when pipelines are killed and stopped?",
        "benchmarks.soak --events 100 --shapes 4x1 --torchrun 5",
        "benchmarks.soak --short",
        "SOAK.md",
        limit_s=600.0,
    ),
    Benchmark(
        "testbed",
        "Do real links take what the simulator's rule says?",
        "benchmarks.testbed rules --cluster FILE",
        "benchmarks.testbed --short",
        "TESTBED.md",
        limit_s=300.0,
    ),
)


@dataclass(frozen=True)
class FullReport:
    """The last full report of a benchmark.

    Attributes:
        date: the youngest that a heading in it tells.
        missed: how often it says that something was not reached.
        has_verdicts: whether it says of anything that it was reached or not.
    """

    date: str
    missed: int
    has_verdicts: bool


def full_report(benchmark: Benchmark, room: Path = ROOM) -> FullReport | None:
    """What its file says; None if there is none or it tells no date."""
    path = room / benchmark.report
    if not path.is_file():
        return None
    text = path.read_text()
    dates = re.findall(r"^Made by `[^`]+` on (\d{4}-\d{2}-\d{2})", text, re.MULTILINE)
    if not dates:
        return None
    missed = len(re.findall(r"\bnot reached\b", text, re.IGNORECASE))
    return FullReport(max(dates), missed, bool(re.search(r"\breached\b", text)))
