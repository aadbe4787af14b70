"""What each change would give: found by replaying, by scheduling anew, by solving anew.

Every value is of a plan that was found and simulated, so it is an upper bound on the best iteration
time under the change; lower bounds, where there are some, say what it could give at most. The plan
as it is goes through the same steps, so that a gain is the change's and not the longer search's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from planner.artifacts.plan import Plan
from planner.errors import InfeasibleError, PipeplanError
from planner.explain import explain
from planner.schedule.heuristic import Schedule, best_heuristic_schedule, fits_memory
from planner.schedule.recomputed import RecomputedSchedules
from planner.schedule.solve import improve_schedule
from planner.simulator import Timeline, simulate_plan
from planner.solver import check_settings, solve
from planner.solver_settings import DEFAULT_WORKERS, Clock, Settings
from planner.verifier import replay
from planner.what_if.altered import alter, alter_each, unaltered
from planner.what_if.candidates import default_changes
from planner.what_if.case import Case
from planner.what_if.changes import Change, DeviceChange
from planner.what_if.values import Progress, WhatIf, value_of

MOST_EVENTS = 400_000
"""Of all replays of a quick answer together, a few seconds; changes beyond are left out."""
SCHEDULE_EVENTS = 50
"""As many replays the best quick schedule takes."""
SECONDS_AN_EVENT = 1e-5
"""What an event of a replay counts in deterministic time."""
SCHEDULE_SHARE = 0.25
"""Of the time, for scheduling anew; the rest is for solving anew."""


def what_if(
    plan: Plan,
    changes: Sequence[Change] | None = None,
    *,
    solve_anew: bool = False,
    time_limit_s: float = 60.0,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> WhatIf:
    """Value changes of a plan's machines, job and recomputation.

    Quick: replays, bounds and quick schedules of the plan's own stages, no search; the same answer
    always. Solving anew adds CP-SAT on the schedules and a search for each changed problem.

    Args:
        plan: that fits memory.
        changes: to value; those of :func:`default_changes` if none are given.
        solve_anew: search for better plans under each change.
        time_limit_s: of all searches together; the last may run over a little.
        seed: of the searches.
        workers: their threads.
        deterministic: the same answer on every machine; the limit is then in CP-SAT's seconds.
        progress: called with every step of a search.

    Returns:
        All values; on Ctrl-C what was found until then.

    Raises:
        PipeplanError: naming every change that cannot be made, a setting out of range, or what
            keeps the plan from being replayed within memory.
    """
    check_settings(time_limit_s, 0.0, seed, workers)
    timeline = replay(plan)
    if not fits_memory(timeline):
        raise PipeplanError(
            "the plan overflows memory, so no change can be compared with it; `pipeplan verify` "
            "says where"
        )
    if changes is None:
        changes = default_changes(plan, explain(timeline), devices=solve_anew)
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
        progress: Callable[[Progress], None],
    ) -> None:
        self._timeline = timeline
        self._settings = settings
        self._clock = clock
        self._progress = progress
        self._events = len(timeline.operations) + len(timeline.transfers)
        self._split = any(event.operation.kind == "W" for event in timeline.operations)
        self._base = Case(None, unaltered(plan), self._split)
        self._cases: list[Case] = []
        self._left_out = 0
        self._interrupted = False

    def add(self, changes: Sequence[Change], *, quick: bool) -> None:
        """Changes to value; those that cannot be made are told all at once."""
        distinct = list(dict.fromkeys(changes))
        room = max(1, MOST_EVENTS // max(1, self._events)) if quick else len(distinct)
        self._left_out = len(distinct[room:])
        rows = alter_each(self._base.altered, distinct)
        self._cases = [Case(change, rows[change], self._split) for change in distinct[:room]]

    def run(self, *, solve_anew: bool) -> WhatIf:
        """All steps; Ctrl-C ends them."""
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
        self._clock.spend(SECONDS_AN_EVENT * self._events)
        if timeline is None:
            case.why_not = "the plan's orders do not fit memory then"
            return
        case.replay_s = timeline.iteration_time_s
        case.offer(timeline, "same plan replayed")
        case.same = Schedule(case.altered.orders, timeline, "the plan's own")

    def _schedule_all(self, *, thorough: bool) -> None:
        """By quick schedules; as many as a quick answer has room for, memory's changes first."""
        left = MOST_EVENTS - self._events * len(self._cases)
        for case in [self._base, *sorted(self._cases, key=_needs_no_schedule)]:
            left -= SCHEDULE_EVENTS * self._events
            if left < 0 and not (thorough and self._clock.left_s > 0):
                return
            self._schedule(case)
            if case is self._base:
                self._carry_over()

    def _schedule(self, case: Case) -> None:
        """Unless the replay is as good as any schedule of these stages can be."""
        if self._is_proved(case):
            return
        self._clock.spend(SCHEDULE_EVENTS * SECONDS_AN_EVENT * self._events)
        schedule = best_heuristic_schedule(case.pipeline, split=self._split)
        case.offer_same(schedule)
        if not self._split and not case.altered.is_of_plan and case.partition is not None:
            plain = case.plain_pipeline
            case.offer_schedule(RecomputedSchedules(case.chain).best(case.partition, plain))

    def _is_proved(self, case: Case) -> bool:
        return case.best_s <= case.stages_bound_s * (1 + 1e-9)

    def _improve_all(self) -> None:
        """CP-SAT on the schedules, with equal shares of the time."""
        open_ = [case for case in self._all() if case.same and not self._is_proved(case)]
        end_s = self._clock.elapsed_s + SCHEDULE_SHARE * self._clock.left_s
        for number, case in enumerate(open_):
            limit_s = (end_s - self._clock.elapsed_s) / (len(open_) - number)
            if limit_s <= 0 or self._clock.is_stopped:
                return
            assert case.same is not None
            case.offer_same(
                improve_schedule(case.pipeline, case.same, self._settings, self._clock, limit_s)
            )
            if case is self._base:
                self._carry_over()
            self._tell("scheduled", case)

    # --- any stages -------------------------------------------------------------------------------

    def _solve_all(self) -> None:
        """The problem as it is first, then each changed one, with equal shares of the time left."""
        open_ = [case for case in self._all() if not case.altered.is_of_plan]
        for number, case in enumerate(open_):
            limit_s = self._clock.left_s / (len(open_) - number)
            if limit_s <= 0 or self._clock.is_stopped:
                return
            self._solve(case, limit_s)
            if case is self._base:
                self._carry_over()
            self._tell("solved", case)

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
        if not self._split and case.partition is not None:
            case.lower_bound_s = result.lower_bound_s
            case.bound_covers = result.plan.provenance.bound_covers

    def _carry_over(self) -> None:
        """What was found without a change is tried under each, so that all start alike."""
        best, same = self._base.best, self._base.same
        assert best is not None, "the plan itself fits memory"
        assert same is not None, "the plan itself fits memory"
        start = self._base.with_plan_of(best)
        for case in self._cases:
            if case.altered.is_of_plan:
                case.offer_same(case.schedule_by(same.orders, same.method))
            elif case.change is not None:
                altered = alter(start, case.change)
                timeline = case.replay(altered.orders, altered.stages)
                if timeline is not None and self._base.found_by is not None:
                    case.offer(timeline, self._base.found_by)

    def _tell(self, step: str, case: Case) -> None:
        time_s = case.best_s if math.isfinite(case.best_s) else None
        change = None if case.change is None else str(case.change)
        self._progress(Progress(self._clock.elapsed_s, step, change, time_s))


def _needs_no_schedule(case: Case) -> bool:
    """Whether a replay alone can tell a gain: more memory gains by other orders only."""
    change = case.change
    return not (
        case.altered.is_of_plan or (isinstance(change, DeviceChange) and change.figure == "memory")
    )
