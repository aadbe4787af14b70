"""Cases of the soak, and what each came to as a row of the table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.catalogue import SOAK_LEAST_BAR_S
from benchmarks.soak.figures import Figures, figures_of
from benchmarks.soak.history import ledger_faults, median_iteration_s, read_history
from benchmarks.soak.plans import soak_plan
from benchmarks.soak.processes import Forks
from benchmarks.soak.waits import LongGap, long_gaps, read_waits
from benchmarks.soak.world import GROUP_TIMEOUT_S, Case, Run, World
from executor.coordinator.child import coordinator_for
from planner.sync.strategies import parse_sync

STRATEGIES = (
    "partial_all_reduce",
    "partial_all_reduce:group_size=2,overlap=true",
    "partial_all_reduce:schedule=static",
    "semi_decentralized",
    "semi_decentralized:overlap=true",
    "ad_psgd",
    "ad_psgd:pairs=matching",
    "parameter_server",
    "parameter_server:mode=async",
    "eager_parameter_server",
    "wave_synchronous",
)
ITERATION_S = 0.08
MEMBERS_BAR_S = GROUP_TIMEOUT_S + SOAK_LEAST_BAR_S
SHORT = (
    6,
    ("partial_all_reduce", "semi_decentralized:overlap=true", "ad_psgd", "parameter_server"),
    ((4, 1),),
)
"""Events, strategies and shapes of the short form."""
TORCHRUN_STRATEGY = "semi_decentralized"
STEPS_PER_EVENT = 40
LONGEST = 3
"""Gaps of each strategy that are told of, if no more are over the bar."""
STEPS_PER_TORCHRUN_EVENT = 400
COLUMNS = (
    "strategy",
    "pipelines x places",
    "kills, stops, coordinator's",
    "came back",
    "hung",
    "ended unhurt",
    "ended late",
    "shares",
    "lost or twice",
    "failed exchanges",
    "iteration s",
    "others' gap s",
    "others over bar",
    "members' gap s",
    "members over bar",
    "detection s",
    "rejoin s",
    "from start s",
    "coordinator's gap s",
)


@dataclass(frozen=True)
class Row:
    """The results of one case; gaps are the longest, with the median in front."""

    case: Case
    kills: int
    stops: int
    coordinators: int
    returns: int
    hung: bool
    strange: int
    killed_late: int
    shares: int
    faults: tuple[str, ...]
    failed: int
    median_s: float
    others_s: tuple[float, ...]
    members_s: tuple[float, ...]
    detection_s: tuple[float, ...]
    rejoin_s: tuple[float, ...]
    start_s: tuple[float, ...]
    coordinator_s: tuple[float, ...]
    long_gaps: tuple[LongGap, ...]
    wall_s: float

    @property
    def others_bar_s(self) -> float:
        """The bar for gaps of pipelines that had no exchange with the rank that was hit."""
        return max(3 * self.median_s, SOAK_LEAST_BAR_S)

    @property
    def members_bar_s(self) -> float:
        """The bar for gaps of pipelines that had an exchange with it."""
        return MEMBERS_BAR_S

    @property
    def is_well(self) -> bool:
        """Whether training continued and nothing was lost."""
        return not (self.hung or self.strange or self.faults)

    def cells(self) -> Iterator[object]:
        """Yield the row's cells."""
        case = self.case
        yield case.strategy + (" (torchrun)" if case.torchrun else "")
        yield f"{case.pipelines} x {case.places}"
        yield f"{self.kills}, {self.stops}, {self.coordinators}"
        yield self.returns
        yield "yes" if self.hung else "no"
        yield self.strange
        yield self.killed_late
        yield self.shares
        yield len(self.faults)
        yield self.failed
        yield f"{self.median_s:.3f}"
        yield _spread(self.others_s)
        yield f"{sum(s > self.others_bar_s for s in self.others_s)} of {len(self.others_s)}"
        yield _spread(self.members_s)
        yield f"{sum(s > self.members_bar_s for s in self.members_s)} of {len(self.members_s)}"
        yield _spread(self.detection_s)
        yield _spread(self.rejoin_s)
        yield _spread(self.start_s)
        yield _spread(self.coordinator_s)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f}, {max(values):.2f}"


def row_of(run: Run) -> Row:
    """The figures of a run."""
    case = run.case
    sync = parse_sync(case.strategy)
    sizes = (case.pipelines, case.places, case.pipelines, case.steps * case.pipelines)
    history = read_history(run.log, coordinator_for(sync, *sizes))
    found = figures_of(history, run.hits, run.started_s, case.strategy)
    return Row(
        case=case,
        kills=sum(hit.kind == "kill" for hit in run.hits),
        stops=sum(hit.kind == "stop" for hit in run.hits),
        coordinators=sum(hit.kind == "coordinator" for hit in run.hits),
        returns=sum(history.report["incarnations"]) - case.pipelines,
        hung=run.hung or run.status != 0,
        strange=len(run.strange),
        killed_late=run.killed_late,
        shares=history.report["committed"],
        faults=tuple(ledger_faults(history, case.steps * case.pipelines)),
        failed=history.failed,
        median_s=median_iteration_s(history),
        others_s=tuple(_gaps(found, are_members=False)),
        members_s=tuple(_gaps(found, are_members=True)),
        detection_s=tuple(
            f.detection_s for f in found if f.hit.kind == "kill" and f.detection_s is not None
        ),
        rejoin_s=tuple(f.rejoin_s for f in found if f.rejoin_s is not None),
        start_s=tuple(f.start_s for f in found if f.start_s is not None),
        coordinator_s=tuple(
            max(gap.seconds for gap in f.others.values())
            for f in found
            if f.hit.kind == "coordinator" and f.others
        ),
        long_gaps=tuple(long_gaps(history, found, read_waits(run.waits), MEMBERS_BAR_S, LONGEST)),
        wall_s=run.wall_s,
    )


def _gaps(found: Sequence[Figures], *, are_members: bool) -> Iterator[float]:
    for figures in found:
        if figures.hit.kind == "coordinator" or not figures.is_alone:
            continue
        for pipeline, gap in figures.others.items():
            if (pipeline in figures.members) == are_members:
                yield gap.seconds


def run_cases(cases: Sequence[Case], folder: Path) -> Iterator[Row]:
    """One after the other; logs stay in the folder."""
    forks = Forks()
    try:
        for number, case in enumerate(cases):
            here = folder / f"{number}.{case.strategy.replace(':', '.')}"
            here.mkdir(parents=True)
            soak_plan(case.pipelines, case.places, ITERATION_S).save(here / "plan.json")
            run = World(case, here / "plan.json", here, forks).run()
            (here / "hits.json").write_text(json.dumps([asdict(hit) for hit in run.hits]))
            yield row_of(run)
    finally:
        forks.close()
