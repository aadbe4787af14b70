"""The steps of a search for one problem, whose devices may be tensor-parallel groups.

Each step goes on until a share of the clock's limit is used, or until it has nothing left to try.
What it finds goes to the incumbent.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.bounds import Prover
from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.model.blocks import block_name
from planner.plan.membership import outside
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.program.layout import Layout
from planner.search.choices import Choice, chosen
from planner.search.clock import OPERATIONS_PER_S, STATES_PER_S, TASKS_PER_S, Clock, Part
from planner.search.cp_sat.decide import METHOD, Limits, decide
from planner.search.cp_sat.decisions import rule_constraints
from planner.search.cp_sat.plan_model import Effort, PlanModels, Stages
from planner.search.incumbent import Found, Incumbent
from planner.search.needs import Needs
from planner.search.orders.search import ScheduleSearch
from planner.search.settings import Settings
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.plans import timeline_of
from planner.search.walk.search import Found as WalkFound
from planner.search.walk.search import WalkSearch
from planner.search.walk.starts import Needs as IntervalNeeds
from planner.search.walk.starts import Start, needs_of, starts
from planner.search.walk.walker import Walker
from planner.simulation.simulator import reduced_soonest, simulate_plan
from planner.simulation.timeline import Timeline
from planner.variants.problems import with_job

LOG = logging.getLogger(__name__)
RULE_STAGES = (2, 3, 4, 5, 6, 1, 8)
"""Numbers of stages of which the plan model looks for stages that keep rules, in turn."""
RULE_SHARE = 0.3
"""Share of the walk's time for the plan model, where there are rules."""
BEST_OF_MODEL = 3
"""Solutions of the plan model, of each number of stages, that the walk is given."""
SIMPLE_SHARE = 0.1
"""Share of the time limit, beyond it, for simple plans to choose among."""
FIRST_STARTS = 300
"""Layouts of which the first that fits is a search's first plan."""
PASS_S = 0.1
"""Seconds that must be left for another pass of the bounds' programs to begin."""
NEIGHBOURS, NEAR_S = 3, 0.3
"""Neighbouring stages that CP-SAT changes at a time under the caller's constraints, and seconds."""


@dataclass
class Steps:
    """The steps of a search, each until a share of the clock's limit is used.

    Attributes:
        problem: what is searched; nothing in its job is left open.
        clock: of the search.
        found: what it has found.
        settings: of the search.
        starts: stages to start from.
        seed: of the random numbers of walks and schedules.
        operations: of the best plan that a walk has found.
    """

    problem: Problem
    clock: Clock
    found: Incumbent
    settings: Settings
    starts: list[Start] = field(default_factory=list)
    seed: int = 0
    operations: int = 0

    @cached_property
    def table(self) -> StageTable:
        """What stages cost."""
        return StageTable(self.problem)

    @cached_property
    def _network(self) -> NetworkTable:
        return NetworkTable.of(self.problem.cluster)

    @cached_property
    def _prover(self) -> Prover:
        return Prover(self.problem)

    @cached_property
    def _models(self) -> PlanModels:
        rules = rule_constraints(self.problem.job.rules, self.problem.cluster)
        own = [] if self.settings.constrain is None else [self.settings.constrain]
        return PlanModels(self.table, self._network, (*rules.values(), *own))

    @cached_property
    def _walker(self) -> Walker:
        freedoms = freedoms_of(self.problem)
        return Walker(self.problem, self.table, self._network, freedoms, self.settings.seed)

    @cached_property
    def _needs(self) -> IntervalNeeds:
        return needs_of(self._walker.memory, self.table, self._walker.freedoms)

    def offer_known(self, plan: Plan) -> None:
        """Take a plan of this very problem as it is; the stages of others are starts alone."""
        same = plan.on_groups
        too_few = len(same.stages[0].devices) < self.problem.least_pipelines
        if too_few or same.problem.digest != self.problem.digest:
            return
        timeline = simulate_plan(same)
        if not timeline.overflow_bytes:
            self.found.offer(Found.of(timeline, "warm start"))

    @property
    def is_impossible(self) -> bool:
        """Whether memory rules out all plans, by the least that stages need."""
        if self.problem.job.max_stages_per_device > 1:
            return False
        try:
            return Needs(self.problem).divide() is None
        except OverflowError:
            return False

    # --- plans ------------------------------------------------------------------------------------

    def first(self, _: float) -> None:
        """Offer the first layout that fits, however long that takes: one stage, if it does.

        So a search has a plan before its bounds take time, and even where its limit is very short.
        """
        if self.settings.constrain is not None:
            return
        devices = tuple(range(len(self.problem.cluster.devices)))
        whole = Start((len(self.table.layers),), (devices,))
        likely = starts(self._network, self._walker.freedoms, self._needs)
        for start in islice(chain([whole], likely), FIRST_STARTS):
            candidate = self._walker.start(start, 0.0, tasks=0)
            if candidate is not None:
                self._take_walk(WalkFound(*self._walker.layout(candidate)))
            if self.clock.is_stopped or self.found.best is not None:
                break
        self.clock.spend(self._walker.tasks_done / TASKS_PER_S)

    def walk(self, until: float) -> None:
        """Walk over whole plans: from starts of its own, of the bounds, and that keep the rules."""
        if self.settings.constrain is not None:
            self._keep(until)
            return
        if not self.problem.job.rules.is_empty:
            self.starts += self._starts_by_model(RULE_SHARE * self.clock.left_s(until))
        self.starts += [Start(*row) for row in self._prover.likely]
        self._walk(until)
        if self.found.best is None and not self.clock.is_stopped:
            # Memory is tight: no start fits, of which the walk has only the likely ones.
            self.starts = self._starts_by_model(RULE_SHARE * self.clock.left_s())
            self._walk(max(until, 1 - RULE_SHARE))

    def short_walk(self, until: float) -> None:
        """Walk before the bounds are proved: users see a good plan early, and proofs aim at it."""
        if self.settings.constrain is None and self.problem.job.rules.is_empty:
            self._walk(until)

    def _walk(self, until: float) -> None:
        limit = Part(self.clock, until, lambda: self.found.is_enough)
        search = WalkSearch(
            self.problem,
            self.table,
            limit,
            needs=self._needs,
            seed=self.seed,
            threads=self.settings.threads,
            told=self._take_walk,
        )
        done = search.run(self.starts)
        self.found.tried += done.layouts
        if done.found:
            best = done.found[0].layout
            self.starts = [Start(best.ends, best.devices)]

    def _starts_by_model(self, limit_s: float) -> list[Start]:
        effort = self._effort(limit_s / max(1, len(self._stage_counts)))
        rows = self._models.starts(effort, self._stage_counts)
        return [start_of(stages) for found in rows for stages in found[-BEST_OF_MODEL:]]

    @cached_property
    def _stage_counts(self) -> list[int]:
        most = min(len(self.table.layers), len(self.problem.cluster.devices))
        job = self.problem.job
        most = most if job.max_stages is None else min(most, job.max_stages)
        return [count for count in RULE_STAGES if job.min_stages <= count <= most]

    def _effort(self, seconds: float) -> Effort:
        self.clock.spend(seconds)
        return Effort(max(seconds, 1e-3), self.clock.deterministic, self.settings.seed)

    def _take_walk(self, row: WalkFound) -> None:
        found = Found(row.seconds, "walk", partial(self._replayed, row.layout))
        if len(row.layout.ends) == 1:  # Its reductions may take much less time all at once.
            found = Found.of(self._replayed(row.layout), "walk")
        if self.found.offer(found):
            self.operations = 2 * len(row.layout.ends) * self.problem.job.microbatches

    def _replayed(self, layout: Layout) -> Timeline:
        return reduced_soonest(timeline_of(layout, self.table))

    def _plain(self, within: float) -> list[Found]:
        """Return plans in 1F1B to choose among, some with stages cut at the ends of blocks.

        Args:
            within: share by which they may take longer than the best plan.
        """
        narrow = with_job(self.problem, order="1f1b", backward="whole")
        end_s = self.clock.elapsed_s + SIMPLE_SHARE * self.clock.limit_s
        freedoms, most_s = freedoms_of(narrow), self.found.best_s * (1 + within)
        whole = freedoms.may_cut & _between_blocks(self.table.layers)
        found = []
        for kept in (freedoms, freedoms._replace(may_cut=whole)):
            walker = Walker(narrow, self.table, self._network, kept, self.settings.seed)
            needs = needs_of(walker.memory, self.table, kept)
            for start in (*self.starts, *starts(self._network, kept, needs)):
                candidate = walker.start(start)
                if candidate is not None and candidate.seconds <= most_s:
                    seconds, layout = walker.layout(candidate)
                    found.append(Found(seconds, "1F1B", partial(self._replayed, layout)))
                if self.clock.is_stopped or self.clock.elapsed_s >= end_s:
                    break
        return found

    def chosen(self, choice: Choice) -> tuple[Found, dict[str, Any]]:
        """Return the plan that is chosen among those near the best, and why.

        Raises:
            AssertionError: if none of the plans found fits memory when it is replayed.
        """
        more = []
        if choice.most_slower is not None and not self.clock.is_stopped:
            more = self._plain(choice.most_slower)
        while self.found.best is not None:
            taken, reason = chosen(self.found, more, choice)
            if not taken.timeline.overflow_bytes:
                return taken, reason
            LOG.warning("a plan of %.6g s does not fit memory; it is left out", taken.seconds)
            self.found.drop(taken)
        raise AssertionError("no plan that the walk found fits memory when it is replayed")

    # --- constraints of the caller ----------------------------------------------------------------

    def _keep(self, until: float) -> None:
        """Search stages under the caller's constraints, which CP-SAT alone can test."""
        each_s = RULE_SHARE * self.clock.left_s(until) / max(1, len(self._stage_counts))
        best: tuple[float, Stages] | None = None
        for count in self._stage_counts:
            for stages in self._models.model(count).solve(self._effort(each_s)):
                best = self._better(best, stages)
        draw = random.Random(self.settings.seed)
        while best is not None and self.clock.left_s(until) > 0:
            first = draw.randrange(len(best[1]))
            free = range(first, min(len(best[1]), first + NEIGHBOURS))
            for stages in self._models.near(best[1], free, self._effort(NEAR_S)):
                best = self._better(best, stages)

    def _better(
        self, best: tuple[float, Stages] | None, stages: Stages
    ) -> tuple[float, Stages] | None:
        candidate = self._walker.start(start_of(stages))
        self.found.tried += 1
        if candidate is None or (best is not None and candidate.seconds >= best[0]):
            return best
        seconds, layout = self._walker.layout(candidate)
        self.found.offer(Found(seconds, "CP-SAT's plan model", partial(self._replayed, layout)))
        return candidate.seconds, stages

    # --- schedules --------------------------------------------------------------------------------

    def close(self, until: float) -> None:
        """Improve the best schedule by annealing and CP-SAT, whose whole model may prove it."""
        best, job = self.found.best, self.problem.job
        if best is None or job.order == "1f1b" or job.lengths is not None:
            return
        if self.clock.left_s(until) < self.operations / OPERATIONS_PER_S:
            return
        search = ScheduleSearch(
            best.timeline.pipeline,
            Part(self.clock, until, lambda: self.found.is_enough),
            job.splits,
            best=best.timeline,
            seed=self.seed,
            workers=self.settings.threads,
            told=self._offer_timeline,
        )
        search.run()

    def _offer_timeline(self, timeline: Timeline, method: str) -> None:
        self.found.offer(Found.of(timeline, method))

    def decide(self, until: float) -> None:
        """Decide all partitions of a tiny cluster that may have a faster plan."""
        if self.found.best is None:
            return
        limits = Limits(
            lambda: self.clock.left_s(until),
            self.clock.spend,
            self.clock.deterministic,
            self.settings.seed,
        )
        best_s, bound_s = self.found.best_s, self.found.bound_s
        for row in decide(self.problem, self.table, best_s, bound_s, limits):
            if row.better is not None and self._is_in_space(row.better):
                self._offer_timeline(reduced_soonest(row.better), METHOD)
            self.found.decide(row.bound_s)

    def _is_in_space(self, timeline: Timeline) -> bool:
        """Return whether the job allows a plan: what is decided is of a wider space."""
        stages = [stage.spec for stage in timeline.pipeline.stages]
        space = self.problem.job.space
        return not any(outside(space, stages, timeline.orders, self.table.layers))

    # --- bounds -----------------------------------------------------------------------------------

    def prove(self, until: float) -> None:
        """Raise the bound by certificates."""
        self._prover.best_s = self.found.best_s
        looked_at = 0.0 if self.found.proved is None else self.found.proved.looked_at
        for proved in self._prover.steps():
            self.clock.spend(max(0.0, proved.looked_at - looked_at) / STATES_PER_S)
            looked_at = max(looked_at, proved.looked_at)
            self.found.prove(proved)
            if self.clock.left_s(until) <= (0 if self.clock.deterministic else PASS_S):
                return


def start_of(stages: Stages) -> Start:
    """Return the plan model's stages as the walk takes them."""
    return Start(tuple(row.last for row in stages), tuple(row.devices for row in stages))


def _between_blocks(layers: Sequence[str]) -> NDArray[np.bool_]:
    """Return before which layers no numbered block is divided, and the end."""
    blocks = [block_name(name) for name in layers]
    divided = [one is not None and one == other for one, other in pairwise(blocks)]
    return np.array([True, *(not row for row in divided), True])
