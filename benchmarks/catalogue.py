"""The benchmarks as data: questions, commands, reports, and the bars of their claims."""

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
        "schedule",
        "How near the best are microbatch orders, and how much faster than published ones?",
        "benchmarks.schedule --data DATA",
        "benchmarks.schedule --short",
        "SCHEDULE.md",
        takes_data=True,
    ),
    Benchmark(
        "rivals",
        "How much faster are plans than those of published planners, in the best schedule of all?",
        "benchmarks.rivals --data DATA",
        "benchmarks.rivals --short",
        "RIVALS.md",
        takes_data=True,
    ),
    Benchmark(
        "unequal",
        "How much faster are microbatches of several lengths than all padded to the longest?",
        "benchmarks.unequal",
        "benchmarks.unequal --short",
        "UNEQUAL.md",
    ),
    Benchmark(
        "groups",
        "How much faster are plans of tensor-parallel groups than the best even layout?",
        "benchmarks.groups",
        "benchmarks.groups --short",
        "GROUPS.md",
    ),
    Benchmark(
        "proofs",
        "How much of the bounds of plans can anyone check, and how long does that take?",
        "benchmarks.proofs --full",
        "benchmarks.proofs --short",
        "PROOFS.md",
        limit_s=600.0,
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
        "published",
        "How far off are predictions of other people's published runs?",
        "benchmarks.published --data DATA",
        "benchmarks.published --short",
        "PUBLISHED.md",
        limit_s=300.0,
        takes_data=True,
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


# --- the bars: what each benchmark's figures are compared with ------------------------------------

RIVALS_BAR, RIVALS_BASELINES_BAR, RIVALS_SPP_BAR = 1.10, 1.15, 1.05
"""Baselines' iteration time over ours, geometric mean: the best, the best but SPP, and SPP."""
GROUPS_UNEVEN_BAR = 1.10
"""Time of the best even layout over ours on uneven clusters, geometric mean."""
END_TO_END_LARGE_S_BAR, END_TO_END_LARGE_GB_BAR = 180.0, 4.0
"""To trace, plan and verify Llama 2 70B on 64 and 1,024 GPUs: seconds of all, GB of each."""
PROOFS_ALONE_BAR, PROOFS_CHECK_BAR_S = 0.8, 5.0
"""Share of plans whose certificate alone proves the bound, and the time to check one."""
REPLAN_COMMAND_BAR_S = 5.0
"""The whole command `pipeplan replan`."""
EXECUTOR_OVERHEAD_BAR, EXECUTOR_PEERS_BAR = 0.03, 1.0
"""Iteration time over the simulator's, less one; step time and memory over those of torch."""
EXECUTOR_MEDIAN_ERROR_BAR, EXECUTOR_WORST_ERROR_BAR = 0.05, 0.1
"""Predicted against measured iteration time on the testbed."""
EXECUTOR_SPEED_UP_ERROR_BAR, EXECUTOR_SPEED_UP_BAR = 0.05, 1.0
"""Measured speed-up over baselines: its difference from the predicted one, and its least value."""
PUBLISHED_MEDIAN_BAR, PUBLISHED_WORST_BAR = 0.05, 0.12
"""Errors of predicted iteration times of other people's runs, from their own profiles."""
PREDICTION_BARS = {2: (0.04, 0.1), 4: (0.08, 0.15)}
"""Median and worst error of predicted iteration times of real training, by the number of ranks."""
PREDICTION_MEMORY_BAR, PREDICTION_LOW_BAR = 0.05, 0.03
"""Error of the heaviest rank's predicted peak memory, and the most that any rank is above it."""
ROOFLINE_TRANSFORMERS_BAR, ROOFLINE_OTHERS_BAR = 0.15, 2.0
"""Error of a transformer's predicted time on A100 and H100, and the factor of any other model."""
ROOFLINE_SPEED_BAR_S = 60.0
"""Time from a torch model to the costs of every layer of Llama-7B."""
SYNC_LOOPBACK_BARS = {
    "homogeneous": 1.05,
    "one_2x_slow": 1.7,
    "one_4x_slow": 3.0,
    "random_sleeps": 2.0,
}
"""Throughput over that of all-reduce on loopback, by setting."""
SOAK_LEAST_BAR_S, SOAK_DETECTION_BAR_S, SOAK_REJOIN_BAR_S = 0.3, 1.2, 3.0
"""Least allowance for a gap between steps; detecting a killed rank; rejoining from its hello."""
TESTBED_LONG_S, TESTBED_LONG_BAR, TESTBED_SHORT_BAR = 6e-3, 0.03, 0.07
"""Error of the simulator's rule for messages of at least this duration, and for shorter ones."""


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
    """Return what a benchmark's report says; None if there is none or it has no date."""
    path = room / benchmark.report
    if not path.is_file():
        return None
    text = path.read_text()
    dates = re.findall(r"^Made by `[^`]+` on (\d{4}-\d{2}-\d{2})", text, re.MULTILINE)
    if not dates:
        return None
    missed = len(re.findall(r"\bnot reached\b", text, re.IGNORECASE))
    return FullReport(max(dates), missed, bool(re.search(r"\breached\b", text)))
