"""``pipeplan plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import JobOption, JsonOption, ModelArgument, SetOption
from planner.cli.output import user_errors
from planner.cli.planning import PlanRequest, SearchSettings, make_plan
from planner.solver_settings import DEFAULT_WORKERS


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
        make_plan(
            PlanRequest(
                model=model,
                cluster=cluster,
                job=job,
                model_arguments=set_,
                costs=tuple(costs or ()),
                warm_starts=tuple(warm_start or ()),
                robust=robust,
                sync=sync,
            ),
            SearchSettings(time_limit, gap, seed, workers, deterministic),
            output,
            as_json=as_json,
        )
