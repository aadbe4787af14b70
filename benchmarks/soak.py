"""Pipelines that die and stop while they train: does training go on, and how long do others wait?

Usage:
    python -m benchmarks.soak [--events N] [--strategies NAMES] [--shapes 4x1,2x2] [--seed S]
                              [--torchrun N] [--folder DIR] [--output FILE | --json]
    python -m benchmarks.soak --short [--claims FILE] [--json]

Each case trains a small model as pipelines with jobs of their own and a coordinator. At random
moments, half of them as the ranks average, a random rank is killed (SIGKILL) or stopped (SIGSTOP)
for 0.2 to 3.5 s, and now and then the coordinator is killed. Killed ranks come back. It ends with
status 1 if a case hung, a pipeline ended to which nothing was done, or a share was lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.claims import add_claims_option, begin, tell
from benchmarks.report import heading, table, write_table
from benchmarks.soak_figures import (
    DETECTION_BAR_S,
    LEAST_BAR_S,
    REJOIN_BAR_S,
    Figures,
    figures_of,
    ledger_faults,
    median_iteration_s,
    read_history,
)
from benchmarks.soak_plans import soak_plan
from benchmarks.soak_processes import Forks
from benchmarks.soak_world import GROUP_TIMEOUT_S, Case, Run, World
from executor.coordinator.coordinators import coordinator_for
from planner.sync.strategies import parse_sync

STRATEGIES = (
    "partial_all_reduce",
    "partial_all_reduce:schedule=static",
    "semi_decentralized",
    "semi_decentralized:overlap=true",
    "ad_psgd",
    "ad_psgd:pairs=matching",
    "parameter_server",
    "parameter_server:mode=async",
    "eager_parameter_server",
)
ITERATION_S = 0.04
SHORT = (
    6,
    ("partial_all_reduce", "semi_decentralized:overlap=true", "ad_psgd", "parameter_server"),
    ((4, 1),),
)
"""Events, strategies and shapes of the short form."""
_BY_TORCHRUN = "semi_decentralized"
_STEPS_AN_EVENT = 70
_STEPS_AN_EVENT_OF_TORCHRUN = 400
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
    """What one case came to; gaps are the longest, with the median in front."""

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
    wall_s: float

    @property
    def others_bar_s(self) -> float:
        """Of a gap of somebody who had nothing to do with the rank that was hit."""
        return max(3 * self.median_s, LEAST_BAR_S)

    @property
    def members_bar_s(self) -> float:
        """Of a gap of somebody who had."""
        return GROUP_TIMEOUT_S + LEAST_BAR_S

    @property
    def is_well(self) -> bool:
        """Whether training went on, and nothing was lost."""
        return not (self.hung or self.strange or self.faults)

    def cells(self) -> Iterator[object]:
        """Of the table."""
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
        returns=sum(history.report["lives"]) - case.pipelines,
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
            max(f.others_s.values()) for f in found if f.hit.kind == "coordinator" and f.others_s
        ),
        wall_s=run.wall_s,
    )


def _gaps(found: Sequence[Figures], *, are_members: bool) -> Iterator[float]:
    for figures in found:
        if figures.hit.kind == "coordinator" or not figures.is_alone:
            continue
        for pipeline, gap_s in figures.others_s.items():
            if (pipeline in figures.members) == are_members:
                yield gap_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    options = _options(argv)
    if options.claims:
        begin(options.claims)
    rows = []
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.folder or Path(temporary)
        for row in run_cases(list(_cases(options)), folder):
            print(_progress(row), file=sys.stderr, flush=True)
            rows.append(row)
    if options.claims:
        from benchmarks.short import soak as short

        tell(short.entries(rows), options.claims)
    if options.json:
        print(json.dumps([{**asdict(row), "is_well": row.is_well} for row in rows]))
    elif options.output or not options.claims:
        write_table(_report(rows, options), options.output)
    return 0 if all(row.is_well for row in rows) else 1


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


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    strategies = options.strategies.split(";")
    for pipelines, places in options.shapes:
        for strategy in strategies:
            steps = options.steps_per_event * options.events
            yield Case(strategy, pipelines, places, options.events, steps, options.seed)
    if options.torchrun:
        steps = _STEPS_AN_EVENT_OF_TORCHRUN * options.torchrun
        yield Case(_BY_TORCHRUN, 2, 2, options.torchrun, steps, options.seed, torchrun=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what it leaves open is that of the short form or of the full one."""
    options = _parser().parse_args(argv)
    full = (20, STRATEGIES, ((4, 1), (2, 2)))
    events, strategies, shapes = SHORT if options.short else full
    options.events = options.events or events
    options.strategies = options.strategies or ";".join(strategies)
    options.shapes = options.shapes or shapes
    return options


def _progress(row: Row) -> str:
    found = zip(COLUMNS, row.cells(), strict=True)
    return f"{row.wall_s:.0f} s  " + "  ".join(f"{name}: {cell}" for name, cell in found)


def _report(rows: Sequence[Row], options: argparse.Namespace) -> str:
    command = "python -m benchmarks.soak " + " ".join(sys.argv[1:])
    about = (
        "Ranks are processes of this machine with emulated compute "
        f"({ITERATION_S:g} s an iteration), forked from a process that has imported torch: "
        "times from start leave out the import, which torchrun's restarts pay for (the last row, "
        "if it says so). A gap is from the end of one step to the end of the next, the longest in "
        "the time from the hit until the pipeline is back; others have exchanged nothing with "
        "the rank that was hit while it was silent, members have, or were to. Each cell of times "
        f"has the median and the largest. Bars: others max(3 iterations, {LEAST_BAR_S:g} s), "
        f"members the group timeout of {GROUP_TIMEOUT_S:g} s and {LEAST_BAR_S:g} s, detection "
        f"{DETECTION_BAR_S:g} s, rejoin {REJOIN_BAR_S:g} s from hello."
    )
    cells = [list(row.cells()) for row in rows]
    return f"{heading('Soak', command)}\n{about}\n\n{table(COLUMNS, cells)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--events", type=int, help="of each case (default 20)")
    parser.add_argument("--strategies", help="with semicolons between (default all)")
    parser.add_argument("--shapes", type=_shapes, help="such as 4x1,2x2 (the default)")
    parser.add_argument("--steps-per-event", type=int, default=_STEPS_AN_EVENT)
    parser.add_argument("--torchrun", type=int, default=0, metavar="N", help="events by torchrun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the logs there")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--short", action="store_true", help="a few events of four strategies")
    add_claims_option(parser)
    parser.add_argument("--output", type=Path, help="write the report to this file")
    return parser


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        pipelines, _, places = part.partition("x")
        found.append((int(pipelines), int(places)))
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
