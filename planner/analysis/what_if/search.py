"""The gain of each change: by replaying, by scheduling again, by solving again.

Every value is of a plan that was found and simulated, so it is an upper bound on the best iteration
time under the change; lower bounds, where there are some, say what it could give at most. The plan
as it is goes through the same steps, so that a gain is the change's and not the longer search's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.analysis.explain import explain
from planner.analysis.what_if.altered import alter, alter_each, unaltered
from planner.analysis.what_if.candidates import default_changes
from planner.analysis.what_if.case import Case
from planner.analysis.what_if.values import WhatIf, WhatIfProgress, value_of
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.prediction import replay
from planner.search.budget import Clock, SearchWork, Settings
from planner.search.recomputed import RecomputedSchedules
from planner.search.schedule.heuristic import Schedule, best_heuristic_schedule, fits_memory
from planner.search.schedule.search import improve_any
from planner.search.schedule.solve import ScheduleTask
from planner.search.settings import DEFAULT_WORKERS, check_settings
from planner.search.solve import solve
from planner.simulation.simulator import simulate_plan
from planner.simulation.timeline import Timeline
from planner.variants.changes import Change, DeviceChange

MOST_EVENTS = 400_000
"""Events of all replays of a quick answer, a few seconds; changes beyond are left out."""
SCHEDULE_EVENTS = 50
"""The time of the best quick schedule, in replays."""
SCHEDULE_SHARE = 0.25
"""Share of the time for scheduling again; the rest is for solving again."""


def what_if(
    plan: Plan,
    changes: Sequence[Change] | None = None,
    *,
    solve_anew: bool = False,
    time_limit_s: float = 60.0,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Callable[[WhatIfProgress], None] | None = None,
    timeline: Timeline | None = None,
) -> WhatIf:
    """Value changes of a plan's machines, job and recomputation.

    Quick: replays, bounds and quick schedules of the plan's own stages, no search; the same answer
    always. Solving again adds CP-SAT on the schedules and a search for each changed problem.

    Args:
        plan: that fits memory.
        changes: to value; those of :func:`default_changes` if none are given.
        solve_anew: search for better plans under each change.
        time_limit_s: of all searches together; the last may run over a little.
        seed: of the searches.
        workers: their threads.
        deterministic: the same answer on every machine; the limit is then in CP-SAT's seconds.
        progress: called with every step of a search.
        timeline: the plan's simulation, where that was made already.

    Returns:
        All values; on Ctrl-C what was found until then.

    Raises:
        PipeplanError: naming every change that cannot be made, a setting out of range, or what
            keeps the plan from being replayed within memory.
    """
    check_settings(time_limit_s, 0.0, seed, workers)
    require_without(plan.job, "explain --what-if", ["offload"])
    timeline = timeline or replay(plan)
    if not fits_memory(timeline):
        raise PipeplanError(
            "the plan overflows memory, so no change can be compared with it; `pipeplan verify` "
            "says where"
        )
    if changes is None:
        changes = default_changes(plan, explain(timeline), solve_anew=solve_anew)
    settings = Settings(seed, workers, deterministic)
    search = _Search(
        plan, timeline, settings, Clock(time_limit_s, deterministic), progress or (lambda row: None)
    )
    search.add(changes, quick=not solve_anew)
    return search.run(solve_anew=solve_anew)


class _Search:
    """The steps, each over all changes."""

    def __init__(
        self,
        plan: Plan,
        timeline: Timeline,
        settings: Settings,
        clock: Clock,
        progress: Callable[[WhatIfProgress], None],
    ) -> None:
        self._timeline = timeline
        self._settings = settings
        self._clock = clock
        self._progress = progress
        self._events = len(timeline.operations) + len(timeline.transfers)
        self._base = Case(None, unaltered(plan))
        self._cases: list[Case] = []
        self._left_out = 0
        self._interrupted = False

    def add(self, changes: Sequence[Change], *, quick: bool) -> None:
        """Add changes to value; errors of all that cannot be made are raised together."""
        distinct = list(dict.fromkeys(changes))
        room = max(1, MOST_EVENTS // max(1, self._events)) if quick else len(distinct)
        self._left_out = len(distinct[room:])
        rows = alter_each(self._base.altered, distinct)
        self._cases = [Case(change, rows[change]) for change in distinct[:room]]

    def run(self, *, solve_anew: bool) -> WhatIf:
        """Run all steps; Ctrl-C ends them."""
        self._replay(self._base)
        try:
            for case in self._cases:
                self._replay(case)
            self._schedule_all(thorough=solve_anew)
            if solve_anew:
                self._improve_all()
                self._solve_all()
        except KeyboardInterrupt:
            self._interrupted = True
        base_s, base_found_by = self._base.best_s, self._base.found_by
        assert base_found_by is not None, "the plan itself fits memory"
        values = [value_of(case, self._base) for case in self._cases]
        ranked = sorted(values, key=lambda value: -(value.gain if value.gain is not None else -9e9))
        return WhatIf(
            plan_s=self._timeline.iteration_time_s,
            base_s=base_s,
            base_found_by=base_found_by,
            values=tuple(ranked),
            solved_anew=solve_anew,
            left_out=self._left_out,
            interrupted=self._interrupted or self._clock.is_stopped,
        )

    def _all(self) -> list[Case]:
        return [self._base, *self._cases]

    # --- the plan's own stages --------------------------------------------------------------------

    def _replay(self, case: Case) -> None:
        case.prove_stages()
        timeline = case.replay(case.altered.orders)
        self._clock.charge(SearchWork.REPLAYED_EVENT, self._events)
        if timeline is None:
            case.why_not = (
                "the plan's orders do not fit memory then"
                if case.allows(case.altered.stages, case.altered.orders)
                else "the plan uses what the change takes away"
            )
            return
        case.replay_s = timeline.iteration_time_s
        case.offer(timeline, "same plan replayed")
        case.same = Schedule(case.altered.orders, timeline, "the plan's own")

    def _schedule_all(self, *, thorough: bool) -> None:
        """Schedule as many cases as a quick answer has room for, changes of memory first."""
        left = MOST_EVENTS - self._events * len(self._cases)
        for case in [self._base, *sorted(self._cases, key=_needs_no_schedule)]:
            left -= SCHEDULE_EVENTS * self._events
            if left < 0 and not (thorough and self._clock.left_s > 0):
                return
            self._schedule(case)
            if case is self._base:
                self._carry_over()

    def _schedule(self, case: Case) -> None:
        """Try quick schedules, unless the replay is proved to be as good as any."""
        if self._is_proved(case) or not case.allows(case.altered.stages, {}):
            return
        self._clock.charge(SearchWork.REPLAYED_EVENT, SCHEDULE_EVENTS * self._events)
        schedule = best_heuristic_schedule(case.pipeline, backward=case.backward)
        case.offer_same(schedule)
        if not case.altered.is_of_plan and case.partition is not None:
            plain = case.plain_pipeline
            case.offer_schedule(RecomputedSchedules(case.chain).best(case.partition, plain))

    def _is_proved(self, case: Case) -> bool:
        return case.best_s <= case.stages_bound_s * (1 + 1e-9)

    def _improve_all(self) -> None:
        """Improve the schedules by CP-SAT, with equal shares of the time."""
        open_ = [case for case in self._all() if case.same and not self._is_proved(case)]
        end_s = self._clock.elapsed_s + SCHEDULE_SHARE * self._clock.left_s
        for number, case in enumerate(open_):
            limit_s = (end_s - self._clock.elapsed_s) / (len(open_) - number)
            if limit_s <= 0 or self._clock.is_stopped:
                return
            assert case.same is not None
            case.offer_same(
                improve_any(
                    case.pipeline,
                    case.same,
                    ScheduleTask(self._settings, self._clock, backward=case.backward),
                    limit_s,
                )
            )
            if case is self._base:
                self._carry_over()
            self._report("scheduled", case)

    # --- any stages -------------------------------------------------------------------------------

    def _solve_all(self) -> None:
        """Solve the unchanged problem, then each changed one, in equal shares of the time left."""
        open_ = [case for case in self._all() if not case.altered.is_of_plan]
        for number, case in enumerate(open_):
            limit_s = self._clock.left_s / (len(open_) - number)
            if limit_s <= 0 or self._clock.is_stopped:
                return
            self._solve(case, limit_s)
            if case is self._base:
                self._carry_over()
            self._report("solved", case)

    def _solve(self, case: Case, limit_s: float) -> None:
        known = [case.altered.stages]
        if case.best is not None:
            known.append(tuple(stage.spec for stage in case.best.pipeline.stages))
        try:
            result = solve(
                case.altered.problem,
                time_limit_s=limit_s,
                seed=self._settings.seed,
                workers=self._settings.workers,
                deterministic=self._settings.deterministic,
                warm_starts=known,
            )
        except InfeasibleError as error:
            case.why_not = "; ".join(error.problems)
            return
        self._clock.spend(result.search_s)
        if result.ended == "interrupted":
            self._clock.stop()
        case.offer(simulate_plan(result.plan), "solved anew")
        if case.partition is not None:
            case.lower_bound_s = result.lower_bound_s
            case.bound_covers = str(result.plan.provenance.bound_covers)

    def _carry_over(self) -> None:
        """Try what was found without a change under each, so that all start alike."""
        best, same = self._base.best, self._base.same
        assert best is not None, "the plan itself fits memory"
        assert same is not None, "the plan itself fits memory"
        start = self._base.with_plan_of(best)
        for case in self._cases:
            if case.change is None:
                continue
            if case.altered.is_of_plan:
                altered = alter(replace(self._base.altered, orders=same.orders), case.change)
                case.offer_same(case.schedule_by(altered.orders, same.method))
            else:
                altered = alter(start, case.change)
                timeline = case.replay(altered.orders, altered.stages)
                if timeline is not None and self._base.found_by is not None:
                    case.offer(timeline, self._base.found_by)

    def _report(self, step: str, case: Case) -> None:
        time_s = case.best_s if math.isfinite(case.best_s) else None
        change = None if case.change is None else str(case.change)
        self._progress(WhatIfProgress(self._clock.elapsed_s, step, change, time_s))


def _needs_no_schedule(case: Case) -> bool:
    """Return whether a replay alone shows a gain: more memory gains by other orders only."""
    change = case.change
    return not (
        case.altered.is_of_plan or (isinstance(change, DeviceChange) and change.figure == "memory")
    )
