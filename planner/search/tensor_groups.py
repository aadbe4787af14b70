"""Plans whose devices are tensor-parallel groups: one size of groups each, the fastest of all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from planner.cluster.group_packing import packed
from planner.cluster.tensor_groups import TensorGroup
from planner.errors import InfeasibleError, PipeplanError
from planner.job import WITHOUT_GROUPS
from planner.model.group_graph import split_of
from planner.plan.plan import Plan, gap
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.search.budget import Clock
from planner.search.certification import Certifier
from planner.search.mixed_groups import mixed_packings
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.chain import Chain
from planner.search.result import Ended, HistoryRow, Result, Status
from planner.search.settings import OPTIMALITY_TOLERANCE
from planner.search.state import Progress
from planner.units import plural
from planner.verification import require_valid

_NO_TIME_S = 0.05
"""A search that begins after the limit still gives the plan that it tries first."""
FIRST_SHARE = 0.5
"""Share of the time for all sizes in turn; what they leave is for the sizes that count then."""
PROOF_SHARE, LEAST_PROOF_SHARE = 0.5, 0.05
"""Shares for certificates, which say of a size that no plan of it is as fast as the best: of what
is left after that, and of the whole time where less is left; first plans may take all of it."""


class SolveOne(Protocol):
    """The search for a plan of one problem, whatever its devices are."""

    def __call__(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        progress: Progress | None,
        known: Sequence[Plan] = (),
    ) -> Result:
        """Return the best plan of the problem found within a limit; it starts from known ones."""


@dataclass(frozen=True)
class Variant:
    """The problem with groups of one size, or of several.

    Attributes:
        problem: whose devices are the groups.
        parallel: the groups; None: single devices.
        work_s: least time of any of its plans, by their work.
    """

    problem: Problem
    parallel: TensorParallel | None
    work_s: float

    @property
    def words(self) -> str:
        """What its devices are."""
        if self.parallel is None:
            return "single devices"
        if len(self.parallel.degrees) == 1:
            return f"groups of {self.parallel.degrees[0]}"
        counts = Counter(len(group.devices) for group in self.parallel.groups)
        return " and ".join(f"{plural(counts[size], 'group')} of {size}" for size in sorted(counts))


def solve_on_groups(
    problem: Problem, solve_one: SolveOne, clock: Clock, progress: Progress | None
) -> Result:
    """Find the fastest plan over the sizes of groups that a job allows.

    All sizes share one half of the time. Then the least of their bounds are raised by certificates,
    as far as the fastest plan of all, and the size of that plan and that of the least bound share
    what is left. The bound is the least of theirs, so it covers plans with one size of
    groups, packed as :func:`planner.cluster.group_packing.packed` does, and plans on the packings
    of several sizes that were searched (:mod:`planner.search.mixed_groups`).

    Args:
        problem: of single devices; its job's ``tensor_parallel`` is not 1.
        solve_one: the search for one size.
        clock: of all searches together.
        progress: called with every new incumbent or bound.

    Raises:
        InfeasibleError: if no plan fits with any size; it says for each what is in the way.
        PipeplanError: if no size is possible.
    """
    variants = variants_of(problem)
    if problem.job.tensor_parallel != "any":
        (only,) = variants
        result = solve_one(only.problem, time_limit_s=clock.left_s, progress=progress)
        result = replace(result, plan=result.plan.of_problem(problem, only.parallel))
    else:
        variants = sorted([*variants, *_mixed(problem, variants)], key=lambda row: row.work_s)
        search = _Search(problem, variants, clock, progress or (lambda row: None))
        result = search.best(solve_one)
    require_valid(result.plan)
    return result


def variants_of(problem: Problem) -> list[Variant]:
    """Return the problem with each size of groups, the one with the least work first.

    Args:
        problem: of single devices; its job's ``tensor_parallel`` is not 1.

    Raises:
        PipeplanError: if no size is possible.
    """
    job, record = problem.job, problem.graph.record
    if job.tensor_parallel != "any":
        return [_variant(problem, job.tensor_parallel)]
    degrees = sorted(
        row.degree
        for row in record.splits
        if row.degree and row.regions and row.sequence == job.sequence_parallel
    )
    if not degrees:
        split_of(record, 2, sequence=job.sequence_parallel)  # Says what to do.
    found = [_variant(problem, 1)]
    for degree in degrees:
        try:
            groups = packed(problem.cluster, degree)
        except PipeplanError:
            continue  # The cluster has no such devices, so no plan has such groups.
        found.append(_variant(problem, degree, groups))
    return sorted(found, key=lambda row: row.work_s)


def _mixed(problem: Problem, variants: Sequence[Variant]) -> list[Variant]:
    """Return the problem with groups of several sizes, of those that variants have."""
    degrees = [1 if row.parallel is None else row.parallel.degrees[0] for row in variants]
    found = []
    for parallel in mixed_packings(problem, sorted(degrees)):
        on_groups = grouped_problem(problem, parallel)
        found.append(Variant(on_groups, parallel, work_bound_s(Chain(on_groups))))
    return found


def _variant(problem: Problem, degree: int, groups: Sequence[TensorGroup] = ()) -> Variant:
    """Return the problem with one size of groups, packed unless they are given."""
    if degree == 1:
        single = replace(problem, job=problem.job.model_copy(update=WITHOUT_GROUPS))
        return Variant(single, None, work_bound_s(Chain(single)))
    sequence = problem.job.sequence_parallel
    split = split_of(problem.graph.record, degree, sequence=sequence)
    if not split.regions:
        raise PipeplanError(
            f"tensor_parallel = {degree}: no part of {problem.graph.name!r} splits into {degree} "
            "equal shares (heads, columns, vocabulary or experts); choose another number"
        )
    parallel = TensorParallel(
        sequence=sequence, groups=tuple(groups or packed(problem.cluster, degree))
    )
    variant = grouped_problem(problem, parallel)
    return Variant(variant, parallel, work_bound_s(Chain(variant)))


@dataclass
class _Search:
    """The searches of all sizes of groups, and their findings so far.

    Attributes:
        problem: of single devices.
        variants: the problem with each size of groups.
        clock: of all searches together.
        report: called with every row of the history.
        bounds: what is proved for each size so far.
        found: the last result of each size that has a plan, by its number.
        reasons: why sizes gave no plan, by their numbers.
        tried: number of partitions that were scheduled.
        history: of the search.
    """

    problem: Problem
    variants: Sequence[Variant]
    clock: Clock
    report: Progress
    bounds: list[float] = field(init=False)
    found: dict[int, Result] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    tried: int = 0
    history: list[HistoryRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bounds = [variant.work_s for variant in self.variants]

    @property
    def best_s(self) -> float:
        """The time of the fastest plan so far."""
        return min((row.iteration_time_s for row in self.found.values()), default=math.inf)

    def best(self, solve_one: SolveOne) -> Result:
        """Search every size and return the fastest plan with the bound over all."""
        later_s = (1 - FIRST_SHARE) * self.clock.left_s
        self._try_in_turn(range(len(self.variants)), solve_one, later_s)
        self._prove(max(PROOF_SHARE * self.clock.left_s, LEAST_PROOF_SHARE * self.clock.limit_s))
        self._try_in_turn(self._open(), solve_one)
        if not self.found:
            raise InfeasibleError(reason for rows in self.reasons.values() for reason in rows)
        return self._result()

    def _prove(self, limit_s: float) -> None:
        """Raise the least bounds within a limit.

        A bound beyond the fastest plan of all sizes is of no use, so that the checker is asked for
        that one first: where it confirms it, no other search of that size is needed.
        """
        end_s = self.clock.elapsed_s + limit_s

        def has_time() -> bool:
            return self.clock.elapsed_s < end_s and not self.clock.is_stopped

        raised: set[int] = set()
        while self.found and has_time() and not self._is_proved:
            weakest = min(range(len(self.bounds)), key=self.bounds.__getitem__)
            if weakest in raised:
                return
            raised.add(weakest)
            variant, best_s = self.variants[weakest], self.best_s
            certifier = Certifier(Chain(variant.problem), self.clock)
            try:
                certifier.certify(best_s, has_time)
            except KeyboardInterrupt:
                self.clock.stop()
            if certifier.bound_s > self.bounds[weakest]:
                self.bounds[weakest] = certifier.bound_s
                event = f"{variant.words}: bound: certificate"
                bound_s = min(*self.bounds, best_s)
                self._record(HistoryRow(self.clock.elapsed_s, best_s, bound_s, event))

    def _open(self) -> list[int]:
        """Return the sizes to search again.

        That of the fastest plan and, if it is another, that of the least bound among those with
        plans; where no plan was found, all for which none is ruled out.
        """
        if not self.found:
            return [n for n, bound_s in enumerate(self.bounds) if math.isfinite(bound_s)]
        if self._is_proved:
            return []
        fastest = min(self.found, key=lambda number: self.found[number].iteration_time_s)
        weakest = min(self.found, key=self.bounds.__getitem__)
        return [fastest] if fastest == weakest else [fastest, weakest]

    @property
    def _is_proved(self) -> bool:
        return self.best_s <= min(self.bounds) * (1 + OPTIMALITY_TOLERANCE)

    def _try_in_turn(
        self, numbers: Sequence[int], solve_one: SolveOne, later_s: float = 0.0
    ) -> None:
        """Search some sizes, which share the time but for what is kept for later."""
        for place, number in enumerate(numbers):
            if self.clock.is_stopped:
                return
            if self.bounds[number] >= self.best_s:
                continue
            limit_s = (self.clock.left_s - later_s) / (len(numbers) - place)
            if number in self.found and limit_s <= 0:
                continue
            try:
                self._search(number, solve_one, max(limit_s, _NO_TIME_S))
            except KeyboardInterrupt:
                if not self.found:
                    raise
                self.clock.stop()

    def _search(self, number: int, solve_one: SolveOne, limit_s: float) -> None:
        known = [self.found[number].plan] if number in self.found else []
        progress = self._progress(number, self.variants[number])
        problem = self.variants[number].problem
        try:
            result = solve_one(problem, time_limit_s=limit_s, progress=progress, known=known)
        except InfeasibleError as error:
            words = self.variants[number].words
            self.reasons[number] = [f"{words}: {problem}" for problem in error.problems]
            self.clock.spend(limit_s)
            if error.is_proved:
                self.bounds[number] = math.inf
            return
        self.clock.spend(result.search_s)
        self.tried += result.tried
        self.bounds[number] = max(self.bounds[number], result.lower_bound_s)
        before = self.found.get(number)
        if before is not None and before.iteration_time_s <= result.iteration_time_s:
            # Only its stages were known to the other search.
            self.found[number] = replace(before, ended=result.ended)
        else:
            self.found[number] = result
        if result.ended == "interrupted":
            self.clock.stop()

    def _progress(self, number: int, variant: Variant) -> Callable[[HistoryRow], None]:
        begun_s, before_s = self.clock.elapsed_s, self.best_s

        def report(row: HistoryRow) -> None:
            bounds = [*self.bounds]
            bounds[number] = max(bounds[number], row.lower_bound_s)
            time_s = min(before_s, row.iteration_time_s)
            event = f"{variant.words}: {row.event}"
            self._record(HistoryRow(begun_s + row.time_s, time_s, min(*bounds, time_s), event))

        return report

    def _record(self, row: HistoryRow) -> None:
        self.history.append(row)
        self.report(row)

    def _result(self) -> Result:
        number = min(self.found, key=lambda number: self.found[number].iteration_time_s)
        best, variant = self.found[number], self.variants[number]
        bound_s = min(*self.bounds, best.iteration_time_s)
        status, ended = self._end(best, bound_s)
        return replace(
            best,
            status=status,
            plan=self._bounded(best.plan.of_problem(self.problem, variant.parallel), bound_s),
            lower_bound_s=bound_s,
            history=tuple(self.history),
            tried=self.tried,
            ended=ended,
            search_s=self.clock.elapsed_s,
        )

    def _end(self, best: Result, bound_s: float) -> tuple[Status, Ended]:
        if best.iteration_time_s <= bound_s * (1 + OPTIMALITY_TOLERANCE):
            return "optimal", "proved"
        if self.clock.is_stopped:
            return "interrupted", "interrupted"
        ends = {row.ended for row in self.found.values()}
        reasons: tuple[Ended, ...] = ("time limit", "gap limit")
        return "feasible", next((end for end in reasons if end in ends), "nothing left to try")

    def _bounded(self, plan: Plan, bound_s: float) -> Plan:
        """Return a plan with the bound over all sizes, of which there is no certificate."""
        space = self.problem.job.space
        tried = ", ".join(variant.words for variant in self.variants)
        packings = (row.parallel for row in self.variants if row.parallel is not None)
        mixed = tuple(row.digest for row in packings if len(row.degrees) > 1)
        covers = plan.provenance.bound_covers
        provenance = plan.provenance.model_copy(
            update={
                "solver": f"{plan.provenance.solver}; the best of {tried}",
                "bound_covers": covers.model_copy(update={"space": space, "packings": mixed}),
                "problem_digest": self.problem.digest_in(space),
            }
        )
        figures = {"lower_bound_s": bound_s, "gap": gap(plan.predicted.iteration_time_s, bound_s)}
        predicted = plan.predicted.model_copy(update=figures)
        update = {"provenance": provenance, "predicted": predicted, "proof": None}
        return plan.model_copy(update=update)
