"""The freedoms that a job does not give and with which a plan fits, each with its plan's time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from planner.errors import InfeasibleError
from planner.plan.problem import Problem
from planner.plan.runtimes import narrowed_by
from planner.search.budget import Clock, Settings
from planner.search.feasibility import form_problem
from planner.search.state import Candidate, Search, SearchTask
from planner.space import WITH_SHARDED_PARAMETERS, Space
from planner.units import format_seconds
from planner.variants.problems import with_job

LIMIT_S = 0.05
"""Deterministic seconds of each search for a plan with one freedom more."""
GAP_LIMIT = 0.1
"""It ends as soon as its plan is that near its bound."""
Run = Callable[[Search], None]
"""Runs the steps of a search."""


def with_missing_freedoms(error: InfeasibleError, search: Search, run: Run) -> InfeasibleError:
    """Return the error, with each freedom that makes a plan fit and the time of that plan.

    Args:
        error: that nothing fits.
        search: that found nothing.
        run: the steps of a search.
    """
    found = list(_that_help(search.problem, search.settings.seed, run))
    if not found:
        return error
    (*first, last) = error.problems
    problems = [*first, f"{last}; {', or '.join(found)}"]
    return InfeasibleError(problems, is_proved=error.is_proved)


def _that_help(problem: Problem, seed: int, run: Run) -> Iterator[str]:
    """Yield each freedom with which a plan was found, and what that takes."""
    for fields in wider_spaces(problem.job.space):
        changed = with_job(problem, **fields)
        task = SearchTask(changed, Settings(seed, 1, deterministic=True), GAP_LIMIT)
        if form_problem(task.chain) is not None:
            continue
        search = Search(task, Clock(LIMIT_S, deterministic=True))
        run(search)
        if search.clock.is_stopped:
            return
        if search.best is not None:
            yield _words(problem, _needed(fields, search.best), search.best_s)


def wider_spaces(space: Space) -> Iterator[dict[str, Any]]:
    """Yield fields of a job with one freedom more each, of those that the space does not give."""
    everything = Space()
    # Groups of devices cannot divide what they split, whatever the job's cuts.
    cuts = ("cuts",) if space.tensor_parallel == 1 else ()
    for name in ("recompute", "max_stages", "min_stages", *cuts, "replication", "placement"):
        value = getattr(everything, name)
        if getattr(space, name) != value:
            yield {name: value}
    if space.replication and not space.shard_optimizer:
        yield {"shard_optimizer": True}
    is_divisible = space.replication and space.tensor_parallel == 1 and not space.offload
    if is_divisible and not space.shard_parameters:
        yield {"shard_parameters": True, **WITH_SHARDED_PARAMETERS}
    if space.has_pipelines and space.order == "any":
        yield {"equal_pipelines": False}
    if space.order == "1f1b":
        yield {"order": "any", "backward": "any"}
    elif space.backward != "any":
        yield {"backward": "any"}


def _needed(fields: dict[str, Any], best: Candidate) -> dict[str, Any]:
    """Return the least values of the fields that the plan needs."""
    if "max_stages" in fields:
        return {"max_stages": len(best.partition)}
    if "order" in fields:
        return {"order": "any"}
    return fields


def _words(problem: Problem, fields: dict[str, Any], time_s: float) -> str:
    runtime = problem.job.runtime
    cannot = f", but {runtime} cannot run it" if {*fields} & narrowed_by(runtime) else ""
    needed = [(n, v) for n, v in fields.items() if getattr(problem.job, n) != v]
    told = (f"{n} = {'any' if n == 'cuts' else json.dumps(v)}" for n, v in needed)
    return f"with {', '.join(told)} a plan of {format_seconds(time_s)} fits{cannot}"
