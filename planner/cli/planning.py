"""The work of ``pipeplan plan``: from what the command line asks for to a plan file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.cli.models import Asked, told_problem
from planner.cli.plan_output import progress_table, show_result
from planner.cli.sync import needs_pipelines, require_sync, with_sync
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.artifacts.problem import Problem
    from planner.result import Result


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is wanted of; None where an option was not given.

    Attributes:
        asked: the problem.
        warm_starts: files of earlier plans.
        robust: whether the plan should keep its time under noise.
        sync: strategy of synchronisation with its options, or ``choose``.
    """

    asked: Asked
    warm_starts: tuple[Path, ...]
    robust: bool
    sync: str | None


@dataclass(frozen=True)
class SearchSettings:
    """How it is searched for, see :func:`planner.solver.solve`."""

    time_limit_s: float
    gap_limit: float
    seed: int
    workers: int
    deterministic: bool


def make_plan(
    request: PlanRequest, settings: SearchSettings, output: Path, *, as_json: bool
) -> None:
    """Search for a plan, write it and show it.

    Args:
        request: what a plan is wanted of.
        settings: of the search.
        output: plan file.
        as_json: print JSON, and no progress.

    Raises:
        PipeplanError: naming what is wrong with the input, or why there is no plan.
    """
    from planner.artifacts.plan import Plan

    _require_possible(request, settings, output)
    warm_starts = [Plan.load(path) for path in request.warm_starts]
    told = told_problem(request.asked)
    problem = told.problem
    _tell_unusable(problem, dict(zip(request.warm_starts, warm_starts, strict=True)))
    found = _search(problem, request, settings, warm_starts, quiet=as_json)
    plan, reason = with_sync(found.plan, request.sync)
    plan.save(output)
    if request.robust and found.robustness is None:
        typer.echo("note: interrupted before plans were compared under noise", err=True)
    show_result(replace(found, plan=plan), output, told.text_problem, as_json=as_json)
    if reason and not as_json:
        typer.echo(f"synchronisation by {reason}")


def _require_possible(request: PlanRequest, settings: SearchSettings, output: Path) -> None:
    """What can be wrong is found before the model is traced, which may take a while."""
    from planner.artifacts.document import require_file_path
    from planner.solver import check_settings

    check_settings(settings.time_limit_s, settings.gap_limit, settings.seed, settings.workers)
    require_file_path(output)
    require_sync(request.sync)
    if request.robust and needs_pipelines(request.sync):
        raise PipeplanError(
            f"robust: it compares plans whose pipelines run in step, which {request.sync} does "
            "not; leave --robust out"
        )
    keep_inputs(output, request.asked.inputs)


def keep_inputs(output: Path, inputs: list[Path]) -> None:
    """Refuse to write the plan over one of the files it is made from.

    Raises:
        PipeplanError: naming the file.
    """
    for path in inputs:
        if _is_same_file(path, output):
            raise PipeplanError(
                f"--output {output}: is a file the plan is made from; choose another name"
            )


def keep_warm_starts(output: Path, request: PlanRequest) -> None:
    """Refuse to write over a plan that the search starts from, unless it was named with ``-o``.

    Raises:
        PipeplanError: naming the file.
    """
    for path in request.warm_starts:
        if _is_same_file(path, output):
            raise PipeplanError(
                f"--warm-start {path}: would be written over; say -o {path} if it shall be, or "
                "choose another name"
            )


def _is_same_file(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _tell_unusable(problem: Problem, plans: dict[Path, Plan]) -> None:
    """Say which warm starts cannot be used."""
    from planner.partition.chain import Chain

    chain = Chain(problem)
    for path, earlier in plans.items():
        if chain.partition([(stage.layers, stage.devices) for stage in earlier.stages]) is None:
            typer.echo(
                f"note: {path} is left out: its stages do not cut this model's layers in order, or "
                "one has no device left in this cluster",
                err=True,
            )


def _search(
    problem: Problem,
    request: PlanRequest,
    settings: SearchSettings,
    warm_starts: Sequence[Plan],
    *,
    quiet: bool,
) -> Result:
    from planner.side_by_side import solve_side_by_side
    from planner.solver import solve

    aside = needs_pipelines(request.sync)
    search = solve_side_by_side if aside else partial(solve, robust=request.robust)
    progress = progress_table(quiet=quiet)
    return search(problem, **asdict(settings), progress=progress, warm_starts=warm_starts)
