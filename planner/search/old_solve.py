"""The driver of `solve`: a table of the steps of a search, for which problems, for how long."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

from planner.costs.network_table import NetworkTable
from planner.costs.placed_pipeline import StageSpec
from planner.costs.stage_table import StageTable
from planner.errors import InfeasibleError, PipeplanError, require_kind, shorten
from planner.lengths import Lengths
from planner.plan.membership import outside
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtimes import for_runtime
from planner.plan.unsupported import require_without
from planner.search.budget import Clock, Settings, TimeShare, TimeSlice
from planner.search.cp_sat.conflicts import conflict
from planner.search.cp_sat.decisions import rule_constraints
from planner.search.cp_sat.plan_model import Effort
from planner.search.feasibility import explain_infeasible, form_problem
from planner.search.finished import (
    ended_by,
    limit_text,
    plan_of,
    status_of,
)
from planner.search.group_search import (
    plan_groups,
    search_fewer_devices,
    search_pipelines,
    searched_apart,
)
from planner.search.local_search import anneal, descend
from planner.search.missing_freedoms import with_missing_freedoms
from planner.search.near import SHARE, ChosenSchedule
from planner.search.offloaded import solve_with_offload
from planner.search.old_steps import (
    bound_by_columns,
    bound_by_work,
    certify,
    complete_schedules,
    find_any,
    improve_partitions,
    improve_schedules,
    model_applies,
    prune_replicas,
    relax_cluster,
    schedule_warm_starts,
    search_partitions,
    try_baselines,
    try_grid,
    try_orders,
    try_simple_partitions,
    try_thorough_partitions,
)
from planner.search.partition.chain import Chain, Partition
from planner.search.result import LengthChoice, Result, Robustness, Simplicity
from planner.search.robust import choose_robust
from planner.search.ruled_partitions import try_plan_model
from planner.search.settings import DEFAULT_WORKERS, OPTIMALITY_TOLERANCE, check_settings
from planner.search.shared_devices import plan_shared
from planner.search.simple import WITHIN, choose_simple
from planner.search.state import Candidate, Progress, Search, SearchTask
from planner.search.tensor_groups import solve_on_groups
from planner.search.unequal import choose_for_lengths
from planner.simulation.noise import Noise
from planner.space import WITH_SHARDED_PARAMETERS
from planner.variants.problems import with_job

if TYPE_CHECKING:
    from planner.search.partition.cp_sat.search import Constrain

logger = logging.getLogger(__name__)


def always(search: Search) -> bool:
    """Apply to every problem."""
    return True


def has_plan(search: Search) -> bool:
    """Apply where a plan was found."""
    return search.best is not None


def has_no_plan(search: Search) -> bool:
    """Apply while nothing was found that fits."""
    return search.best is None


def has_constraints(search: Search) -> bool:
    """Apply where the job has rules, or the caller adds constraints."""
    return search.task.constrain is not None


def is_large(search: Search) -> bool:
    """Apply to clusters so large that devices are handed out several at a time."""
    return search.optimiser.is_large


def is_small(search: Search) -> bool:
    """Apply to clusters whose devices are handed out one by one."""
    return not search.optimiser.is_large


def has_small_plan(search: Search) -> bool:
    """Apply to small clusters where a plan was found."""
    return has_plan(search) and is_small(search)


def has_large_plan(search: Search) -> bool:
    """Apply to large clusters where a plan was found."""
    return has_plan(search) and is_large(search)


def is_loose(search: Search) -> bool:
    """Apply to small clusters, and to large ones of which no equal groups were planned."""
    return is_small(search) or search.best is None


def is_large_and_loose(search: Search) -> bool:
    """Apply to large clusters of which no equal groups were planned."""
    return is_large(search) and search.best is None


def has_pipelines(search: Search) -> bool:
    """Apply where replicas must form equal pipelines."""
    return search.problem.job.has_pipelines


def allows_several(search: Search) -> bool:
    """Apply where a device may hold several stages."""
    return not search.has_single_stages


def is_middling(search: Search) -> bool:
    """Apply to problems that are too large for the partition model, but not for moving devices."""
    return not model_applies(search) and is_small(search)


def has_slow_hosts(search: Search) -> bool:
    """Apply where devices of a host slow each other."""
    return bool(search.problem.cluster.host_of)


@dataclass(frozen=True)
class SearchStep:
    """One step of a search.

    Attributes:
        name: what it does.
        run: does it until its time is up; adds to what the search found.
        share_of_time: when it gives way to the next step.
        applies_to: asked when its turn comes.
    """

    name: str
    run: Callable[[Search, TimeSlice], None]
    share_of_time: TimeShare
    applies_to: Callable[[Search], bool] = always


def has_blocking_messages(search: Search) -> bool:
    """Apply where the runtime waits for messages."""
    return search.problem.runtime.blocks


def plan_as_if_overlapped(search: Search, time: TimeSlice) -> None:
    """Search as if no message blocked, and schedule the best stages as they are run.

    The way from one partition to a better one is often longer where messages block.
    """
    problem = replace(search.problem, runtime=search.problem.runtime.overlapped)
    task = replace(search.task, problem=problem)
    found = searched_apart(search, task, time.left_s, run_until_stopped)
    schedule_warm_starts(search, found[:MOST_OVERLAPPED])


OVERLAPPED = SearchStep(
    "as if messages overlapped",
    plan_as_if_overlapped,
    TimeShare(0.4, "whole"),
    has_blocking_messages,
)
MOST_OVERLAPPED = 8
"""Partitions of a search as if no message blocked that are scheduled as they are run."""


EVEN_GRID = SearchStep("even grid", try_grid, TimeShare(0.3, "whole"))
"""Comes before the others where sizes of groups are compared."""


def search_equal_pipelines(search: Search, time: TimeSlice) -> None:
    """Search one of several equal pipelines by the steps of this table."""
    search_pipelines(search, time, run_until_stopped)


def search_fewer(search: Search, time: TimeSlice) -> None:
    """Search without devices that add little to their hosts by the other steps of this table.

    This one would leave out again what another share already does.
    """
    others = [step for step in STEPS if step.run is not search_fewer]
    search_fewer_devices(search, time, lambda part: run_until_stopped(part, others))


STEPS = (
    SearchStep("total work", bound_by_work, TimeShare(1)),
    SearchStep("plan model", try_plan_model, TimeShare(0.4, "whole"), has_constraints),
    SearchStep("fewer devices of hosts", search_fewer, TimeShare(0.4, "whole"), has_slow_hosts),
    SearchStep("equal pipelines", search_equal_pipelines, TimeShare(0.5, "whole"), has_pipelines),
    # On large clusters nothing else is scheduled as soon as one of many equal groups.
    SearchStep("equal groups of devices", plan_groups, TimeShare(0.5, "whole"), is_large),
    SearchStep("simple partitions", try_simple_partitions, TimeShare(0.15, "whole"), is_loose),
    SearchStep("baselines", try_baselines, TimeShare(0.3, "whole"), is_small),
    SearchStep("orders of devices", try_orders, TimeShare(0.5, "whole"), is_small),
    SearchStep("orders of devices", try_orders, TimeShare(0.75, "whole"), is_large),
    # A pass of the checker of certificates is quick, and it often proves more than relaxations.
    SearchStep("certificate of the bound", certify, TimeShare(0.05), has_small_plan),
    SearchStep("relaxations of the cluster", relax_cluster, TimeShare(0.05), is_small),
    SearchStep("partitions by their bounds", improve_partitions, TimeShare(0.15), is_small),
    SearchStep("annealing by schedules", anneal, TimeShare(0.35), model_applies),
    SearchStep("relaxations of the cluster", relax_cluster, TimeShare(0.75, "whole"), is_large),
    SearchStep("columns of devices", bound_by_columns, TimeShare(0.3), allows_several),
    SearchStep("certificate of the bound", certify, TimeShare(0.25), has_small_plan),
    SearchStep("certificate of the bound", certify, TimeShare(0.1)),
    SearchStep("baselines", try_baselines, TimeShare(0.2), is_large_and_loose),
    SearchStep(
        "partitions by their bounds", improve_partitions, TimeShare(0.3), is_large_and_loose
    ),
    SearchStep("several stages a device", plan_shared, TimeShare(0.6), allows_several),
    SearchStep("equal groups of devices", plan_groups, TimeShare(0.2), model_applies),
    SearchStep("equal groups of devices", plan_groups, TimeShare(0.5), is_middling),
    SearchStep("balanced partitions", try_thorough_partitions, TimeShare(0.2), is_loose),
    SearchStep("any plan that fits", find_any, TimeShare(1), has_no_plan),
    SearchStep("descent by schedules", descend, TimeShare(0.35), is_loose),
    SearchStep("annealing by schedules", anneal, TimeShare(0.4), model_applies),
    SearchStep("annealing by schedules", anneal, TimeShare(0.8), is_middling),
    SearchStep("all quick schedules", complete_schedules, TimeShare(0.5), has_plan),
    SearchStep("fewer replicas", prune_replicas, TimeShare(0.02, "beyond"), has_small_plan),
    SearchStep("schedules by CP-SAT", improve_schedules, TimeShare(0.25), has_small_plan),
    SearchStep("schedules by CP-SAT", improve_schedules, TimeShare(1), has_large_plan),
    SearchStep("partitions by CP-SAT", search_partitions, TimeShare(0.3), model_applies),
    SearchStep("annealing by schedules", anneal, TimeShare(0.6), model_applies),
    SearchStep("schedules by CP-SAT", improve_schedules, TimeShare(0.25), has_small_plan),
    SearchStep("partitions by CP-SAT", search_partitions, TimeShare(1), model_applies),
    SearchStep("fewer replicas", prune_replicas, TimeShare(0.02, "beyond"), has_small_plan),
    SearchStep("certificate of the bound", certify, TimeShare(0.05, "beyond"), has_plan),
)
"""All steps of :func:`solve`, in order, after the warm starts.

Shares ``whole`` end at that share of the whole limit; others are of the time left."""

BASELINE_STEPS = ("baselines", "even grid")
"""Names of the steps that take stages of the baselines."""


def run_quickly(search: Search) -> None:
    """Run the steps that find a plan soon and prove little."""
    run_until_stopped(search, QUICK_STEPS)


QUICK_STEPS = (
    SearchStep("total work", bound_by_work, TimeShare(1)),
    SearchStep(
        "equal pipelines",
        lambda search, time: search_pipelines(search, time, run_quickly),
        TimeShare(0.5, "whole"),
        has_pipelines,
    ),
    SearchStep("simple partitions", try_simple_partitions, TimeShare(0.15, "whole")),
    SearchStep("orders of devices", try_orders, TimeShare(0.5, "whole"), is_small),
    SearchStep("any plan that fits", find_any, TimeShare(1), has_no_plan),
    SearchStep("descent by schedules", descend, TimeShare(1)),
)
"""Steps of a search that asks only whether a plan fits, and about how long it takes."""


def _require_buffers_kept(problem: Problem) -> None:
    """Refuse freedoms under which a buffer that forward writes would differ from one process's.

    Raises:
        PipeplanError: naming the layers, the buffers and the fields to set.
    """
    job = problem.job
    fields = [name for name in ("replication", "recompute") if getattr(job, name)]
    rows = [layer for layer in problem.graph.record.layers if layer.writes]
    if rows and fields:
        raise PipeplanError(
            f"layer {rows[0].name!r} writes {', '.join(rows[0].writes)} in its forward, which "
            "replicas or a second forward would change; set "
            f"{' and '.join(f'{name} = false' for name in fields)} in the job"
        )


Preference = Literal["fast", "simple"]
Choose = Callable[[Search], ChosenSchedule | None]


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
        problem: the model, cluster and job. Where the job shares the optimizer's state, divides
            parameters or offloads stashes ``if_needed``, a search without comes first, and one with
            only if no plan was found; the plan's job says which.
        time_limit_s: of each, stop after this long with the best plan so far; seconds of CP-SAT's
            deterministic time in deterministic mode.
        gap_limit: stop once iteration time / lower bound - 1 is at most this.
        seed: of the solver's searches.
        workers: threads of the solver; by default one for each core, up to 8.
        deterministic: one worker and a deterministic limit: the same plan on every machine.
        progress: called with every new incumbent or bound.
        warm_starts: earlier plans of the model, perhaps for another job or cluster, or just
            stages; the search starts from them where the layers and devices still exist and the
            job allows such stages.
        constrain: adds constraints of one's own to the partition model's decisions, see
            docs/own_constraints.md; plans with several stages a device are left out then.
        robust: prefer a plan that keeps its time: of those found that are at most 2 % slower than
            the fastest, the one with the least 95th percentile of iteration times under a noise;
            True stands for ``Noise(seed=seed)``. A tenth of the time limit is for that choice.
        prefer: ``simple``: of the plans found that are about as fast as the fastest, and simple
            neighbours of these, the one with the fewest stages unevenly over nodes, then the fewest
            stages, uneven replicas and divided blocks, then in a published schedule. A tenth of the
            time limit is for that choice.
        prefer_within: share by which a simple plan may take longer than the fastest found.
        without_steps: names of steps of :data:`STEPS` to leave out, to see what each of them finds.

    Raises:
        InfeasibleError: if no plan fits; the message says which constraint binds.
        PipeplanError: if a setting is out of range, or the job's runtime cannot run the model.
        KeyboardInterrupt: on Ctrl-C before any plan was found; later on Ctrl-C ends the search
            and the best plan so far is returned.
    """
    require_kind(problem, Problem, "problem", "write Problem(graph, cluster, job)")
    check_settings(time_limit_s, gap_limit, seed, workers)
    check_preference(prefer, prefer_within, is_robust=bool(robust))
    check_steps(without_steps)
    if robust or prefer != "fast":
        what = "robust = True" if robust else 'prefer = "simple"'
        require_without(problem.job, what, ("offload", "lengths"))
    _require_buffers_kept(problem)
    problem.require_known_devices()
    one = _OneCall(
        settings=Settings(seed, workers, deterministic),
        time_limit_s=time_limit_s,
        gap_limit=gap_limit,
        progress=progress or (lambda row: None),
        warm_starts=warm_starts,
        constrain=_with_rules(problem, constrain),
        noise=Noise(seed=seed) if robust is True else robust,
        prefer=prefer,
        prefer_within=prefer_within,
        without_steps=frozenset(without_steps),
    )
    *tried, last = _decided(for_runtime(problem))
    for variant in tried:
        with suppress(InfeasibleError):
            return one.solve(variant)
    return one.solve(last)


@dataclass(frozen=True, kw_only=True)
class _OneCall:
    """What one call of :func:`solve` asks for, whatever problems it searches for that."""

    settings: Settings
    time_limit_s: float
    gap_limit: float
    progress: Progress
    warm_starts: Sequence[Plan | Sequence[StageSpec]]
    constrain: Constrain | None
    noise: Noise | Literal[False]
    prefer: Preference
    prefer_within: float
    without_steps: frozenset[str]

    def solve(self, problem: Problem) -> Result:
        """Search a problem whose freedoms are decided, over sizes of groups if it has several."""
        limit_s, deterministic = self.time_limit_s, self.settings.deterministic
        if problem.job.offload:
            return solve_with_offload(
                problem,
                self.search,
                time_limit_s=limit_s,
                deterministic=deterministic,
                gap_limit=self.gap_limit,
                progress=self.progress,
                infeasible=_infeasible,
            )
        if problem.job.tensor_parallel == 1 or problem.has_groups:
            return self.solve_one(problem, time_limit_s=limit_s, progress=self.progress)
        of_size = partial(self.solve_one, first=(EVEN_GRID,))
        return solve_on_groups(problem, of_size, Clock(limit_s, deterministic), self.progress)

    def solve_one(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        progress: Progress | None,
        first: Sequence[SearchStep] = (),
        known: Sequence[Plan] = (),
    ) -> Result:
        """Return the plan that one search finds, chosen as the caller prefers."""
        choose = _choose(self.noise, self.prefer, self.prefer_within, problem.job.lengths)
        limit_s = time_limit_s * (1 - SHARE if choose else 1)
        search = self.search(problem, limit_s, progress, first, known)
        return _result(search, limit_text(self.time_limit_s, self.settings.deterministic), choose)

    def search(
        self,
        problem: Problem,
        limit_s: float,
        progress: Progress | None,
        first: Sequence[SearchStep] = (),
        known: Sequence[Plan] = (),
    ) -> Search:
        """Run one search to its end.

        Args:
            problem: whose devices are what stages are placed on.
            limit_s: for it.
            progress: called with every new incumbent or bound.
            first: steps before those of the table.
            known: plans to start from, besides the caller's.
        """
        task = SearchTask(
            problem, self.settings, self.gap_limit, self.constrain, self.without_steps
        )
        search = Search(task, Clock(limit_s, self.settings.deterministic), progress)
        partitions = _partitions(search.chain, [*self.warm_starts, *known])
        search.found.is_infeasible = form_problem(search.chain) is not None
        if not search.found.is_infeasible:
            run_until_stopped(search, (_warm_starts(partitions), *first, OVERLAPPED, *STEPS))
        return search


def _with_rules(problem: Problem, constrain: Constrain | None) -> Constrain | None:
    """Return the constraints of the job's rules and of the caller; None if there are none."""
    rules = rule_constraints(problem.job.rules, problem.cluster)
    rows: list[Any] = [*rules.values(), *([constrain] if constrain else [])]
    if not rows:
        return None

    def add_all(decisions: Any) -> None:
        for row in rows:
            row(decisions)

    return add_all


def _decided(problem: Problem) -> list[Problem]:
    """Return the problem with each choice that its job makes only if it is needed, in order."""
    open_ = [name for name in _IF_NEEDED if getattr(problem.job, name) == "if_needed"]
    choices = product(*((False, True) for _ in open_))
    rows = [dict(zip(open_, row, strict=True)) for row in choices]
    # Parameters are not divided without the optimizer's state: that both are is one choice.
    rows = [row for row in rows if not (row.get("shard_parameters") and row.get("shard_optimizer"))]
    return [with_job(problem, **_with_what_it_takes(row)) if row else problem for row in rows]


CONFLICT_S = 5.0
"""Deterministic seconds of each solve that looks for rules in conflict."""
_IF_NEEDED = ("offload", "shard_parameters", "shard_optimizer")
"""Choices of a job, those that cost more time first."""


def _with_what_it_takes(fields: Mapping[str, bool]) -> dict[str, Any]:
    """Return the fields of a job with those that sharded parameters ask for."""
    return {**fields, **(WITH_SHARDED_PARAMETERS if fields.get("shard_parameters") else {})}


def _warm_starts(known: Sequence[Partition]) -> SearchStep:
    """Return the step that comes first: the partitions the user brought are scheduled."""
    return SearchStep(
        "warm starts", lambda search, time: schedule_warm_starts(search, known), TimeShare(1)
    )


def run_until_stopped(search: Search, steps: Sequence[SearchStep] | None = None) -> None:
    """Run the steps that apply, one after the other; Ctrl-C ends them and stops the clock."""
    try:
        for step in STEPS if steps is None else steps:
            if step.name not in search.task.without_steps and step.applies_to(search):
                logger.debug("%8.2f s  %s", search.clock.elapsed_s, step.name)
                time = step.share_of_time.slice_of(search.clock)
                search.schedules_until_s = max(search.clock.limit_s, time.end_s)
                step.run(search, time)
    except KeyboardInterrupt:
        search.clock.stop()


def check_steps(names: Collection[str]) -> None:
    """Check the names of steps that :func:`solve` shall leave out.

    Raises:
        PipeplanError: naming each that no step has.
    """
    known = dict.fromkeys(step.name for step in (EVEN_GRID, OVERLAPPED, *STEPS))
    unknown = [name for name in names if name not in known]
    if unknown:
        words = f"choose from {', '.join(known)}"
        raise PipeplanError(
            [f"without_steps: no step is named {shorten(name)}; {words}" for name in unknown]
        )


def check_preference(prefer: str, within: float, *, is_robust: bool) -> None:
    """Check what :func:`solve` shall choose by besides time.

    Raises:
        PipeplanError: naming a wrong setting.
    """
    if prefer not in get_args(Preference):
        raise PipeplanError(
            f"prefer: {shorten(prefer)} is not one of {', '.join(get_args(Preference))}"
        )
    if not 0 <= within <= 1:
        raise PipeplanError(f"prefer_within: {within} is not a share from 0 to 1, such as 0.01")
    if prefer == "simple" and is_robust:
        raise PipeplanError("prefer: simple and robust are two choices; ask for one of them")


def _choose(
    noise: Noise | Literal[False], prefer: Preference, within: float, lengths: Lengths | None
) -> Choose | None:
    """Return the choice among plans near the fastest; None where the fastest is wanted."""
    if lengths is not None:
        return lambda search: choose_for_lengths(search, lengths)
    if noise:
        return lambda search: choose_robust(search, noise)
    if prefer == "simple":
        return lambda search: choose_simple(search, within, run_quickly)
    return None


def _partitions(chain: Chain, plans: Sequence[Plan | Sequence[StageSpec]]) -> list[Partition]:
    """Return the stages of earlier plans that are partitions of the chain in the job's space."""
    found, space, layers = [], chain.problem.job.space, chain.names
    for plan in plans:
        stages = plan.stages if isinstance(plan, Plan) else plan
        partition = chain.partition([(stage.layers, stage.devices) for stage in stages])
        if partition is not None and not any(outside(space, chain.specs(partition), {}, layers)):
            found.append(partition)
    return found


def _result(search: Search, limit: str, choose: Choose | None) -> Result:
    """Return the verified plan of the incumbent, or of the candidate that is chosen."""
    best = best_of(search)
    ended = ended_by(search)
    choice = _choice(search, choose)
    if search.clock.is_stopped:
        ended = ended_by(search)
    best = search.best or best
    schedule = choice.schedule if choice else best.schedule
    reason = choice.reason if choice else None
    plan = plan_of(search, schedule, limit, _method(schedule.method, reason))
    return Result(
        status=status_of(search, plan.predicted.iteration_time_s),
        plan=plan,
        lower_bound_s=min(search.found.bound_s, search.best_s),
        history=tuple(search.found.history),
        tried=search.found.tried,
        ended=ended,
        search_s=search.clock.elapsed_s,
        deterministic=search.settings.deterministic,
        processor_share=search.clock.processor_share,
        robustness=reason if isinstance(reason, Robustness) else None,
        simplicity=reason if isinstance(reason, Simplicity) else None,
        lengths=reason if isinstance(reason, LengthChoice) else None,
    )


def best_of(search: Search) -> Candidate:
    """Return the fastest candidate of a search.

    Raises:
        InfeasibleError: if no plan fits, or none was found; the message says what is in the way.
        KeyboardInterrupt: if the search was stopped before.
    """
    if search.best is not None:
        return search.best
    if search.clock.is_stopped:
        raise KeyboardInterrupt("before any plan was found")
    if search.task.constrain is not None:
        blamed = _conflict(search.problem)
        if blamed:
            raise InfeasibleError(
                f"no plan keeps these rules of the job together: {', '.join(blamed)}; "
                "drop or relax one of them",
                is_proved=True,
            )
        verdict = "no plan keeps" if search.found.is_infeasible else "no plan was found that keeps"
        raise InfeasibleError(
            f"{verdict} the constraints added by constrain=; solve without them, or one by "
            "one, to see which of them, or the memory, is in the way"
        )
    raise _infeasible(search)


def _conflict(problem: Problem) -> tuple[str, ...]:
    """Return rules of the job that no plan keeps together; empty if none are known to be."""
    if problem.job.rules.is_empty:
        return ()
    effort = Effort(CONFLICT_S, deterministic=True)
    return conflict(StageTable(problem), NetworkTable.of(problem.cluster), effort)


def _infeasible(search: Search) -> InfeasibleError:
    """Return why a search found no plan, with what would help."""
    error = explain_infeasible(search.chain, is_proved=search.found.is_infeasible)
    return with_missing_freedoms(error, search, run_quickly)


def _choice(search: Search, choose: Choose | None) -> ChosenSchedule | None:
    """Choose among plans near the fastest; None after Ctrl-C, which keeps the fastest."""
    # Plans are compared, so that none may have fewer schedules than others.
    search.schedules_until_s = math.inf
    try:
        return choose(search) if choose is not None else None
    except KeyboardInterrupt:
        search.clock.stop()
        return None


def _method(method: str, reason: Robustness | Simplicity | LengthChoice | None) -> str:
    text = f"partition portfolio, schedule by {method}"
    if isinstance(reason, Robustness):
        return f"{text}, chosen for robustness under noise ({reason.noise})"
    if isinstance(reason, Simplicity):
        return f"{text}, chosen as the simplest within {reason.within:.2%} of the fastest"
    if isinstance(reason, LengthChoice):
        return f"{text}, chosen over lengths, microbatches {reason.order.replace('_', ' ')}"
    return text
