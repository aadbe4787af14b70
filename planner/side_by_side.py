"""Plans that consist of pipelines, for strategies whose pipelines train side by side.

One pipeline is planned on a share of the devices, with a share of the microbatches; the others take
the same stages at the same places. The bound is that of all plans: these are among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan
from planner.artifacts.problem import Problem
from planner.assemble import assemble_plan
from planner.costs.placement import StageSpec, is_connected, place
from planner.errors import DeadlockError, InfeasibleError, PipeplanError
from planner.partition.chain import Chain
from planner.portfolio.search import Progress
from planner.result import HistoryRow, Result
from planner.simulator import Orders, simulate
from planner.solver import OPTIMALITY_TOLERANCE, check_settings, solve
from planner.solver_settings import DEFAULT_WORKERS, Clock
from planner.sync.lanes import IN_STEP, lanes_of
from planner.units import plural
from planner.verifier import verify

SHARE = 0.5
"""Of the time limit, for plans of one pipeline; the rest goes into the bound on all plans."""
_NO_TIME_S = 0.05
"""A search that begins after the limit still gives the plan that it tries first."""

Grouping = tuple[tuple[str, ...], ...]
"""The devices of each pipeline, by place."""


@dataclass(frozen=True)
class _Found:
    plan: Plan
    pipelines: int

    @property
    def time_s(self) -> float:
        return self.plan.predicted.iteration_time_s


def solve_side_by_side(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    gap_limit: float = OPTIMALITY_TOLERANCE,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Progress | None = None,
    warm_starts: Sequence[Plan | Sequence[StageSpec]] = (),
) -> Result:
    """Find a fast plan of two pipelines or more, and bound how far it can be from the best plan.

    The time compared is that of pipelines in step, which the simulator of plans knows. The bound is
    on plans of any form, so the gap also holds what it costs to have pipelines.

    Args:
        problem: the model, cluster and job.
        time_limit_s: of all searches together.
        gap_limit: stop a search once iteration time / lower bound - 1 is at most this.
        seed: of the searches.
        workers: threads of the solver.
        deterministic: as in :func:`planner.solver.solve`.
        progress: called with every better plan of pipelines, and every new bound.
        warm_starts: for the search over plans of any form, whose plan counts if it has pipelines.

    Raises:
        InfeasibleError: if no plan of pipelines was found; it says what is in the way.
        PipeplanError: if a setting is out of range.
    """
    check_settings(time_limit_s, gap_limit, seed, workers)
    _require_possible(problem)
    clock = Clock(time_limit_s, deterministic)
    report = progress or (lambda row: None)
    settings: dict[str, Any] = {"seed": seed, "workers": workers, "deterministic": deterministic}
    rows: list[HistoryRow] = []
    best, reasons, tried = None, [], 0
    groupings = list(_groupings(problem))
    for number, grouping in enumerate(groupings):
        limit_s = (SHARE * time_limit_s - clock.elapsed_s) / (len(groupings) - number)
        try:
            alone = solve(
                _alone(problem, grouping),
                time_limit_s=max(limit_s, _NO_TIME_S),
                gap_limit=gap_limit,
                **settings,
            )
            clock.spend(alone.search_s if deterministic else 0.0)
            tried += alone.tried
            found = _Found(_multiplied(problem, alone.plan, grouping), len(grouping))
        except PipeplanError as error:
            reasons.append(f"{_words(grouping)}: {error.problems[0]}")
            continue
        if best is None or found.time_s < best.time_s:
            best = found
            rows.append(HistoryRow(clock.elapsed_s, best.time_s, 0.0, f"plan: {_words(grouping)}"))
            report(rows[-1])
        if alone.ended == "interrupted":
            clock.stop()
            break
    if best is None:
        raise InfeasibleError(
            "sync: no plan of several pipelines was found, and pipelines that train side by side "
            f"need one; {'; '.join(dict.fromkeys(reasons))}; use {IN_STEP}, which run any plan, or "
            "make a pipeline smaller"
        )
    begun_s, before = clock.elapsed_s, best

    def tell_bound(row: HistoryRow) -> None:
        """Plans of another form are no news; what is proved of all plans is."""
        if row.event.startswith("bound"):
            time_s = before.time_s
            bound_s = min(row.lower_bound_s, time_s)
            rows.append(HistoryRow(begun_s + row.time_s, time_s, bound_s, row.event))
            report(rows[-1])

    whole = solve(
        problem,
        time_limit_s=_NO_TIME_S if clock.is_stopped else max(clock.left_s, _NO_TIME_S),
        gap_limit=gap_limit,
        progress=tell_bound,
        warm_starts=[*warm_starts, best.plan],
        **settings,
    )
    if _has_pipelines(whole.plan) and whole.iteration_time_s < best.time_s:
        return replace(
            whole,
            history=(*rows, *whole.history[-1:]),
            tried=tried + whole.tried,
            search_s=begun_s + whole.search_s,
        )
    return _result(best, whole, tuple(rows), tried, begun_s, interrupted=clock.is_stopped)


def _require_possible(problem: Problem) -> None:
    """Refuse what no search can mend."""
    job, devices = problem.job, len(problem.cluster.devices)
    remedy = f"or use {IN_STEP}, which run any plan"
    if not job.replication:
        raise InfeasibleError(
            "job.replication: it is false, and pipelines that train side by side hold the same "
            f"stages; set replication = true in the job file, {remedy}"
        )
    if devices < 2:
        raise InfeasibleError(
            "cluster.devices: there is one, and pipelines that train side by side need one each at "
            f"least; add devices, {remedy}"
        )
    if not _numbers(problem):
        raise InfeasibleError(
            f"job.microbatches: {job.microbatches} cannot be divided among 2 to {devices} "
            "pipelines, which run as many each; make it a multiple of 2 in the job file, "
            f"{remedy}"
        )


def _numbers(problem: Problem) -> list[int]:
    """Of pipelines that a plan may have."""
    most = min(len(problem.cluster.devices), problem.job.microbatches)
    return [n for n in range(2, most + 1) if problem.job.microbatches % n == 0]


def _groupings(problem: Problem) -> Iterator[Grouping]:
    """Devices divided into pipelines, by their types and by their speed, without repetition."""
    seen: set[Grouping] = set()
    for number in reversed(_numbers(problem)):
        for grouping in (_of_one_mix(problem, number), _of_one_speed(problem, number)):
            if grouping[0] and grouping not in seen:
                seen.add(grouping)
                yield grouping


def _of_one_mix(problem: Problem, number: int) -> Grouping:
    """Each pipeline has as many devices of every type, neighbours in the cluster's order."""
    groups: list[list[str]] = [[] for _ in range(number)]
    for names in _by_speed(problem):
        each = len(names) // number
        for index, group in enumerate(groups):
            group += names[index * each : (index + 1) * each]
    order = problem.cluster.numbers
    return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)


def _of_one_speed(problem: Problem, number: int) -> Grouping:
    """At each place devices of about one speed; fewer are left over than by types.

    The last pipeline has the slowest.
    """
    names = [name for row in _by_speed(problem) for name in row]
    rows = [names[p * number : (p + 1) * number] for p in range(len(names) // number)]
    return tuple(tuple(row[index] for row in rows) for index in range(number))


def _by_speed(problem: Problem) -> list[list[str]]:
    """The devices of each type, the fastest type first."""
    chain, cluster = Chain(problem), problem.cluster
    total_s = chain.work_s.sum(axis=1)
    kinds = sorted(range(len(chain.types)), key=lambda kind: float(total_s[kind]))
    return [
        [name for name in cluster.device_names if cluster.type_of(name) == chain.types[kind]]
        for kind in kinds
    ]


def _alone(problem: Problem, grouping: Grouping) -> Problem:
    """The problem of the last pipeline, which has the slowest devices.

    Devices forward nothing, so paths between those that stay are the same.
    """
    mine = set(grouping[-1])
    cluster = problem.cluster
    left = {*mine, *cluster.switches}
    return replace(
        problem,
        cluster=cluster.model_copy(
            update={
                "devices": tuple(device for device in cluster.devices if device.name in mine),
                "links": tuple(link for link in cluster.links if left.issuperset(link.between)),
            }
        ),
        job=problem.job.model_copy(
            update={
                "microbatches": problem.job.microbatches // len(grouping),
                "replication": False,
            }
        ),
    )


def _multiplied(problem: Problem, alone: Plan, grouping: Grouping) -> Plan:
    """The plan of one pipeline, at the same places of all.

    Raises:
        PipeplanError: if the other pipelines' devices do not hold it.
    """
    place_of = {device: index for index, device in enumerate(grouping[-1])}
    specs = [
        StageSpec(
            stage.layers,
            tuple(group[place_of[device]] for group in grouping for device in stage.devices),
            stage.recompute,
        )
        for stage in alone.stages
    ]
    pipeline = place(problem, specs)
    if not is_connected(pipeline):
        raise PipeplanError("cluster.links: no path joins its devices to those of the others")
    number = len(grouping)
    orders: Orders = {
        group[place_of[device]]: [
            Operation(stage, kind, microbatch * number + index) for stage, kind, microbatch in order
        ]
        for device, order in alone.parsed_orders().items()
        for index, group in enumerate(grouping)
    }
    try:
        timeline = simulate(pipeline, orders)
    except DeadlockError:
        raise PipeplanError("orders: pipelines wait for each other in a circle") from None
    provenance = alone.provenance.model_copy(
        update={"solver": f"{alone.provenance.solver}, {plural(number, 'pipeline')}"}
    )
    plan = assemble_plan(timeline, orders, 0.0, provenance)
    problems = verify(plan)
    if problems:
        raise PipeplanError(problems)
    return plan


def _has_pipelines(plan: Plan) -> bool:
    try:
        return len(lanes_of(plan)) > 1
    except PipeplanError:
        return False


def _words(grouping: Grouping) -> str:
    return f"{plural(len(grouping), 'pipeline')} of up to {plural(len(grouping[0]), 'device')}"


def _result(
    best: _Found,
    whole: Result,
    rows: tuple[HistoryRow, ...],
    tried: int,
    begun_s: float,
    *,
    interrupted: bool,
) -> Result:
    """The plan of pipelines, with the bound on all plans."""
    bound_s = min(whole.lower_bound_s, best.time_s)
    provenance = whole.plan.provenance.model_copy(update={"solver": best.plan.provenance.solver})
    plan = best.plan
    orders = plan.parsed_orders()
    specs = [StageSpec(stage.layers, stage.devices, stage.recompute) for stage in plan.stages]
    timeline = simulate(place(plan.problem, specs), orders)
    stopped = interrupted or whole.ended == "interrupted"
    is_optimal = best.time_s <= bound_s * (1 + OPTIMALITY_TOLERANCE)
    ended = whole.ended if whole.ended not in ("proved", "gap limit") else "nothing left to try"
    return replace(
        whole,
        status="optimal" if is_optimal else "interrupted" if stopped else "feasible",
        plan=assemble_plan(timeline, orders, bound_s, provenance),
        lower_bound_s=bound_s,
        history=rows,
        tried=tried + whole.tried,
        ended="proved" if is_optimal else "interrupted" if stopped else ended,
        search_s=begun_s + whole.search_s,
    )
