"""The search of ``replan``: repaired stages, a walk over plans from the best of them, a bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from planner.bounds import ProvedBound, Prover
from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.program.layout import Layout
from planner.replanning.choice import Candidate
from planner.replanning.recut import Recut
from planner.replanning.repair import OldStage, Repairs
from planner.replanning.state import State
from planner.search.clock import STATES_PER_S, TASKS_PER_S
from planner.search.result import Ended, HistoryRow
from planner.search.settings import OPTIMALITY_TOLERANCE
from planner.search.walk.block import HEADER, devices_of
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.plans import timeline_of
from planner.search.walk.starts import Start, needs_of, starts
from planner.search.walk.walker import Candidate as Judged
from planner.search.walk.walker import Walker
from planner.simulation.simulator import reduced_soonest
from planner.simulation.timeline import Timeline
from planner.variants.machine_changes import NewMachines

REPAIRS_UNTIL, STARTS_UNTIL = 0.2, 0.3
"""Shares of the time limit at the end of the repairs, and of stages of the search alone."""
WALKS = ((0.5, 4, 0.001, 0.0001), (0.9, 1, 0.03, 0.0005))
"""Walks: until which share of the limit, from how many plans, the heats at begin and end."""
TASKS_PER_CALL = 20_000
"""Tasks that a walk replays between two looks at the clock."""
MOST_GROUPS = 150
"""The most groups of devices that are cut into stages."""
SOLVE_S = 5.0
"""Limit of the search at length."""
Progress = Callable[[HistoryRow], None]


@dataclass
class ReplanSearch:
    """One search for plans near an old one.

    Attributes:
        problem: of the machines there are now.
        state: what their devices hold.
        limit_s: seconds; with ``deterministic`` of counted work.
        deterministic: whether the same input gives the same plans on every machine.
        progress: called with each plan that is faster than all before.
        found: all plans.
        proved: the highest bound.
        is_interrupted: whether Ctrl-C ended it.
    """

    problem: Problem
    state: State
    limit_s: float
    seed: int
    deterministic: bool
    progress: Progress
    found: list[Candidate] = field(default_factory=list)
    proved: ProvedBound | None = None
    is_interrupted: bool = False

    def __post_init__(self) -> None:
        self.table = StageTable(self.problem)
        self._freedoms = freedoms_of(self.problem)
        self._network = NetworkTable.of(self.problem.cluster)
        self._walker = Walker(self.problem, self.table, self._network, self._freedoms, self.seed)
        self._judged: list[Judged] = []
        self._begin_s, self._spent_s = time.monotonic(), 0.0

    @property
    def best_s(self) -> float:
        """The time of the fastest plan; infinite before the first."""
        return min((row.seconds for row in self.found), default=math.inf)

    @property
    def bound_s(self) -> float:
        """No plan takes less."""
        return min(self.best_s, 0.0 if self.proved is None else self.proved.bound_s)

    @property
    def ended(self) -> Ended:
        """Why it ended."""
        if self.best_s <= self.bound_s * (1 + OPTIMALITY_TOLERANCE):
            return "proved"
        return "interrupted" if self.is_interrupted else "time limit"

    @property
    def _share(self) -> float:
        return self.elapsed_s / self.limit_s

    @property
    def elapsed_s(self) -> float:
        """Seconds of the limit that are used."""
        if not self.deterministic:
            return time.monotonic() - self._begin_s
        return self._spent_s + self._walker.tasks_done / TASKS_PER_S

    def run(self, plan: Plan, machines: NewMachines) -> None:
        """Search from the plan that training ran by (on groups if it has some); Ctrl-C ends it."""
        try:
            self._repair(plan, machines)
            for walk in WALKS if self._judged else ():
                self._walk(*walk)
            if self.found:
                self._prove()
        except KeyboardInterrupt:
            self.is_interrupted = True

    # --- repairs ------------------------------------------------------------------------------

    def _repair(self, plan: Plan, machines: NewMachines) -> None:
        """Judge the old stages on what is left, in ways that move few bytes, then a few others."""
        job = self.problem.job
        needs = needs_of(self._walker.memory, self.table, self._freedoms)
        may_cut = self._freedoms.may_cut.copy()
        may_cut[np.cumsum([0, *(len(stage.layers) for stage in plan.stages)])] = True
        recut = Recut(needs, may_cut, self.state, job.microbatches)
        bounded = [
            (self.state.lacking_bytes(self.state.needed(start)), load_s, start)
            for groups in islice(self._repairs(plan, machines).groups(), MOST_GROUPS)
            for load_s, start in recut.starts(groups)
        ]
        self._judge(_promising(bounded), REPAIRS_UNTIL)
        self._judge(starts(self._network, self._freedoms, needs), STARTS_UNTIL)

    def _judge(self, rows: Iterable[Start], until: float) -> None:
        for start in rows:
            judged = self._walker.start(start)
            if judged is not None:
                self._take(judged)
            if self.found and self._share >= until:
                return

    def _take(self, judged: Judged) -> None:
        self._judged.append(judged)
        self._add(Candidate(judged.seconds, _stages_of(judged), partial(self._timeline, judged)))

    def _add(self, row: Candidate) -> None:
        if row.seconds < self.best_s:
            self.progress(HistoryRow(self.elapsed_s, row.seconds, 0.0, "replan"))
        self.found.append(row)

    def _repairs(self, plan: Plan, machines: NewMachines) -> Repairs:
        cluster, job = self.problem.cluster, self.problem.job
        number = cluster.numbers
        work_s = self.table.arrays.seconds[:, :, :2].sum(axis=2).min(axis=0)
        begins = np.cumsum([0, *(len(stage.layers) for stage in plan.stages)])
        stages = tuple(
            OldStage(
                tuple(number[device] for device in stage.devices if device in machines.survivors),
                float(work_s[begin : begin + len(stage.layers)].sum()),
            )
            for begin, stage in zip(begins[:-1], plan.stages, strict=True)
        )
        return Repairs(
            stages=stages,
            devices=len(number),
            slowed=frozenset(number[name] for name in machines.slowed),
            links=cluster.link_table,
            max_stages=self._freedoms.max_stages,
            most_on_device=job.max_stages_per_device,
            replicates=job.replication,
        )

    # --- walk and bound -----------------------------------------------------------------------

    def _walk(self, until: float, count: int, hottest: float, coolest: float) -> None:
        """Walk from the fastest plans of unlike numbers of stages."""
        first: dict[int, Judged] = {}
        for row in sorted(self._judged, key=lambda row: row.seconds):
            first.setdefault(row.shape[0], row)
        chosen, begin = list(first.values())[:count], self._share
        for number, row in enumerate(chosen, 1):
            end = begin + (until - begin) * number / len(chosen)
            self._walk_from(row, end, hottest, coolest)

    def _walk_from(self, row: Judged, end: float, hottest: float, coolest: float) -> None:
        self._walker.stand_at(row)
        begin, best_s = self._share, row.seconds
        while (share := self._share) < end:
            part = (share - begin) / (end - begin)
            self._walker.walk(hottest * (coolest / hottest) ** part, TASKS_PER_CALL)
            if self._walker.best.seconds < best_s:
                best_s = self._walker.best.seconds
                self._take(self._walker.best)

    def solve(self) -> None:
        """Search at length, as no start fits; an InfeasibleError says what is in the way."""
        from planner.search.solve import solve

        plan = solve(
            self.problem,
            time_limit_s=max(self.limit_s, SOLVE_S),
            seed=self.seed,
            deterministic=self.deterministic,
        ).plan
        layout = Layout.of(plan, self.table)
        start = Start(layout.ends, layout.devices)
        seconds = plan.predicted.iteration_time_s
        self._add(Candidate(seconds, start, partial(self._timeline, layout)))
        self._prove()

    def _timeline(self, found: Judged | Layout) -> Timeline:
        layout = found if isinstance(found, Layout) else self._walker.layout(found)[1]
        return reduced_soonest(timeline_of(layout, self.table))

    def _prove(self) -> None:
        for proved in Prover(self.problem, self.best_s).steps():
            self.proved, self._spent_s = proved, proved.looked_at / STATES_PER_S
            if self._share >= 1:
                return


def _stages_of(judged: Judged) -> Start:
    block, count = judged.block, judged.shape[0]
    ends = block[HEADER : HEADER + count]
    return Start(tuple(ends.tolist()), tuple(tuple(devices_of(block, s)) for s in range(count)))


def _promising(rows: Sequence[tuple[int, float, Start]]) -> list[Start]:
    """Return stages: the first, those with the least load, then the front of bytes and loads.

    Args:
        rows: bytes moved, seconds of the longest stage, and the stages.
    """
    ranked = sorted(rows, key=lambda row: (row[1], row[0]))
    front, least_s = [], math.inf
    for row in sorted(rows, key=lambda row: row[:2]):
        if row[1] < least_s:
            least_s = row[1]
            front.append(row)
    return [*dict.fromkeys(row[2] for row in (*rows[:1], *ranked[:1], *front, *ranked))]
