"""``solve``: the fastest plan of a problem that a search finds, with a bound on all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

from planner.bounds import list_partitions
from planner.costs.placed_pipeline import StageSpec
from planner.errors import InfeasibleError, require_kind
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtimes import for_runtime
from planner.plan.unsupported import require_without
from planner.search.choices import Choice
from planner.search.clock import OPERATIONS_PER_S, Clock
from planner.search.cp_sat.decide import may_decide
from planner.search.cp_sat.decisions import Constrain
from planner.search.finish import bounded_over, finished_plan, starts_of
from planner.search.incumbent import Incumbent, Progress
from planner.search.infeasible import why_no_form, why_nothing_fits
from planner.search.orders.search import COOLEST
from planner.search.orders.stages import StageOrders
from planner.search.remedies import QuickPlan
from planner.search.result import Ended, HistoryRow, Result, Status, StepRow
from planner.search.settings import (
    DEFAULT_WORKERS,
    OPTIMALITY_TOLERANCE,
    WITHIN,
    Preference,
    Settings,
    check_buffers,
    check_preference,
    check_settings,
    check_steps,
)
from planner.search.steps import Steps
from planner.search.variants import Variant, variants_of
from planner.simulation.ahead import two_layers
from planner.simulation.noise import Noise
from planner.space import WITH_SHARDED_PARAMETERS
from planner.variants.problems import with_job
from planner.verification import require_valid

SHARES = {"first": 0.02, "short walk": 0.06, "bound": 0.14, "walk": 0.78, "close": 0.88, "prove": 1}
"""The steps, and the share of the time at the end of each; what one leaves is the next one's."""
TINY_SHARES = {"first": 0.02, "bound": 0.04, "walk": 0.2, "prove": 0.3, "decide": 0.85, "close": 1}
"""The same where CP-SAT can decide the partitions one by one."""
AGAIN = 0.02
"""Share of the time that must be left to walk again; with less, the limit ended the search."""
TRIAL = 0.3
"""Share of the time in which all sizes of tensor-parallel groups are tried."""
IN_REACH = 1.1
"""Sizes whose first plan is slower than the best by this factor are tried no further."""
QUICK_S, QUICK_GAP = 0.05, 0.1
"""Deterministic seconds of a search that asks only whether a plan fits, and its gap at the end."""
IF_NEEDED = ("offload", "shard_parameters", "shard_optimizer")
"""Choices of a job, those that cost more time first."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    gap_limit: float = OPTIMALITY_TOLERANCE,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Progress | None = None,
    warm_starts: Sequence[Plan | Sequence[StageSpec]] = (),
    constrain: Constrain | None = None,
    robust: bool | Noise = False,
    prefer: Preference = "fast",
    prefer_within: float = WITHIN,
    without_steps: Collection[str] = (),
) -> Result:
    """Find the fastest plan for a problem and bound how far it can be from the best.

    Args:
        problem: the model, cluster and job. Where the job has ``microbatch_sizes``, the search
            tries all of them in the order of their bounds and goes on with the two best. Where it
            shares the optimizer's state, divides parameters or offloads stashes ``if_needed``, a
            search without comes first, and one with only if no plan was found; the plan's job says
            which.
        time_limit_s: of each search; in deterministic mode in seconds of counted work.
        gap_limit: stop once iteration time / lower bound - 1 is at most this.
        seed: of random numbers.
        workers: threads of the walk; one in deterministic mode.
        deterministic: whether the same input gives the same plan on every machine.
        progress: called with every new incumbent or bound.
        warm_starts: earlier plans of the model, perhaps for another job or cluster, or just
            stages; the search starts from them where the layers and devices still exist.
        constrain: adds constraints of one's own to CP-SAT's plan model, see
            docs/own_constraints.md; plans with several stages a device are left out then.
        robust: of the plans found that are at most 2 % slower than the fastest, take the one with
            the least 95th percentile of iteration times under a noise; True stands for
            ``Noise(seed=seed)``.
        prefer: ``simple``: of the plans found that are about as fast as the fastest, take the one
            with the fewest stages unevenly over nodes, then the fewest stages, uneven replicas and
            divided blocks, then in 1F1B.
        prefer_within: share by which a simple plan may take longer than the fastest found.
        without_steps: steps to leave out, names of :data:`SHARES`, to see what each of them finds.

    Raises:
        InfeasibleError: if no plan fits or none was found; the message says what is in the way.
        PipeplanError: if a setting is out of range, or the job's runtime cannot run the model.
        KeyboardInterrupt: on Ctrl-C before any plan was found; later on Ctrl-C ends the search
            and the best plan so far is returned.
    """
    require_kind(problem, Problem, "problem", "write Problem(graph, cluster, job)")
    check_settings(time_limit_s, gap_limit, seed, workers)
    check_preference(prefer, prefer_within, is_robust=bool(robust))
    check_steps(without_steps, STEPS)
    if robust or prefer != "fast":
        what = "robust = True" if robust else 'prefer = "simple"'
        require_without(problem.job, what, ("offload", "lengths"))
    check_buffers(problem)
    problem.require_known_devices()
    without = frozenset(without_steps)
    settings = Settings(time_limit_s, gap_limit, seed, workers, deterministic, constrain, without)
    noise = (Noise(seed=seed) if robust is True else robust) or None
    choice = Choice(noise, prefer_within if prefer == "simple" else None)
    compile_ahead(is_tiny=may_decide(problem))
    *tried, last = decided(for_runtime(problem))
    for resolved in tried:
        with suppress(InfeasibleError):
            return _Search(settings, resolved, progress, warm_starts, choice).run()
    return _Search(settings, last, progress, warm_starts, choice).run()


def decided(problem: Problem) -> list[Problem]:
    """Return the problem with each choice that its job makes only if it is needed, in order."""
    open_ = [name for name in IF_NEEDED if getattr(problem.job, name) == "if_needed"]
    rows = [dict(zip(open_, row, strict=True)) for row in product((False, True), repeat=len(open_))]
    # Parameters are not divided without the optimizer's state: that both are is one choice.
    rows = [row for row in rows if not (row.get("shard_parameters") and row.get("shard_optimizer"))]
    sharded: dict[str, Any] = dict(WITH_SHARDED_PARAMETERS)
    fields = [{**row, **(sharded if row.get("shard_parameters") else {})} for row in rows]
    return [with_job(problem, **row) if row else problem for row in fields]


@cache
def compile_ahead(*, is_tiny: bool = False) -> None:
    """Compile what searches run, or load it, before any clock starts: search two layers."""
    if is_tiny:
        list_partitions(two_layers(), 1e3, most=1)
    # Without a first plan, which may be proved at once, so that the other steps have work.
    left_out = frozenset({"first"})
    settings = Settings(0.01, OPTIMALITY_TOLERANCE, 0, 1, deterministic=True, without=left_out)
    search = _Search(settings, two_layers(), None, (), Choice())
    search.run()
    best = search.rows[0].found.best
    assert best is not None
    # Its schedule is proved before it would be annealed.
    orders = StageOrders(best.timeline.pipeline, 0)
    orders.replay(best.timeline.orders)
    orders.anneal(COOLEST, 1)


def quickly(problem: Problem) -> QuickPlan | None:
    """Return the best plan of a short walk; None if it found none."""
    if why_no_form(problem) is not None:
        return None
    search = _Search(
        Settings(QUICK_S, QUICK_GAP, 0, 1, deterministic=True), problem, None, (), Choice()
    )
    (row,) = search.rows = [search.steps_of(variant) for variant in search.variants]
    row.first(SHARES["first"])
    row.prove(SHARES["bound"])
    row.walk(1.0)
    best = row.found.best
    return QuickPlan(best.seconds, len(best.timeline.pipeline.stages)) if best else None


class _Search:
    """The search of one problem, on its devices or on groups of the sizes that it allows."""

    def __init__(
        self,
        settings: Settings,
        problem: Problem,
        progress: Progress | None,
        warm_starts: Sequence[Plan | Sequence[StageSpec]],
        choice: Choice,
    ) -> None:
        self.settings, self.problem, self.choice = settings, problem, choice
        self.progress, self.warm_starts = progress, warm_starts
        self.history: list[HistoryRow] = []
        self.clock = Clock(
            settings.time_limit_s, deterministic=settings.deterministic, threads=settings.threads
        )
        self.variants = variants_of(problem)
        self.rows: list[Steps] = []
        self.steps: list[StepRow] = []

    def run(self) -> Result:
        """Run all steps; of several sizes of groups all are tried, and the best go on."""
        self.rows = [self.steps_of(variant) for variant in self.variants]
        rows = [row for row in self.rows if why_no_form(row.problem) is None]
        for row, plan in product(rows, self.warm_starts):
            if isinstance(plan, Plan) and self.settings.constrain is None:
                row.offer_known(plan)
        shares = TINY_SHARES if self._is_tiny else SHARES
        last = 0.0
        for name, end in shares.items():
            if name == "bound":
                self._reserve(rows)
            if name == "walk" and len(rows) > 1:
                rows = self._tried(rows)
            begin = self.clock.elapsed_s / self.clock.limit_s
            # Where the steps before took longer, a step has half of its own share at least.
            own = min(1.0, max(end, begin + (end - last) / 2)) - begin
            last = end
            for place, row in enumerate(rows, 1):
                self._step(row, name, begin + own * place / len(rows))
        if not self._is_tiny:
            self._go_on(rows)
        return self._result()

    def _reserve(self, rows: Sequence[Steps]) -> None:
        """Leave time to verify the plan, which takes seconds where it has many operations."""
        if not self.settings.deterministic:
            took_s = max((row.operations for row in rows), default=0) / OPERATIONS_PER_S
            self.clock.limit_s -= min(took_s, self.clock.limit_s / 2)

    def _go_on(self, rows: Sequence[Steps]) -> None:
        """Walk with other random numbers, and close again, as long as proofs have left time."""
        before_s = -1.0
        while (
            self.clock.left_s() > AGAIN * self.clock.limit_s > 0 and self.clock.elapsed_s > before_s
        ):
            before_s, begin = self.clock.elapsed_s, self.clock.elapsed_s / self.clock.limit_s
            end = begin + (1 - begin) * SHARES["close"]
            for number, row in enumerate(rows, 1):
                row.seed += 1
                self._step(row, "walk", begin + (end - begin) * number / len(rows))
            for row in rows:
                self._step(row, "close", 1.0)

    @property
    def _is_tiny(self) -> bool:
        """Whether CP-SAT can decide the partitions one by one."""
        is_one = len(self.variants) == 1 and self.problem.least_pipelines == 1
        is_tiny = is_one and may_decide(self.problem)
        return is_tiny and self.settings.constrain is None and self.problem.job.rules.is_empty

    def steps_of(self, variant: Variant) -> Steps:
        words = f"{variant.words}: " if len(self.variants) > 1 else ""
        found = Incumbent(self.clock, lambda row: self._record(row, words), self.settings.gap_limit)
        return Steps(
            variant.problem,
            self.clock,
            found,
            self.settings,
            list(starts_of(variant.problem, self.warm_starts)),
            self.settings.seed,
        )

    def _record(self, row: HistoryRow, words: str) -> None:
        """Note a new plan or bound of one size of groups as one of all of them."""
        best_s = min(steps.found.best_s for steps in self.rows)
        bound_s = min(steps.found.bound_s for steps in self.rows)
        last = self.history[-1] if self.history else None
        if last is not None and (best_s, bound_s) == last[1:3]:
            return
        if math.isfinite(best_s):
            row = HistoryRow(row.time_s, best_s, bound_s, words + row.event)
            self.history.append(row)
            if self.progress is not None:
                self.progress(row)

    def _step(self, row: Steps, name: str, until: float) -> None:
        is_over = name not in ("first", "bound") and self.clock.left_s() <= 0
        is_enough = row.found.best is not None and (row.found.is_enough or is_over)
        if name in self.settings.without or self.clock.is_stopped or is_enough:
            return
        begin_s, before = self.clock.elapsed_s, row.found.tried
        self.clock.run(lambda: STEPS[name](row, until))
        words = self.variants[self.rows.index(row)].words
        self.steps.append(
            StepRow(
                f"{words}: {name}" if len(self.variants) > 1 else name,
                self.clock.elapsed_s - begin_s,
                row.found.tried - before,
                row.found.best_s,
                row.found.bound_s,
            )
        )

    def _tried(self, rows: Sequence[Steps]) -> list[Steps]:
        """Walk for a while on each size whose bound allows it; return the sizes to go on with."""
        ranked = sorted(rows, key=lambda row: row.found.bound_s)
        for number, row in enumerate(ranked, 1):
            if row.found.bound_s < min(other.found.best_s for other in rows):
                self._step(row, "walk", TRIAL * number / len(rows))
        best_s = min(row.found.best_s for row in rows)
        near = [row for row in rows if row.found.best_s <= IN_REACH * best_s]
        return sorted(near, key=lambda row: row.found.best_s)[:2]

    # --- the result -------------------------------------------------------------------------------

    def _result(self) -> Result:
        place = min(range(len(self.rows)), key=lambda n: self.rows[n].found.best_s)
        best, variant = self.rows[place], self.variants[place]
        if not math.isfinite(best.found.best_s):
            if self.clock.is_stopped:
                raise KeyboardInterrupt("before any plan was found")
            raise why_nothing_fits(self.variants, self.settings.constrain, quickly)
        taken, reason = best.chosen(self.choice)
        time_s = best.found.best_s
        bounds = [
            (other.samples, row.found.bound_s)
            for row, other in zip(self.rows, self.variants, strict=True)
            if row.found.best is not None or not row.is_impossible
        ]
        bound_s = min(time_s, *(bound for _, bound in bounds))
        own_s = min(time_s, *(bound for samples, bound in bounds if samples == variant.samples))
        status, ended = self._end(taken.timeline.iteration_time_s, time_s, bound_s)
        why = next(iter(reason.values()), None)
        plan = finished_plan(taken, why, best.found, self.settings, variant)
        groups = [row for row in self.variants if row.samples == variant.samples]
        if len(groups) > 1:
            plan = bounded_over(plan, variant.whole, own_s, groups)
        if not self.problem.has_groups:  # Such a plan is checked once it names their devices.
            require_valid(plan)
        return Result(
            status=status,
            plan=plan,
            lower_bound_s=min(bound_s, plan.predicted.iteration_time_s),
            history=tuple(self.history),
            tried=sum(row.found.tried for row in self.rows),
            ended=ended,
            search_s=self.clock.elapsed_s,
            deterministic=self.settings.deterministic,
            processor_share=self.clock.processor_share,
            steps=tuple(self.steps),
            sizes=self.problem.job.microbatch_sizes,
            **reason,
        )

    def _end(self, time_s: float, best_s: float, bound_s: float) -> tuple[Status, Ended]:
        """Return the status of a plan that takes ``time_s``, and why the search ended."""
        tolerance, gap_limit = OPTIMALITY_TOLERANCE, self.settings.gap_limit
        proved_s = bound_s * (1 + min(gap_limit, tolerance))
        status: Status = "optimal" if time_s <= proved_s else "feasible"
        if best_s <= proved_s:
            return status, "proved"
        if self.clock.is_stopped:
            return "interrupted", "interrupted"
        if best_s <= bound_s * (1 + gap_limit):
            return status, "gap limit"
        is_over = self.clock.left_s() <= AGAIN * self.clock.limit_s
        return status, "time limit" if is_over else "nothing left to try"


STEPS: dict[str, Callable[[Steps, float], None]] = {
    "first": Steps.first,
    "short walk": Steps.short_walk,
    "bound": Steps.prove,
    "walk": Steps.walk,
    "close": Steps.close,
    "prove": Steps.prove,
    "decide": Steps.decide,
}
"""The steps by their names in :data:`SHARES`."""
