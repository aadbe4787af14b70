"""``pipeplan plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.models import problem_of
from planner.cli.options import JobOption, JsonOption, ModelArgument, SetOption
from planner.cli.output import print_json, show_plan, user_errors
from planner.cli.sync import needs_pipelines, require_sync, with_sync
from planner.errors import PipeplanError
from planner.solver_settings import DEFAULT_WORKERS
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.artifacts.problem import Problem
    from planner.result import HistoryRow, Result


def plan(
    model: ModelArgument,
    cluster: Annotated[Path, typer.Option("--cluster", help="cluster file (TOML)")],
    job: JobOption = None,
    set_: SetOption = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="measured times: a profile, or the graph of `calibrate --graph`; may be repeated",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="plan file")] = Path("plan.json"),
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            help="stop after this long; with --deterministic in CP-SAT's own seconds, of 1 to 10 s",
        ),
    ] = 30.0,
    gap: Annotated[
        float, typer.Option("--gap", help="stop once time / bound - 1 is this small")
    ] = 1e-4,
    seed: Annotated[int, typer.Option("--seed", help="of the solver")] = 0,
    workers: Annotated[int, typer.Option("--workers", help="solver threads")] = DEFAULT_WORKERS,
    warm_start: Annotated[
        list[Path] | None,
        typer.Option("--warm-start", metavar="PLAN", help="start from this plan's stages"),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="the same plan on every run and machine")
    ] = False,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="prefer a plan that keeps its time under noise (jitter 0.05) and is at most 2 % "
            "slower without",
        ),
    ] = False,
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            metavar="NAME[:OPTION=VALUE,…]",
            help="how replicas agree, all_reduce unless given; choose: what suits the plan's "
            "pipelines, by simulation; one between pipelines makes a plan of pipelines",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan and prove how far from the best it can be."""
    with user_errors():
        from planner.artifacts.document import require_file_path
        from planner.artifacts.plan import Plan
        from planner.side_by_side import solve_side_by_side
        from planner.solver import check_settings, solve

        # What can be wrong is found before the model is traced, which may take a while.
        check_settings(time_limit, gap, seed, workers)
        require_file_path(output)
        require_sync(sync)
        if robust and needs_pipelines(sync):
            raise PipeplanError(
                f"robust: it compares plans whose pipelines run in step, which {sync} does not; "
                "leave --robust out"
            )
        _keep_inputs(output, [Path(model), cluster, *([job] if job else []), *(costs or [])])
        warm_starts = [Plan.load(path) for path in warm_start or ()]
        problem = problem_of(model, cluster, job, set_, costs)
        _tell_unusable(problem, dict(zip(warm_start or (), warm_starts, strict=True)))
        search = solve_side_by_side if needs_pipelines(sync) else partial(solve, robust=robust)
        result = search(
            problem,
            time_limit_s=time_limit,
            gap_limit=gap,
            seed=seed,
            workers=workers,
            deterministic=deterministic,
            progress=_progress_table(quiet=as_json),
            warm_starts=warm_starts,
        )
        plan, reason = with_sync(result.plan, sync)
        result = replace(result, plan=plan)
        plan.save(output)
        if robust and result.robustness is None:
            typer.echo("note: interrupted before plans were compared under noise", err=True)
        _report_result(result, output, as_json)
        if reason and not as_json:
            typer.echo(f"synchronisation by {reason}")


def _keep_inputs(output: Path, inputs: list[Path]) -> None:
    """Refuse to write the plan over one of the files it is made from."""
    for path in inputs:
        if path.exists() and output.exists() and path.samefile(output):
            raise PipeplanError(
                f"--output {output}: is a file the plan is made from; choose another name"
            )


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


def _report_result(result: Result, output: Path, as_json: bool) -> None:
    from planner.run_command import run_command

    if as_json:
        report = {
            "status": result.status,
            "ended": result.ended,
            "plan": str(output),
            **result.plan.predicted.model_dump(mode="json"),
            "unjoined_devices": list(result.unjoined_devices),
            "robustness": None if result.robustness is None else asdict(result.robustness),
            "history": [row._asdict() for row in result.history],
        }
        print_json(report)
        return
    show_plan(result.plan)
    typer.echo(result.summary())
    _tell_unjoined(result.unjoined_devices)
    typer.echo(f"the bound holds for {result.plan.provenance.bound_covers}")
    if result.robustness is not None and not result.robustness.is_fastest:
        typer.echo("the gap counts from the plan's own time; a faster plan is known, less robust")
    elif needs_pipelines(result.plan.sync.strategy):
        typer.echo(
            "the time is that of pipelines in step, the bound one on plans of any form: the gap "
            "also holds what it costs to have pipelines"
        )
    elif result.status != "optimal" and result.gap is not None:
        typer.echo("the gap is what is not proved: a better plan may exist, none is known")
    typer.echo(f"wrote {output}")
    command = run_command(result.plan, output)
    if command is not None:
        typer.echo(f"to run it on one host: {command}")


def _tell_unjoined(devices: Sequence[str]) -> None:
    """Say which devices the plan had no way to use with the others."""
    from planner.report.names import compress_devices

    if devices:
        typer.echo(
            f"note: no path of links and switches joins {compress_devices(devices)} to a device "
            f"in use: {plural(len(devices), 'device')} left unused; add links to the cluster file "
            "to use more"
        )


def _progress_table(quiet: bool) -> Callable[[HistoryRow], None]:
    """Prints rows of progress as they come, below a heading."""
    if quiet:
        return lambda row: None
    headings = [f"{'time':>8}  {'iteration':>12}  {'bound':>12}  {'gap':>7}"]

    def show(row: HistoryRow) -> None:
        while headings:
            typer.echo(headings.pop(), err=True)
        gap = f"{row.gap:7.2%}" if row.gap is not None else "      -"
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        typer.echo(f"{row.time_s:7.1f}s  {time:>12}  {bound:>12}  {gap}  {row.event}", err=True)

    return show
