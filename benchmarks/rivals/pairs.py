"""The pairs of a public profile and a cluster, and what every planner makes of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.plans.drawn import random_cluster
from benchmarks.rivals.profiles import PRECISION, read_profile
from planner import Cluster, Job, PipeplanError, Problem
from planner.analysis.comparison import OURS, ComparisonRow, compare
from planner.baselines import BASELINES
from planner.records.document import Record

MICROBATCHES = 32
FREEDOMS = {"backward": "any", "max_stages_per_device": 2}
"""What every planner may use: all published schedules."""
LOCAL = "this_machine"
"""The example that describes the machine one sits at."""
RANDOM_CLUSTERS = 20
STRIDE = 11
"""One in so many pairs makes the table; prime to the number of clusters, so that all kinds of
clusters and most profiles come by."""
RIVALS = tuple(BASELINES)
"""The published planners and the best even layout."""


@dataclass(frozen=True)
class Pair:
    """A public profile on a cluster.

    Attributes:
        profile: its file.
        cluster: file of a sample cluster, or seed of a random one.
    """

    profile: Path
    cluster: Path | int

    def problem(self) -> Problem:
        """Return the problem, with every freedom that a published schedule needs."""
        cluster = self.cluster
        machines = (
            Cluster.from_data(random_cluster(cluster))
            if isinstance(cluster, int)
            else Cluster.load(cluster)
        )
        graph = read_profile(self.profile)
        job = Job(
            name=graph.name,
            samples_per_microbatch=graph.record.samples_per_microbatch,
            precision=PRECISION,
            microbatches=MICROBATCHES,
            **FREEDOMS,
        )
        return Problem(graph, machines, job)

    @property
    def name(self) -> tuple[str, str]:
        """Profile and cluster."""
        where = self.cluster
        return self.profile.stem, f"random {where}" if isinstance(where, int) else where.stem


class Answer(Record):
    """What a planner found.

    Attributes:
        schedule: the method that made the schedule.
        stages: number of stages.
        time_s: iteration time.
        memory_share: the largest share that a device uses of its memory.
    """

    schedule: str
    stages: int
    time_s: float
    memory_share: float


class PairRow(Record):
    """What every planner makes of a pair.

    Attributes:
        profile, cluster: of the pair.
        devices: of the cluster.
        time_limit_s: of our search, in deterministic seconds.
        ours: our plan, of a search that knows nothing of the rivals' stages.
        rivals: by planner; null where it finds nothing that fits.
    """

    profile: str
    cluster: str
    devices: int
    time_limit_s: float
    ours: Answer
    rivals: dict[str, Answer | None]

    @property
    def best_rival(self) -> tuple[str, Answer]:
        """The fastest rival and what it found.

        Raises:
            PipeplanError: if no rival found anything.
        """
        found = [(name, answer) for name, answer in self.rivals.items() if answer is not None]
        if not found:
            raise PipeplanError(f"{self.profile} on {self.cluster}: no rival finds a plan")
        return min(found, key=lambda row: row[1].time_s)

    @property
    def ratio(self) -> float:
        """Time of the best rival over ours."""
        return self.best_rival[1].time_s / self.ours.time_s

    def ratio_of(self, names: Sequence[str]) -> float:
        """Time of the best of some rivals over ours; infinity if none finds a plan."""
        answers = [self.rivals[name] for name in names]
        times_s = [answer.time_s for answer in answers if answer is not None]
        return min(times_s, default=math.inf) / self.ours.time_s


def pairs(data: Path) -> list[Pair]:
    """Return every profile with every sample cluster and every random one.

    Raises:
        PipeplanError: if the folder has no profiles.
    """
    folders = ("dapple", "pipedream")
    profiles = [path for name in folders for path in sorted((data / name).glob("*.txt"))]
    if not profiles:
        raise PipeplanError(f"--data {data}: no *.txt in dapple, pipedream; give their parent")
    samples = [path for path in sorted(SAMPLE_CLUSTERS.glob("*.toml")) if path.stem != LOCAL]
    clusters: list[Path | int] = [*samples, *range(RANDOM_CLUSTERS)]
    return [Pair(profile, cluster) for profile in profiles for cluster in clusters]


def rows_of(
    chosen: Sequence[Pair], time_limit_s: float, kept: Path | None = None
) -> Iterator[PairRow]:
    """Yield a row a pair as it is known, those first that an earlier run left.

    One pair a core; each search has one thread and a deterministic limit, so that the figures do
    not depend on what else the machine does.

    Args:
        chosen: the pairs.
        time_limit_s: of each of our searches, in deterministic seconds.
        kept: file of rows, JSON lines: read first, and rows are added as they are known.

    Raises:
        PipeplanError: naming a line of the file that is no row.
    """
    known = {row_name(row): row for row in read_rows(kept) if row.time_limit_s == time_limit_s}
    yield from (known[pair.name] for pair in chosen if pair.name in known)
    missing = [pair for pair in chosen if pair.name not in known]
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        running = [executor.submit(partial(measure, pair, time_limit_s)) for pair in missing]
        for future in as_completed(running):
            row = future.result()
            if kept is not None:
                with kept.open("a") as file:
                    print(row.model_dump_json(), file=file)
            yield row


def row_name(row: PairRow) -> tuple[str, str]:
    """Return the name of a row's pair."""
    return row.profile, row.cluster


def read_rows(path: Path | None) -> list[PairRow]:
    """Return the rows of a file; none if there is no file.

    Raises:
        PipeplanError: naming a line that is no row.
    """
    if path is None or not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(PairRow.model_validate_json(line))
        except ValidationError as error:
            told = error.errors()[0]["msg"]
            raise PipeplanError(f"{path}:{number}: {told}; delete the line") from None
    return rows


def measure(pair: Pair, time_limit_s: float) -> PairRow:
    """Plan a pair with every planner."""
    problem = pair.problem()
    search = partial(compare, time_limit_s=time_limit_s, workers=1, deterministic=True)
    answers = {row.planner: _answer(row) for row in search(problem, RIVALS)}
    ours = answers.pop(OURS)
    if ours is None:
        raise PipeplanError(f"{' on '.join(pair.name)}: no plan was found")
    profile, cluster = pair.name
    return PairRow(
        profile=profile,
        cluster=cluster,
        devices=len(problem.cluster.devices),
        time_limit_s=time_limit_s,
        ours=ours,
        rivals=answers,
    )


def _answer(row: ComparisonRow) -> Answer | None:
    if row.figures is None or row.stages is None or row.schedule is None:
        return None
    return Answer(
        schedule=row.schedule,
        stages=len(row.stages),
        time_s=row.figures.iteration_time_s,
        memory_share=row.figures.peak_memory_share,
    )
